"""Hugging Face weights into the model and out of it, whatever its parallel layout.

Owns reading a checkpoint's safetensors into each rank's shards, buckets of whole tensors under their
Hugging Face names, and writing a checkpoint directory. The conversions are tables in
``slime.weights.families``, collecting the ranks' shards is ``gather``'s, sending buckets to engines
``slime.weights.transport``'s. Tests hold: what is saved equals what was loaded bit for bit, for every
family and layout.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import torch
from megatron.core.transformer.module import MegatronModule
from safetensors import safe_open
from torch import distributed as dist

from slime.backends.megatron.gather import gather_tensors
from slime.backends.megatron.parameters import local_tensors, model_family, model_shape, shard_group
from slime.config import Config
from slime.errors import CheckpointError
from slime.weights.families.family import EMBEDDING, OUTPUT_LAYER, VALUE_HEAD
from slime.weights.fp8 import SCALE_SUFFIX, dequantize_blocks
from slime.weights.hf_files import HfWriter, weight_files
from slime.weights.report import Receivers

Bucket = list[tuple[str, torch.Tensor]]


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
        """One tensor; what is stored in scaled 8-bit blocks comes in fp32."""
        tensor = self._read(name)
        if name + SCALE_SUFFIX in self._files:
            return dequantize_blocks(tensor, self._read(name + SCALE_SUFFIX))
        if tensor.dtype.itemsize == 1:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} is stored as {tensor.dtype} without {name + SCALE_SUFFIX!r}; "
                "convert the checkpoint to bf16 first"
            )
        return tensor

    def _read(self, name: str) -> torch.Tensor:
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
    tied = not config.megatron.untie_embeddings_and_output_weights
    with Checkpoint(path) as checkpoint, torch.no_grad():
        for tensor in local_tensors(chunks, family):
            place, op, group = tensor.place, tensor.place.rule.op, shard_group(tensor.place)
            names = place.hf_names
            if config.role == "critic" and place.name in VALUE_HEAD and names[0] not in checkpoint:
                continue  # a policy's checkpoint: the head stays as it was made
            if place.name == OUTPUT_LAYER and tied:  # the last pipeline stage's copy of the embedding
                names = family.place(EMBEDDING).hf_names
            whole = op.to_megatron([checkpoint[name] for name in names], shape)
            part = op.shard(whole, group.rank(), group.size())
            if part.shape != tensor.data.shape:
                raise CheckpointError(
                    f"{path}: {', '.join(names)} give {tuple(part.shape)} for {place.name}, "
                    f"the model has {tuple(tensor.data.shape)}; does the checkpoint belong to --hf-checkpoint?"
                )
            tensor.data.copy_(part)


def iter_hf_buckets(
    chunks: Sequence[MegatronModule], config: Config, bucket_bytes: int, receivers: Receivers = "first"
) -> Iterator[Bucket]:
    """Whole tensors under their Hugging Face names, in buckets.

    Collective over the tensor-, expert- and pipeline-parallel ranks of every replica of the model; exhaust
    it on all of them. Global rank 0 or all of them get tensors; elsewhere each bucket is empty. Tensors are CPU or
    device tensors as the model's, and may be views of its parameters: use them before the next step.

    Args:
        chunks: This rank's chunks.
        config: The resolved configuration.
        bucket_bytes: A bucket is closed before a tensor that would exceed this; a larger tensor has its own.
        receivers: Who gets tensors.

    Yields:
        ``[(name, tensor), ...]``; vocabulary padding is stripped and the tied output layer left out.
    """
    bucket: Bucket = []
    filled = 0
    source = receivers == "all" or dist.get_rank() == 0
    for name, tensor in gather_tensors(chunks, config, receivers):
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > bucket_bytes:
            yield bucket
            bucket, filled = [], 0
        filled += size
        if source:
            bucket.append((name, tensor))
    if filled:
        yield bucket


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
