"""Brings a run up and takes it down, whatever happens in between.

Owns the order of start and end, the local Ray instance, the guardian, and signals. Tests hold: a
failure or Ctrl-C at any moment leaves no process and no scratch directory; SIGTERM saves first.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from slime.cluster.engines import EngineGroup
from slime.cluster.placement import Layout, Placement, plan_layout
from slime.cluster.ray_session import guarded_processes, ray_session
from slime.cluster.rollout import RolloutHandle
from slime.cluster.run import Run
from slime.cluster.schedule import check_steps_left
from slime.cluster.tracking_options import tracking_options
from slime.cluster.trainer import TrainerGroup
from slime.config import Config
from slime.errors import ConfigError, SlimeError
from slime.observability.report import Reporter
from slime.observability.tracking import init_tracking

logger = logging.getLogger(__name__)

_ORDERLY_SECONDS = 10.0
_HURRIED_SECONDS = 0.3


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; not an ``Exception``, so that nothing on the way swallows it."""


@contextmanager
def launch(config: Config) -> Iterator[Run]:
    """Start everything a run needs; end everything on leaving.

    On SIGTERM the last trained weights are saved before the end, if ``--save`` is given: a step in
    progress may take up to ``--sigterm-save-timeout-seconds`` to finish first.

    Args:
        config: Resolved configuration.

    Raises:
        SlimeError: What kept the run from starting or going on.
    """
    run_dir = Path(config.logging.output_dir or "outputs")
    run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        guardian = stack.enter_context(guarded_processes())
        stack.enter_context(ray_session(config.cluster.device, _layout(config).num_slots, guardian.scratch_dir))
        stack.enter_context(_signals())  # after Ray, which takes SIGTERM for itself when it starts
        run = _bring_up(config, run_dir, stack)
        try:
            yield run
        except Terminated:
            _save_before_exit(run, config)
            raise
        logger.info("the run is complete\n%s", run.summary())


def _layout(config: Config) -> Layout:
    return plan_layout(
        config.cluster,
        debug_train_only=config.debug.debug_train_only,
        debug_rollout_only=config.debug.debug_rollout_only,
        external_engines=config.rollout.rollout_external_engine_addrs is not None,
    )


def _bring_up(config: Config, run_dir: Path, stack: ExitStack) -> Run:
    """Processes first (they load in parallel), then data, then the trainer, then the engines."""
    limit, log_dir = config.cluster.cluster_start_timeout_seconds, run_dir.absolute() / "logs"
    placement = Placement(_layout(config), device=config.cluster.device, timeout_seconds=limit)
    stack.callback(placement.close)
    engines = trainer = None
    facts: dict[str, Any] = {}
    if not config.debug.debug_train_only:
        engines = EngineGroup(config, placement, log_dir)
        _close_at_end(stack, engines.close)
        engines.start_router()
        facts = {"sglang_router_ip": engines.router_ip, "sglang_router_port": engines.router_port}
    if not config.debug.debug_rollout_only:
        trainer = TrainerGroup(config, placement, log_dir)
        _close_at_end(stack, trainer.close)
    rollout = RolloutHandle(config, log_dir, facts)
    _close_at_end(stack, rollout.close)
    if engines is not None:
        engines.launch()
    per_epoch = rollout.start()
    config = _complete(config, per_epoch)
    if engines is not None and config.cluster.offload_rollout:
        engines.wait_ready()
        engines.release_memory()
    first_step = trainer.init(config) if trainer is not None else 0
    if config.checkpoint.start_rollout_id is not None:
        first_step = config.checkpoint.start_rollout_id
    num_rollout = config.data.num_rollout or 0
    check_steps_left(first_step, num_rollout, load=config.checkpoint.load)
    rollout.load(first_step - 1)
    if engines is not None:
        engines.wait_ready()
        rollout.watch(engines.check)
    reporter = Reporter(
        init_tracking(tracking_options(config, run_dir)),
        num_rollout=num_rollout,
        first_step=first_step,
        train_steps_per_rollout=config.num_steps_per_rollout if config.logging.wandb_always_use_train_step else None,
        max_logprob_diff=config.algorithm.max_logprob_diff,
        stop_on_logprob_diff=config.algorithm.max_logprob_diff_action == "stop",
    )
    stack.callback(reporter.close)
    return Run(
        config,
        run_dir=run_dir,
        reporter=reporter,
        rollout=rollout,
        engines=engines,
        trainer=trainer,
        first_step=first_step,
        num_rollout=num_rollout,
        num_rollout_per_epoch=per_epoch,
    )


def _close_at_end(stack: ExitStack, close: Callable[[float], None]) -> None:
    """Orderly end after a complete run, little patience with processes that a failure left busy."""

    def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close(_ORDERLY_SECONDS if kind is None else _HURRIED_SECONDS)

    stack.push(leave)


def _complete(config: Config, num_rollout_per_epoch: int | None) -> Config:
    """Fill in what follows from ``--num-epoch`` once the data is known: steps, and the trainer's schedule.

    Raises:
        ConfigError: The data does not say how long an epoch is, or it is shorter than one rollout.
    """
    data = config.data
    if data.num_rollout is not None:
        return config
    if not num_rollout_per_epoch:
        raise ConfigError(
            f"--num-epoch needs data with at least --rollout-batch-size {data.rollout_batch_size} prompts per epoch; "
            "give --num-rollout instead, or a smaller batch"
        )
    num_rollout = (data.num_epoch or 1) * num_rollout_per_epoch
    samples = num_rollout * data.rollout_batch_size * data.n_samples_per_prompt
    per_step = data.global_batch_size or data.rollout_batch_size * data.n_samples_per_prompt
    values = {**config.megatron.values, "train_iters": samples // per_step}
    return dataclasses.replace(
        config,
        data=dataclasses.replace(data, num_rollout=num_rollout),
        megatron=dataclasses.replace(config.megatron, values=values),
    )


def _save_before_exit(run: Run, config: Config) -> None:
    seconds = config.cluster.sigterm_save_timeout_seconds
    try:
        run.save_before_exit(seconds)
    except SlimeError as error:
        logger.error("no checkpoint was saved before ending: %s", error)


@contextmanager
def _signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise ``Terminated`` in the main thread, once; later ones do not disturb the end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGHUP)}

    def terminate(signum: int, frame: FrameType | None) -> None:
        for s in previous:
            signal.signal(s, signal.SIG_IGN)
        raise Terminated(signal.Signals(signum).name)

    for s in previous:
        signal.signal(s, terminate)
    try:
        yield
    finally:
        for s, handler in previous.items():
            signal.signal(s, handler)
