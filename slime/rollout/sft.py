"""Supervised samples: conversations from the data, nothing generated.

The rollout function of supervised fine-tuning, ``--rollout-function-path
slime.rollout.sft_rollout.generate_rollout`` with ``--loss-type sft_loss``. Tests hold that the
trained tokens are those of the assistant turns.
"""

from __future__ import annotations

from typing import Any

from slime.data.masks import MultiTurnLossMaskGenerator
from slime.data.templates import load_tokenizer
from slime.errors import ConfigError, DataError
from slime.rollout.types import RolloutFnTrainOutput
from slime.types import Sample, Status


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> RolloutFnTrainOutput:
    """Take one batch of conversations and mask what the assistant did not say.

    Args:
        args: Flat arguments; no engine and no open ``RolloutContext`` is needed.
        rollout_id: Which rollout.
        data_source: Gives groups whose prompt is a message list.
        evaluation: Refused: there is nothing to generate.

    Raises:
        ConfigError: ``evaluation``.
        DataError: A prompt is no message list, or has no assistant turn.
    """
    if evaluation:
        raise ConfigError(
            "supervised fine-tuning has no evaluation rollout; drop --eval-interval or set another --eval-function-path"
        )
    tokenizer = args.rollout_context.tokenizer if "rollout_context" in args else load_tokenizer(args.hf_checkpoint)
    generator = MultiTurnLossMaskGenerator(tokenizer, args.loss_mask_type)
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (s for group in groups for s in group):
        _fill(generator, sample)
    return RolloutFnTrainOutput(samples=groups)


def _fill(generator: MultiTurnLossMaskGenerator, sample: Sample) -> None:
    if not isinstance(sample.prompt, list):
        raise DataError(
            f"sample {sample.index}: supervised fine-tuning needs a message list as prompt, found "
            f"{type(sample.prompt).__name__}; name its column with --input-key and leave --apply-chat-template out"
        )
    tokens, mask = generator.get_loss_mask(sample.prompt, sample.metadata.get("tools"))
    length = generator.get_response_lengths([mask])[0]
    if length == 0:
        raise DataError(f"sample {sample.index}: its conversation has no assistant turn to train on")
    sample.tokens = tokens
    sample.response_length = length
    sample.loss_mask = mask[-length:]
    sample.response = generator.tokenizer.decode(tokens[-length:])
    sample.reward = 0
    sample.status = Status.COMPLETED
