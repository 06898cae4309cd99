"""Supervised samples."""

from __future__ import annotations

import pytest

from slime.data.templates import load_tokenizer
from slime.errors import ConfigError, DataError
from slime.rollout.sft import generate_rollout
from tests.support.rollout_args import ListSource, make_args

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]


def test_assistant_turns_are_trained_and_nothing_else(model_path):
    args = make_args(model_path, "http://127.0.0.1:1", rollout_batch_size=2, n_samples_per_prompt=1)
    output = generate_rollout(args, 0, ListSource([TALK], 1))
    assert len(output.samples) == 2
    sample = output.samples[0][0]
    tokenizer = load_tokenizer(str(model_path))
    response = sample.tokens[-sample.response_length :]
    trained = [t for t, m in zip(response, sample.loss_mask, strict=True) if m]
    assert tokenizer.decode(trained).replace("\n", "") == "hello<|im_end|>ciao<|im_end|>"
    assert sample.loss_mask[0] == 1
    assert sample.reward == 0
    sample.check_alignment()


def test_what_it_refuses(model_path):
    args = make_args(model_path, "http://127.0.0.1:1", rollout_batch_size=1)
    with pytest.raises(ConfigError, match="evaluation"):
        generate_rollout(args, 0, ListSource([TALK], 1), evaluation=True)
    with pytest.raises(DataError, match="message list"):
        generate_rollout(args, 0, ListSource(["text"], 1))
    with pytest.raises(DataError, match="no assistant turn"):
        generate_rollout(args, 0, ListSource([TALK[:1]], 1))
