"""Reward functions of the user: coroutines, plain functions, and reward model classes.

Plain code runs in threads, so that it never blocks the event loop. A call past its time is given up,
not waited for; only code that blocks inside a coroutine escapes this. Tests hold: every form is bounded
from the start of its call; a class is built once, scores what has finished in batches, and an answer of
the wrong length is an error.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, cast

from slime.errors import PluginError, WaitTimeoutError
from slime.plugins import load_plugin
from slime.rewards.grade import RewardTimeoutError
from slime.rewards.threads import Call, CallThreads
from slime.types import Sample

FLAG = "--custom-rm-path"

NUM_THREADS = 64  # plain functions mostly wait for a judge
MAX_ABANDONED = 256
MAX_ABANDONED_MODELS = 2  # each holds a whole model
MODEL_START_SECONDS = 1800.0


class CustomReward(Protocol):
    """A user's reward, whatever form it has."""

    async def score(self, args: Any, sample: Sample, kwargs: dict[str, Any]) -> Any:
        """Reward of one sample."""
        ...

    async def score_all(self, args: Any, samples: Sequence[Sample], kwargs: dict[str, Any]) -> list[Any]:
        """Rewards of several samples, in their order."""
        ...

    def close(self) -> None:
        """End threads."""
        ...


def load_custom_reward(path: str, *, model_path: str | None, timeout_seconds: float) -> CustomReward:
    """Load ``--custom-rm-path``.

    Args:
        path: ``pkg.module.function``, ``file.py:function``, or ``file.py`` with ``CustomRewardModel``.
        model_path: Given to the class.
        timeout_seconds: Most seconds per call, counted from its start: building the class and
            waiting for a thread come before it.

    Raises:
        PluginError: It cannot be loaded or has neither form.
    """
    target = load_plugin(path, flag=FLAG, kind="reward")
    if inspect.isclass(target):
        if not callable(getattr(target, "compute_reward", None)):
            raise PluginError(f"{FLAG} {path}: class {target.__name__} needs compute_reward(prompts, responses)")
        return RewardModel(path, cast("Callable[[str | None], Any]", target), model_path, timeout_seconds)
    return RewardFunction(path, target, timeout_seconds)


class RewardFunction:
    """``fn(args, sample, **kw)``, or ``fn(args, samples, **kw)`` for several; coroutine or plain."""

    def __init__(self, path: str, function: Callable[..., Any], timeout_seconds: float) -> None:
        self._path = path
        self._what = f"the reward function {path} ({FLAG})"
        self._function = function
        self._timeout_seconds = timeout_seconds
        self._is_coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(type(function), "__call__", None)  # noqa: B004 - whether calling it gives a coroutine
        )
        self._threads = CallThreads(self._what, num_threads=NUM_THREADS, max_abandoned=MAX_ABANDONED)
        self._given_up: set[asyncio.Future[Any]] = set()

    async def score(self, args: Any, sample: Sample, kwargs: dict[str, Any]) -> Any:
        """Call it with one sample.

        Raises:
            RewardTimeoutError: It took too long and was given up.
            PluginError: Too many calls that were given up still run.
        """
        return await self._call(args, sample, kwargs)

    async def score_all(self, args: Any, samples: Sequence[Sample], kwargs: dict[str, Any]) -> list[Any]:
        """Call it once with all samples.

        Raises:
            RewardTimeoutError: The call took too long and was given up.
            PluginError: The answer is not a list with one reward per sample.
        """
        rewards = await self._call(args, samples, kwargs)
        if not isinstance(rewards, Sequence) or len(cast(Sequence[Any], rewards)) != len(samples):
            found = (
                f"{len(cast(Sequence[Any], rewards))} rewards" if isinstance(rewards, Sequence) else repr(rewards)[:80]
            )
            raise PluginError(
                f"{FLAG} {self._path}: called with a list of {len(samples)} samples it must return one reward for "
                f"each of them, found {found}"
            )
        return list(cast(Sequence[Any], rewards))

    async def _call(self, args: Any, subject: Any, kwargs: dict[str, Any]) -> Any:
        if self._is_coroutine:
            return await self._finish(self._function(args, subject, **kwargs))
        context = contextvars.copy_context()  # how async_rm finds the rollout's service
        result = await self._threads.run(
            lambda: context.run(self._function, args, subject, **kwargs), timeout_seconds=self._timeout_seconds
        )
        return await self._finish(result) if inspect.isawaitable(result) else result

    async def _finish(self, awaitable: Awaitable[Any]) -> Any:
        """Await user code; when its time is over it is cancelled, and not waited for in case it ignores that."""
        task = asyncio.ensure_future(awaitable)
        try:
            done, _ = await asyncio.wait([task], timeout=self._timeout_seconds)
        except asyncio.CancelledError:
            self._give_up(task)
            raise
        if done:
            return task.result()
        self._give_up(task)
        raise RewardTimeoutError(f"the rollout waited {self._timeout_seconds:g} s for {self._what}")

    def _give_up(self, task: asyncio.Future[Any]) -> None:
        self._given_up.add(task)  # a loop itself keeps only weak references
        task.add_done_callback(self._given_up.discard)
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        task.cancel()

    def close(self) -> None:
        """End the threads as soon as their calls return."""
        self._threads.close()


