"""Hugging Face weights into the model and out of it, whatever its parallel layout.

Owns reading a checkpoint's safetensors into each rank's shards, gathering whole tensors under their
Hugging Face names in buckets, and writing a checkpoint directory. The conversions are tables in
``slime.weights.families``; sending buckets to engines is ``slime.weights.transport``'s. Tests hold: what is
saved equals what was loaded bit for bit, for every family and layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from megatron.core import parallel_state as mpu
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from safetensors import safe_open
from torch import distributed as dist

from slime.backends.megatron.hf_files import HfWriter, weight_files
from slime.config import Config
from slime.errors import CheckpointError, ConfigError
from slime.weights.families import FAMILIES, Family
from slime.weights.families.family import EMBEDDING, OUTPUT_LAYER, VALUE_HEAD, global_name, local_layer, with_value_head
from slime.weights.ops import ModelShape, Rule

Bucket = list[tuple[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTensor:
    """One parameter of this rank with its place in the family's table."""

    name: str  # Megatron's, global
    rule: Rule
    layer: int | None
    data: torch.Tensor


def model_family(config: Config) -> Family:
    """The weight table of the configured checkpoint's family.

    Raises:
        ConfigError: There is no checkpoint, or no table for it.
    """
    if config.hf is None:
        raise ConfigError("training needs --hf-checkpoint: a model directory with config.json and tokenizer")
    if config.hf.model_type not in FAMILIES:
        raise ConfigError(
            f"--hf-checkpoint {config.hf.path}: model_type {config.hf.model_type!r} cannot be trained yet; "
            f"supported: {', '.join(sorted(FAMILIES))}"
        )
    family = FAMILIES[config.hf.model_type]
    return with_value_head(family) if config.role == "critic" else family


def model_shape(config: Config) -> ModelShape:
    """The sizes that weight conversions depend on."""
    megatron = config.megatron
    return ModelShape(
        num_attention_heads=megatron.num_attention_heads,
        num_query_groups=megatron.num_query_groups,
        head_dim=megatron.kv_channels,
        vocab_size=megatron.vocab_size,
        padded_vocab_size=megatron.padded_vocab_size,
    )


def local_tensors(chunks: Sequence[MegatronModule], family: Family) -> list[LocalTensor]:
    """Parameters of this rank's chunks, in the order of the model."""
    found: list[LocalTensor] = []
    for chunk in unwrap_model(list(chunks)):
        for name, parameter in chunk.named_parameters():
            index = local_layer(name)
            number = None if index is None else chunk.decoder.layers[index].layer_number - 1
            name = global_name(name, number)
            rule, layer = family.rule(name)
            found.append(LocalTensor(name=name, rule=rule, layer=layer, data=parameter.detach()))
    return found


class Checkpoint:
    """Lazily read tensors of a directory of safetensors files, by name."""

    def __init__(self, path: str | Path) -> None:
        self._files = weight_files(Path(path))
        self._path = path
        self._open: dict[Path, safe_open] = {}

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise CheckpointError(f"{self._path}: tensor {name!r} is missing; is this a complete checkpoint?")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file].get_tensor(name)


