"""A rollout cut up for one rank: which samples it trains, in which micro-batches and optimizer steps.

Owns the translation of flags into the planner's settings and of its answer into packed rows. What is
done with the micro-batches is the trainers'. Roles that share a rollout may cut it differently, but
take the same optimizer steps of it, so that what one drops the other drops too.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime.backends.megatron.batches import MicroBatch, RowSettings, build_micro_batch, packing_lengths
from slime.backends.megatron.hf_experts import layer_pattern
from slime.backends.megatron.parallel import ParallelState
from slime.backends.megatron.step import Denominators
from slime.config import Config, MegatronConfig
from slime.data.packing import (
    DPSchedule,
    Lengths,
    PackingSettings,
    StepPlan,
    build_dp_schedule,
    repack,
    sequence_costs,
)
from slime.types import RolloutBatch

logger = logging.getLogger(__name__)

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """A rollout cut up for this rank.

    Args:
        schedule: All ranks' shares.
        samples: This rank's samples in the order in which it meets them.
        train: Micro-batches of each optimizer step.
        score: Micro-batches of forward-only passes, over all steps.
    """

    schedule: DPSchedule
    samples: list[int]
    train: list[list[MicroBatch]]
    score: list[MicroBatch]

    @property
    def num_rollouts(self) -> int:
        """Trajectories of all optimizer steps."""
        return sum(step.num_rollouts for step in self.schedule.steps)


class RolloutPlanner:
    """Cuts rollouts up for one rank.

    Args:
        config: The resolved configuration.
        parallel: This rank's place.
    """

    def __init__(self, config: Config, parallel: ParallelState) -> None:
        self._config = config
        self._parallel = parallel
        self._packing = _packing_settings(config, parallel)
        self._rows = RowSettings.of(
            parallel,
            share_prompts=shares_prompts(config, parallel.cp_size),
            every_position=config.algorithm.loss_type == "custom_loss" and config.role == "actor",
            sequence_parallel=config.megatron.sequence_parallel,
            pad_multiplier=config.data.data_pad_size_multiplier,
            dtype=_DTYPES[config.train.precision],
        )

    def plan(self, batch: RolloutBatch) -> RolloutPlan:
        """This rank's share of a rollout; every rank computes the same schedule from the same batch."""
        lengths = packing_lengths(batch, share_prompts=self._rows.share_prompts)
        costs = _sample_costs(self._config, batch.total_lengths) if self._packing.balance == "cost" else None
        schedule = build_dp_schedule(batch.rollout_ids, lengths, self._packing, costs)
        if schedule.num_dropped_samples:
            logger.warning(
                "rollout %d: %d samples do not fill an optimizer step of --global-batch-size %d and are dropped",
                batch.rollout_id,
                schedule.num_dropped_samples,
                self._packing.global_batch_size,
            )
        rank = self._parallel.dp_rank
        train = [self._build(batch, step, rank) for step in schedule.steps]
        return RolloutPlan(
            schedule=schedule,
            samples=schedule.rank_samples(rank),
            train=train,
            score=self._scoring_batches(batch, schedule, lengths, train),
        )

    def _build(self, batch: RolloutBatch, step: StepPlan, rank: int) -> list[MicroBatch]:
        return [build_micro_batch(batch, s, self._rows, self._parallel) for s in step.micro_batches[rank]]

    def _scoring_batches(
        self, batch: RolloutBatch, schedule: DPSchedule, lengths: Lengths, train: Sequence[Sequence[MicroBatch]]
    ) -> list[MicroBatch]:
        """The training micro-batches again, unless forward-only passes have a token cap of their own."""
        cap, train_cap = self._config.data.log_probs_max_tokens_per_gpu, self._config.data.max_tokens_per_gpu
        if self._packing.max_tokens is None or cap is None or cap == train_cap:
            return [micro_batch for step in train for micro_batch in step]
        repacked = repack(
            schedule, lengths, cap * self._parallel.cp_size, micro_batch_group=self._packing.micro_batch_group
        )
        return self._build(batch, repacked.steps[0], self._parallel.dp_rank)


def shares_prompts(config: Config, cp_size: int) -> bool:
    """``--share-prompt-prefix``; unset, prompts are shared where a row is not split over ranks."""
    chosen = config.train.share_prompt_prefix
    return cp_size == 1 if chosen is None else chosen


def denominators(config: Config, batch: RolloutBatch, step: StepPlan) -> Denominators:
    """What the sums of one optimizer step are divided by."""
    return Denominators(
        num_rollouts=step.num_rollouts,
        num_tokens=sum(max(int(batch.loss_masks[i].sum()), 1) for i in step.samples),
        per_token=config.algorithm.calculate_per_token_loss,
    )


def _packing_settings(config: Config, parallel: ParallelState) -> PackingSettings:
    data = config.data
    samples = data.rollout_batch_size * data.n_samples_per_prompt
    dynamic = data.max_tokens_per_gpu if data.use_dynamic_batch_size else None
    group = config.megatron.get("microbatch_group_size_per_vp_stage") or parallel.pp_size
    return PackingSettings(
        global_batch_size=data.global_batch_size or samples // config.num_steps_per_rollout,
        dp_size=parallel.dp_size,
        micro_batch_size=data.micro_batch_size,
        max_tokens=None if dynamic is None else dynamic * parallel.cp_size,
        micro_batch_group=group if parallel.vpp_size > 1 else 1,
        balance="cost" if data.balance_by_flops else "tokens" if data.balance_data else "none",
    )


def _sample_costs(config: Config, lengths: Sequence[int]) -> list[float]:
    """Forward FLOPs of each sample: matrix products per token, and scores and values per attended pair."""
    megatron = config.megatron
    heads = megatron.num_attention_heads * megatron.kv_channels
    key_values = megatron.num_query_groups * megatron.kv_channels
    gates = 3 if megatron.get("swiglu", False) else 2
    layers = megatron.num_layers
    per_token = 2.0 * megatron.hidden_size * (layers * (2 * heads + 2 * key_values) + gates * _mlp_width(megatron))
    return sequence_costs(lengths, per_token=per_token, per_token_pair=4.0 * layers * heads)


def _mlp_width(megatron: MegatronConfig) -> int:
    """Inner width of the MLPs that a token passes, over all layers."""
    layers, dense_width = megatron.num_layers, megatron.ffn_hidden_size
    if not megatron.get("num_experts"):
        return layers * dense_width
    mixtures = sum(layer_pattern(megatron["moe_layer_freq"], layers))
    width = megatron["moe_router_topk"] * megatron["moe_ffn_hidden_size"]
    width += megatron.get("moe_shared_expert_intermediate_size") or 0
    return (layers - mixtures) * dense_width + mixtures * width
