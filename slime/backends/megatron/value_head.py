"""The output layer of a value model: one number per token, whole on every tensor-parallel rank.

Owns the head, its first weights, its place in checkpoints, and its exchange for a language-model head.
The trunk below it is the policy's own code. Tests hold: first weights are the same under every layout;
weight and bias stay the same on every tensor-parallel rank; a policy's checkpoint gives the trunk and
leaves the head fresh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

CHECKPOINT_NAME = "value_head"
"""Name in Megatron checkpoints; another than a policy's, whose first vocabulary row would fit the head."""

_PARAMETERS = ("output_layer.weight", "output_layer.bias")


class ValueHead(torch.nn.Module):
    """``[r, H]`` hidden states to ``[r, 1]`` float32 values, computed in float32 whatever the model's dtype.

    Args:
        hidden_size: H.
        std: Of the first weights; the first bias is 0.
        seed: Of the first weights, which depend on nothing else.
    """

    def __init__(self, hidden_size: int, *, std: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(1, hidden_size, generator=generator) * std)
        self.bias = torch.nn.Parameter(torch.zeros(1))
        for parameter in self.parameters():
            # Ranks compute equal gradients from equal inputs; averaging keeps rounding from ever telling them apart.
            parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Values of hidden states that are whole on this rank, as is the gradient that flows back to them."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float())


def give_value_head(model: GPTModel, *, seed: int) -> None:
    """Exchange the output layer of a bare chunk; chunks of earlier stages have none."""
    if not model.post_process:
        return
    config = model.config
    model.output_layer = ValueHead(config.hidden_size, std=config.init_method_std, seed=seed)
    described = model.sharded_state_dict

    def sharded_state_dict(prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = described(prefix, *args, **kwargs)
        for name in _PARAMETERS:
            tensor = state[prefix + name]
            tensor.key = tensor.key.replace("output_layer", CHECKPOINT_NAME)
            tensor.allow_shape_mismatch = False
        return state

    model.sharded_state_dict = sharded_state_dict


def leave_missing_head_out(state: dict[str, Any], path: Path) -> None:
    """Take the head out of what is to be loaded if the Megatron checkpoint at ``path`` has none.

    Args:
        state: Sharded state of a chunk, whatever it is wrapped in.
        path: The checkpoint.
    """
    stored = dist_checkpointing.load_tensors_metadata(str(path))
    for name in [name for name in state if name.endswith(_PARAMETERS)]:
        if state[name].key not in stored:
            del state[name]
