"""The policy model of one rank, its data-parallel wrapping and its optimizer.

Owns ``PolicyModel``, Megatron's GPT model run on packed rows with an output head at chosen positions
only, and the construction of model chunks, optimizer and learning-rate schedule from the configuration.
Loading weights is ``export``'s and ``checkpoint``'s. Tests hold: log-probs equal those of transformers
for every family, at every parallel layout, packed or not, with prompts shared or not.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.spec_utils import import_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args
from megatron.training.global_vars import set_args
from megatron.training.training import (
    get_megatron_ddp_config,
    get_megatron_optimizer_config,
    resolve_ddp_bucket_size,
    wrap_model_chunks_with_ddp,
)

from slime.backends.megatron import optimizer_fixes, rotary, update_kernels
from slime.backends.megatron.args import namespace
from slime.backends.megatron.attention import PackedRow
from slime.backends.megatron.layers import block_spec, mark_experts, routers
from slime.backends.megatron.parallel import ParallelState
from slime.backends.megatron.value_head import ValueHead, give_value_head
from slime.config import Config
from slime.errors import ConfigError, PluginError
from slime.plugins import load_plugin

ROTARY_TABLE_TOKENS = 1024
"""Rotary tables are made for multiples of this many positions, so that rows share them."""

PADDED_LOGIT = -1e4
"""Logit of the rows that only pad the vocabulary: no probability, and finite in every dtype."""

Project = Callable[[torch.Tensor], torch.Tensor]
"""The output layer: hidden states ``[r, H]`` to this rank's part of the logits ``[r, V / tp]``, or to values."""
Head = Callable[[torch.Tensor, Project], torch.Tensor]
"""What the last stage returns, from hidden states ``[R, H]`` at the chosen positions."""


class PolicyModel(GPTModel):
    """Megatron's GPT model on packed rows, with logits at chosen positions only."""

    def forward(  # type: ignore[override]  # one packed row replaces Megatron's batch
        self,
        tokens: torch.Tensor | None,
        row: PackedRow,
        logit_index: torch.Tensor | None = None,
        *,
        head: Head | None = None,
    ) -> torch.Tensor:
        """Run this stage's layers. Collective over tensor- and context-parallel groups.

        Args:
            tokens: ``[1, T / cp]`` int64, this rank's tokens of the row; read on the first stage only.
            row: The row.
            logit_index: ``[R]`` int64, places among this rank's tokens at which the head runs, in any
                order and repeated at will; all places when None. Read on the last stage only.
            head: Computes the result from the hidden states instead, so that a caller can take the
                logits in chunks.

        Returns:
            On the last stage logits ``[R, V / tp]`` in the model's dtype, a critic's float32 values ``[R, 1]``,
            or what ``head`` returned; on other stages hidden states ``[T / cp, 1, H]`` (T further divided by
            tp under sequence parallelism).
        """
        return policy_forward(self, tokens, row, logit_index, head=head)


def policy_forward(
    model: GPTModel,
    tokens: torch.Tensor | None,
    row: PackedRow,
    logit_index: torch.Tensor | None = None,
    *,
    head: Head | None = None,
) -> torch.Tensor:
    """``PolicyModel.forward`` for any ``GPTModel``, such as one that a user's provider built."""
    embedded = model.embedding(input_ids=tokens, position_ids=row.positions[None]) if model.pre_process else None
    hidden = model.decoder(
        hidden_states=embedded,
        attention_mask=None,
        rotary_pos_emb=_rotary_frequencies(model, row),
        packed_seq_params=row,
    )
    if not model.post_process:
        return hidden
    if model.config.sequence_parallel:
        # The output layer sums the gradient of its input over the ranks, so the gather's backward only splits.
        hidden = tensor_parallel.gather_from_sequence_parallel_region(
            hidden, tensor_parallel_output_grad=False, group=model.pg_collection.tp
        )
    hidden = hidden.squeeze(1)
    if logit_index is not None:
        hidden = hidden.index_select(0, logit_index)
    return head(hidden, _project(model)) if head else _project(model)(hidden)


