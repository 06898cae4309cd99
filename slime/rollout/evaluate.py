"""Evaluation on several named sets at the same time.

Each set has its own sampling, reward and generate function; what is computed over the results
(pass@k and the like) is observability's. Tests hold that the sets do not disturb each other and
that results come in the order of the prompts.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from typing import Any

from slime.config.eval_datasets import EvalDatasetConfig
from slime.data.dataset import load_eval_dataset
from slime.errors import ConfigError, DataError
from slime.rewards.grade import zero_reward
from slime.rollout.context import RolloutContext
from slime.rollout.generate import gather_or_cancel, generate_and_rm
from slime.rollout.progress import Progress
from slime.rollout.types import RolloutFnEvalOutput, iter_samples
from slime.types import Sample, Status

logger = logging.getLogger(__name__)


async def eval_rollout(args: Any, rollout_id: int) -> tuple[RolloutFnEvalOutput, list[list[Sample]]]:
    """Evaluate on every configured set.

    Args:
        args: Flat arguments of an open ``RolloutContext``.
        rollout_id: Which rollout the evaluation belongs to.

    Returns:
        Results per set, and an empty list (nothing goes back to the data source).

    Raises:
        ConfigError: No sets, or ``--group-rm``.
        TooManyFailuresError: More samples failed than may.
    """
    context = RolloutContext.of(args)
    if args.group_rm:
        raise ConfigError("--group-rm cannot score an evaluation; give the sets a custom_rm_path of their own")
    if not args.eval_datasets:
        raise ConfigError("there are no evaluation sets; give --eval-prompt-data NAME PATH or --eval-config FILE")
    prompts = [await asyncio.to_thread(load_eval_prompts, context, config) for config in args.eval_datasets]
    sizes = [
        len(rows) * config.n_samples_per_eval_prompt for rows, config in zip(prompts, args.eval_datasets, strict=True)
    ]
    context.begin(rollout_id, num_samples=sum(sizes), evaluation=True)
    context.rewards.drain_metrics()  # what was counted before belongs to training
    with context.open_progress(f"evaluation {rollout_id}", sum(sizes), "samples") as progress:
        results = await gather_or_cancel(
            [
                _evaluate(context, config, rows, progress)
                for config, rows in zip(args.eval_datasets, prompts, strict=True)
            ]
        )
    data = {config.name: result for config, result in zip(args.eval_datasets, results, strict=True)}
    counts = {"eval/failed_samples": context.turn.failures.num_failed}
    counts |= {name.replace("rollout/", "eval/", 1): n for name, n in context.rewards.drain_metrics().items()}
    return RolloutFnEvalOutput(data=data, metrics={name: n for name, n in counts.items() if n}), []


async def eval_rollout_single_dataset(
    args: Any, rollout_id: int, dataset_cfg: EvalDatasetConfig
) -> dict[str, dict[str, Any]]:
    """Evaluate on one set; ``{name: {"rewards", "truncated", "group_ids", "samples"}}``."""
    context = RolloutContext.of(args)
    rows = await asyncio.to_thread(load_eval_prompts, context, dataset_cfg)
    count = len(rows) * dataset_cfg.n_samples_per_eval_prompt
    context.begin(rollout_id, num_samples=count, evaluation=True)
    with context.open_progress(f"evaluation {rollout_id} {dataset_cfg.name}", count, "samples") as progress:
        return {dataset_cfg.name: await _evaluate(context, dataset_cfg, rows, progress)}


def load_eval_prompts(context: RolloutContext, config: EvalDatasetConfig) -> list[Sample]:
    """The prompts of a set; read and tokenised once per context.

    Raises:
        DataError: None is left.
    """
    if config.cache_key not in context.eval_datasets:
        processor = context.processor if config.multimodal_keys else None
        dataset = load_eval_dataset(context.args, config, context.tokenizer, processor)
        context.eval_datasets[config.cache_key] = dataset.samples
        dataset.close()
    samples: list[Sample] = context.eval_datasets[config.cache_key]
    if not samples:
        raise DataError(f"evaluation set {config.name} ({config.path}) has no prompts")
    return samples


async def _evaluate(
    context: RolloutContext, config: EvalDatasetConfig, prompts: list[Sample], progress: Progress
) -> dict[str, Any]:
    expanded = expand_prompts(config, prompts)
    group_ids = [sample.group_index for sample, _ in expanded]  # now: a function may return samples without
    produced = await gather_or_cancel(
        [_evaluate_sample(context, config, sample, seed_offset, progress) for sample, seed_offset in expanded]
    )
    pairs = [(s, group) for item, group in zip(produced, group_ids, strict=True) for s in item]
    pairs.sort(key=lambda pair: -1 if pair[0].index is None else pair[0].index)
    return {
        "rewards": [eval_reward(context.args, s) for s, _ in pairs],
        "truncated": [s.status is Status.TRUNCATED for s, _ in pairs],
        "group_ids": [group for _, group in pairs],
        "samples": [s for s, _ in pairs],
    }


def expand_prompts(config: EvalDatasetConfig, prompts: list[Sample]) -> list[tuple[Sample, int]]:
    """``n`` copies of each prompt with consecutive indices, each with its position among the copies."""
    n = config.n_samples_per_eval_prompt
    expanded: list[tuple[Sample, int]] = []
    for group_index, prompt in enumerate(prompts):
        for j in range(n):
            sample = copy.deepcopy(prompt)
            sample.group_index, sample.index = group_index, group_index * n + j
            sample.metadata = config.inject_metadata(sample.metadata)
            sample.custom_rm_path = config.custom_rm_path or sample.custom_rm_path
            sample.generate_function_path = config.custom_generate_function_path or sample.generate_function_path
            expanded.append((sample, j))
    return expanded


def eval_sampling_params(args: Any, config: EvalDatasetConfig, seed_offset: int) -> dict[str, Any]:
    """Sampling parameters of one evaluation sample, in the engine's names; unset ones are None."""
    skip = args.rollout_skip_special_tokens if config.skip_special_tokens is None else config.skip_special_tokens
    return {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_response_len,
        "min_new_tokens": config.min_new_tokens,
        "repetition_penalty": config.repetition_penalty,
        "stop": list(config.stop) if config.stop else None,
        "stop_token_ids": list(config.stop_token_ids) if config.stop_token_ids else None,
        "skip_special_tokens": skip,
        "no_stop_trim": True if config.no_stop_trim is None else config.no_stop_trim,
        "spaces_between_special_tokens": False,
        "sampling_seed": args.rollout_seed + seed_offset if args.sglang_enable_deterministic_inference else None,
    }


async def _evaluate_sample(
    context: RolloutContext, config: EvalDatasetConfig, sample: Sample, seed_offset: int, progress: Progress
) -> list[Sample]:
    params = eval_sampling_params(context.args, config, seed_offset)
    item = await generate_and_rm(context.args, sample, params, evaluation=True)
    samples = list(iter_samples([item]))
    for produced in samples:
        if produced.reward is None:  # aborted from outside, as by an engine that was restarted
            produced.reward = zero_reward(context.args.reward_key, context.args.eval_reward_key)
    progress.update(1, [eval_reward(context.args, s) for s in samples])
    return samples


def eval_reward(args: Any, sample: Sample) -> float:
    """The number that evaluation reports: the reward, or its entry under ``--eval-reward-key``."""
    key = args.eval_reward_key or args.reward_key
    reward = sample.reward
    if not isinstance(reward, dict):
        return float(reward if reward is not None else 0.0)
    if key is None or key not in reward:
        raise ConfigError(
            f"the reward is an object with {', '.join(map(str, reward))}; name one of them with --eval-reward-key "
            f"(now {key})"
        )
    return float(reward[key])
