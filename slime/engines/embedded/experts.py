"""Feed-forward parts of a layer: one gated MLP, or experts of which each token uses a few.

Tokens are grouped by expert, so an expert multiplies all of its tokens at once, with weights packed like those of any
linear layer. The parts of a token are added in the order of its experts, whatever else is in the step. Tests hold:
results and choices equal transformers, and a token gets the same alone and among others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.engines.embedded.linear import Homes
from slime.engines.embedded.shape import ExpertShape, ModelShape
from slime.engines.embedded.weights import Slot, named_rows
from slime.weights.precision import held_dtype

_BIAS = "gate.e_score_correction_bias"


class GatedMlp:
    """``down(silu(gate(x)) * up(x))``.

    Args:
        hidden_size: Width of input and output.
        size: Width between.
        homes: Makes the weights.
        bias: Whether the projections have biases.
    """

    def __init__(self, hidden_size: int, size: int, homes: Homes, *, bias: bool = False) -> None:
        self._size = size
        self._gate_up = homes.linear(2 * size, hidden_size, bias=bias)
        self._down = homes.linear(hidden_size, size, bias=bias)

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, H]`` of ``x`` ``[T, H]``."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate) * up)

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Where each named weight lives."""
        cuts = {"gate_proj": (0, self._size), "up_proj": (self._size, 2 * self._size)}
        return named_rows(prefix, self._gate_up, cuts) | named_rows(prefix, self._down, {"down_proj": None})


@dataclass(frozen=True, slots=True)
class Routing:
    """Where tokens go: ``experts`` ``[T, active]`` int64 and ``weights`` ``[T, active]`` float32."""

    experts: Tensor
    weights: Tensor

    def of(self, wanted: Tensor) -> Routing:
        """The same for some of the tokens."""
        return Routing(self.experts[wanted], self.weights[wanted])


class ExpertMlp:
    """Experts with their router, and perhaps one that every token uses.

    Args:
        shape: Of the model.
        sizes: Of its experts.
        homes: Makes the weights.
    """

    def __init__(self, shape: ModelShape, sizes: ExpertShape, homes: Homes) -> None:
        self._sizes = sizes
        self._router = homes.plain(sizes.num_experts, shape.hidden_size)
        bias_dtype = held_dtype(_BIAS, homes.dtype)
        self._bias = homes.plain(sizes.num_experts, dtype=bias_dtype) if sizes.scores == "sigmoid" else None
        self._experts = [GatedMlp(shape.hidden_size, sizes.expert_size, homes) for _ in range(sizes.num_experts)]
        self._shared = GatedMlp(shape.hidden_size, sizes.shared_size, homes) if sizes.shared_size else None
        self._shared_gate = homes.plain(1, shape.hidden_size) if sizes.shared_gate else None

    def route(self, x: Tensor) -> Routing:
        """Choose the experts of every token of ``x`` ``[T, H]``, in float32."""
        s = self._sizes
        logits = F.linear(x.float(), self._router.data.float())
        if self._bias is None:
            scores = torch.softmax(logits, -1)
            weights, experts = torch.topk(scores, s.num_active, dim=-1)
        else:
            scores = logits.sigmoid()
            experts = self._choose_in_groups(scores + self._bias.data)
            weights = scores.gather(1, experts)
        if s.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(experts, weights * s.scaling)

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """``[T, H]`` of ``x`` ``[T, H]``."""
        out = self._mixture(x, routing)
        if self._shared is None:
            return out
        shared = self._shared(x)
        if self._shared_gate is not None:
            shared = torch.sigmoid(F.linear(x, self._shared_gate.data)) * shared
        return out + shared

    def slots(self, prefix: str) -> dict[str, Slot]:
        """Where each named weight lives."""
        num_experts = self._sizes.num_experts
        slots = {prefix + "gate.weight": Slot(self._router, 0, num_experts)}
        if self._bias is not None:
            slots[prefix + _BIAS] = Slot(self._bias, 0, num_experts)
        for i, expert in enumerate(self._experts):
            slots |= expert.slots(f"{prefix}experts.{i}.")
        if self._shared is not None:
            slots |= self._shared.slots(f"{prefix}{self._sizes.shared_name}.")
        if self._shared_gate is not None:
            slots[f"{prefix}{self._sizes.shared_name}_gate.weight"] = Slot(self._shared_gate, 0, 1)
        return slots

    def _choose_in_groups(self, scores: Tensor) -> Tensor:
        """The best experts ``[T, active]`` of the best groups; a group counts by its two best experts."""
        s = self._sizes
        if s.num_active_groups < s.num_groups:
            grouped = scores.view(scores.shape[0], s.num_groups, -1)
            totals = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
            best = totals.topk(s.num_active_groups, dim=-1).indices
            closed = torch.ones_like(totals, dtype=torch.bool).scatter_(1, best, value=False)
            scores = grouped.masked_fill(closed[:, :, None], float("-inf")).flatten(1)
        return scores.topk(s.num_active, dim=-1).indices

    def _mixture(self, x: Tensor, routing: Routing) -> Tensor:
        if not len(x):  # a step may end in the middle of a prompt, when nobody asks for logits
            return x
        active = self._sizes.num_active
        chosen = routing.experts.flatten()
        order = chosen.argsort(stable=True)
        counts: list[int] = torch.bincount(chosen, minlength=self._sizes.num_experts).tolist()
        inputs = x[order // active]
        parts = [
            self._experts[expert](rows)
            for expert, (rows, count) in enumerate(zip(inputs.split(counts), counts, strict=True))
            if count
        ]
        results = torch.empty_like(inputs)
        results[order] = torch.cat(parts)
        weighted = results.view(x.shape[0], active, -1) * routing.weights[:, :, None].to(x.dtype)
        return weighted.sum(1)