def _rotary_frequencies(model: GPTModel, row: PackedRow) -> torch.Tensor | None:
    """``[T / cp, 1, 1, d]`` angles at the positions of this rank's tokens; latent attention has its own."""
    if model.position_embedding_type not in ("rope", "yarn") or model.config.multi_latent_attention:
        return None
    length = -(-(row.max_position + 1) // ROTARY_TABLE_TOKENS) * ROTARY_TABLE_TOKENS
    # packed_seq: the whole table, not this context-parallel rank's part of it.
    table = model.rotary_pos_emb(length, packed_seq=True)
    if isinstance(table, tuple):  # yarn returns its concentration factor too, which attention layers know
        table = table[0]
    return table.index_select(0, row.positions)


def _project(model: GPTModel) -> Project:
    if isinstance(model.output_layer, ValueHead):
        return model.output_layer
    weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
    real = model.real_vocab_columns

    def project(hidden: torch.Tensor) -> torch.Tensor:
        logits, _ = model.output_layer(hidden, weight=weight)
        if real < logits.size(-1):
            logits[..., real:].fill_(PADDED_LOGIT)
        return logits

    return project


def _set_up_head(model: GPTModel, args: Any, parallel: ParallelState) -> None:
    """Prepare the output layer for gathered rows and for a vocabulary that was padded."""
    if not model.post_process or isinstance(model.output_layer, ValueHead):
        return
    if model.output_layer.sequence_parallel:
        # Its rows are gathered before; it only has to sum their gradient over the ranks.
        model.output_layer.sequence_parallel = False
        model.output_layer.allreduce_dgrad = parallel.tp_size > 1
    columns = args.padded_vocab_size // parallel.tp_size
    model.real_vocab_columns = min(max(args.vocab_size - parallel.tp_rank * columns, 0), columns)


def transformer_config(config: Config) -> TransformerConfig:
    """Megatron's model configuration from ours. Needs initialised groups."""
    return core_transformer_config_from_args(namespace(config))


def build_model(
    config: Config,
    *,
    parallel: ParallelState,
    pre_wrap: Callable[[list[MegatronModule]], None] | None = None,
    wrap_with_ddp: bool = True,
) -> list[MegatronModule]:
    """Build this rank's model chunks (one, or one per interleaved stage). Collective.

    Args:
        config: The resolved configuration; its role decides whether the model predicts tokens or values.
        parallel: This rank's place.
        pre_wrap: Called with the bare fp32 chunks, e.g. to load weights before they are wrapped.
        wrap_with_ddp: False for a model without gradients, such as the reference.

    Returns:
        Chunks in half precision where the configuration says so, wrapped for data parallelism; call
        ``chunk(tokens, row, logit_index, fp32_output=False)`` when half precision is on.
    """
    if parallel.device.type == "cuda":
        rotary.install()
    args = namespace(config)
    tf_config = core_transformer_config_from_args(args)
    stages = range(parallel.vpp_size)
    chunks: list[MegatronModule] = []
    for stage in stages:
        vp_stage = stage if parallel.vpp_size > 1 else None
        first = parallel.is_pp_first and stage == 0
        last = parallel.is_pp_last and stage == stages[-1]
        if config.train.custom_model_provider_path:
            chunk = _custom_chunk(config, args, first, last, vp_stage)
        else:
            chunk = _chunk(args, tf_config, first, last, vp_stage)
            _scale_rotary(chunk, config)
        if config.role == "critic":
            give_value_head(chunk, seed=config.megatron.seed)
        chunks.append(chunk)
    for chunk in chunks:
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        mark_experts(chunk)
        _set_up_head(chunk, args, parallel)
        chunk.to(parallel.device)
    _freeze(config, chunks)
    if pre_wrap:
        pre_wrap(chunks)
    if args.fp16 or args.bf16:
        chunks = [_half_precision(tf_config, chunk) for chunk in chunks]
    return _wrap(args, tf_config, chunks, parallel) if wrap_with_ddp else chunks


def _half_precision(tf_config: TransformerConfig, chunk: MegatronModule) -> MegatronModule:
    """Megatron's wrapper casts buffers too; the expert biases, which decide on routing, stay as they were."""
    biases = [(router, router.expert_bias) for _, router in routers([chunk]) if router.enable_expert_bias]
    wrapped = Float16Module(tf_config, chunk)
    for router, bias in biases:
        router.expert_bias = bias
    return wrapped


def _chunk(args: Any, tf_config: TransformerConfig, first: bool, last: bool, vp_stage: int | None) -> PolicyModel:
    if args.spec is None:
        spec = block_spec(tf_config, vp_stage)
    else:
        spec = import_module(args.spec)
        spec = spec(args, tf_config, vp_stage) if callable(spec) else spec
    return PolicyModel(
        config=tf_config,
        transformer_layer_spec=spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=first,
        post_process=last,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage,
    )


def _freeze(config: Config, chunks: Sequence[MegatronModule]) -> None:
    """Take parameters out of training by name, before gradient buffers are made for them; never a value head."""
    only, frozen = config.train.only_train_params_name_list, config.train.freeze_params_name_list
    if not only and not frozen:
        return
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            matches = any(re.search(pattern, name) for pattern in (only or frozen or ()))
            parameter.requires_grad_(matches if only else not matches)
        if chunk.post_process and isinstance(chunk.output_layer, ValueHead):
            chunk.output_layer.requires_grad_(True)  # its first weights are random
    if not any(parameter.requires_grad for chunk in chunks for parameter in chunk.parameters()):
        flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
        raise ConfigError(f"{flag} {' '.join(only or frozen or ())} leaves no parameter of this stage to train")


def _scale_rotary(model: PolicyModel, config: Config) -> None:
    """Give Llama 3's rope scaling the constants of the checkpoint, which Megatron has fixed but for the factor."""
    scaling = config.hf.get("rope_scaling") if config.hf else None
    if not config.megatron["use_rope_scaling"] or not scaling:
        return
    embedding = model.rotary_pos_emb
    dim = 2 * embedding.inv_freq.numel()
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=embedding.inv_freq.device) / dim
    embedding.inv_freq = embedding._apply_scaling(
        1.0 / (config.megatron["rotary_base"] ** exponents),
        factor=scaling["factor"],
        low_freq_factor=scaling["low_freq_factor"],
        high_freq_factor=scaling["high_freq_factor"],
        original_max_position_embeddings=scaling["original_max_position_embeddings"],
    )


