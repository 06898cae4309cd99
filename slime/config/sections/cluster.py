"""Where processes run: nodes, devices, placement, health checks."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flags import Section, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig(Section):
    """Cluster and fault tolerance."""

    device: str = flag(
        "auto",
        choices=("auto", "cpu", "cuda"),
        doc="Device of trainers and engines. auto: cuda where a CUDA device exists, else CPU processes on gloo.",
    )
    actor_num_nodes: int = flag(1, at_least=1, doc="Training nodes.")
    actor_num_gpus_per_node: int = flag(
        8, at_least=0, doc="Training GPUs (on a CPU: processes) per node; the world size is nodes times this."
    )
    rollout_num_gpus: int | None = flag(
        None,
        at_least=0,
        doc="GPUs (on a CPU: processes) for generation in total. Unset: one engine's, with --colocate the "
        "trainer's. 0 only with --debug-train-only.",
    )
    rollout_num_gpus_per_engine: int = flag(
        1, at_least=1, doc="GPUs of one engine (tensor-parallel times pipeline-parallel size)."
    )
    num_gpus_per_node: int = flag(
        8, at_least=1, doc="GPUs of one node, for the placement of engines. Lower it when nodes have fewer than 8."
    )
    colocate: bool = flag(
        False, doc="Training and generation share GPUs and take turns; each side makes room while the other works."
    )
    offload: bool = flag(False, doc="Short for --offload-train --offload-rollout.")
    offload_train: bool | None = flag(
        None,
        doc="Move the training state from the GPU to host memory while generating, and a PPO run's two models in "
        "turn. Default: with --colocate and with a critic. On a CPU there is nothing to move.",
    )
    offload_rollout: bool | None = flag(
        None,
        doc="Release the memory of engines on the trainer's GPUs while it trains. Default: as --colocate, without "
        "which it has no effect.",
    )
    distributed_backend: str = flag(
        "nccl", choices=("nccl", "gloo"), doc="Process group backend of the trainer; gloo wherever --device is cpu."
    )
    distributed_timeout_minutes: int = flag(10, at_least=1, doc="Bound on every collective of the trainer.")
    use_fault_tolerance: bool = flag(
        False, doc="Replace engines and routers that die, freeze or answer nonsense, and issue their requests again."
    )
    rollout_health_check_interval: float = flag(30.0, above=0, doc="Seconds between two checks of an engine.")
    rollout_health_check_timeout: float = flag(
        30.0,
        above=0,
        doc="Seconds an engine has to answer a check; two failures in a row count (five without "
        "--use-fault-tolerance). SGLang needs more than 1.",
    )
    rollout_health_check_first_wait: float = flag(
        0.0, at_least=0, doc="Seconds after engines started, woke or got weights before the first interval begins."
    )
    cluster_start_timeout_seconds: float = flag(
        300.0, above=0, doc="Bound on starting Ray and getting the requested resources."
    )
    trainer_start_timeout_seconds: float = flag(
        1800.0, above=0, doc="Bound on starting the training processes and loading the model."
    )
    train_step_timeout_seconds: float = flag(7200.0, above=0, doc="Bound on training one rollout.")
    rollout_timeout_seconds: float = flag(14400.0, above=0, doc="Bound on generating one rollout or one evaluation.")
    save_timeout_seconds: float = flag(3600.0, above=0, doc="Bound on writing one checkpoint.")
    sigterm_save_timeout_seconds: float = flag(
        120.0,
        above=0,
        doc="After SIGTERM or SIGHUP: bound on finishing a training step in progress, saving and ending. Without "
        "--save nothing is saved.",
    )

    @property
    def world_size(self) -> int:
        """Number of training processes."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node
