"""The default training rollout: oversample, generate, score, filter, abort.

Owns which groups a rollout delivers. Order of the steps: refill until groups in flight plus groups
kept reach the target, take finished groups, drop or keep each, abort the surplus, sort, run the
user's filters. Tests hold, against real engines: exactly the target is delivered, drops are
counted by reason, the surplus ends in bounded time and goes back to the data source with
``--partial-rollout``, which then neither loses a prompt nor delivers one twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from slime.errors import DataError, EngineError, WaitTimeoutError
from slime.rollout.context import GroupTask, RolloutContext, RolloutTurn
from slime.rollout.evaluate import eval_rollout
from slime.rollout.failures import clear_response
from slime.rollout.selection import GroupSource, Selection
from slime.rollout.state import GenerateState
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput, first_index
from slime.types import Sample

logger = logging.getLogger(__name__)

STALL_REPORT_SECONDS = 300.0
CANCEL_SECONDS = 5.0
MAX_ABORT_PAUSE_SECONDS = 3.0


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Run one rollout to its end; the default of ``--rollout-function-path``.

    Args:
        args: Flat arguments of an open ``RolloutContext``.
        rollout_id: Which rollout.
        data_source: Has ``get_samples(n)`` and ``add_samples(groups)``.
        evaluation: Evaluate on the evaluation sets instead.
    """
    context = RolloutContext.of(args)
    if evaluation:
        output, _ = context.run(eval_rollout(context.args, rollout_id))
        return output
    output, unfinished = context.run(generate_rollout_async(context.args, rollout_id, data_source))
    if unfinished:
        data_source.add_samples(unfinished)
    return output


async def generate_rollout_async(
    args: Any, rollout_id: int, data_source: Any
) -> tuple[RolloutFnTrainOutput, list[list[Sample]]]:
    """The asynchronous body of ``generate_rollout``.

    Args:
        args: Flat arguments of an open ``RolloutContext``.
        rollout_id: Which rollout.
        data_source: A data source, or its ``get_samples``.

    Returns:
        ``rollout_batch_size`` groups sorted by index with the metrics of their selection, and the
        unfinished groups to put back (``--partial-rollout``).

    Raises:
        DataError: No prompts, or a filter that drops everything.
        TooManyFailuresError: More samples failed than may.
        WaitTimeoutError: Engines do not answer, or nothing finishes.
    """
    context = RolloutContext.of(args)
    target = args.rollout_batch_size
    context.begin(rollout_id, num_samples=target * args.n_samples_per_prompt)
    source = GroupSource(data_source, args.n_samples_per_prompt)
    try:
        with context.open_progress(f"rollout {rollout_id}", target, "groups") as progress:
            selection = Selection(context, progress)
            await _collect(context, source, selection)
        unfinished = await abort(args, rollout_id, finished=selection.surplus)
    except BaseException:
        await _abandon(context)
        raise
    selection.kept.sort(key=first_index)
    selection.seen.sort(key=first_index)
    if context.hooks.sample_filter is not None:
        context.hooks.sample_filter(args, selection.kept)
    if context.hooks.all_samples is not None:
        context.hooks.all_samples(args, selection.seen, source)
    return RolloutFnTrainOutput(samples=selection.kept, metrics=selection.metrics(len(unfinished))), unfinished


async def _collect(context: RolloutContext, source: GroupSource, selection: Selection) -> None:
    turn = context.turn
    while not selection.is_complete:
        await _refill(context, source)
        done = await _wait_for_groups(context)
        for task in sorted(done, key=lambda t: first_index(turn.inputs[t])):
            selection.take(task)


async def _refill(context: RolloutContext, source: GroupSource) -> None:
    args, turn = context.args, context.turn
    while turn.remaining_batch_size < args.rollout_batch_size:
        # In a thread: reading and copying prompts must not hold up requests that are in flight.
        groups = await asyncio.to_thread(source, args.over_sampling_batch_size or args.rollout_batch_size)
        if not groups:
            raise DataError(
                f"the data source gave no prompts although {args.rollout_batch_size - turn.remaining_batch_size} are "
                "wanted; look at --prompt-data and --data-source-path"
            )
        GenerateState(args).submit_generate_tasks(groups)


