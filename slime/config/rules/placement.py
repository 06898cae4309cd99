"""Device, precision, and how many processes run where."""

from __future__ import annotations

from dataclasses import replace

from slime.config.draft import Draft
from slime.config.layout import plan_layout
from slime.config.sections.algorithm import CRITIC_ESTIMATORS

ADDRESS_BOUND_FLAGS = frozenset(
    {"--use-nccl-ub", "--enable-cuda-graph", "--external-cuda-graph", "--cuda-graph-impl", "--optimizer-cuda-graph"}
)
"""Megatron's flags that register buffers with NCCL or capture their addresses in CUDA graphs."""


def resolve_placement(draft: Draft) -> None:
    """Settle device and precision, expand the short forms, and count processes."""
    _device(draft)
    _precision(draft)
    if draft.debug.debug_rollout_only:
        _rollout_only(draft)
    else:
        _actor_and_rollout(draft)
    _offload(draft)
    _check_counts(draft)
    _check_carrier(draft)
    _say_what_runs(draft)


def _device(draft: Draft) -> None:
    cluster, devices = draft.cluster, draft.surroundings.num_cuda_devices
    device = cluster.device
    if device == "auto":
        device = "cuda" if devices > 0 else "cpu"
    elif device == "cuda" and devices == 0 and not draft.surroundings.joins_cluster:
        draft.problems.append("--device cuda: this machine has no CUDA device; use --device cpu or auto")
    backend = cluster.distributed_backend
    if device == "cpu":
        if backend == "nccl" and "distributed_backend" in draft.given:
            draft.notices.append("--distributed-backend nccl needs CUDA; gloo is used on a CPU")
        backend = "gloo"
    draft.cluster = replace(cluster, device=device, distributed_backend=backend)


def _precision(draft: Draft) -> None:
    precision, device = draft.train.precision, draft.cluster.device
    asked = [name for name in ("bf16", "fp16") if f"--{name}" in draft.megatron_flags]
    if len(asked) == 2:
        draft.problems.append("--bf16 and --fp16 exclude each other; remove one")
    if precision == "auto":
        precision = asked[0] if asked else ("bf16" if device == "cuda" else "fp32")
    elif asked and asked[0] != precision:
        draft.problems.append(f"--precision {precision} and --{asked[0]} contradict each other; remove one")
    if precision == "fp16" and device == "cpu":
        draft.problems.append("fp16 training needs CUDA; on a CPU use --precision fp32 or bf16")
    draft.train = replace(draft.train, precision=precision)


