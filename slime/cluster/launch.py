"""Brings a run up and takes it down, whatever happens in between.

Owns the order of start and end, the local Ray instance, the guardian, and signals. Tests hold: a
failure or Ctrl-C at any moment leaves no process and no scratch directory; SIGTERM saves first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from slime.cluster.actor_critic import start_trainer
from slime.cluster.engines import EngineGroup
from slime.cluster.logprob_facts import logprob_facts
from slime.cluster.placement import Placement
from slime.cluster.progress import shown
from slime.cluster.ray_session import guarded_processes, ray_session
from slime.cluster.recovery import Recovery
from slime.cluster.rollout_handle import RolloutHandle
from slime.cluster.run import Run
from slime.cluster.schedule import check_steps_left, complete_schedule
from slime.cluster.signals import held_back, terminable
from slime.cluster.tracking_options import tracking_options
from slime.config import Config
from slime.errors import SlimeError
from slime.observability.display import open_display
from slime.observability.logprob_monitor import LogprobMonitor
from slime.observability.report import Reporter
from slime.observability.tracking import init_tracking

logger = logging.getLogger(__name__)

_ORDERLY_SECONDS = 10.0
_HURRIED_SECONDS = 0.3
_END_SECONDS = 10.0  # of the time after SIGTERM: for ending all processes after the save


@contextmanager
def launch(config: Config) -> Iterator[Run]:
    """Start everything a run needs; end everything on leaving.

    On SIGTERM and SIGHUP the last trained weights are saved before the end, if ``--save`` is given,
    after a training step in progress; ``--sigterm-save-timeout-seconds`` bounds all of it.

    Args:
        config: Resolved configuration.

    Raises:
        SlimeError: What kept the run from starting or going on.
    """
    run_dir = Path(config.logging.output_dir or "outputs")
    run_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        guardian = stack.enter_context(guarded_processes())
        with held_back():  # a signal waits until it is ours: Ray takes SIGTERM for itself when it starts
            stack.enter_context(ray_session(config.cluster.device, config.layout.num_slots, guardian.scratch_dir))
            ending = stack.enter_context(terminable())
        run = _bring_up(config, run_dir, stack)
        try:
            yield run
            run.finish_save()
        except KeyboardInterrupt:
            if ending.signum is not None:
                _save_before_exit(run, config)
            raise
        except SlimeError:
            _finish_save_of_failed(run, config)
            raise
        logger.info("the run is complete\n%s", run.summary())


def _bring_up(config: Config, run_dir: Path, stack: ExitStack) -> Run:
    """Processes first (they load in parallel), then data, then the trainer, then the engines."""
    limit, log_dir = config.cluster.cluster_start_timeout_seconds, run_dir.absolute() / "logs"
    placement = Placement(config.layout, device=config.cluster.device, timeout_seconds=limit)
    stack.callback(placement.close)
    engines = trainer = recovery = None
    facts: dict[str, Any] = {}
    if not config.debug.debug_train_only:
        engines = EngineGroup(config, placement, log_dir)
        _close_at_end(stack, engines.close)
        engines.start_router()
        addresses = engines.router_addresses
        ip, port = next(iter(addresses.values()))
        facts = {"sglang_router_ip": ip, "sglang_router_port": port, "sglang_model_routers": addresses}
    rollout = RolloutHandle(config, log_dir, facts)
    _close_at_end(stack, rollout.close)
    if not config.debug.debug_rollout_only:
        trainer = start_trainer(config, placement, log_dir, board=rollout.actor)
        _close_at_end(stack, trainer.close)
    if engines is not None:
        engines.launch()
    per_epoch = rollout.start()
    config = complete_schedule(config, per_epoch)
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
        recovery = Recovery(config, engines, rollout.suspects, weights_wait=trainer is not None)
        stack.callback(recovery.close)
        rollout.watch(recovery.check)
    reporter = _open_reporter(config, run_dir, engines, first_step)
    stack.callback(reporter.close)
    stack.enter_context(shown(rollout.actor, open_display()))
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
        recovery=recovery,
    )


def _open_reporter(config: Config, run_dir: Path, engines: EngineGroup | None, first_step: int) -> Reporter:
    """Metrics, and the diagnosis of log-probs; that asks an engine of then, which may not be one of the start."""
    return Reporter(
        init_tracking(tracking_options(config, run_dir)),
        num_rollout=config.data.num_rollout or 0,
        first_step=first_step,
        train_steps_per_rollout=config.num_steps_per_rollout if config.logging.wandb_always_use_train_step else None,
        logprob_monitor=LogprobMonitor(
            config.algorithm.max_logprob_diff,
            stop=config.algorithm.max_logprob_diff_action == "stop",
            facts=lambda: logprob_facts(config, engines.urls if engines is not None else ()),
        ),
    )


def _close_at_end(stack: ExitStack, close: Callable[[float], None]) -> None:
    """Orderly end after a complete run, little patience with processes that a failure left busy."""

    def leave(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        close(_ORDERLY_SECONDS if kind is None else _HURRIED_SECONDS)

    stack.push(leave)


def _finish_save_of_failed(run: Run, config: Config) -> None:
    """A checkpoint in the background is from before the failure: do not lose it."""
    try:
        run.finish_save(config.cluster.sigterm_save_timeout_seconds)
    except SlimeError as error:
        logger.error("the checkpoint in progress was not completed: %s", error)


def _save_before_exit(run: Run, config: Config) -> None:
    seconds = config.cluster.sigterm_save_timeout_seconds
    try:
        run.save_before_exit(max(seconds - _END_SECONDS, seconds / 2))
    except SlimeError as error:
        logger.error("no checkpoint was saved before ending: %s", error)
