"""What every actor does first: its log, its working directory, its stack dumps.

An actor's output goes to a file of its own below the run's directory; warnings also go to the
driver's terminal through Ray.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from slime.cluster.signals import leave_to_driver
from slime.cluster.waits import STACK_SIGNAL
from slime.observability.logger import configure_logger, tail
from slime.observability.watchdog import dump_stacks_on_signal


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSetting:
    """What an actor needs to know about its run."""

    name: str
    log_path: Path
    work_dir: Path
    sys_path: tuple[str, ...]

    @classmethod
    def of(cls, name: str, log_dir: Path) -> ActorSetting:
        """The setting of an actor called ``name`` that is started from this process."""
        return cls(
            name=name,
            log_path=log_dir / f"{name.replace(' ', '_')}.log",
            work_dir=Path.cwd(),
            sys_path=tuple(p for p in sys.path if p),
        )

    def log_tail(self, num_lines: int = 15) -> str:
        """End of the actor's log as far as this machine can see it."""
        return f"end of {self.log_path}:\n{tail(self.log_path, num_lines)}"


def enter(setting: ActorSetting) -> None:
    """Make this process the actor ``setting`` describes.

    The working directory and import path become the driver's, so that relative paths and plug-ins
    mean the same everywhere. Ctrl-C and ending signals are left to the driver.
    """
    leave_to_driver()
    if setting.work_dir.is_dir():
        os.chdir(setting.work_dir)
    sys.path.extend(p for p in setting.sys_path if p not in sys.path)
    setting.log_path.parent.mkdir(parents=True, exist_ok=True)
    to_driver = os.fdopen(os.dup(2), "w", buffering=1)
    log = setting.log_path.open("a", buffering=1, encoding="utf-8")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    configure_logger(f"[{setting.name}]", stream=sys.stderr, warnings_to=to_driver)
    dump_stacks_on_signal(STACK_SIGNAL, log)
    logging.getLogger(__name__).info("%s is process %d", setting.name, os.getpid())
