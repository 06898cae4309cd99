"""Rotary position embeddings: their settings in ``config.json``, frequencies and the table of rotations.

Tests hold: rotated models of every kind equal transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime.errors import ConfigError

_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeShape:
    """How positions turn pairs of channels.

    Args:
        theta: Base of the frequencies.
        dim: Channels that are turned, two per frequency.
        scaling: Kind (``rope_type``) and its parameters.
    """

    theta: float
    dim: int
    scaling: Mapping[str, Any]

    @property
    def amplitude(self) -> float:
        """Factor of sine and cosine: 1 except for yarn (https://arxiv.org/abs/2309.00071, section 3.4)."""
        s = self.scaling
        if s["rope_type"] != "yarn":
            return 1.0
        if s.get("attention_factor") is not None:
            return float(s["attention_factor"])
        if s.get("mscale") and s.get("mscale_all_dim"):
            return _magnitude(s["factor"], s["mscale"]) / _magnitude(s["factor"], s["mscale_all_dim"])
        return _magnitude(s["factor"], 1.0)

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores in models whose yarn scales them too (``mscale_all_dim``)."""
        s = self.scaling
        if s["rope_type"] != "yarn" or not s.get("mscale_all_dim"):
            return 1.0
        return _magnitude(s["factor"], s["mscale_all_dim"]) ** 2


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(config: Mapping[str, Any], head_dim: int, *, partial: float | None = None) -> RopeShape:
    """Settings from ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``.

    Args:
        config: Contents of ``config.json``.
        head_dim: Channels of a head.
        partial: Share of them that is turned where the file does not say; None in models that turn all.

    Raises:
        ConfigError: A kind of scaling that the embedded engine lacks.
    """
    scaling: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _KINDS:
        raise ConfigError(f"rope scaling {kind!r} in config.json; the embedded engine has {', '.join(_KINDS)}")
    share = float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or partial or 1.0)
    if partial is None and share != 1.0:
        raise ConfigError(f"partial_rotary_factor {share:g} in config.json; models of this kind turn whole heads")
    scaling["rope_type"] = kind
    if kind == "yarn":
        positions = config.get("max_position_embeddings", 2048)
        original = scaling.setdefault("original_max_position_embeddings", positions)
        scaling["factor"] = float(scaling.get("factor") or positions / original)
    return RopeShape(theta=theta, dim=int(head_dim * share), scaling=scaling)


def inverse_frequencies(rope: RopeShape) -> Tensor:
    """Rotation per position of each pair of channels, ``[dim / 2]`` float32.

    The ``llama3`` rule keeps short wavelengths, divides long ones by ``factor`` and blends between
    (https://arxiv.org/abs/2407.21783, section 3); ``yarn`` does so by the number of turns within the original context.
    """
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    inverse = 1.0 / (rope.theta**exponents)
    kind = rope.scaling["rope_type"]
    if kind == "linear":
        return inverse / float(rope.scaling["factor"])
    if kind == "llama3":
        return _llama3(inverse, rope.scaling)
    if kind == "yarn":
        return _yarn(inverse, rope)
    return inverse


def _llama3(inverse: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / inverse
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelengths > original / low, inverse / factor, inverse)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(between, blended, scaled)


def _yarn(inverse: Tensor, rope: RopeShape) -> Tensor:
    scaling, dim = rope.scaling, rope.dim
    original = float(scaling["original_max_position_embeddings"])

    def channel(turns: float) -> float:
        """The (fractional) pair of channels that turns so often within the original context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = channel(scaling.get("beta_fast") or 32), channel(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / max(high - low, 0.001)).clamp_(0, 1)
    return inverse / scaling["factor"] * stretched + inverse * (1 - stretched)


class RotationTable:
    """Cosines and sines of every position, computed as far as positions are asked for.

    Args:
        rope: The settings.
        dtype: Of the table.
        device: Where it lives.
    """

    def __init__(self, rope: RopeShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self._inverse = inverse_frequencies(rope).to(device)
        self._amplitude = rope.amplitude
        self._dtype = dtype
        self._cos, self._sin = self._compute(0)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and signed sine ``[T, 1, dim]`` for ``positions`` ``[T]``."""
        needed = int(positions.max()) + 1
        if needed > self._cos.shape[0]:
            self._cos, self._sin = self._compute(max(1024, 1 << (needed - 1).bit_length()))
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def _compute(self, length: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(length, device=self._inverse.device).float()[:, None] * self._inverse
        cos, sin = angles.cos() * self._amplitude, angles.sin() * self._amplitude
        # The sign of "rotate half" is in the table, so that a plain roll of the channels is enough.
        return torch.cat((cos, cos), -1).to(self._dtype), torch.cat((-sin, sin), -1).to(self._dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first ``dim`` channels of ``x`` ``[T, heads, D]`` by a table's rows ``[T, 1, dim]``.

    The pairs are the first and second half of those channels; the others stay.
    """
    dim = cos.shape[-1]
    if dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :dim], cos, sin), x[..., dim:]), -1)
    return torch.addcmul(x * cos, torch.roll(x, dim // 2, -1), sin)
