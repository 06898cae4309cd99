"""How responses are graded."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flags import Section, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(Section):
    """Rewards."""

    rm_type: str | None = flag(
        None,
        doc="Built-in grader: math, deepscaler, dapo, f1, gpqa, ifbench, random or remote_rm; with the prefix boxed_ "
        "only the content of the last \\boxed{} is graded. Metadata of a row may name another.",
    )
    reward_key: str | None = flag(None, doc="Which entry is trained when rewards are objects.")
    eval_reward_key: str | None = flag(None, doc="Which entry evaluation reports. Default: --reward-key.")
    group_rm: bool = flag(False, doc="Grade all samples of a group in one call; not possible in evaluation.")
    rm_url: str | None = flag(None, doc="Address of a remote reward model, or of the teacher of --opd-type sglang.")
    custom_rm_path: str | None = flag(
        None,
        metavar="PATH",
        doc="Reward of your own: pkg.module.function, file.py:function, or file.py with class CustomRewardModel.",
    )
    custom_rm_model_path: str | None = flag(
        None, doc="model_path given to CustomRewardModel. Default: --hf-checkpoint."
    )
    overlong_buffer_len: int | None = flag(
        None,
        at_least=1,
        metavar="TOKENS",
        doc="Soft over-long penalty (DAPO, https://arxiv.org/abs/2503.14476): in the last N tokens before "
        "--rollout-max-response-len the trained reward falls linearly by --overlong-penalty-factor. Raw rewards stay.",
    )
    overlong_penalty_factor: float = flag(1.0, at_least=0, doc="What a response of full length loses.")
    custom_reward_post_process_path: str | None = flag(
        None, doc="Function (args, samples) -> (raw_rewards, rewards) instead of the group baseline."
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, doc="Function (args, samples) -> dict that builds the training columns."
    )
    rm_timeout: float = flag(
        30.0, above=0, doc="Seconds one response may take to grade; above, the reward is 0 and counted."
    )
    rm_workers: int | None = flag(
        None, at_least=1, doc="Processes that run rule-based graders. Default: by the machine's cores, at most 8."
    )
