"""Batch arithmetic: how many samples a rollout has and how they are cut into optimizer steps."""

from __future__ import annotations

from dataclasses import replace

from slime.config.draft import Draft


def resolve_batches(draft: Draft) -> None:
    """Derive what follows, and check ``rollouts x samples = global batch x steps``."""
    _steps(draft)
    _run_length(draft)
    _dynamic(draft)
    data = draft.data
    over = draft.rollout.over_sampling_batch_size
    if over is None:
        draft.rollout = replace(draft.rollout, over_sampling_batch_size=data.rollout_batch_size)
    elif over < data.rollout_batch_size:
        draft.problems.append(
            f"--over-sampling-batch-size {over} must be at least --rollout-batch-size {data.rollout_batch_size}"
        )
    if data.n_samples_per_prompt == 1 and draft.algorithm.grpo_std_normalization:
        draft.algorithm = replace(draft.algorithm, grpo_std_normalization=False)


def _steps(draft: Draft) -> None:
    data = draft.data
    samples = data.rollout_batch_size * data.n_samples_per_prompt
    if "rollout_batch_size" not in draft.given and not draft.debug.debug_train_only:
        draft.notices.append(f"no --rollout-batch-size: {data.rollout_batch_size} prompts per rollout")
    batch, steps = data.global_batch_size, data.num_steps_per_rollout
    if steps is None:
        steps = max(1, samples // batch) if batch is not None else 1
    if batch is None:
        batch = samples // steps
    if batch * steps != samples or batch == 0:
        given_steps = f" x --num-steps-per-rollout {steps}" if data.num_steps_per_rollout is not None else ""
        given_batch = f"--global-batch-size {data.global_batch_size}" if data.global_batch_size is not None else ""
        right = (given_batch + given_steps).removeprefix(" x ")
        draft.problems.append(
            f"--rollout-batch-size {data.rollout_batch_size} x --n-samples-per-prompt {data.n_samples_per_prompt} = "
            f"{samples} samples per rollout, which must equal --global-batch-size x --num-steps-per-rollout; found "
            f"{right}. {_remedy(data.global_batch_size, data.num_steps_per_rollout, samples)}"
        )
        return
    draft.data = replace(data, global_batch_size=batch, num_steps_per_rollout=steps)


def _remedy(batch: int | None, steps: int | None, samples: int) -> str:
    if steps is not None and samples % steps == 0:
        return f"Use --global-batch-size {samples // steps} or leave it out"
    if batch is not None:
        divisors = [d for d in range(1, samples + 1) if samples % d == 0]
        nearest = min(divisors, key=lambda d: (abs(d - batch), -d))
        return f"Nearest --global-batch-size that fits: {nearest}"
    return f"--num-steps-per-rollout must divide {samples}"


def _run_length(draft: Draft) -> None:
    data = draft.data
    if data.num_rollout is not None and data.num_epoch is not None:
        draft.notices.append(f"--num-rollout {data.num_rollout} wins over --num-epoch {data.num_epoch}")
        draft.data = replace(data, num_epoch=None)
    elif data.num_rollout is None:
        if not data.rollout_global_dataset:
            draft.problems.append(
                "--num-rollout is missing; with --disable-rollout-global-dataset the length of an epoch is unknown"
            )
        elif data.num_epoch is None:
            draft.data = replace(data, num_epoch=1)
            draft.notices.append("no --num-rollout and no --num-epoch: one pass over the prompts")


def _dynamic(draft: Draft) -> None:
    data = draft.data
    if data.use_dynamic_batch_size and data.max_tokens_per_gpu is None:
        draft.problems.append("--use-dynamic-batch-size needs --max-tokens-per-gpu, the tokens of one micro-batch")
    if data.balance_by_flops:
        if not data.use_dynamic_batch_size:
            draft.problems.append("--balance-by-flops needs --use-dynamic-batch-size")
        data = replace(data, balance_data=True)
    if data.log_probs_max_tokens_per_gpu is None:
        data = replace(data, log_probs_max_tokens_per_gpu=data.max_tokens_per_gpu)
    draft.data = replace(
        draft.data,
        balance_data=data.balance_data,
        log_probs_max_tokens_per_gpu=data.log_probs_max_tokens_per_gpu,
    )