def _rollout_only(draft: Draft) -> None:
    """Shrink the trainer to what the engines occupy; nothing is trained."""
    cluster = draft.cluster
    num = cluster.rollout_num_gpus
    if num is None:
        num = cluster.world_size if cluster.colocate else cluster.rollout_num_gpus_per_engine
    per_node = min(8, num)
    draft.cluster = replace(
        cluster,
        rollout_num_gpus=num,
        actor_num_gpus_per_node=per_node,
        actor_num_nodes=max(1, num // per_node) if per_node else 1,
        colocate=False,
        offload=False,
        offload_train=False,
        offload_rollout=False,
    )


def _actor_and_rollout(draft: Draft) -> None:
    cluster = draft.cluster
    if cluster.actor_num_gpus_per_node < 1:
        draft.problems.append(
            "--actor-num-gpus-per-node must be at least 1; to generate without training use --debug-rollout-only"
        )
    if draft.debug.debug_train_only:
        draft.cluster = replace(cluster, rollout_num_gpus=0, colocate=False)
        return
    if cluster.rollout_num_gpus is None:
        num = cluster.world_size if cluster.colocate else cluster.rollout_num_gpus_per_engine
        if not cluster.colocate:
            draft.notices.append(
                f"no --rollout-num-gpus: one engine with {num} {_units(draft, num)}; --colocate shares the trainer's"
            )
        draft.cluster = replace(cluster, rollout_num_gpus=num)
    elif cluster.rollout_num_gpus == 0 and draft.rollout.rollout_external_engine_addrs is None:
        draft.problems.append(
            "--rollout-num-gpus 0 starts no engine, so nothing can be generated; give a number, "
            "or --debug-train-only to train on recorded data"
        )


def _offload(draft: Draft) -> None:
    cluster = draft.cluster
    if cluster.offload and not draft.debug.debug_rollout_only:
        contradicted = [
            f"--no-{name.replace('_', '-')}"
            for name in ("offload_train", "offload_rollout")
            if getattr(cluster, name) is False
        ]
        if contradicted:
            draft.problems.append(f"--offload and {contradicted[0]} contradict each other; remove one")
        cluster = replace(cluster, offload_train=True, offload_rollout=True)
    if cluster.offload_rollout and not cluster.colocate and not draft.debug.debug_rollout_only:
        draft.notices.append("--offload-rollout has no effect without --colocate: no engine is on the trainer's GPUs")
    # Actor and critic share their devices whatever the engines do.
    train = cluster.colocate or draft.algorithm.advantage_estimator in CRITIC_ESTIMATORS
    cluster = replace(
        cluster,
        offload_train=train if cluster.offload_train is None else cluster.offload_train,
        offload_rollout=cluster.colocate if cluster.offload_rollout is None else cluster.offload_rollout,
    )
    draft.cluster = cluster
    if cluster.offload_train and cluster.device == "cuda":
        _check_addresses(draft)


def _check_addresses(draft: Draft) -> None:
    """Memory that leaves a GPU comes back elsewhere, so nothing may be bound to where it was."""
    for flag in sorted(ADDRESS_BOUND_FLAGS & draft.megatron_flags):
        draft.problems.append(
            f"{flag} binds the training state to its place on the GPU, which it leaves with --offload-train (implied "
            f"by --colocate and by a critic); remove {flag}, or give --no-offload-train"
        )


def _check_counts(draft: Draft) -> None:
    cluster = draft.cluster
    rollout, per_engine = cluster.rollout_num_gpus or 0, cluster.rollout_num_gpus_per_engine
    if rollout % per_engine and not draft.deployment and not draft.external_engines:
        draft.problems.append(
            f"--rollout-num-gpus {rollout} is not a multiple of --rollout-num-gpus-per-engine {per_engine}"
        )
    if per_engine > cluster.num_gpus_per_node and per_engine % cluster.num_gpus_per_node:
        draft.problems.append(
            f"--rollout-num-gpus-per-engine {per_engine} spans nodes and must be a multiple of "
            f"--num-gpus-per-node {cluster.num_gpus_per_node}"
        )
    available, here = draft.surroundings.num_cuda_devices, not draft.surroundings.joins_cluster
    needed = num_devices(draft)
    if cluster.device == "cuda" and here and cluster.actor_num_nodes == 1 and 0 < available < needed:
        draft.problems.append(
            f"this run needs {needed} GPUs (--actor-num-gpus-per-node {cluster.actor_num_gpus_per_node}, "
            f"--rollout-num-gpus {rollout}), this machine has {available}; lower them"
            + ("" if cluster.colocate else ", or share GPUs with --colocate")
        )


def _check_carrier(draft: Draft) -> None:
    if (
        draft.cluster.device == "cuda"
        and draft.cluster.colocate
        and draft.weights.update_weight_transport == "broadcast"
    ):
        draft.problems.append(
            "--update-weight-transport broadcast with --colocate: a trainer and an engine on the same GPU cannot be in "
            "one NCCL group; use nccl, which lets such engines read the trainer's memory"
        )


def num_devices(draft: Draft) -> int:
    """Devices the run occupies: both sides, or the larger one when they share."""
    layout = plan_layout(
        draft.cluster,
        debug_train_only=draft.debug.debug_train_only,
        debug_rollout_only=draft.debug.debug_rollout_only,
        external_engines=draft.rollout.rollout_external_engine_addrs is not None,
    )
    return layout.num_slots


def _units(draft: Draft, count: int) -> str:
    noun = "GPU" if draft.cluster.device == "cuda" else "CPU process"
    return noun if count == 1 else {"GPU": "GPUs", "CPU process": "CPU processes"}[noun]


def _say_what_runs(draft: Draft) -> None:
    cluster = draft.cluster
    if cluster.device != "cpu":
        return
    per_engine = cluster.rollout_num_gpus_per_engine
    groups = [group for model in draft.deployment for group in model.server_groups]
    engines = sum(group.num_engines(per_engine) for group in groups) or (cluster.rollout_num_gpus or 0) // per_engine
    engines = 0 if draft.external_engines else engines
    trainers = 0 if draft.debug.debug_rollout_only else cluster.world_size
    critics = f", {trainers} critic" if trainers and draft.algorithm.advantage_estimator in CRITIC_ESTIMATORS else ""
    why = "--device cpu" if "device" in draft.given else "no CUDA device"
    draft.notices.append(
        f"{why}: {trainers} trainer{critics} and {engines} engine processes run on the CPU, trainers over gloo"
    )
