"""Rotary embedding in one kernel on CUDA, where Megatron without Transformer Engine takes ten.

Owns the substitution of Megatron's function by ``install`` and the arithmetic. It is compiled, in a few seconds, at the
first row. Tests hold: the same values and gradients as Megatron's function.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

from slime.backends.megatron.compiled import ForAnyLength

_NAME = "_apply_rotary_pos_emb_bshd"


class Rotary:
    """Takes the place of Megatron's function for ``[T, 1, h, d]`` heads; keeps that for what it does not cover.

    Args:
        whole: Megatron's function.
        compiled: Whether the arithmetic is one kernel.
    """

    def __init__(self, whole: Callable[..., Tensor], *, compiled: bool) -> None:
        self._whole = whole
        self._rotate = ForAnyLength(_rotate) if compiled else _rotate

    def __call__(
        self,
        t: Tensor,
        freqs: Tensor,
        rotary_interleaved: bool = False,
        mla_rotary_interleaved: bool = False,
        mscale: float = 1.0,
        multi_latent_attention: bool | None = None,
    ) -> Tensor:
        """Rotate heads ``[T, 1, h, d]`` by angles ``[T, 1, 1, d]``."""
        if rotary_interleaved or mla_rotary_interleaved or multi_latent_attention or freqs.size(-1) != t.size(-1):
            return self._whole(
                t,
                freqs,
                rotary_interleaved=rotary_interleaved,
                mla_rotary_interleaved=mla_rotary_interleaved,
                mscale=mscale,
                multi_latent_attention=multi_latent_attention,
            )
        # Outside the kernel, which would take them once per head.
        cos, sin = ((f(freqs) * mscale).to(t.dtype) for f in (torch.cos, torch.sin))
        return self._rotate(t, cos, sin)


def install() -> None:
    """Put it in the place of Megatron's function (0.19.x); a second call changes nothing."""
    present = getattr(rope_utils, _NAME)
    if not isinstance(present, Rotary):
        setattr(rope_utils, _NAME, Rotary(present, compiled=True))


def _rotate(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = t.chunk(2, dim=-1)
    return t * cos + torch.cat((-second, first), dim=-1) * sin
