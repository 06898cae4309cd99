"""From a pending sample to a scored one: one completion, one sample, one group.

``generate`` is the built-in single-turn function. ``generate_and_rm`` is the boundary around user
code: whatever a custom generate function, a hook or a reward raises costs that sample alone, except
faults that no further sample would escape (``PluginError``, an engine that does not answer).
Tests hold the order of the steps and that a fault leaves neither a slot taken nor a column
misaligned.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import uuid
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, TypeVar

from slime.errors import ConfigError, EngineError, PluginError, SlimeError, WaitTimeoutError
from slime.observability.trace import trace_next_attempt, trace_span
from slime.replay_data import num_routed
from slime.rollout.completion import complete, prompt_token_ids, token_budget
from slime.rollout.context import RolloutContext
from slime.rollout.conversation import generate_single, generate_with_list_form
from slime.rollout.failures import TooManyFailuresError, clear_response, reset_response
from slime.rollout.hooks import check_generated
from slime.rollout.offpolicy import NOTHING_EARLIER, mask_earlier_tokens, mask_older_tokens
from slime.rollout.types import GroupItem, RolloutGroup, iter_samples
from slime.types import Sample, Status

__all__ = ["generate", "generate_and_rm", "generate_and_rm_group", "generate_single"]

T = TypeVar("T")

# Faults of the whole run: a further sample would meet them too.
FATAL_ERRORS = (ConfigError, PluginError, WaitTimeoutError, TooManyFailuresError)
FINISHED = (Status.COMPLETED, Status.TRUNCATED, Status.FAILED)
MAX_INTERRUPTIONS = 8
"""Attempts in a row at a sample whose requests are aborted from outside before any new token is kept."""


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate the response of a sample in one turn, or continue an aborted one.

    Args:
        args: Flat argument view of a running rollout.
        sample: Pending or aborted; changed in place.
        sampling_params: In the engine's names; ``max_new_tokens`` counts what is there already.

    Returns:
        ``sample``.

    Raises:
        EngineError: The engine refused the request.
        WaitTimeoutError: No engine answered in time.
    """
    assert sample.status in (Status.PENDING, Status.ABORTED), f"sample {sample.index} is {sample.status.value} already"
    context = RolloutContext.of(args)
    if not sample.tokens:
        sample.tokens = prompt_token_ids(context, sample)
    left = sampling_params["max_new_tokens"] - sample.response_length
    assert left >= 0, f"sample {sample.index} has {sample.response_length} tokens, {-left} more than max_new_tokens"
    left = token_budget(context, len(sample.tokens), left)
    if left <= 0:
        sample.status = Status.TRUNCATED
        return sample
    params = {**sampling_params, "max_new_tokens": left}
    routes_from = num_routed(sample.rollout_routed_experts)
    completion = await complete(context, sample, sample.tokens, params, routes_from=routes_from)
    sample.append_response_tokens(
        args,
        tokens=completion.token_ids,
        log_probs=completion.log_probs,
        meta_info=completion.meta_info,
        text=completion.text,
    )
    return sample


