"""How the trainer runs: precision, hooks, which parameters train, kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime.config.flags import Section, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Section):
    """Training."""

    train_backend: Literal["megatron"] = flag("megatron", doc="Training engine.")
    precision: str = flag(
        "auto",
        choices=("auto", "fp32", "bf16", "fp16"),
        doc="Compute precision of training. auto: bf16 on CUDA unless --fp16 is given; fp32 on a CPU unless --bf16 is.",
    )
    custom_config_path: str | None = flag(
        None,
        metavar="YAML",
        doc="YAML mapping whose keys are set on top of the command line; unknown names reach plug-ins through args.",
    )
    train_env_vars: Mapping[str, Any] = flag(
        {}, metavar="JSON", doc='Extra environment of the training processes, for example \'{"NCCL_DEBUG": "INFO"}\'.'
    )
    custom_model_provider_path: str | None = flag(
        None, doc="Function (pre_process, post_process, vp_stage=None) -> GPTModel that replaces the model builder."
    )
    custom_megatron_init_path: str | None = flag(None, doc="Hook (args), called after distributed start-up.")
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None, doc="Hook (args, model, store_prefix), called before each log-prob pass."
    )
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None,
        doc="Hook (args, rollout_id, step_id, model, optimizer, opt_param_scheduler), called before each step.",
    )
    recompute_loss_function: bool = flag(
        False,
        doc="Never hold all logits of a micro-batch: compute them chunk by chunk, and again in the backward pass.",
    )
    max_skipped_steps: int = flag(
        5,
        at_least=0,
        doc="End the run when this many optimizer steps in a row were skipped because the loss or the gradient norm "
        "was not finite; 0 never does.",
    )
    log_probs_chunk_size: int = flag(
        -1,
        at_least=-1,
        doc="Tokens whose fp32 temporaries of the log-probs may exist at a time, and with --recompute-loss-function "
        "their logits; -1 picks a number that keeps the device busy.",
    )
    share_prompt_prefix: bool | None = flag(
        None,
        doc="Pack a prompt once in front of all its responses of a micro-batch. Default: on without context "
        "parallelism. Loss and gradients do not depend on it.",
    )
    only_train_params_name_list: tuple[str, ...] | None = flag(
        None,
        metavar="REGEX",
        doc="Train only parameters whose name matches one of these (re.search), and a critic's value head.",
    )
    freeze_params_name_list: tuple[str, ...] | None = flag(
        None,
        metavar="REGEX",
        doc="Freeze parameters whose name matches one of these (re.search), but never a critic's value head.",
    )
    freeze_indexer: bool = flag(False, doc="Freeze the indexer weights of DSA attention.")
    allgather_cp: bool = flag(False, doc="Contiguous context-parallel layout instead of zig-zag (DSA models only).")
    qwen_gdn_backend: Literal["fla", "flashqla"] = flag("fla", doc="Gated-delta-net kernel of Qwen linear attention.")
    release_train: bool = flag(
        False,
        doc="End the training processes while engines generate; new ones continue from the checkpoint of every step. "
        "Needs --save and --update-weight-transport disk.",
    )
    mtp_num_layers: int | None = flag(None, at_least=0, doc="Multi-token-prediction layers of the model.")
    enable_mtp_training: bool = flag(False, doc="Train the multi-token-prediction layers.")
    mtp_loss_scaling_factor: float = flag(0.2, doc="Weight of the multi-token-prediction loss.")
    padded_vocab_size: int | None = flag(
        None,
        at_least=1,
        doc="Rows of the embedding; computed from the vocabulary, --make-vocab-size-divisible-by and the "
        "tensor-parallel size when unset.",
    )
    megatron_config_path: str | None = flag(
        None, metavar="YAML", doc="Flags with other values for one role (actor, critic); see docs/ppo.md."
    )
    megatron_deepgemm_forward_layers: tuple[int, ...] | None = flag(
        None, doc="Layers whose dense forward uses the engine's kernels."
    )
    megatron_deepgemm_moe_forward_layers: tuple[int, ...] | None = flag(
        None, doc="Layers whose expert forward uses the engine's kernels."
    )
    megatron_deepgemm_forward_modules: tuple[str, ...] | None = flag(
        None, doc="Dense modules that use the engine's kernels."
    )
    megatron_deepgemm_moe_forward_modules: tuple[str, ...] | None = flag(
        None, doc="Expert modules that use the engine's kernels."
    )
