"""The objective: advantages, loss, corrections, distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flags import Section, flag

WHITENED_ESTIMATORS = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Estimators that are only sound with ``--normalize-advantages``."""

CRITIC_ESTIMATORS = frozenset({"ppo"})
"""Estimators that need values of a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig(Section):
    """Algorithm."""

    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = flag(
        "grpo",
        doc="How advantages are estimated. The two REINFORCE++ forms need --normalize-advantages; ppo trains a critic.",
    )
    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = flag("policy_loss", doc="Which loss is trained.")
    custom_loss_function_path: str | None = flag(
        None, doc="Loss (args, batch, logits, sum_of_sample_mean) -> (loss, metrics) for --loss-type custom_loss."
    )
    custom_advantage_function_path: str | None = flag(
        None, doc="Function (args, rollout_data) that sets advantages and returns."
    )
    compute_advantages_and_returns: bool = flag(
        True,
        off="--disable-compute-advantages-and-returns",
        doc="Skip advantages and returns (supervised or custom losses).",
    )
    calculate_per_token_loss: bool = flag(False, doc="Mean over tokens instead of mean over rollouts.")
    eps_clip: float = flag(
        0.2, at_least=0, doc="Lower clip range of the ratio; also the upper without --eps-clip-high."
    )
    eps_clip_high: float | None = flag(None, at_least=0, doc="Upper clip range of the ratio. Default: --eps-clip.")
    eps_clip_c: float | None = flag(None, above=1, doc="Dual clip for negative advantages.")
    value_clip: float = flag(
        0.2,
        at_least=0,
        doc="How far a value may usefully move from its old value in one rollout (PPO's clipped value loss).",
    )
    kl_coef: float = flag(0.0, doc="KL to the reference inside the reward or advantage; excludes --kl-loss-coef.")
    use_kl_loss: bool = flag(
        False, doc="KL to the reference in the loss. Without --ref-load the reference is --hf-checkpoint."
    )
    kl_loss_coef: float = flag(0.0, doc="Weight of the KL loss.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag("k1", doc="KL estimator.")
    use_unbiased_kl: bool = flag(False, doc="Multiply the KL term by the importance ratio.")
    ref_update_interval: int | None = flag(
        None, at_least=1, doc="Copy the trained weights to the reference every N rollouts."
    )
    entropy_coef: float = flag(0.0, doc="Weight of the entropy bonus.")
    gamma: float = flag(1.0, at_least=0, at_most=1, doc="Discount of REINFORCE++ and PPO.")
    lambd: float = flag(1.0, at_least=0, at_most=1, doc="Lambda of generalised advantage estimation.")
    normalize_advantages: bool = flag(False, doc="Whiten advantages over the whole batch.")
    grpo_std_normalization: bool = flag(
        True,
        off="--disable-grpo-std-normalization",
        doc="Do not divide group rewards by their standard deviation (Dr. GRPO).",
    )
    rewards_normalization: bool = flag(
        True, off="--disable-rewards-normalization", doc="Do not subtract the group mean from rewards."
    )
    use_rollout_entropy: bool = flag(False, doc="Compute the entropy in the log-prob pass and log it.")
    get_mismatch_metrics: bool = flag(
        False, doc="Log the mismatch between engine and trainer; needs --custom-tis-function-path."
    )
    reset_optimizer_states: bool = flag(False, doc="Zero the optimizer's state at every rollout.")
    use_stateless_adam: bool = flag(
        False, doc="Adam without state over steps; needs --optimizer adam and --no-save-optim."
    )
    use_rollout_logprobs: bool = flag(False, doc="Take the engine's log-probs as the old policy; excludes --use-tis.")
    use_tis: bool = flag(False, doc="Truncated importance sampling between engine and trainer.")
    tis_clip: float = flag(2.0, above=0, doc="Upper bound of the weight.")
    tis_clip_low: float = flag(0.0, at_least=0, doc="Lower bound of the weight.")
    custom_tis_function_path: str | None = flag(
        None, doc="Correction (args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, ...)."
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None, doc="Reducer (total_lengths, response_lengths, loss_masks, calculate_per_token_loss) of the policy loss."
    )
    use_routing_replay: bool = flag(
        False, doc="Send tokens to the same experts in training as in the log-prob pass (MoE)."
    )
    use_rollout_routing_replay: bool = flag(
        False,
        doc="Send tokens to the experts that the engine chose, in the log-prob pass and in training; implies "
        "--use-routing-replay.",
    )
    use_opsm: bool = flag(False, doc="Mask off-policy sequences with negative advantage.")
    opsm_delta: float = flag(1e-4, doc="Threshold of --use-opsm on the sequence's mean log-ratio.")
    num_critic_only_steps: int = flag(
        0, at_least=0, doc="First rollouts that train only the critic; the actor and its weight version stay."
    )
    use_opd: bool = flag(
        False, doc="On-policy distillation: advantages follow a teacher's log-probs of the student's tokens."
    )
    opd_type: Literal["sglang", "megatron"] | None = flag(
        None,
        doc="megatron: the trainer holds the teacher's weights. sglang: an inference server at --rm-url, asked by "
        "slime.rollout.on_policy_distillation.",
    )
    opd_kl_coef: float = flag(1.0, doc="Factor of log p(student) - log p(teacher), subtracted from the advantage.")
    opd_teacher_load: str | None = flag(
        None,
        doc="Teacher of --opd-type megatron: Megatron checkpoint or Hugging Face directory of the student's shape.",
    )
    opd_teacher_ckpt_step: int | None = flag(None, doc="Iteration of the teacher checkpoint.")
    max_logprob_diff: float | None = flag(
        None,
        above=0,
        doc="Bound on the mean difference of trainer and engine log-probs; see --max-logprob-diff-action.",
    )
    max_logprob_diff_action: Literal["warn", "stop"] = flag(
        "warn", doc="Above --max-logprob-diff: warn, or end the run."
    )
