"""From a command line to an exit code: what ``train.py`` and ``train_async.py`` share.

0 done, 1 the run failed (one readable message), 2 usage, 130 Ctrl-C, 143 told to end.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence

from slime.cluster.launch import Terminated
from slime.config import Config
from slime.errors import ConfigError, SlimeError
from slime.observability.logger import configure_logger

logger = logging.getLogger(__name__)


def main(
    train: Callable[[Config], None], parse_args: Callable[[Sequence[str]], Config], argv: Sequence[str] | None = None
) -> int:
    """Parse, train, and say how it went.

    Args:
        train: The loop.
        parse_args: Parses the command line; exits with code 2 on a usage error.
        argv: Arguments without the program; those of the process when None.
    """
    configure_logger()
    try:
        train(parse_args(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        logger.error("interrupted")
        return 128 + signal.SIGINT
    except Terminated as error:
        logger.error("ended by %s", error)
        return 128 + signal.SIGTERM
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    except SlimeError as error:
        logger.error("the run failed: %s: %s", type(error).__name__, error)
        return 1
    return 0
