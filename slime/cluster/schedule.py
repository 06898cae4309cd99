"""Which steps there are, and at which of them something periodic is due. Pure arithmetic."""

from __future__ import annotations

import dataclasses

from slime.config import Config, MegatronConfig
from slime.errors import ConfigError


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Whether an action with this interval is due after rollout ``rollout_id``.

    Args:
        rollout_id: Zero-based step.
        interval: Every so many steps; None means never.
        num_rollout_per_epoch: Also due at the end of each epoch.
        num_rollout: Also due at the last step, ``num_rollout`` - 1.
    """
    if interval is None:
        return False
    if num_rollout is not None and rollout_id == num_rollout - 1:
        return True
    step = rollout_id + 1
    if num_rollout_per_epoch is not None and step % num_rollout_per_epoch == 0:
        return True
    return step % interval == 0


def check_steps_left(first_step: int, num_rollout: int, *, load: str | None) -> None:
    """Refuse a run that would train nothing although steps were asked for.

    Raises:
        ConfigError: The loaded checkpoint already covers every requested step.
    """
    if 0 < num_rollout <= first_step:
        raise ConfigError(
            f"nothing left to train: {num_rollout} rollouts were asked for (--num-rollout or --num-epoch), and "
            f"{first_step} are already done in {load or 'the loaded checkpoint'}; raise --num-rollout above "
            f"{first_step}, or start over with another --load"
        )


def complete_schedule(config: Config, num_rollout_per_epoch: int | None) -> Config:
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
    data = dataclasses.replace(data, num_rollout=num_rollout)
    critic = config.critic
    if critic is not None:
        critic = dataclasses.replace(
            critic,
            data=dataclasses.replace(critic.data, num_rollout=num_rollout),
            megatron=_of_length(critic.megatron, samples // per_step),
        )
    return dataclasses.replace(
        config, data=data, critic=critic, megatron=_of_length(config.megatron, samples // per_step)
    )


def _of_length(megatron: MegatronConfig, num_steps: int) -> MegatronConfig:
    return dataclasses.replace(megatron, values={**megatron.values, "train_iters": num_steps})
