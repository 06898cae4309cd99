"""Multi-latent attention (DeepSeek V3 and its relatives) over packed rows.

Owns the projections between hidden states and the heads of Megatron's MLA module: the down projections
are whole on every tensor-parallel rank and see its part of the row, so that the rotary key, which all
heads share, gets the gradient of all of them; rotary angles come from the row's positions. Tests hold
through ``model``: log-probs and gradients equal those of transformers at every layout.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig
from torch import nn

from slime.backends.megatron.attention import PackedRow

LATENT_NORM_EPSILON = 1e-6
"""Of the norms of the latents, whatever the epsilon of the layers' own norms."""


class LatentAttention(MLASelfAttention):
    """Megatron's MLA for a ``PackedRow``; parameters keep Megatron's names."""

    config: MLATransformerConfig

    def __init__(self, config: MLATransformerConfig, submodules: MLASelfAttentionSubmodules, **kwargs: Any) -> None:
        super().__init__(config, submodules, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = _replicated_linear(config, config.q_lora_rank)
        self.linear_kv_down_proj = _replicated_linear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)
        self.frequencies, self.rotary_scale = self._frequencies()

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Megatron's own choice wants norms fused by Transformer Engine where there is no query latent."""
        linears = {
            name: getattr(submodules, name) for name in ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
        }
        return {**linears, "q_layernorm": latent_norm, "kv_layernorm": latent_norm}

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
        inference_context: Any = None,
        *,
        inference_params: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of this tensor-parallel rank's heads. Collective over that group.

        Args:
            hidden_states: ``[T / cp, 1, H]`` (T further divided by tp under sequence parallelism).
            key_value_states: Unused, as the further arguments but one.
            position_ids: Unused: the row says where its tokens stand.
            packed_seq_params: The row.
            inference_context: Unused.
            inference_params: Unused.

        Returns:
            Query and key ``[T / cp, 1, h, qk]``, value ``[T / cp, 1, h, v]``, and both latents.
        """
        assert packed_seq_params is not None, "the model runs on packed rows only"
        config = self.config
        queries = hidden_states
        if config.q_lora_rank is not None:
            queries = self.q_layernorm(self.linear_q_down_proj(hidden_states))
        latent, rotary_key = self.linear_kv_down_proj(hidden_states).split(
            [config.kv_lora_rank, config.qk_pos_emb_head_dim], -1
        )
        latent = self.kv_layernorm(latent)
        rotary_key = self._for_all_heads(rotary_key)
        angles = packed_seq_params.positions.float().outer(self.frequencies.to(rotary_key.device))

        def heads(queries: torch.Tensor, latent: torch.Tensor, rotary_key: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._heads(queries, latent, rotary_key, angles)

        if self.recompute_up_proj:
            self.qkv_up_checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None)
            query, key, value = self.qkv_up_checkpoint.checkpoint(heads, queries, latent, rotary_key)
        else:
            query, key, value = heads(queries, latent, rotary_key)
        return query, key, value, queries, latent

    def _heads(
        self, queries: torch.Tensor, latent: torch.Tensor, rotary_key: torch.Tensor, angles: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        config, num_heads = self.config, self.num_attention_heads_per_partition
        project = self.linear_q_proj if config.q_lora_rank is None else self.linear_q_up_proj
        query = project(queries)[0].unflatten(-1, (num_heads, self.q_head_dim))
        plain, rotary = query.split([config.qk_head_dim, config.qk_pos_emb_head_dim], -1)
        query = torch.cat([plain, rotate(rotary, angles, self.rotary_scale)], -1)
        both = self.linear_kv_up_proj(latent)[0].unflatten(-1, (num_heads, config.qk_head_dim + config.v_head_dim))
        plain, value = both.split([config.qk_head_dim, config.v_head_dim], -1)
        rotary = rotate(rotary_key.unsqueeze(-2), angles, self.rotary_scale)
        key = torch.cat([plain, rotary.expand(*plain.shape[:-1], -1)], -1)
        return query, key, value.contiguous()

    def _for_all_heads(self, rotary_key: torch.Tensor) -> torch.Tensor:
        """The rotary key of the whole row; its gradient is summed over the heads of all tensor-parallel ranks."""
        group = self.pg_collection.tp
        if self.config.sequence_parallel:
            return tensor_parallel.gather_from_sequence_parallel_region(
                rotary_key.contiguous(), tensor_parallel_output_grad=True, group=group
            )
        return tensor_parallel.copy_to_tensor_model_parallel_region(rotary_key, group=group)

    def _frequencies(self) -> tuple[torch.Tensor, float]:
        """``[d / 2]`` fp32 angle per position of each rotary pair, and the factor of sine and cosine."""
        if self.config.rope_type == "rope":
            return self.rotary_pos_emb.inv_freq, 1.0
        table, scale = self.rotary_pos_emb.get_emb(2)  # yarn's frequencies are only found in its table
        return table[1].flatten()[: self.config.qk_pos_emb_head_dim // 2], scale


def rotate(x: torch.Tensor, angles: torch.Tensor, scale: float) -> torch.Tensor:
    """Rotate neighbouring pairs of the last dimension; first halves of all pairs come before the second ones.

    Args:
        x: ``[T, 1, h, d]``.
        angles: ``[T, d / 2]`` fp32.
        scale: Factor of the result.

    Returns:
        ``[T, 1, h, d]`` in the dtype of ``x``.
    """
    cos, sin = ((part * scale).to(x.dtype)[:, None, None] for part in (angles.cos(), angles.sin()))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, odd * cos + even * sin], -1)


def latent_norm(config: MLATransformerConfig, hidden_size: int, **_: Any) -> nn.Module:
    """The norm of a latent; each tensor-parallel rank sees its own part of the row under sequence parallelism."""
    norm = nn.RMSNorm(hidden_size, eps=LATENT_NORM_EPSILON)
    setattr(norm.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return norm


def _replicated_linear(config: MLATransformerConfig, size: int) -> nn.Linear:
    linear = nn.Linear(config.hidden_size, size, bias=False, dtype=config.params_dtype)
    if config.perform_initialization:
        assert config.init_method is not None, "Megatron's configuration sets one"
        config.init_method(linear.weight)
    setattr(linear.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return linear
