"""From a command line to an exit code: what ``train.py`` and ``train_async.py`` share.

0 done, 1 the run failed (one readable message), 2 usage, 128 + number of the signal that ended it: 130
Ctrl-C, 143 SIGTERM, 129 SIGHUP. Imports nothing heavy, so that Ctrl-C is quiet from the first moment.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable

from slime.cluster.signals import Terminated
from slime.errors import ConfigError, SlimeError
from slime.observability.logger import configure_logger

logger = logging.getLogger(__name__)


def exit_code(program: Callable[[], None]) -> int:
    """Run a program and say how it went.

    Args:
        program: Parses the command line and trains; what takes long to import is imported inside.
    """
    configure_logger()
    try:
        program()
    except KeyboardInterrupt:
        logger.error("interrupted")
        return 128 + signal.SIGINT
    except Terminated as error:
        logger.error("ended by %s", error)
        return 128 + error.signum
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    except SlimeError as error:
        logger.error("the run failed: %s: %s", type(error).__name__, error)
        return 1
    return 0
