"""Reward functions of the user: coroutines, plain functions, and reward model classes.

Plain code runs in threads, so that it never blocks the event loop. Tests hold: a class is built
once, scores what has finished in batches, and an answer of the wrong length is an error.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, cast

from slime.errors import PluginError, WaitTimeoutError
from slime.plugins import load_plugin
from slime.types import Sample

FLAG = "--custom-rm-path"


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
        timeout_seconds: Longest wait for one call.

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
        self._function = function
        self._timeout_seconds = timeout_seconds
        self._is_coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(type(function), "__call__", None)  # noqa: B004 - whether calling it gives a coroutine
        )
        self._threads = ThreadPoolExecutor(thread_name_prefix="custom-reward")

    async def score(self, args: Any, sample: Sample, kwargs: dict[str, Any]) -> Any:
        """Call it with one sample."""
        return await self._call(args, sample, kwargs)

    async def score_all(self, args: Any, samples: Sequence[Sample], kwargs: dict[str, Any]) -> list[Any]:
        """Call it once with all samples.

        Raises:
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
        try:
            async with asyncio.timeout(self._timeout_seconds):
                if self._is_coroutine:
                    return await self._function(args, subject, **kwargs)
                loop = asyncio.get_running_loop()
                result = await loop.run_in_executor(self._threads, lambda: self._function(args, subject, **kwargs))
                return await result if inspect.isawaitable(result) else result
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"the rollout waited {self._timeout_seconds:g} s for the reward function {self._path} ({FLAG})"
            ) from error

    def close(self) -> None:
        """End the threads as soon as their calls return."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: Any
    response: str
    reward: Future[Any]


class RewardModel:
    """A class with ``compute_reward(prompts, responses)``: built once, in the one thread it is used from.

    While it computes, finished samples gather; the next call gets all of them.
    """

    def __init__(
        self, path: str, cls: Callable[[str | None], Any], model_path: str | None, timeout_seconds: float
    ) -> None:
        self._path = path
        self._cls = cls
        self._model_path = model_path
        self._timeout_seconds = timeout_seconds
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="custom-reward-model")
        self._model: Any = None

    async def score(self, args: Any, sample: Sample, kwargs: dict[str, Any]) -> Any:
        """Reward of one sample, computed together with others that have finished."""
        del args, kwargs
        request = _Request(sample.prompt, sample.response, Future())
        self._requests.put(request)
        self._thread.submit(self._serve)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(request.reward), self._timeout_seconds)
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"the rollout waited {self._timeout_seconds:g} s for compute_reward of {self._path} ({FLAG})"
            ) from error

    async def score_all(self, args: Any, samples: Sequence[Sample], kwargs: dict[str, Any]) -> list[Any]:
        """Rewards of several samples."""
        return list(await asyncio.gather(*(self.score(args, sample, kwargs) for sample in samples)))

    def _serve(self) -> None:
        """Score everything that waits; runs in the model's thread."""
        batch: list[_Request] = []
        while not self._requests.empty():
            batch.append(self._requests.get())
        batch = [request for request in batch if request.reward.set_running_or_notify_cancel()]
        if not batch:
            return
        try:
            rewards = self._compute([r.prompt for r in batch], [r.response for r in batch])
        except Exception as error:  # noqa: BLE001 - plug-in boundary: handed to those who wait
            for request in batch:
                request.reward.set_exception(error)
            return
        for request, reward in zip(batch, rewards, strict=True):
            request.reward.set_result(reward)

    def _compute(self, prompts: list[Any], responses: list[str]) -> list[Any]:
        if self._model is None:
            self._model = self._cls(self._model_path)
        rewards = list(self._model.compute_reward(prompts, responses))
        if len(rewards) != len(prompts):
            raise PluginError(
                f"{FLAG} {self._path}: compute_reward got {len(prompts)} prompts and returned {len(rewards)} rewards"
            )
        return rewards

    def close(self) -> None:
        """End the thread as soon as its call returns."""
        self._thread.shutdown(wait=False, cancel_futures=True)
