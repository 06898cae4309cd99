"""The experts of one layer on one rank, computed together.

Owns the fast path that takes the place of Transformer Engine's grouped GEMM: on CUDA in bf16
all experts run in two calls of torch's grouped matrix product, elsewhere one after the other as in
Megatron. Parameters keep the names of Megatron's ``SequentialMLP``, so that weight tables and
checkpoints do not depend on the path. Tests (on a GPU) hold: output and gradients agree with the
experts one by one.
"""

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from torch.nn import functional as F


class GroupedExperts(SequentialMLP):
    """Megatron's sequence of experts with a grouped forward where the device has one."""

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run each expert on its tokens.

        Args:
            permuted_local_hidden_states: ``[T, H]``, tokens of the first expert first.
            tokens_per_expert: ``[E]`` int64, summing to T.
            permuted_probs: ``[T]``, the router's weight of each.

        Returns:
            ``[T, H]`` weighted outputs in the same order, and no bias.
        """
        hidden = permuted_local_hidden_states
        width = self.local_experts[0].linear_fc2.weight.size(1)
        if not can_group(hidden, width) or not hidden.size(0):
            return super().forward(hidden, tokens_per_expert, permuted_probs)
        ends = tokens_per_expert.cumsum(0).to(device=hidden.device, dtype=torch.int32)
        first, second = (
            torch.stack([getattr(expert, name).weight for expert in self.local_experts])
            for name in ("linear_fc1", "linear_fc2")
        )
        return grouped_swiglu(hidden, first, second, permuted_probs, ends), None


def can_group(hidden: torch.Tensor, width: int) -> bool:
    """Whether torch has a grouped matrix product for activations ``[T, H]`` and experts of that width."""
    return hidden.is_cuda and hidden.dtype == torch.bfloat16 and hidden.size(-1) % 8 == 0 and width % 8 == 0


def grouped_swiglu(
    hidden: torch.Tensor, first: torch.Tensor, second: torch.Tensor, probs: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """Gated experts over tokens sorted by expert.

    Args:
        hidden: ``[T, H]``.
        first: ``[E, 2F, H]`` gate above up.
        second: ``[E, H, F]``.
        probs: ``[T]``.
        ends: ``[E]`` int32, index after the last token of each expert.

    Returns:
        ``[T, H]`` in the dtype of ``hidden``.
    """
    gate, up = F.grouped_mm(hidden, first.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    inner = F.silu(gate) * up
    # As Megatron: the product with the router's weight in the router's precision, then back.
    inner = (inner * probs.unsqueeze(-1)).to(hidden.dtype)
    return F.grouped_mm(inner, second.transpose(1, 2), offs=ends)
