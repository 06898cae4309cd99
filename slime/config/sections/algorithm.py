"""The objective: advantages, loss, corrections, distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slime.config.flags import Section, flag

KL_PENALTY_ESTIMATORS = frozenset({"rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"})
"""Estimators whose advantages contain the penalty of ``--kl-coef``."""

WHITENED_ESTIMATORS = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline"})
"""Estimators that are only sound with ``--normalize-advantages``."""

DISCOUNTED_ESTIMATORS = frozenset({"reinforce_plus_plus", "ppo"})
"""Estimators that discount by ``--gamma``."""

CRITIC_ESTIMATORS = frozenset({"ppo"})
"""Estimators that need values of a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig(Section):
    """Algorithm."""

    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
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
    calculate_per_token_loss: bool = flag(
        False, doc="Mean over tokens (DAPO, https://arxiv.org/abs/2503.14476) instead of mean over rollouts."
    )
    constant_loss_denominator: int | None = flag(
        None,
        at_least=1,
        metavar="TOKENS",
        doc="Divide each rollout's sum of token losses by this constant, such as the maximum response length, instead "
        "of by its own number of tokens (Dr. GRPO, https://arxiv.org/abs/2503.20783).",
    )
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
    gamma: float = flag(1.0, at_least=0, at_most=1, doc="Discount of reinforce_plus_plus and ppo.")
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
        False,
        doc="Log perplexities and importance weights of trainer and engine (from --custom-tis-function-path, if "
        "given) without a change of the loss; costs a log-prob pass.",
    )
    reset_optimizer_states: bool = flag(False, doc="Zero the optimizer's state at every rollout.")
    use_stateless_adam: bool = flag(
        False, doc="Adam without state over steps; needs --optimizer adam and --no-save-optim."
    )
    use_rollout_logprobs: bool = flag(False, doc="Take the engine's log-probs as the old policy; excludes --use-tis.")
    use_tis: bool = flag(
        False,
        doc="Multiply the policy loss by importance weights trainer / engine, truncated by default "
        "(https://fengyao.notion.site/off-policy-rl).",
    )
    tis_clip: float = flag(2.0, above=0, doc="Upper bound of the weight.")
    tis_clip_low: float = flag(0.0, at_least=0, doc="Lower bound of the weight.")
    tis_level: Literal["token", "sequence", "geometric"] = flag(
        "token", doc="Weight of a token, of its sequence (product over tokens), or the sequence's geometric mean."
    )
    tis_mode: Literal["truncate", "clip", "mask"] = flag(
        "truncate",
        doc="truncate: weights are cut at the upper bound (and --tis-clip-low); clip: at both bounds; mask: tokens "
        "outside the bounds leave the loss (https://richardli.xyz/rl-collapse).",
    )
    tis_upper_bound: float | None = flag(None, above=0, doc="Upper bound of the weight. Default: --tis-clip.")
    tis_lower_bound: float | None = flag(
        None,
        at_least=0,
        doc="Lower bound of --tis-mode clip and mask. Default: --tis-clip-low when given, else 1 / upper bound.",
    )
    tis_batch_normalize: bool = flag(
        False, doc="Divide the weights by their mean over the rollout; costs a log-prob pass."
    )
    use_icepop: bool = flag(
        False,
        doc="IcePop: tokens whose weight lies outside [--tis-clip-low, --tis-clip] get no policy gradient "
        "(https://arxiv.org/abs/2510.18855).",
    )
    use_rs: bool = flag(
        False,
        doc="Rejection: tokens or sequences whose ratio trainer / engine lies outside the bounds leave the loss "
        "(https://richardli.xyz/rl-collapse).",
    )
    rs_level: Literal["token", "sequence", "geometric"] = flag("token", doc="What --use-rs takes the ratio of.")
    rs_upper_bound: float | None = flag(None, above=0, doc="Upper bound of --use-rs. Default: that of the weights.")
    rs_lower_bound: float | None = flag(
        None, at_least=0, doc="Lower bound of --use-rs. Default: that of the weights in --tis-mode clip."
    )
    rs_veto_threshold: float | None = flag(
        None, above=0, doc="With --use-rs: one token with a ratio below this takes its whole sequence out of the loss."
    )
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

    @property
    def tis_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of importance weights; ``--tis-mode truncate`` uses the upper one."""
        high = self.tis_clip if self.tis_upper_bound is None else self.tis_upper_bound
        low = self.tis_lower_bound
        if low is None:
            low = self.tis_clip_low if self.tis_clip_low > 0 else 1 / high
        return low, high

    @property
    def rs_bounds(self) -> tuple[float, float]:
        """Lower and upper bound of the rejection."""
        low, high = self.tis_bounds
        return (
            low if self.rs_lower_bound is None else self.rs_lower_bound,
            high if self.rs_upper_bound is None else self.rs_upper_bound,
        )