class _Request:
    """One sample for a reward model; ``serving`` is set to the call that has taken it."""

    def __init__(self, prompt: Any, response: str) -> None:
        self.prompt = prompt
        self.response = response
        self.serving: Future[Call] = Future()
        self.reward: Future[Any] = Future()


class RewardModel:
    """A class with ``compute_reward(prompts, responses)``: built once, in the one thread it is used from.

    While it computes, finished samples gather; the next call gets all of them. A call that hangs keeps
    its thread and its model; another of each takes over, a few times.
    """

    def __init__(
        self, path: str, cls: Callable[[str | None], Any], model_path: str | None, timeout_seconds: float
    ) -> None:
        self._path = path
        self._what = f"compute_reward of {path} ({FLAG})"
        self._cls = cls
        self._model_path = model_path
        self._timeout_seconds = timeout_seconds
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._threads = CallThreads(self._what, num_threads=1, max_abandoned=MAX_ABANDONED_MODELS)
        self._of_thread = threading.local()

    async def score(self, args: Any, sample: Sample, kwargs: dict[str, Any]) -> Any:
        """Reward of one sample, computed together with others that have finished.

        Raises:
            RewardTimeoutError: The call it was part of took too long and was given up.
            WaitTimeoutError: No call began: the class takes too long to build.
            PluginError: Calls that were given up still run.
        """
        del args, kwargs
        request = _Request(sample.prompt, sample.response)
        self._requests.put(request)
        try:
            self._threads.submit(self._serve)
            begun, _ = await asyncio.wait([asyncio.wrap_future(request.serving)], timeout=MODEL_START_SECONDS)
            if not begun:
                raise WaitTimeoutError(
                    f"the rollout waited {MODEL_START_SECONDS:g} s for {self._what} to begin; look at its __init__"
                )
            reward = asyncio.wrap_future(request.reward)
            done, _ = await asyncio.wait([reward], timeout=self._timeout_seconds)
        except BaseException:
            request.reward.cancel()  # not computed if it still waits
            raise
        if done:
            return reward.result()
        reward.cancel()
        self._threads.abandon(request.serving.result())
        raise RewardTimeoutError(f"the rollout waited {self._timeout_seconds:g} s for {self._what}")

    async def score_all(self, args: Any, samples: Sequence[Sample], kwargs: dict[str, Any]) -> list[Any]:
        """Rewards of several samples."""
        return list(await asyncio.gather(*(self.score(args, sample, kwargs) for sample in samples)))

    def _serve(self, call: Call) -> None:
        """Score everything that waits; runs in the model's thread."""
        batch: list[_Request] = []
        while not self._requests.empty():
            batch.append(self._requests.get())
        batch = [request for request in batch if request.reward.set_running_or_notify_cancel()]
        if not batch:
            return
        try:
            compute = self._model().compute_reward
            self._begin(batch, call)
            rewards = self._check(list(compute([r.prompt for r in batch], [r.response for r in batch])), len(batch))
        except Exception as error:  # noqa: BLE001 - plug-in boundary: handed to those who wait
            self._begin(batch, call)
            for request in batch:
                request.reward.set_exception(error)
            return
        for request, reward in zip(batch, rewards, strict=True):
            request.reward.set_result(reward)

    @staticmethod
    def _begin(batch: list[_Request], call: Call) -> None:
        for request in batch:
            if not request.serving.done():
                request.serving.set_result(call)

    def _model(self) -> Any:
        if not hasattr(self._of_thread, "model"):
            self._of_thread.model = self._cls(self._model_path)
        return self._of_thread.model

    def _check(self, rewards: list[Any], count: int) -> list[Any]:
        if len(rewards) != count:
            raise PluginError(
                f"{FLAG} {self._path}: compute_reward got {count} prompts and returned {len(rewards)} rewards"
            )
        return rewards

    def close(self) -> None:
        """End the thread as soon as its call returns."""
        self._threads.close()
