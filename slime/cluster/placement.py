"""Which process gets which device.

Owns the reservation of a layout's slots as a Ray placement group. Tests hold that a cluster that is
too small is refused with both numbers, and one whose nodes would cut an engine in two.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime.cluster import waits
from slime.config.engine_plan import EnginePlan
from slime.config.layout import Layout
from slime.errors import ConfigError, WaitTimeoutError

logger = logging.getLogger(__name__)

# Shares of one slot; several actors of a colocated run live on it.
TRAINER_SHARE = 0.4
ENGINE_SHARE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One reserved slot: its bundle in the placement group, its node, and its GPU there (None on a CPU)."""

    bundle: int
    node_id: str
    gpu_id: int | None


def check_engine_slots(plan: EnginePlan, slots: Sequence[Slot]) -> None:
    """Refuse a placement in which a process of an engine would not have neighbouring GPUs of one node.

    Raises:
        ConfigError: Naming the engine and what it got.
    """
    for engine in plan.engines:
        for process in engine.processes:
            own = [slots[number] for number in process.slots]
            gpus = [slot.gpu_id for slot in own if slot.gpu_id is not None]
            one_node = len({slot.node_id for slot in own}) == 1
            if one_node and gpus == list(range(gpus[0], gpus[0] + len(gpus)) if gpus else ()):
                continue
            found = ", ".join(f"GPU {slot.gpu_id} of node {slot.node_id[:8]}" for slot in own)
            raise ConfigError(
                f"{engine.name} needs {len(own)} neighbouring GPUs of one node and would get {found}; choose "
                "--num-gpus-per-node, --rollout-num-gpus-per-engine and --actor-num-gpus-per-node so that engines do "
                "not reach over the end of a node"
            )


class _Probe:
    """Lives in a bundle just long enough to say which GPU it got."""

    def gpu_id(self) -> int:
        return int(ray.get_gpu_ids()[0])


class Placement:
    """The reserved slots of a run, ordered by node and GPU so that neighbours are neighbours."""

    def __init__(self, layout: Layout, *, device: str, timeout_seconds: float) -> None:
        """Reserve the slots.

        Args:
            layout: What to reserve.
            device: ``"cpu"`` or ``"cuda"``.
            timeout_seconds: How long the cluster may take to grant them.

        Raises:
            ConfigError: The cluster has fewer slots than needed.
            WaitTimeoutError: It has enough, but did not grant them in time.
        """
        self.layout = layout
        self.device = device
        self._group: PlacementGroup | None = None
        self.slots: tuple[Slot, ...] = ()
        if not layout.num_slots:
            return
        resource = "GPU" if device == "cuda" else "CPU"
        available = int(ray.cluster_resources().get(resource, 0))
        if available < layout.num_slots:
            raise ConfigError(
                f"the run needs {layout.num_slots} {resource} slots ({len(layout.trainer)} trainer, "
                f"{len(layout.rollout)} rollout), the Ray cluster has {available}; lower --actor-num-gpus-per-node "
                "or --rollout-num-gpus, use --colocate, or add nodes"
            )
        bundle = {"CPU": 1.0, "GPU": 1.0} if device == "cuda" else {"CPU": 1.0}
        self._group = placement_group([dict(bundle) for _ in range(layout.num_slots)], strategy="PACK")
        try:
            waits.get(
                self._group.ready(),
                waited_for=f"{layout.num_slots} {resource} slots of the Ray cluster",
                timeout_seconds=timeout_seconds,
            )
        except WaitTimeoutError:
            self.close()
            raise
        self.slots = self._order_slots(timeout_seconds)

    def _order_slots(self, timeout_seconds: float) -> tuple[Slot, ...]:
        nodes: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        gpu_ids: dict[int, int | None] = dict.fromkeys(nodes)
        if self.device == "cuda":
            probe_class = ray.remote(_Probe)
            probes = {b: probe_class.options(**self._options(b, ENGINE_SHARE)).remote() for b in nodes}
            gpu_ids = dict(
                zip(
                    probes,
                    waits.get_all(
                        [p.gpu_id.remote() for p in probes.values()],
                        waited_for=[f"the GPU of bundle {b}" for b in probes],
                        timeout_seconds=timeout_seconds,
                    ),
                    strict=True,
                )
            )
            for probe in probes.values():
                ray.kill(probe)
        slots = [Slot(bundle=b, node_id=node, gpu_id=gpu_ids[b]) for b, node in nodes.items()]
        return tuple(sorted(slots, key=lambda s: (s.node_id, -1 if s.gpu_id is None else s.gpu_id, s.bundle)))

    def options(self, slot: int, share: float) -> dict[str, Any]:
        """Ray actor options that put an actor on ``slot`` with ``share`` of its device."""
        return self._options(self.slots[slot].bundle, share)

    def _options(self, bundle: int, share: float) -> dict[str, Any]:
        assert self._group is not None
        return {
            "num_cpus": share,
            "num_gpus": share if self.device == "cuda" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._group,
                placement_group_bundle_index=bundle,
                placement_group_capture_child_tasks=False,
            ),
        }

    def close(self) -> None:
        """Give the slots back; safe to call twice."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
