"""The rules of supervised fine-tuning by their effect on a parsed command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.config.rules.supervised import SUPERVISED_ROLLOUT

from .conftest import Run

Problems = Callable[..., list[str]]

SFT = f"--rollout-function-path {SUPERVISED_ROLLOUT} --loss-type sft_loss"


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    file = tmp_path / "talks.jsonl"
    row = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
    file.write_text((json.dumps(row) + "\n") * 40)
    return file


def test_the_established_script_and_the_short_form_start_the_same_run(
    run: Run, model_dir: Path, conversations: Path
) -> None:
    common = f"""
        --hf-checkpoint {model_dir} --prompt-data {conversations} {SFT} --num-epoch 3 --rollout-batch-size 8
        --actor-num-gpus-per-node 1 --calculate-per-token-loss
    """
    written = run(
        f"{common} --input-key messages --disable-compute-advantages-and-returns --debug-train-only", base=False
    )
    short = run(common, base=False)
    for config in (written, short):
        assert config.data.input_key == "messages"
        assert config.debug.debug_train_only
        assert not config.algorithm.compute_advantages_and_returns
        assert config.layout.num_slots == 1  # no engine
        assert config.data.global_batch_size == 8
    assert any("no engines are started" in notice for notice in short.notices)
    assert not any("engines are started" in notice for notice in written.notices)


def test_supervised_losses_take_no_advantages(run: Run) -> None:
    assert not run("--loss-type sft_loss").algorithm.compute_advantages_and_returns
    assert run().algorithm.compute_advantages_and_returns


def test_engines_are_kept_for_an_evaluation_that_can_use_them(run: Run, problems: Problems, prompts: Path) -> None:
    evaluation = f"--eval-interval 2 --eval-prompt-data held {prompts}"
    config = run(f"{SFT} {evaluation} --eval-function-path slime.rollout.sglang_rollout.generate_rollout")
    assert not config.debug.debug_train_only
    assert config.layout.num_slots == 3
    (problem,) = problems(f"{SFT} {evaluation}")
    assert "cannot evaluate" in problem
    assert "--eval-function-path" in problem


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{SFT} --apply-chat-template", "remove --apply-chat-template"),
    ],
)
def test_faults(problems: Problems, flags: str, words: str) -> None:
    (problem,) = problems(flags)
    assert words in problem


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (f"{SFT} --rollout-temperature 0.5", "at this temperature"),
        (f"--rollout-function-path {SUPERVISED_ROLLOUT}", "--loss-type policy_loss has nothing to follow"),
    ],
)
def test_notices(run: Run, flags: str, words: str) -> None:
    assert words in "\n".join(run(flags).notices)
