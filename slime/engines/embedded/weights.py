"""Model weights under their Hugging Face names: what is held, how it is loaded, replaced, freed and summed up.

Projections that run fused (q, k, v; gate, up) are held as one tensor; a name addresses its rows. A bucket of new
weights is checked as a whole before the first byte changes. Tests hold: reading back gives the written bits for every
name, and the checksums are those of the written tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from slime.engines.api import RequestError
from slime.engines.embedded.linear import Linear, Plain
from slime.errors import ConfigError
from slime.weights.checksum import tensor_checksum

_NO_PARAMETERS = ("rotary_emb.inv_freq",)
"""Endings of names that old checkpoints carry and that are computed here."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a named tensor lives: rows ``[start, end)`` of ``home``, or all of it."""

    home: Plain | Linear
    start: int
    end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the named tensor."""
        return (self.end - self.start, *self.home.shape[1:])


class WeightStore:
    """All weights of one model by name.

    Args:
        slots: Where each name lives.
        tied: Pairs of (source, copy): the copy is refreshed whenever the source changes.
        aliases: Further names that are accepted for writing, such as a tied ``lm_head.weight``.
        spare: Beginnings of names that a model directory may hold and that are not used here.
    """

    def __init__(
        self,
        slots: dict[str, Slot],
        *,
        tied: Sequence[tuple[Plain, Linear]] = (),
        aliases: dict[str, str] | None = None,
        spare: tuple[str, ...] = (),
    ) -> None:
        self.slots = slots
        self._tied = tied
        self._aliases = aliases or {}
        self._spare = spare
        self.missing: set[str] = set(slots)

    def read(self, name: str) -> Tensor:
        """The tensor called ``name``; rows of a plain home are a view.

        Raises:
            RequestError: No such name, or the weights are released.
        """
        slot = self._slot(name)
        self._require_values(name)
        return slot.home.dense()[slot.start : slot.end]

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Raise RequestError unless a tensor of this name, shape and dtype can be taken."""
        slot = self._slot(name)
        if tuple(shape) != slot.shape:
            raise RequestError(f"{name} comes with shape {list(shape)}; the model has {list(slot.shape)}")
        if not dtype.is_floating_point:
            raise RequestError(f"{name} comes as {dtype}; accepted: a floating point dtype")

    def write(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Replace the named tensors, converting to the model's dtype.

        Raises:
            RequestError: A name, shape or dtype does not fit; nothing has changed then.
        """
        for name, tensor in tensors:
            self.check(name, tensor.shape, tensor.dtype)
        opened: dict[int, tuple[Linear, Tensor]] = {}
        touched: set[int] = set()
        for name, tensor in tensors:
            slot = self._slot(name)
            home = slot.home
            if isinstance(home, Linear) and not home.is_plain:
                if id(home) not in opened:
                    opened[id(home)] = (home, home.dense())
                target = opened[id(home)][1]
            else:
                target = home.dense()
                home.store(target)
            target[slot.start : slot.end].copy_(tensor)
            touched.add(id(home))
            self.missing.discard(self._aliases.get(name, name))
        for home, dense in opened.values():
            home.store(dense)
        for source, copy in self._tied:
            if id(source) in touched:
                copy.store(source.data)

    def release(self) -> None:
        """Free every tensor; nothing can be read until it is written again."""
        for slot in self.slots.values():
            slot.home.release()
        for _, copy in self._tied:
            copy.release()
        self.missing = set(self.slots)

    def reset(self) -> None:
        """Set every tensor to zero, so that a later update can be shown to fill them all."""
        self.write([(name, torch.zeros(slot.shape, dtype=slot.home.dtype)) for name, slot in self.slots.items()])

    def checksums(self, skip: Sequence[str] = ()) -> dict[str, str]:
        """Checksum of every tensor, over the values that are multiplied with.

        Args:
            skip: Leave out every name that contains one of these.
        """
        found: dict[str, str] = {}
        home: Plain | Linear | None = None
        dense = torch.empty(0)
        for name, slot in self.slots.items():
            if any(pattern in name for pattern in skip):
                continue
            self._require_values(name)
            if slot.home is not home:  # the tensors of one home follow each other: it is unpacked once
                home, dense = slot.home, slot.home.dense().cpu()
            found[name] = tensor_checksum(dense[slot.start : slot.end])
        return found

    def load(self, model_path: str | Path) -> None:
        """Read all weights of a model directory.

        Raises:
            ConfigError: Files or tensors are missing, or do not fit the model.
        """
        unfilled = set(self.slots)
        try:
            for file in safetensors_files(Path(model_path)):
                for name, tensor in _tensors_of(file):
                    if not name.endswith(_NO_PARAMETERS) and not name.startswith(self._spare):
                        self.write([(name, tensor)])
                        unfilled.discard(self._aliases.get(name, name))
        except RequestError as error:
            raise ConfigError(f"--model-path {model_path}: {error}") from error
        if unfilled:
            names = ", ".join(sorted(unfilled)[:3])
            raise ConfigError(f"--model-path {model_path} lacks {len(unfilled)} tensors, such as {names}")

    def _require_values(self, name: str) -> None:
        if self._aliases.get(name, name) in self.missing:
            raise RequestError(f"{name} holds no values: its memory was released and no update has filled it since")

    def _slot(self, name: str) -> Slot:
        slot = self.slots.get(self._aliases.get(name, name))
        if slot is None:
            example = next(iter(self.slots))
            raise RequestError(
                f"the model has no tensor {name!r}; names are those of the checkpoint, such as {example!r}"
            )
        return slot


def named_rows(prefix: str, linear: Linear, cuts: Mapping[str, tuple[int, int] | None]) -> dict[str, Slot]:
    """Slots of the projections that ``linear`` holds, and of their biases; rows None means all of them."""
    spans = {name: rows or (0, linear.shape[0]) for name, rows in cuts.items()}
    slots = {f"{prefix}{name}.weight": Slot(linear, *rows) for name, rows in spans.items()}
    if linear.bias is not None:
        slots |= {f"{prefix}{name}.bias": Slot(linear.bias, *rows) for name, rows in spans.items()}
    return slots


def safetensors_files(path: Path) -> list[Path]:
    """Weight files of a model directory, in the order of its index.

    Raises:
        ConfigError: There is none, or the index names a missing file.
    """
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [str(f) for f in files if not f.is_file()]
    if missing or not files:
        what = f"misses {', '.join(missing)}" if missing else "has no *.safetensors file"
        raise ConfigError(f"--model-path {path} {what}; give a complete Hugging Face model directory")
    return files


def _tensors_of(file: Path) -> Iterator[tuple[str, Tensor]]:
    with safe_open(file, framework="pt") as reader:
        names: Iterable[str] = reader.keys()
        for name in names:
            yield name, reader.get_tensor(name)
