"""The files of a Hugging Face model directory: where its tensors are, and how to write a new one.

Owns the index of safetensors files and the writing of a directory aside, then renaming it. Knows nothing of
Megatron. Tests hold: whatever rename a write is killed at, the last complete directory is under the final name, or
comes back there with the next write.
"""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import torch

from slime.errors import CheckpointError
from slime.files import force_tree_to_disk

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"

_safe_open = cast(Any, safetensors.safe_open)
_save_file = cast(Any, safetensors.torch).save_file


def weight_files(path: Path) -> dict[str, Path]:
    """Which file of a model directory holds which tensor.

    Raises:
        CheckpointError: There are no safetensors files, or the index cannot be read.
    """
    index = path / INDEX
    try:
        if index.exists():
            return {name: path / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        found: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with _safe_open(file, framework="pt") as tensors:
                found.update(dict.fromkeys(tensors.keys(), file))
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: the weights cannot be read: {error}") from error
    if not found:
        raise CheckpointError(f"{path}: no *.safetensors files")
    return found


class HfWriter:
    """Writes one model directory, shard by shard.

    Args:
        out_dir: The final directory.
        template: Directory whose configuration and tokenizer files are copied.
    """

    SHARD_BYTES = 5 * 2**30

    def __init__(self, out_dir: Path, template: Path) -> None:
        self._out = out_dir
        self._template = template
        self._aside = out_dir.with_name(f".{out_dir.name}.incomplete")
        self._retired = out_dir.with_name(f".{out_dir.name}.retired")
        self._shards: list[Mapping[str, torch.Tensor]] = []
        self._names: list[list[str]] = []
        self._bytes: Counter[torch.dtype] = Counter()
        try:
            self._recover()
            if self._aside.exists():
                shutil.rmtree(self._aside)
            self._aside.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"{out_dir}: cannot be written: {error}") from error

    def write(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Write one shard."""
        shard = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors}
        try:
            _save_file(shard, self._aside / f"{len(self._names)}.safetensors", metadata={"format": "pt"})
        except (OSError, safetensors.SafetensorError) as error:  # a full disk is the latter
            raise CheckpointError(f"{self._out}: cannot be written: {error}") from error
        self._names.append(list(shard))
        for tensor in shard.values():
            self._bytes[tensor.dtype] += tensor.numel() * tensor.element_size()

    def finish(self) -> None:
        """Add index, configuration and tokenizer, then put the directory in its place."""
        try:
            self._name_shards()
            self._copy_other_files()
            force_tree_to_disk(self._aside)
            if self._retired.exists():  # its successor is in place: the constructor saw to that
                shutil.rmtree(self._retired)
            if self._out.exists():
                self._out.replace(self._retired)
            try:
                self._aside.replace(self._out)
            except BaseException:
                self._recover()
                raise
            if self._retired.exists():
                shutil.rmtree(self._retired)
        except OSError as error:
            raise CheckpointError(f"{self._out}: cannot be written: {error}") from error

    def _recover(self) -> None:
        """Bring the last complete directory back if a write ended between its two renames."""
        if self._retired.exists() and not self._out.exists():
            logger.info("bringing back %s, whose replacement was interrupted", self._out)
            self._retired.replace(self._out)

    def _name_shards(self) -> None:
        count = len(self._names)
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._names):
            file = "model.safetensors" if count == 1 else f"model-{i + 1:05d}-of-{count:05d}.safetensors"
            (self._aside / f"{i}.safetensors").replace(self._aside / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self._bytes.total()}, "weight_map": dict(sorted(weight_map.items()))}
            (self._aside / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _copy_other_files(self) -> None:
        for source in sorted(self._template.iterdir()):
            if source.is_file() and not source.name.startswith(".") and not _is_weights(source.name):
                shutil.copyfile(source, self._aside / source.name)
        path = self._aside / "config.json"
        config = json.loads(path.read_text())
        if self._bytes:  # of most weights: a router's expert bias keeps its own
            key = "dtype" if "dtype" in config else "torch_dtype"
            config[key] = str(self._bytes.most_common(1)[0][0]).removeprefix("torch.")
        # Weights are never written quantised, whatever they were read from.
        config.pop("quantization_config", None)
        path.write_text(json.dumps(config, indent=2) + "\n")


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json"))