def _custom_chunk(config: Config, args: Any, first: bool, last: bool, vp_stage: int | None) -> MegatronModule:
    flag = "--custom-model-provider-path"
    provider = load_plugin(config.train.custom_model_provider_path, flag=flag, kind="other")
    set_args(args)  # established providers read megatron.training.get_args()
    model = provider(first, last, vp_stage) if vp_stage is not None else provider(first, last)
    if not isinstance(model, GPTModel):
        raise PluginError(f"{flag} returned {type(model).__name__}; a megatron.core GPTModel is needed")
    if type(model).forward is GPTModel.forward:
        model.forward = policy_forward.__get__(model)
    return model


def _wrap(
    args: Any, tf_config: TransformerConfig, chunks: Sequence[MegatronModule], parallel: ParallelState
) -> list[MegatronModule]:
    ddp_config = get_megatron_ddp_config(args)
    num_parameters = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    ddp_config.bucket_size = resolve_ddp_bucket_size(
        ddp_config, parallel.dp_cp_group, ddp_config.overlap_grad_reduce, num_parameters
    )
    # As Megatron: only the first chunk of the first stage is cut into buckets.
    whole = [i > 0 or args.overlap_param_gather_with_optimizer_step for i in range(len(chunks))]
    return wrap_model_chunks_with_ddp(
        list(chunks),
        tf_config,
        ddp_config,
        bucket_sizes=[None if w or not parallel.is_pp_first else ddp_config.bucket_size for w in whole],
        disable_bucketing_per_chunk=whole,
    )


def build_optimizer(
    config: Config, chunks: Sequence[MegatronModule]
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Megatron's optimizer and learning-rate schedule for wrapped chunks. Collective.

    The schedule counts samples: step it by the global batch size.
    """
    args = namespace(config)
    optimizer_fixes.apply()
    if config.cluster.device == "cuda":
        update_kernels.fuse_clipping()
    optimizer_config, overrides = get_megatron_optimizer_config(args)
    optimizer = get_megatron_optimizer(
        optimizer_config,
        list(chunks),
        config_overrides=overrides,
        # On a CPU Megatron's groups are gloo already, and no second set was made.
        use_gloo_process_groups=args.use_gloo_process_groups and config.cluster.device == "cuda",
    )
    return optimizer, _scheduler(args, _num_steps(config, args), optimizer)


def _num_steps(config: Config, args: Any) -> int:
    """Optimizer steps of the whole run."""
    if args.train_iters is not None:
        return args.train_iters
    data = config.data
    if data.num_rollout is not None:
        return data.num_rollout * data.rollout_batch_size * data.n_samples_per_prompt // args.global_batch_size
    if args.lr_decay_style == "constant":
        return 1
    raise ConfigError(
        f"--lr-decay-style {args.lr_decay_style} needs the number of rollouts: give --num-rollout, or "
        "--lr-decay-style constant"
    )


def _scheduler(args: Any, num_steps: int, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    decay = (args.lr_decay_iters or num_steps) * args.global_batch_size
    warmup = (
        args.lr_warmup_fraction * decay
        if args.lr_warmup_fraction is not None
        else args.lr_warmup_iters * args.global_batch_size
    )
    wsd = args.lr_wsd_decay_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=decay,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=num_steps * args.global_batch_size,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=args.override_opt_param_scheduler,
        wsd_decay_steps=None if wsd is None else wsd * args.global_batch_size,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