async def _wait_for_groups(context: RolloutContext) -> set[GroupTask]:
    """Wait until a group has finished; report a stall, and give up when a request would have by then."""
    turn = context.turn
    started = time.monotonic()
    bound = 2 * context.client.timeouts.request_seconds
    while True:
        done, turn.pendings = await asyncio.wait(
            turn.pendings, timeout=min(STALL_REPORT_SECONDS, bound), return_when=asyncio.FIRST_COMPLETED
        )
        if done:
            return done
        waited = time.monotonic() - started
        report = (
            f"rollout {turn.rollout_id} has waited {waited:.0f} s for any of {len(turn.pendings)} groups in flight; "
            f"{context.limit.in_use} samples are generating ({context.limit.limit} may)"
        )
        if waited >= bound:
            raise WaitTimeoutError(f"{report}; --http-request-timeout-seconds sets how long it may take")
        logger.warning("%s", report)


async def abort(args: Any, rollout_id: int, finished: Sequence[GroupTask] = ()) -> list[list[Sample]]:
    """End what still runs and return the unfinished groups to put back.

    Requests are aborted in the engines, whose replies then end the tasks. A task that does not
    end within ``--abort-timeout-seconds``, such as one that waits for a slow judge, is cancelled.

    Args:
        args: Flat arguments of an open ``RolloutContext``.
        rollout_id: Which rollout; recorded as the start of the samples that have a response.
        finished: Tasks of finished groups that are not wanted any more.

    Returns:
        Unfinished and unwanted groups with ``--partial-rollout``, else nothing.
    """
    context = RolloutContext.of(args)
    turn = context.turn
    turn.aborted = True
    tasks, turn.pendings = turn.pendings, set()
    running = await _end_tasks(context, tasks)
    if running:
        logger.warning(
            "rollout %d: %d groups did not end within %g s of the abort and are cancelled",
            *(rollout_id, len(running), context.client.timeouts.abort_seconds),
        )
        await _cancel(running)
    inputs, turn.inputs = turn.inputs, {}
    if not args.partial_rollout:
        for task in tasks:
            _log_fault(task)
        return []
    unwanted = sorted({*tasks, *finished}, key=lambda task: first_index(inputs[task]))
    groups = [_unfinished_group(inputs[task], task) for task in unwanted]
    for sample in (s for group in groups for s in group):
        if sample.response_length:
            sample.metadata.setdefault("start_rollout_id", rollout_id)
    return groups


async def _end_tasks(context: RolloutContext, tasks: set[GroupTask]) -> set[GroupTask]:
    """Abort in the engines until the tasks have ended; returns those that have not within the bound."""
    give_up_at = time.monotonic() + context.client.timeouts.abort_seconds
    pending: set[GroupTask] = tasks
    pause = 0.05
    while pending and (left := give_up_at - time.monotonic()) > 0:
        # Again and again: a multi-turn function may start its next request after an abort. Each time to
        # its end: an engine may be in the middle of it, and an abort that is left behind would end
        # requests of the next rollout.
        try:
            await context.client.abort_all(timeout_seconds=left)
        except (EngineError, WaitTimeoutError) as error:
            logger.warning("abort: %s", error)
        left = give_up_at - time.monotonic()
        _, pending = await asyncio.wait(pending, timeout=max(0.0, min(pause, left)))
        pause = min(2 * pause, MAX_ABORT_PAUSE_SECONDS)
    return pending


def _unfinished_group(inputs: list[Sample], task: GroupTask) -> list[Sample]:
    """What of a group can be continued later: its samples, or the bare prompts if it was fanned out or failed."""
    if not _log_fault(task):
        items = task.result()
        samples = [item for item in items if isinstance(item, Sample)]
        if len(samples) == len(items):
            return samples
        for sample in inputs:
            clear_response(sample)
    return inputs


def _log_fault(task: GroupTask) -> bool:
    """Whether a task ended without a result; the reason is logged."""
    if task.cancelled():
        return True
    error = task.exception()
    if error is not None:
        logger.warning("a group failed while the rollout was being aborted: %s: %s", type(error).__name__, error)
    return error is not None


async def _cancel(tasks: set[GroupTask]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=CANCEL_SECONDS)


async def _abandon(context: RolloutContext) -> None:
    """After an error: end everything that runs, in the engines too, within seconds."""
    turn: RolloutTurn = context.turn
    turn.aborted = True
    tasks = turn.pendings | set(turn.inputs)
    turn.pendings, turn.inputs = set(), {}
    await _cancel({task for task in tasks if not task.done()})
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # seen: one of them is being raised already
    if not tasks:
        return
    try:
        await context.client.abort_all(timeout_seconds=CANCEL_SECONDS)
    except (EngineError, WaitTimeoutError) as error:  # the error that led here matters more
        logger.warning("could not abort the requests in flight: %s", error)
