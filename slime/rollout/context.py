"""The handle of a rollout: everything that lives as long as the process that generates.

``RolloutContext`` owns the loop thread, the client, the tokenizer, the reward service, the
concurrency limit and the user's hooks. It travels inside ``args`` as the run-time fact ``rollout_context``, so that
functions which receive nothing but ``args`` reach it from any thread and any loop, and two
contexts in one process stay apart. The established functions without even an ``args``
(``post``, ``run``) find it through a context variable that is set around each rollout function.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from slime.data.templates import load_processor, load_tokenizer
from slime.errors import ConfigError, WaitTimeoutError
from slime.observability.progress import ProgressBoard, ProgressSink
from slime.rewards import RewardService
from slime.rollout.client import ClientTimeouts, EngineClient
from slime.rollout.failures import FailureBudget
from slime.rollout.hooks import CustomGenerate, RolloutHooks
from slime.rollout.loop import ConcurrencyLimit, LoopThread
from slime.rollout.progress import Progress
from slime.rollout.reissue import Reissues
from slime.rollout.stops import end_token_ids
from slime.rollout.types import RolloutFnEvalOutput, RolloutFnTrainOutput, RolloutGroup, call_rollout_fn
from slime.types import Sample

logger = logging.getLogger(__name__)

T = TypeVar("T")

_active_context: ContextVar[RolloutContext] = ContextVar("slime_rollout_context")

CLOSE_SECONDS = 30.0

GroupTask = asyncio.Task[RolloutGroup]


class ArgsWithFacts(Protocol):
    """Flat arguments that take run-time facts; ``ArgsView`` is one."""

    def with_facts(self, **facts: Any) -> Any:
        """The same arguments with further attributes."""
        ...


@dataclass(eq=False)
class RolloutTurn:
    """What changes during one rollout; a new one is made for each.

    Args:
        rollout_id: Which rollout.
        failures: Counts failed samples.
        evaluation: Whether it is an evaluation.
        max_context_len: Most tokens of prompt plus response; None for no bound.
        aborted: Set once the target is met: what still runs is to end.
        remaining_batch_size: Groups in flight plus groups kept.
        pendings: Tasks of groups in flight.
        inputs: The samples that each task was started with.
    """

    rollout_id: int
    failures: FailureBudget
    evaluation: bool = False
    max_context_len: int | None = None
    aborted: bool = False
    remaining_batch_size: int = 0
    pendings: set[GroupTask] = field(default_factory=set)
    inputs: dict[GroupTask, list[Sample]] = field(default_factory=dict)


class RolloutContext:
    """Owner of the handles that rollouts share; build it with ``open``, once per process.

    Attributes:
        args: Flat arguments, this context among them; what every rollout function receives.
        client: HTTP to the router.
        tokenizer: Tokenizer of ``--hf-checkpoint``.
        end_token_ids: Tokens that end an output of it by themselves.
        progress: Where rollouts and evaluations state how far they are; to be read from any thread.
        limit: Samples that may generate at once.
        rewards: Grades samples.
        hooks: The user's functions.
        sampling_params: Sampling parameters of training; copy before changing them.
        turn: State of the rollout that runs, or of the last one.
        eval_datasets: Evaluation sets that were read, by ``cache_key``.
        dp_counts: Samples in flight per data-parallel rank of the engine.
    """

    def __init__(
        self, args: Any, *, client: EngineClient, loop_thread: LoopThread, tokenizer: Any, progress: ProgressSink
    ) -> None:
        self.args = args.with_facts(rollout_context=self)
        self.client = client
        self.loop_thread = loop_thread
        self.tokenizer = tokenizer
        self.end_token_ids = end_token_ids(args.hf_checkpoint, tokenizer)
        self.progress = progress
        self.hooks = RolloutHooks.load(self.args)
        self.rewards = RewardService(self.args)
        self.limit = ConcurrencyLimit(args.sglang_server_concurrency * max(1, args.rollout_num_engines))
        self.sampling_params = train_sampling_params(args)
        self.turn = self.begin(-1, num_samples=1)
        self.eval_datasets: dict[Any, Any] = {}
        self.dp_counts = [0] * max(1, args.sglang_dp_size or 1)
        self._generate_functions: dict[str, CustomGenerate] = {}
        self._processor: list[Any] = []
        self._running = threading.Lock()
        self._pid = os.getpid()

    @classmethod
    def open(cls, args: ArgsWithFacts, *, progress: ProgressSink | None = None) -> RolloutContext:
        """Load tokenizer and hooks, connect to the router.

        Args:
            args: Flat arguments with the facts ``sglang_router_ip``, ``sglang_router_port`` and
                ``rollout_num_engines``.
            progress: Told how far each rollout is; default a new ``ProgressBoard``.

        Raises:
            ConfigError: No router address.
            DataError: No tokenizer.
            PluginError: A user function cannot be loaded.
        """
        flat: Any = args
        tokenizer = load_tokenizer(flat.hf_checkpoint)
        client = EngineClient(
            router_url(flat),
            timeouts=ClientTimeouts.from_args(flat),
            reissues=Reissues() if flat.use_fault_tolerance else None,
        )
        loop_thread = LoopThread()
        try:
            loop_thread.run(client.open(), timeout_seconds=CLOSE_SECONDS)
            return cls(
                flat,
                client=client,
                loop_thread=loop_thread,
                tokenizer=tokenizer,
                progress=progress or ProgressBoard(),
            )
        except BaseException:
            loop_thread.run(client.close(), timeout_seconds=CLOSE_SECONDS)
            loop_thread.close()
            raise

    @staticmethod
    def of(args: Any) -> RolloutContext:
        """The context that ``args`` belongs to.

        Raises:
            RuntimeError: ``args`` comes from elsewhere than a running rollout.
        """
        try:
            return args.rollout_context
        except AttributeError:
            raise RuntimeError(
                "these args belong to no rollout: pass on the args that your function received, "
                "or open a handle with RolloutContext.open(args) and use its .args"
            ) from None

    @staticmethod
    def active() -> RolloutContext | None:
        """The context whose rollout function is running around the caller, if any."""
        return _active_context.get(None)

    @property
    def processor(self) -> Any:
        """Multimodal processor of ``--hf-checkpoint``, loaded on first use; None for a text model."""
        if not self._processor:
            self._processor.append(load_processor(self.args.hf_checkpoint))
        return self._processor[0]

    def generate_function(self, path: str | None) -> CustomGenerate | None:
        """The function at ``path``; without a path the one of the flag, or None for the built-in one."""
        if path is None:
            return self.hooks.generate
        if path not in self._generate_functions:
            self._generate_functions[path] = CustomGenerate.load(path)
        return self._generate_functions[path]

    def generate(self, fn: Callable[..., Any], rollout_id: int, data_source: Any) -> RolloutFnTrainOutput:
        """Run a training rollout function to its end.

        Args:
            fn: Function of ``--rollout-function-path``.
            rollout_id: Which rollout.
            data_source: Where prompts come from and unfinished groups go.
        """
        output = self._call(fn, rollout_id, data_source, evaluation=False)
        assert isinstance(output, RolloutFnTrainOutput)
        return output

    def evaluate(self, fn: Callable[..., Any], rollout_id: int, data_source: Any) -> RolloutFnEvalOutput:
        """Run an evaluation function to its end; arguments as in ``generate``."""
        output = self._call(fn, rollout_id, data_source, evaluation=True)
        assert isinstance(output, RolloutFnEvalOutput)
        return output

    def _call(
        self, fn: Callable[..., Any], rollout_id: int, data_source: Any, *, evaluation: bool
    ) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
        # One at a time: the abort at the end of a training rollout ends every request of the engines.
        bound = 4 * self.client.timeouts.request_seconds
        if not self._running.acquire(timeout=bound):
            raise WaitTimeoutError(
                f"rollout {rollout_id} waited {bound:g} s for rollout {self.turn.rollout_id} of the same process"
            )
        try:
            with self.activate():
                return call_rollout_fn(fn, self.args, rollout_id, data_source, evaluation=evaluation)
        finally:
            self._running.release()

    @contextlib.contextmanager
    def activate(self) -> Iterator[RolloutContext]:
        """Make this the context that functions without ``args`` find."""
        token = _active_context.set(self)
        try:
            with self.rewards.activate():
                yield self
        finally:
            _active_context.reset(token)

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine of a whole rollout on the loop and block for its result.

        Raises:
            WaitTimeoutError: It takes longer than a rollout may.
        """
        return self.loop_thread.run(coro, timeout_seconds=self.args.rollout_timeout_seconds)

    def open_progress(self, label: str, target: int, unit: str) -> Progress:
        """Progress of new work of ``target`` units; a context manager."""
        return Progress(self.progress, label, target, unit)

    def begin(self, rollout_id: int, *, num_samples: int, evaluation: bool = False) -> RolloutTurn:
        """Start the state of a new rollout that is to deliver ``num_samples``."""
        args = self.args
        self.turn = RolloutTurn(
            rollout_id,
            FailureBudget(num_samples, args.max_failed_sample_share),
            evaluation=evaluation,
            max_context_len=args.eval_max_context_len if evaluation else args.rollout_max_context_len,
        )
        return self.turn

    def close(self) -> None:
        """End grader processes, connections and the loop thread; bounded."""
        try:
            self.loop_thread.run(self.rewards.close(), timeout_seconds=CLOSE_SECONDS)
            self.loop_thread.run(self.client.close(), timeout_seconds=CLOSE_SECONDS)
        finally:
            self.loop_thread.close()

    def __enter__(self) -> RolloutContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        # args is sent to grader processes; the handles stay here.
        return DetachedContext, (self._pid,)

    def __deepcopy__(self, memo: dict[int, Any]) -> RolloutContext:
        return self


