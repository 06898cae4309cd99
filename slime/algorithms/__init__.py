"""Reinforcement-learning mathematics: torch tensors and plain numbers, no processes, no configuration.

``ALGORITHMS`` maps the values of ``--advantage-estimator`` to what each of them does; code elsewhere
asks the row, never the name. A new algorithm is a new row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from slime.algorithms.advantages import (
    Estimator,
    broadcast_reward,
    generalized_advantages,
    leave_one_out,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
)
from slime.algorithms.baselines import overlong_penalty, shape_group_rewards
from slime.algorithms.losses import cispo_loss, clipped_policy_loss
from slime.algorithms.objective import ClipRange, PolicyForm

__all__ = ["ALGORITHMS", "AlgorithmSpec", "overlong_penalty", "shape_group_rewards"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSpec:
    """What an advantage estimator does and needs.

    Args:
        estimate: Rewards and KL to advantages and returns.
        form: Its policy loss.
        group_baseline: Rewards are compared within their prompt group (unless switched off).
        group_std: The group baseline may be divided by the group's standard deviation.
        leave_one_out: The group baseline leaves the rollout's own reward out.
        needs_critic: Trains a value model.
        needs_old_log_probs: Old log-probs must come from a pass of their own, even when one optimizer
            step per rollout would make them equal to the current ones.
    """

    estimate: Estimator
    form: PolicyForm
    group_baseline: bool = False
    group_std: bool = False
    leave_one_out: bool = False
    needs_critic: bool = False
    needs_old_log_probs: bool = False


def _clipped(ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor]:
    del log_probs
    return clipped_policy_loss(ppo_kl, advantages, clip.low, clip.high, clip.dual)


def _cispo(ppo_kl: Tensor, log_probs: Tensor, advantages: Tensor, clip: ClipRange) -> tuple[Tensor, Tensor]:
    return cispo_loss(ppo_kl, log_probs, advantages, clip.low, clip.high)


_PPO_CLIP = PolicyForm(loss=_clipped)

ALGORITHMS: Mapping[str, AlgorithmSpec] = MappingProxyType(
    {
        "grpo": AlgorithmSpec(estimate=broadcast_reward, form=_PPO_CLIP, group_baseline=True, group_std=True),
        "gspo": AlgorithmSpec(
            estimate=broadcast_reward,
            form=PolicyForm(loss=_clipped, sequence_ratio=True),
            group_baseline=True,
            group_std=True,
            needs_old_log_probs=True,
        ),
        "cispo": AlgorithmSpec(
            estimate=broadcast_reward,
            form=PolicyForm(loss=_cispo, dual_clip=False),
            group_baseline=True,
            group_std=True,
        ),
        "rloo": AlgorithmSpec(estimate=leave_one_out, form=_PPO_CLIP, group_baseline=True, leave_one_out=True),
        "reinforce_plus_plus": AlgorithmSpec(estimate=reinforce_plus_plus, form=_PPO_CLIP),
        "reinforce_plus_plus_baseline": AlgorithmSpec(
            estimate=reinforce_plus_plus_baseline, form=_PPO_CLIP, group_baseline=True
        ),
        "ppo": AlgorithmSpec(estimate=generalized_advantages, form=_PPO_CLIP, needs_critic=True),
    }
)
