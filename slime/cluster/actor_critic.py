"""The training processes of a PPO run: actor and critic as one trainer.

Offers what ``TrainerGroup`` offers, so that nothing else of a run knows of two roles. Owns a rollout's way
through both, whose turn on the devices it is, and that a checkpoint is one of both. Tests hold: what was
interrupted anywhere is finished without doing any of it twice; the actor's checkpoint, which is the one that
counts, is written after the critic's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from slime.cluster.checkpoints import prune_critic
from slime.cluster.placement import Placement
from slime.cluster.released_trainer import ReleasedTrainer
from slime.cluster.signals import held_back
from slime.cluster.trainer import TrainerGroup
from slime.config import Config
from slime.config.roles import Role, critic_config
from slime.errors import TrainerError
from slime.weights.endpoint import EngineEndpoint

CRITIC_PATH = "slime.backends.megatron.critic:CriticWorker"


def start_trainer(
    config: Config, placement: Placement, log_dir: Path, *, board: Any
) -> TrainerGroup | ActorCritic | ReleasedTrainer:
    """Start the training processes of every role that the run has; see ``TrainerGroup``."""
    if config.train.release_train:
        return ReleasedTrainer(lambda: TrainerGroup(config, placement, log_dir, board=board))
    actor = TrainerGroup(config, placement, log_dir, board=board)
    if config.critic is None:
        return actor
    critic = TrainerGroup(critic_config(config), placement, log_dir, name="critic", worker_path=CRITIC_PATH)
    return ActorCritic(config, actor, critic)


class ActorCritic:
    """Both roles as one; every method is a bounded collective call.

    Args:
        config: The run's configuration.
        actor: Its processes, on all trainer slots.
        critic: The critic's, on the same slots.
    """

    def __init__(self, config: Config, actor: TrainerGroup, critic: TrainerGroup) -> None:
        self._config = config
        self._groups: dict[Role, TrainerGroup] = {"actor": actor, "critic": critic}
        self._present: dict[Role, _Presence] = {"actor": "everything", "critic": "everything"}
        self._errand: _RolloutTraining | _Saving | None = None

    def init(self, config: Config) -> int:
        """Meet, build and load both models; the first rollout id, on which they agree.

        Raises:
            TrainerError: A rank failed or died, or the roles continue different rollouts.
        """
        self._config = config
        configs: dict[Role, Config] = {"actor": config, "critic": critic_config(config)}
        first = self._load_in_turn(configs) if self._share_gpus else self._load_together(configs)
        if first["actor"] != first["critic"]:
            raise TrainerError(
                f"actor and critic loaded different iterations: the first rollout would be {first['actor']} for the "
                f"actor, {first['critic']} for the critic"
            )
        self._rest("critic")
        return first["actor"]

    @property
    def _share_gpus(self) -> bool:
        return self._config.cluster.device == "cuda" and bool(self._config.cluster.offload_train)

    def _load_together(self, configs: dict[Role, Config]) -> dict[Role, int]:
        loading = {role: group.begin_init(configs[role]) for role, group in self._groups.items()}
        return {role: group.finish_init(loading[role]) for role, group in self._groups.items()}

    def _load_in_turn(self, configs: dict[Role, Config]) -> dict[Role, int]:
        """The critic first, which then leaves: both at once may not fit."""
        first: dict[Role, int] = {"critic": self._groups["critic"].init(configs["critic"])}
        self._rest("critic")
        return first | {"actor": self._groups["actor"].init(configs["actor"])}

    def train(self, batch: Any, rollout_id: int) -> dict[str, float]:
        """Train one rollout; the actor only from rollout ``--num-critic-only-steps`` on.

        Args:
            batch: Reference to the ``RolloutBatch``.
            rollout_id: Its number.
        """
        critic_only = rollout_id < self._config.algorithm.num_critic_only_steps
        rollout = self._errand = _RolloutTraining(self._groups, batch, rollout_id, critic_only=critic_only)
        self._finish()
        return rollout.metrics

    def step_metrics(self) -> list[dict[str, float]]:
        """``train/*`` and ``critic-train/*`` of each optimizer step of the last rollout."""
        actor, critic = (self._groups[role].step_metrics() for role in ("actor", "critic"))
        if not actor:  # a rollout for the critic alone
            return [{"train/step": row["critic-train/step"], **row} for row in critic]
        return [{**mine, **theirs} for mine, theirs in zip(actor, critic, strict=True)]

    def save(self, rollout_id: int, timeout_seconds: float | None = None) -> None:
        """Write the checkpoints of ``rollout_id``, of which the actor's makes the pair complete.

        With ``--async-save`` that is the one that is complete later.
        """
        self._errand = _Saving(self._groups, self._config, rollout_id)
        self._finish(timeout_seconds)

    def finish_save(self, timeout_seconds: float | None = None) -> None:
        """Wait for the actor's checkpoint that is written in the background."""
        self._groups["actor"].finish_save(timeout_seconds)

    def last_complete_save(self) -> int | None:
        """Rollout id of the newest pair of checkpoints that was completed."""
        return self._groups["actor"].last_complete_save()

    def save_hf(self, path: str) -> None:
        """Export the actor's Hugging Face weights to ``path``."""
        self._groups["actor"].save_hf(path)

    def connect_engines(self, endpoints: Sequence[EngineEndpoint], check: Callable[[], None] | None = None) -> None:
        """Tell the actor which engines get its weights."""
        self._groups["actor"].connect_engines(endpoints, check)

    def update_weights(self, check: Callable[[], None] | None = None) -> dict[str, float]:
        """Bring every engine to the actor's weights."""
        return self._groups["actor"].update_weights(check)

    def weight_version(self) -> int:
        """Version given to the engines last."""
        return self._groups["actor"].weight_version()

    def drain(self, timeout_seconds: float) -> None:
        """Wait until a call of the actor that failed has ended on all of its ranks."""
        self._groups["actor"].drain(timeout_seconds)

    def sleep(self) -> None:
        """Leave the devices, as the critic has done after its turn."""
        self._rest("actor")

    def hold_parameters(self) -> None:
        """Have the actor's parameters on the devices and nothing else."""
        self._present["actor"] = "unknown"
        self._groups["actor"].hold_parameters()
        self._present["actor"] = "parameters"

    def device_memory(self) -> dict[str, float]:
        """Bytes in use on the device of the actor's rank 0; empty on a CPU."""
        return self._groups["actor"].device_memory()

    def wake_up(self, timeout_seconds: float | None = None) -> None:
        """Come back: the actor, which everything but a turn of the critic needs."""
        self._wake("actor", timeout_seconds)

    def wait_idle(self, timeout_seconds: float) -> None:
        """Finish what was interrupted in the driver, with the calls of it that had not begun."""
        deadline = time.monotonic() + timeout_seconds
        if self._errand is not None:
            self._finish(timeout_seconds)
        for group in self._groups.values():
            group.wait_idle(max(deadline - time.monotonic(), 0.0))

    def close(self, timeout_seconds: float = 5.0) -> None:
        """End all ranks of both roles: orderly where possible within the time, by force otherwise."""
        for group in self._groups.values():
            group.close(timeout_seconds / len(self._groups))

    def _finish(self, timeout_seconds: float | None = None) -> None:
        """Take the errand in progress through its stages; those that were done before do nothing."""
        errand = self._errand
        assert errand is not None, "something is in progress"
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        for role, stage in errand.stages():
            with self._turn(role, _left(deadline)):
                stage(_left(deadline))
        self._errand = None

    @contextmanager
    def _turn(self, role: Role, timeout_seconds: float | None) -> Iterator[None]:
        """The role alone on the devices; outside of turns they are the actor's."""
        self._rest("actor" if role == "critic" else "critic")
        self._wake(role, timeout_seconds)
        yield
        self._rest("critic")
        self._wake("actor", timeout_seconds)

    def _rest(self, role: Role) -> None:
        if self._config.cluster.offload_train and self._present[role] != "nothing":
            self._present[role] = "unknown"  # an interrupt leaves it so
            self._groups[role].sleep()
            self._present[role] = "nothing"

    def _wake(self, role: Role, timeout_seconds: float | None) -> None:
        if self._present[role] != "everything":
            self._groups[role].wake_up(timeout_seconds)
            self._present[role] = "everything"


_Presence = Literal["everything", "parameters", "nothing", "unknown"]
"""What of a role is on the devices."""

Stage = Callable[[float | None], None]
"""A part of an errand that one role does, within so many seconds."""


class _Errand(Protocol):
    """Something both roles do in turns, and that an interrupt may leave anywhere."""

    def stages(self) -> Sequence[tuple[Role, Stage]]:
        """What is done, in order. Each may be run again and then only waits for what it began."""
        ...


class _Calls:
    """Calls of all ranks of a group, each begun once."""

    def __init__(self) -> None:
        self._begun: dict[str, list[Any]] = {}

    def once(self, name: str, group: TrainerGroup, method: str, *args: Any) -> list[Any]:
        """References of the call ``name``; it begins at the first time."""
        if name not in self._begun:
            with held_back():  # begun and noted, or neither
                self._begun[name] = group.begin(method, *args)
        return self._begun[name]


class _RolloutTraining(_Errand):
    """One rollout: the critic's values, the actor's returns and update, the critic's update.

    Values and returns travel sample by sample, so the roles may be split over ranks differently.
    """

    def __init__(self, groups: dict[Role, TrainerGroup], batch: Any, rollout_id: int, *, critic_only: bool) -> None:
        self._actor, self._critic = groups["actor"], groups["critic"]
        self._batch = batch
        self._what = f"rollout {rollout_id}"
        self._critic_only = critic_only
        self._calls = _Calls()
        self._values: Any = None
        self._returns: Any = None
        self.metrics: dict[str, float] = {}

    def stages(self) -> Sequence[tuple[Role, Stage]]:
        return (("critic", self._score), ("actor", self._train_actor), ("critic", self._train_critic))

    def _score(self, limit: float | None) -> None:
        refs = self._calls.once("values", self._critic, "score", self._batch)
        values = _together(self._critic.finish(refs, f"score {self._what}", limit))
        self._values = self._actor.share(values)

    def _train_actor(self, limit: float | None) -> None:
        method = "estimate" if self._critic_only else "train"
        refs = self._calls.once("actor", self._actor, method, self._batch, self._values)
        self.metrics |= _first(self._actor.finish(refs, f"{method} {self._what}", limit))
        self._returns = self._critic.share(_together(self._actor.read("returns", limit)))

    def _train_critic(self, limit: float | None) -> None:
        refs = self._calls.once("critic", self._critic, "train", self._batch, self._values, self._returns)
        self.metrics |= _first(self._critic.finish(refs, f"train {self._what}", limit))


class _Saving(_Errand):
    """A pair of checkpoints; without the actor's the critic's is nothing."""

    def __init__(self, groups: dict[Role, TrainerGroup], config: Config, rollout_id: int) -> None:
        self._groups = groups
        self._config = config
        self._rollout_id = rollout_id
        self._calls = _Calls()

    def stages(self) -> Sequence[tuple[Role, Stage]]:
        return (("critic", lambda limit: self._save("critic", limit)), ("actor", self._save_actor))

    def _save(self, role: Role, limit: float | None) -> None:
        group = self._groups[role]
        refs = self._calls.once(role, group, "save", self._rollout_id)
        group.finish(refs, "save", self._config.cluster.save_timeout_seconds if limit is None else limit)

    def _save_actor(self, limit: float | None) -> None:
        self._save("actor", limit)
        save, critic_save = self._config.checkpoint.save, critic_config(self._config).checkpoint.save
        if save is not None and critic_save is not None and self._config.checkpoint.keep_checkpoints is not None:
            prune_critic(Path(critic_save), actor_dir=Path(save), newest=self._rollout_id)


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(deadline - time.monotonic(), 0.0)


def _together(parts: Sequence[dict[int, Any]]) -> dict[int, Any]:
    """Rows of all ranks, each sample from one of them."""
    return {sample: row for part in parts for sample, row in part.items()}


def _first(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return next((dict(row) for row in rows if row), {})