class DetachedContext:
    """What is left of a context in another process: it says where the real one is.

    Args:
        pid: Process that owns the context.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_pid":
            raise AttributeError(name)
        raise RuntimeError(
            f"rollout_context.{name} is only available in the rollout process {self._pid}, not in process {os.getpid()}"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return DetachedContext, (self._pid,)


def router_url(args: Any) -> str:
    """``http://host:port`` of the router.

    Raises:
        ConfigError: The address is not known.
    """
    if not args.sglang_router_ip or not args.sglang_router_port:
        raise ConfigError(
            "no router address: start the rollout after the router, or give --sglang-router-ip and --sglang-router-port"
        )
    host = args.sglang_router_ip
    return f"http://[{host}]:{args.sglang_router_port}" if ":" in host else f"http://{host}:{args.sglang_router_port}"


def train_sampling_params(args: Any) -> dict[str, Any]:
    """Sampling parameters of a training request, in the engine's names."""
    params: dict[str, Any] = {
        "temperature": args.rollout_temperature,
        "top_p": args.rollout_top_p,
        "top_k": args.rollout_top_k,
        "max_new_tokens": args.rollout_max_response_len,
        "stop": list(args.rollout_stop) if args.rollout_stop else None,
        "stop_token_ids": list(args.rollout_stop_token_ids) if args.rollout_stop_token_ids else None,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    return params
