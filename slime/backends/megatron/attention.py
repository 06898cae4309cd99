"""Attention over packed rows, plugged into Megatron's layers by layer spec (``layers``).

Owns the core attention module and ``PackedRow``, which carries one row's layout through Megatron's
layers. Padded SDPA batches serve
CPUs and fp32, ``torch.nn.attention.varlen`` (flash attention) CUDA in half precision. Under context
parallelism keys and values are gathered over the group, which is exact for any layout. Tests hold:
each kernel, and each number of context-parallel ranks, equals SDPA with the full mask.
"""

import math
from dataclasses import dataclass

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from slime.backends.megatron.layout import PackedLayout, Segment, context_parallel_index
from slime.backends.megatron.padded import PaddedPlan
from slime.backends.megatron.varlen import VarlenPlan

__all__ = ["CoreAttention", "PackedLayout", "PackedRow", "Segment", "pack_row"]


@dataclass(kw_only=True)
class PackedRow(PackedSeqParams):
    """One packed row on its way through the model.

    ``qkv_format`` is "sbhd" on purpose: Megatron's attention then takes the row as one sequence with
    batch size 1 and applies rotary frequencies token by token, which lets ``positions`` say where each
    token stands; which tokens see each other is the core attention's business alone.

    Args:
        layout: The whole row, the same on all context-parallel ranks.
        index: ``[T / cp]`` int64, the row's tokens on this rank.
        positions: ``[T / cp]`` int64, their rotary positions.
        max_position: The largest position of the whole row.
        plan: The work of the attention kernel, shared by all layers.
    """

    layout: PackedLayout
    index: torch.Tensor
    positions: torch.Tensor
    max_position: int
    plan: "PaddedPlan | VarlenPlan | MaskPlan"


class MaskPlan:
    """SDPA with one explicit mask over the whole row: context parallelism on a CPU or in fp32."""

    def __init__(self, layout: PackedLayout, index: torch.Tensor, gathered: torch.Tensor, device: torch.device) -> None:
        mask = layout.visible()[index][:, gathered]
        # A row of the mask without any key would make its output, and every gradient, NaN.
        self.blind = (~mask.any(1)).to(device)
        self.mask = (mask | (~mask.any(1))[:, None]).to(device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, dropout: float = 0.0
    ) -> torch.Tensor:
        """As ``PaddedPlan.attend``, for this rank's queries ``[T / cp, h, d]`` and all keys ``[T, g, d]``."""
        output = F.scaled_dot_product_attention(
            *(x.transpose(0, 1)[None] for x in (query, key, value)),
            attn_mask=self.mask,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=query.size(1) != key.size(1),
        )
        return output[0].transpose(0, 1).masked_fill(self.blind[:, None, None], 0)


def pack_row(
    layout: PackedLayout, *, dtype: torch.dtype, device: torch.device, cp_rank: int = 0, cp_size: int = 1
) -> PackedRow:
    """Prepare a layout for the model.

    Args:
        layout: The row; its length is a multiple of 2 * cp_size, and with sequence parallelism of
            tp_size after that split.
        dtype: Of the activations.
        device: Of the activations.
        cp_rank: This rank's place in its context-parallel group.
        cp_size: Size of that group.
    """
    index = context_parallel_index(layout.num_tokens, cp_rank, cp_size)
    gathered = torch.cat([context_parallel_index(layout.num_tokens, rank, cp_size) for rank in range(cp_size)])
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        plan: PaddedPlan | VarlenPlan | MaskPlan = VarlenPlan(layout, index, gathered, device=device)
    elif cp_size == 1:
        plan = PaddedPlan(layout, dtype=dtype, device=device)
    else:
        plan = MaskPlan(layout, index, gathered, device)
    positions = layout.positions()
    return PackedRow(
        qkv_format="sbhd",
        layout=layout,
        index=index.to(device),
        positions=positions[index].to(device),
        max_position=int(positions.max()) if positions.numel() else 0,
        plan=plan,
    )


class CoreAttention(MegatronModule):
    """Softmax attention of one layer over a ``PackedRow``; the arguments are Megatron's."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = groups.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> torch.Tensor:
        """Attend within a row. Collective over the context-parallel group.

        Args:
            query: ``[T / cp, 1, h, d]``, this tensor-parallel rank's heads.
            key: ``[T / cp, 1, g, d]``.
            value: ``[T / cp, 1, g, v]``; v is d but in multi-latent attention.
            attention_mask: Unused: the row's layout says which tokens see each other.
            attn_mask_type: Unused.
            attention_bias: Unused.
            packed_seq_params: The row.

        Returns:
            ``[T / cp, 1, h * v]``.
        """
        assert packed_seq_params is not None, "the model runs on packed rows only"
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        if self.cp_group.size() > 1:
            key, value = (
                tensor_parallel.gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)
                for x in (key, value)
            )
        dropout = self.dropout if self.training else 0.0
        output = packed_seq_params.plan.attend(query, key, value, scale=self.scale, dropout=dropout)
        return output.reshape(output.size(0), 1, -1)