async def generate_and_rm(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> GroupItem:
    """Generate, run the hooks, score.

    Args:
        args: Flat argument view of a running rollout.
        sample: Pending, aborted, or finished in an earlier rollout.
        sampling_params: In the engine's names.
        evaluation: Whether it belongs to an evaluation.

    Returns:
        The sample, or the list that a custom function fanned it out to. A sample whose
        processing failed has status FAILED and the reason in ``metadata["error"]``.

    Raises:
        ConfigError: There is no such reward.
        PluginError: A user function broke its contract.
        WaitTimeoutError: No engine answered in time.
        TooManyFailuresError: More samples failed than may.
    """
    context = RolloutContext.of(args)
    masks = args.partial_rollout and args.mask_offpolicy_in_partial_rollout and not evaluation
    is_resumed = sample.response_length > 0 and sample.status is not Status.FAILED
    earlier = mask_earlier_tokens(sample) if masks and is_resumed else NOTHING_EARLIER
    if sample.status is Status.ABORTED:
        trace_next_attempt(sample)
    item: GroupItem = sample
    if sample.status not in FINISHED:
        with user_code(context, [sample], "generate"), trace_span(sample, "generate_and_rm"):
            item = await _generate_item(context, sample, sampling_params, evaluation)
            for produced in iter_samples([item]) if masks else ():
                mask_older_tokens(produced, earlier)
    if args.group_rm and not evaluation:
        return item
    return await _score_item(context, item)


async def _generate_item(
    context: RolloutContext, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> GroupItem:
    turn = context.turn
    async with context.limit:
        if turn.aborted:
            sample.status = Status.ABORTED
            return sample
        item = await _generate_uninterrupted(context, sample, sampling_params, evaluation)
    for produced in iter_samples([item]):
        if produced.status is Status.PENDING:  # many custom functions leave the status alone
            produced.status = Status.COMPLETED
    if all(s.status is not Status.ABORTED for s in iter_samples([item])):
        item = await context.hooks.run_sample_hooks(
            context.args, item, rollout_id=turn.rollout_id, evaluation=evaluation
        )
    return item


async def _generate_uninterrupted(
    context: RolloutContext, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> GroupItem:
    """Generate, and again if requests were aborted although the rollout goes on.

    That happens to functions that send requests of their own when weights change with
    ``--update-weight-pause-mode abort``. What they have is continued where they can (``--partial-rollout``).

    Raises:
        EngineError: It happened time after time.
    """
    turn = context.turn
    in_vain = 0
    while in_vain < MAX_INTERRUPTIONS:
        length = sample.response_length
        item = await _call_generate(context, sample, dict(sampling_params), evaluation)
        if turn.aborted or all(s.status is not Status.ABORTED for s in iter_samples([item])):
            return item
        if item is not sample or not context.args.partial_rollout:
            clear_response(sample)
        in_vain = 0 if sample.response_length > length else in_vain + 1
        trace_next_attempt(sample)
    raise EngineError(
        f"the requests of sample {sample.index} were aborted {MAX_INTERRUPTIONS} times in vain while the rollout goes "
        "on; see the logs of the engines"
    )


async def _call_generate(
    context: RolloutContext, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
) -> GroupItem:
    function = context.generate_function(sample.generate_function_path)
    if function is None:
        return await generate(context.args, sample, sampling_params)
    if function.takes_list:
        return await generate_with_list_form(context, function, sample, sampling_params, evaluation)
    result = await function.call(context.args, sample, sampling_params, evaluation=evaluation)
    return check_generated(result, function.path)


async def _score_item(context: RolloutContext, item: GroupItem) -> GroupItem:
    """Score what has no reward yet. When the rollout is complete only finished work is worth a judge's time."""
    samples = list(iter_samples([item]))
    if context.turn.aborted or any(s.status is Status.ABORTED for s in samples):
        return item
    unscored = [s for s in samples if s.reward is None and s.status is not Status.FAILED]
    if not unscored:
        return item
    with user_code(context, unscored, "reward"), trace_span(unscored, "reward_model"):
        if isinstance(item, list):
            _assign_rewards(unscored, await context.rewards.score_group(unscored))
        else:
            _assign_rewards(unscored, [await context.rewards.score(unscored[0])])
    return item


async def generate_and_rm_group(
    args: Any, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> RolloutGroup:
    """Generate and score the samples of one prompt at the same time.

    Args:
        args: Flat argument view of a running rollout.
        group: Samples of one prompt.
        sampling_params: In the engine's names; gets a seed per position in deterministic mode.
        evaluation: Whether it belongs to an evaluation.

    Raises:
        PluginError: ``--group-rm`` with a function that returns lists, besides what
            ``generate_and_rm`` raises.
    """
    context = RolloutContext.of(args)
    if context.turn.aborted:
        return list(group)
    jobs: list[Awaitable[GroupItem]] = []
    for position, sample in enumerate(group):
        sample.session_id = sample.session_id or uuid.uuid4().hex
        params = copy.copy(sampling_params)
        if args.sglang_enable_deterministic_inference:
            params["sampling_seed"] = args.rollout_seed + position
        jobs.append(generate_and_rm(args, sample, params, evaluation=evaluation))
    items = await gather_or_cancel(jobs)
    if args.group_rm and not evaluation and not context.turn.aborted:
        await _score_group(context, items)
    return items


async def _score_group(context: RolloutContext, items: RolloutGroup) -> None:
    if any(isinstance(item, list) for item in items):
        raise PluginError(
            "--group-rm scores one response per sample, but the --custom-generate-function-path returned a list; "
            "drop --group-rm or return single samples"
        )
    samples = list(iter_samples(items))
    if any(s.status is Status.ABORTED for s in samples):
        return
    unscored = [s for s in samples if s.status is not Status.FAILED]
    if not unscored or all(s.reward is not None for s in unscored):
        return
    with user_code(context, unscored, "group reward"), trace_span(unscored, "group_reward_model"):
        _assign_rewards(unscored, await context.rewards.score_group(unscored))


def _assign_rewards(samples: Sequence[Sample], rewards: Sequence[Any]) -> None:
    if len(rewards) != len(samples):
        raise PluginError(f"the reward function returned {len(rewards)} rewards for {len(samples)} samples")
    for sample, reward in zip(samples, rewards, strict=True):
        if reward is None:
            raise PluginError(f"the reward function returned None for sample {sample.index}; expected a number or dict")
        sample.reward = reward


@contextlib.contextmanager
def user_code(context: RolloutContext, samples: Sequence[Sample], stage: str) -> Iterator[None]:
    """The plug-in boundary: what is raised inside costs ``samples``, unless it is a fault of the whole run.

    A failed sample stays in its group in a form that every later stage can take.
    """
    try:
        yield
    except FATAL_ERRORS:
        raise
    except Exception as error:  # noqa: BLE001 plug-in boundary: user code may raise anything
        for sample in samples:
            _make_trainable(context, sample)
            context.turn.failures.record(context.args, sample, error, stage=stage)


def _make_trainable(context: RolloutContext, sample: Sample) -> None:
    """Keep a consistent response, else replace it by a filler."""
    try:
        sample.check_alignment()
    except ValueError:
        sample.response_length = 0
    if sample.response_length == 0:
        try:
            prompt_ids = prompt_token_ids(context, sample)
        except SlimeError:  # the prompt itself may be the fault that is being recorded
            prompt_ids = []
        reset_response(sample, prompt_ids, context.tokenizer.eos_token_id or 0)


async def gather_or_cancel(jobs: Sequence[Awaitable[T]]) -> list[T]:
    """Like ``asyncio.gather``, but the first error cancels the rest and waits until it has ended."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
