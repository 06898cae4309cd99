"""The transformer layers of a pipeline stage: Megatron's local modules around our attention.

Owns the layer specs, dense and mixture of experts, and the norms that allow sequence parallelism without
Transformer Engine. Tests hold through ``model``: log-probs equal those of transformers.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from slime.backends.megatron.attention import CoreAttention
from slime.backends.megatron.experts import GroupedExperts
from slime.backends.megatron.latent import LatentAttention


def torch_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
    """A torch norm that works under sequence parallelism.

    Megatron's wrapper refuses it; all it needs is the mark by which ``finalize_model_grads`` sums the
    gradient over tensor-parallel ranks, each of which saw its own part of the row.
    """
    kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
    norm = kind(hidden_size, eps=eps)
    for parameter in norm.parameters():
        setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return norm


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage, each dense or a mixture of experts as ``moe_layer_freq`` says."""
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    for spec in {id(spec): spec for spec in block.layer_specs}.values():
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = torch_norm
        layer.self_attention.submodules.core_attention = CoreAttention
        if config.multi_latent_attention:
            layer.self_attention.module = LatentAttention
        elif config.qk_layernorm:
            layer.self_attention.submodules.q_layernorm = layer.self_attention.submodules.k_layernorm = torch_norm
        mixture = layer.mlp.keywords["submodules"]
        if config.moe_grouped_gemm and isinstance(mixture, MoESubmodules):
            mixture.experts = partial(GroupedExperts, **mixture.experts.keywords)
    block.layer_norm = torch_norm
    return block


def routers(chunks: Sequence[Any]) -> Iterator[tuple[int, TopKRouter]]:
    """The routers of this rank's chunks, wrapped or bare, each with its layer's global number from 0."""
    for chunk in unwrap_model(list(chunks)):
        for layer in chunk.decoder.layers:
            if layer.is_moe_layer:
                yield layer.layer_number - 1, layer.mlp.router


def mark_experts(chunk: Any) -> None:
    """Give every expert its own gradient groups and optimizer, whatever the number of expert-parallel ranks.

    Megatron does so where experts are split otherwise than the rest of the model; the optimizer of a checkpoint
    would then have another form under another layout, and could not be continued from.
    """
    for layer in chunk.decoder.layers:
        if layer.is_moe_layer:
            for parameter in layer.mlp.experts.parameters():
                setattr(parameter, "allreduce", False)  # noqa: B010
