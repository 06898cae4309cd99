"""A real router and real engines under Ray, as a run starts them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slime.cluster.engines import EngineGroup
from slime.cluster.placement import Placement
from slime.cluster.ports import PortBook
from slime.config import Config


@contextmanager
def running_engines(config: Config, log_dir: Path, ports: PortBook | None = None) -> Iterator[EngineGroup]:
    """The engines of ``config`` and their routers, ready; inside ``ray_session``."""
    placement = Placement(config.layout, device="cpu", timeout_seconds=30)
    group = EngineGroup(config, placement, log_dir, ports=ports)
    try:
        group.start_router()
        group.launch()
        group.wait_ready()
        yield group
    finally:
        group.close()
        placement.close()
