"""What a run would do, for ``--dry-run``: processes, batches, memory, notices. It starts nothing.

Memory figures are lower bounds: weights, gradients and optimizer state are counted from the checkpoint's
own shapes; activations, caches and logits depend on the data and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from slime.config.engine_plan import DEFAULT_MODEL, PlannedEngine, plan_engines
from slime.config.families import MegatronConfig
from slime.config.hf import count_parameters
from slime.config.schema import Config


def plan_text(config: Config) -> str:
    """The plan as text for a terminal."""
    sections = (
        ("Model", _model(config)),
        ("Processes", _processes(config)),
        ("Batches", _batches(config)),
        ("Memory, without activations and caches", _memory(config)),
        ("Output", _output(config)),
        ("Notices", config.notices or ("none",)),
    )
    lines: list[str] = []
    for title, content in sections:
        lines += [title, *(f"  {line}" for line in content), ""]
    return "\n".join(lines)


def _model(config: Config) -> Sequence[str]:
    if config.hf is None:
        return ("none",)
    count = count_parameters(config.hf.path)
    return (
        f"{config.hf.path} ({config.hf.model_type}, {count:,} parameters)",
        f"trained in {config.train.precision} from {config.checkpoint.load}"
        + (" (resumes)" if config.checkpoint.resume else ""),
        f"reference: {config.checkpoint.ref_load or 'none'}",
    )


def _processes(config: Config) -> Sequence[str]:
    cluster, megatron = config.cluster, config.megatron
    unit = "GPU" if cluster.device == "cuda" else "CPU process"
    lines: list[str] = []
    layout = config.layout
    trainers = len(layout.trainer)
    if trainers:
        data_parallel = max(1, trainers // megatron.model_parallel_size)
        lines.append(
            f"trainer: {trainers} ({cluster.actor_num_nodes} node(s) x {cluster.actor_num_gpus_per_node}), {unit} "
            f"{_span(0, trainers)}; TP {megatron.tensor_model_parallel_size} x "
            f"PP {megatron.pipeline_model_parallel_size} "
            f"x CP {megatron.context_parallel_size} x DP {data_parallel}, {cluster.distributed_backend}"
        )
    if config.critic is not None:
        own = config.critic.megatron
        lines.append(
            f"critic: on the trainer's; TP {own.tensor_model_parallel_size} x PP {own.pipeline_model_parallel_size} x "
            f"CP {own.context_parallel_size}, from {config.critic.checkpoint.load}"
        )
    lines += _engines(config, unit)
    if cluster.colocate:
        lines.append(
            f"colocated: trainer and engines take turns; offload trainer {'on' if cluster.offload_train else 'off'}, "
            f"engines {'on' if cluster.offload_rollout else 'off'}"
        )
    return lines


def _engines(config: Config, unit: str) -> Sequence[str]:
    plan = plan_engines(config)
    backend = config.engine.rollout_backend
    lines = [f"{e.name}: {backend}, {unit} {_slots(e.slots)}{_role(config, e)}" for e in plan.engines]
    if plan.reserved:
        lines.append(f"kept free: {unit} {_slots(plan.reserved)}")
    lines += [
        f"engine that runs already: {e.backend}, {e.url}, {e.worker_type}, {e.num_gpus} GPU(s)"
        for e in config.external_engines
    ]
    if len(plan.routers) > 1:
        for router in plan.routers:
            count = sum(e.model == router.model for e in plan.engines)
            default = ", the default one" if router.default else ""
            lines.append(f"router of {router.model}: in front of {count} engine(s){default}")
    elif config.num_engines:
        lines.append(f"router: 1, in front of {config.num_engines} engine(s)")
    return lines


def _role(config: Config, engine: PlannedEngine) -> str:
    """What is special about an engine."""
    facts = [engine.worker_type] if engine.worker_type != "regular" else []
    if config.deployment and engine.model != DEFAULT_MODEL:
        facts.append(f"model {engine.model} from {engine.model_path}")
        facts.append("gets the trained weights" if engine.updatable else "keeps its weights")
    if len(engine.processes) > 1:
        facts.append(f"{len(engine.processes)} nodes")
    facts += [f"{name}={value}" for name, value in engine.overrides.items()]
    return "".join(f", {fact}" for fact in facts)


def _slots(slots: Sequence[int]) -> str:
    """Slot numbers, neighbours as a span."""
    whole = list(slots) == list(range(slots[0], slots[-1] + 1))
    return _span(slots[0], len(slots)) if whole else ", ".join(map(str, slots))


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _batches(config: Config) -> Sequence[str]:
    data, cluster = config.data, config.cluster
    samples = data.rollout_batch_size * data.n_samples_per_prompt
    data_parallel = max(1, cluster.world_size // config.megatron.model_parallel_size)
    batch = data.global_batch_size or samples
    packing = (
        f"packed to {data.max_tokens_per_gpu} tokens per GPU"
        if data.use_dynamic_batch_size
        else f"micro-batches of {data.micro_batch_size}"
    )
    total = f"{data.rollout_batch_size} prompts x {data.n_samples_per_prompt} samples = {samples} samples per rollout"
    lines = [
        f"{total} = {config.num_steps_per_rollout} optimizer step(s) x {batch}",
        f"{batch} samples per step over {data_parallel} data-parallel rank(s), {packing}",
        f"{data.num_rollout} rollouts" if data.num_rollout is not None else f"{data.num_epoch} epoch(s)",
        f"prompts: {data.prompt_data}; column {data.input_key!r}, labels {data.label_key!r}",
        f"reward: {config.reward.custom_rm_path or config.reward.rm_type or 'set by the custom functions or the data'}",
    ]
    lines += [
        f"evaluation: {d.name} ({d.path}), {d.n_samples_per_eval_prompt} sample(s) per prompt"
        for d in config.eval.eval_datasets
    ]
    return lines


def bytes_per_parameter(config: Config) -> float:
    """Trainer bytes per parameter a rank holds: weights, fp32 gradients, fp32 master weights and Adam moments."""
    return _bytes_per_parameter(config, max(1, config.cluster.world_size // config.megatron.model_parallel_size))


def _bytes_per_parameter(config: Config, replicas: int) -> float:
    shards = replicas if config.megatron.use_distributed_optimizer else 1
    if config.train.precision == "fp32":
        return 4 + 4 + 8 / shards
    return 2 + 4 + 12 / shards


def trainer_bytes(config: Config, parameters: int, *, gradients: bool = True) -> float:
    """Trainer bytes of one rank of a model with so many parameters; experts are split in their own way.

    Args:
        config: The configuration.
        parameters: Of the whole model.
        gradients: Whether to count them; without them it is what waits in host memory while engines generate.
    """
    less = 0 if gradients else 4
    megatron = config.megatron
    stages = megatron.pipeline_model_parallel_size
    experts = min(_expert_parameters(megatron), parameters)
    common = (parameters - experts) / (megatron.tensor_model_parallel_size * stages)
    split = megatron.expert_model_parallel_size * megatron.expert_tensor_parallel_size * stages
    replicas = max(1, config.cluster.world_size // split)
    of_experts = experts / split * (_bytes_per_parameter(config, replicas) - less)
    return common * (bytes_per_parameter(config) - less) + of_experts


def _expert_parameters(megatron: MegatronConfig) -> int:
    if not megatron.get("num_experts"):
        return 0
    frequency: int | list[int] = megatron["moe_layer_freq"]
    layers = -(-megatron.num_layers // frequency) if isinstance(frequency, int) else sum(frequency)
    return layers * megatron["num_experts"] * 3 * megatron.hidden_size * megatron["moe_ffn_hidden_size"]


def _memory(config: Config) -> Sequence[str]:
    if config.hf is None:
        return ("unknown without a model",)
    parameters = count_parameters(config.hf.path)
    megatron = config.megatron
    local = parameters / (megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size)
    width = 4 if config.train.precision == "fp32" else 2
    lines: list[str] = []
    if not config.debug.debug_rollout_only:
        lines.append(f"trainer, each rank: {_size(trainer_bytes(config, parameters))}")
        if config.cluster.offload_train and config.cluster.device == "cuda":
            waiting = _size(trainer_bytes(config, parameters, gradients=False))
            lines.append(f"of it in host memory while the engines generate: {waiting}, page-locked")
        if config.checkpoint.ref_load is not None and (config.algorithm.use_kl_loss or config.algorithm.kl_coef != 0):
            lines.append(f"reference weights, each rank, host memory: {_size(local * width)}")
    if config.num_engines:
        lines += _engine_memory(config, width)
    return lines


def _engine_memory(config: Config, width: int) -> list[str]:
    """One line per model and size of an engine."""
    unit = "GPU" if config.cluster.device == "cuda" else "process"
    own = [(e.model_path, e.num_gpus) for e in (*plan_engines(config).engines, *config.external_engines)]
    kinds = list(dict.fromkeys(own))
    lines: list[str] = []
    for path, num_gpus in kinds:
        which = f" of {num_gpus} with {path}" if len(kinds) > 1 else ""
        parameters = count_parameters(path)  # none where the model is not on this machine
        share = _size(parameters * width / num_gpus) if parameters else f"unknown, no weights in {path} here"
        lines.append(f"engine{which}, each {unit}: {share}")
    return lines


def _size(num_bytes: float) -> str:
    for unit, scale in (("GiB", 1024**3), ("MiB", 1024**2)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes / 1024:,.1f} KiB"


def _output(config: Config) -> Sequence[str]:
    checkpoint, log = config.checkpoint, config.logging
    interval = f" every {checkpoint.save_interval} rollouts" if checkpoint.save_interval is not None else " at the end"
    trackers = [name for name, on in (("TensorBoard", log.use_tensorboard), ("W&B", log.use_wandb)) if on]
    return (
        f"directory: {log.output_dir}",
        f"checkpoints: {checkpoint.save + interval if checkpoint.save is not None else 'none'}",
        f"trackers: {', '.join(trackers) or 'none'}",
    )
