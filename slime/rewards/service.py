"""Which reward a sample gets, and who computes it.

Owns the order of dispatch, the counters and the handle on everything that computes rewards. The
pipeline builds one ``RewardService`` and activates it around a rollout. ``async_rm`` and
``batched_async_rm``, which user functions import, find it in a context variable: they receive only
``args``, a read-only view that is copied between processes and cannot carry live handles, while a
context variable reaches every task and ``asyncio.to_thread`` call started inside, and nothing else.

Whatever grades it, a sample gets reward 0 and is counted when grading takes longer than
``--rm-timeout``, from the start of the call. Rules run here in the event loop only on responses short
enough for them to end within about two milliseconds; longer ones and computer algebra go to worker
processes. Tests hold the order of dispatch, the counts, and the time-out for every kind of grader.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from numbers import Number
from typing import TYPE_CHECKING, Any, Protocol, cast

from slime.errors import ConfigError, PluginError
from slime.rewards.custom import CustomReward, load_custom_reward
from slime.rewards.grade import Deferred, Grade, Reward, RewardTimeoutError, zero_reward
from slime.rewards.pool import RewardPool
from slime.rewards.registry import BOXED_PREFIX, REWARDS, RM_TYPES, GraderKind, GraderSpec
from slime.types import Sample
from slime.worker_process import resolve

if TYPE_CHECKING:
    from slime.rewards.remote import RemoteReward

logger = logging.getLogger(__name__)

INLINE_CHARS = 4000
"""Longer responses are graded in a worker process: hostile ones of 100 kB take up to 16 ms."""

_LAST_BOXED = "slime.rewards.latex:last_boxed"

_active: ContextVar[RewardService | None] = ContextVar("slime_reward_service", default=None)


class RewardArgs(Protocol):
    """What grading reads from ``args``."""

    rm_type: str | None
    rm_url: str | None
    rm_timeout: float
    rm_workers: int | None
    custom_rm_path: str | None
    custom_rm_model_path: str | None
    hf_checkpoint: str | None
    reward_key: str | None
    eval_reward_key: str | None


class UnknownRewardTypeError(ConfigError, NotImplementedError):
    """There is no such reward type."""


class RewardService:
    """Grades samples; owns the worker processes, threads and connections that this takes.

    Args:
        args: Flat argument view; user functions receive it.
    """

    def __init__(self, args: RewardArgs) -> None:
        self._args = args
        self._pool: RewardPool | None = None
        self._remote: RemoteReward | None = None
        self._custom: dict[str, CustomReward] = {}
        self._num_unparsed = 0
        self._num_graded = 0
        self._num_timeouts = 0
        self._told: set[str] = set()
        if args.custom_rm_path is not None:
            self._custom_reward(args.custom_rm_path)  # now: importing it inside a rollout would stall the rollout

    async def score(self, sample: Sample, **kwargs: Any) -> Reward:
        """Reward of one sample: its own function, else ``--custom-rm-path``, else the built-in type.

        Raises:
            ConfigError: No reward, an unknown type, or one that is not available.
            PluginError: A user's function answered with something that is no reward.
        """
        self._num_graded += 1
        path = sample.custom_rm_path or self._args.custom_rm_path
        try:
            if path is not None:
                return _as_reward(await self._custom_reward(path).score(self._args, sample, kwargs), path)
            return await self._score_built_in(sample)
        except RewardTimeoutError as error:
            return self._time_out(error, 1)

    async def score_group(self, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
        """Rewards of several samples in their order: one call of ``--custom-rm-path``, else one by one.

        ``--rm-timeout`` bounds each call, so that all samples of a late one get reward 0.
        """
        path = self._args.custom_rm_path
        if not samples:
            return []
        if path is None:
            return list(await asyncio.gather(*(self.score(sample, **kwargs) for sample in samples)))
        self._num_graded += len(samples)
        try:
            rewards = await self._custom_reward(path).score_all(self._args, samples, kwargs)
        except RewardTimeoutError as error:
            zero = self._time_out(error, len(samples))
            return [copy.copy(zero) for _ in samples]
        return [_as_reward(reward, path) for reward in rewards]

    async def score_remote(self, sample: Sample) -> Reward:
        """Reward of one sample from ``--rm-url``, whatever the configured type is."""
        self._num_graded += 1
        try:
            return await self._ask_remote(sample, sample.response)
        except RewardTimeoutError as error:
            return self._time_out(error, 1)

    def _time_out(self, error: RewardTimeoutError, num_samples: int) -> Reward:
        level = logging.DEBUG if self._num_timeouts else logging.WARNING  # once per rollout; the rest is counted
        self._num_timeouts += num_samples
        logger.log(level, "reward 0 (--rm-timeout): %s", error)
        return zero_reward(self._args.reward_key, self._args.eval_reward_key)

    async def _score_built_in(self, sample: Sample) -> Reward:
        name = str(sample.metadata.get("rm_type") or self._args.rm_type or "").strip()
        spec, boxed = look_up(name)
        response = sample.response
        if boxed:
            content = await self._compute(_LAST_BOXED, (response,), inline=len(response) <= INLINE_CHARS)
            self._num_unparsed += content is None
            response = content or ""
        if spec.kind is GraderKind.REMOTE:
            return await self._ask_remote(sample, response)
        function = (boxed and spec.boxed_function) or spec.function
        inline = spec.kind is GraderKind.INLINE and len(response) <= INLINE_CHARS
        grade = await self._compute(function, (response, sample.label, sample.metadata), inline=inline)
        if grade is None:
            return zero_reward(self._args.reward_key, self._args.eval_reward_key)
        return self._settle(await self._finish(grade), name)

    async def _ask_remote(self, sample: Sample, response: str) -> Reward:
        reward = await self._remote_reward().score(sample, response)
        return _as_reward(reward, f"--rm-url {self._args.rm_url}")

    async def _compute(self, function: str, arguments: tuple[Any, ...], *, inline: bool) -> Any:
        """Run ``module:attribute`` here or in a worker; None when it brought its worker down."""
        if inline:
            return resolve(function)(*arguments)
        return await self._workers().call(function, arguments, otherwise=None)

    async def _finish(self, grade: Grade | Deferred) -> Grade:
        if isinstance(grade, Grade):
            return grade
        answer = await self._workers().call(grade.function, grade.arguments, otherwise=False)
        return grade.if_true if answer else grade.if_false

    def _settle(self, grade: Grade, name: str) -> Reward:
        self._num_unparsed += grade.unparsed
        if grade.note and grade.note not in self._told:
            self._told.add(grade.note)
            logger.warning("--rm-type %s: %s", name, grade.note)
        return grade.reward

    def _workers(self) -> RewardPool:
        if self._pool is None:
            self._pool = RewardPool(num_workers=self._args.rm_workers, timeout_seconds=self._args.rm_timeout)
        return self._pool

    def _remote_reward(self) -> RemoteReward:
        if self._remote is None:
            # An HTTP client that neither workers nor the command line need to load.
            from slime.rewards.remote import RemoteReward

            self._remote = RemoteReward(self._args.rm_url, timeout_seconds=self._args.rm_timeout)
        return self._remote

    def _custom_reward(self, path: str) -> CustomReward:
        if path not in self._custom:
            model_path = self._args.custom_rm_model_path or self._args.hf_checkpoint
            self._custom[path] = load_custom_reward(path, model_path=model_path, timeout_seconds=self._args.rm_timeout)
        return self._custom[path]

    def drain_metrics(self) -> dict[str, float]:
        """Counts since the last call: graded, unparsed, timed out and failed samples."""
        metrics = {
            "rollout/reward/graded": float(self._num_graded),
            "rollout/reward/unparsed": float(self._num_unparsed),
            "rollout/reward/timeouts": float(self._num_timeouts),
            "rollout/reward/failures": float(self._pool.num_failures if self._pool else 0),
        }
        self._num_graded = self._num_unparsed = self._num_timeouts = 0
        if self._pool is not None:
            self._pool.num_failures = 0
        return metrics

    @contextmanager
    def activate(self) -> Generator[RewardService]:
        """Let ``async_rm`` and ``batched_async_rm`` use this service in the code and tasks within."""
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)

    async def close(self) -> None:
        """Kill workers, end threads, close connections."""
        if self._pool is not None:
            await asyncio.to_thread(self._pool.close)
            self._pool = None
        if self._remote is not None:
            await self._remote.close()
            self._remote = None
        for custom in self._custom.values():
            custom.close()
        self._custom.clear()


def look_up(name: str) -> tuple[GraderSpec, bool]:
    """The registry row of a reward type, and whether it has the ``boxed_`` prefix.

    Raises:
        ConfigError: None is given, it is unknown, or not available.
    """
    known = ", ".join(sorted(REWARDS))
    if not name:
        raise UnknownRewardTypeError(
            "Rule-based RM type is not specified: give --rm-type, a rm_type in the metadata of the rows, or "
            f"--custom-rm-path. Known types: {known}"
        )
    spec = REWARDS.get(name.removeprefix(BOXED_PREFIX))
    if spec is None or (name not in RM_TYPES and spec.kind is not GraderKind.UNAVAILABLE):
        raise UnknownRewardTypeError(
            f"reward type {name!r} (--rm-type or the rm_type of a row) is not known; known are {known}, "
            f"each also with the prefix {BOXED_PREFIX}"
        )
    if spec.kind is GraderKind.UNAVAILABLE:
        raise UnknownRewardTypeError(f"--rm-type {name} is not available: {spec.unavailable_because}")
    return spec, name.startswith(BOXED_PREFIX)


def _as_reward(value: Any, source: str) -> Reward:
    """Check that a foreign answer is a reward; numbers of other libraries become plain ones."""
    if isinstance(value, dict | int | float):
        return cast(Reward, value)
    if isinstance(value, Number) or callable(getattr(value, "item", None)):
        try:
            return float(cast(Any, value))
        except (TypeError, ValueError, RuntimeError):  # torch: more than one element
            pass
    found = f"{type(value).__name__} {value!r:.80}"
    raise PluginError(f"{source}: a reward is a number or a dict of its parts, found {found}")


@asynccontextmanager
async def _service(args: RewardArgs) -> AsyncGenerator[RewardService]:
    """The active service, or one for the time of a call made outside any pipeline."""
    active = _active.get()
    if active is not None:
        yield active
        return
    service = RewardService(args)
    try:
        yield service
    finally:
        await service.close()


async def async_rm(args: RewardArgs, sample: Sample, **kwargs: Any) -> Reward:
    """Reward of one sample, for use in functions of the user."""
    async with _service(args) as service:
        return await service.score(sample, **kwargs)


async def batched_async_rm(args: RewardArgs, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    """Rewards of several samples, for use in functions of the user."""
    async with _service(args) as service:
        return await service.score_group(samples, **kwargs)


async def remote_rm(args: RewardArgs, sample: Sample) -> Reward:
    """Reward of one sample from ``--rm-url``, for use in functions of the user."""
    async with _service(args) as service:
        return await service.score_remote(sample)