def load_hf(chunks: Sequence[MegatronModule], config: Config, path: str | Path) -> None:
    """Copy a Hugging Face checkpoint into the model; each rank reads only what its stage holds.

    Not collective. An optimizer that already exists must be told (``reload_model_params``).

    Args:
        chunks: This rank's chunks, wrapped or bare.
        config: The resolved configuration.
        path: Directory with safetensors files of the configured family.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    family, shape = model_family(config), model_shape(config)
    rank, size = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    tied = not config.megatron.untie_embeddings_and_output_weights
    with Checkpoint(path) as checkpoint, torch.no_grad():
        for tensor in local_tensors(chunks, family):
            names = tensor.rule.hf_names(tensor.layer)
            if config.role == "critic" and tensor.name in VALUE_HEAD and names[0] not in checkpoint:
                continue  # a policy's checkpoint: the head stays as it was made
            if tensor.name == OUTPUT_LAYER and tied:  # the last pipeline stage's copy of the embedding
                names = family.rule(EMBEDDING)[0].hf_names(None)
            whole = tensor.rule.op.to_megatron([checkpoint[name] for name in names], shape)
            part = tensor.rule.op.shard(whole, rank, size)
            if part.shape != tensor.data.shape:
                raise CheckpointError(
                    f"{path}: {', '.join(names)} give {tuple(part.shape)} for {tensor.name}, "
                    f"the model has {tuple(tensor.data.shape)}; does the checkpoint belong to --hf-checkpoint?"
                )
            tensor.data.copy_(part)


def iter_hf_buckets(chunks: Sequence[MegatronModule], config: Config, bucket_bytes: int) -> Iterator[Bucket]:
    """Whole tensors under their Hugging Face names, in buckets.

    Collective over the tensor- and pipeline-parallel ranks of every replica of the model; exhaust it on
    all of them. Only global rank 0 gets tensors; elsewhere each bucket is empty. Tensors are CPU or
    device tensors as the model's, and may be views of its parameters: use them before the next step.

    Args:
        chunks: This rank's chunks.
        config: The resolved configuration.
        bucket_bytes: A bucket is closed before a tensor that would exceed this; a larger tensor has its own.

    Yields:
        ``[(name, tensor), ...]``; vocabulary padding is stripped and the tied output layer left out.
    """
    bucket: Bucket = []
    filled = 0
    source = dist.get_rank() == 0
    for name, tensor in _gathered(chunks, config):
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        filled += size
        if source:
            bucket.append((name, tensor))
    if filled:
        yield bucket


def _gathered(chunks: Sequence[MegatronModule], config: Config) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the model in the order of stages; real on pipeline stage 0, meta elsewhere."""
    family, shape = model_family(config), model_shape(config)
    tied = not config.megatron.untie_embeddings_and_output_weights
    local = [t for t in local_tensors(chunks, family) if not (tied and t.name == OUTPUT_LAYER)]
    group = mpu.get_pipeline_model_parallel_group()
    stages: list[list[tuple[str, torch.Size, torch.dtype]]] = [[] for _ in range(group.size())]
    dist.all_gather_object(stages, [(t.name, t.data.shape, t.data.dtype) for t in local], group=group)
    by_name = {t.name: t for t in local}
    for stage, tensors in enumerate(stages):
        for name, part_shape, dtype in tensors:
            rule, layer = family.rule(name)
            own = by_name.get(name) if stage == group.rank() else None
            part = _on_first_stage(own.data if own else None, part_shape, dtype, stage, group)
            whole = _whole(rule, part) if group.rank() == 0 else None
            if whole is None:
                whole = rule.op.gather([torch.empty(part_shape, dtype=dtype, device="meta")] * _tp_size())
            yield from zip(rule.hf_names(layer), rule.op.to_hf(whole, shape), strict=True)


def _tp_size() -> int:
    return mpu.get_tensor_model_parallel_world_size()


def _on_first_stage(
    data: torch.Tensor | None, shape: torch.Size, dtype: torch.dtype, stage: int, group: dist.ProcessGroup
) -> torch.Tensor | None:
    """A stage's tensor, brought to the first stage's rank of the same tensor-parallel place."""
    if stage == 0 or group.rank() not in (0, stage):
        return data
    ranks = dist.get_process_group_ranks(group)
    if data is not None:
        dist.send(data.contiguous(), dst=ranks[0], group=group)
        return data
    received = torch.empty(shape, dtype=dtype, device=torch.cuda.current_device())
    dist.recv(received, src=ranks[stage], group=group)
    return received


def _whole(rule: Rule, part: torch.Tensor | None) -> torch.Tensor:
    assert part is not None, "the first stage has every tensor by now"
    size = _tp_size()
    if size == 1 or rule.op.gather([part.new_empty(part.shape, device="meta")] * 2).shape == part.shape:
        return part  # whole on every rank
    shards = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(shards, part.contiguous(), group=mpu.get_tensor_model_parallel_group())
    return rule.op.gather(shards)


def save_hf(chunks: Sequence[MegatronModule], config: Config, out_dir: str | Path) -> None:
    """Write a Hugging Face model directory; it appears under its name only when it is complete.

    Collective over all ranks; rank 0 writes. Weights keep the model's dtype, tokenizer and other files
    come from ``--hf-checkpoint``. An existing directory is replaced.

    Raises:
        CheckpointError: The directory cannot be written.
    """
    assert config.hf is not None, "a training configuration has a checkpoint"
    writer = HfWriter(Path(out_dir), Path(config.hf.path)) if dist.get_rank() == 0 else None
    for bucket in iter_hf_buckets(chunks, config, HfWriter.SHARD_BYTES):
        if writer:
            writer.write(bucket)
    if writer:
        writer.finish()
    dist.barrier()
