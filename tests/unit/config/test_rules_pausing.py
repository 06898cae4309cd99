"""A pause of requests that would give wrong results on SGLang."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime.config.draft import Surroundings

from .conftest import Run

Problems = Callable[..., list[str]]

SGLANG = "--rollout-backend sglang --rollout-num-gpus 2"
RETRACT = "--update-weight-pause-mode retract"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--prefill-num-servers 1", "keeps prompts that are half computed with the old weights; use auto or abort"),
        ("--use-rollout-routing-replay", "forgets the experts of tokens that it computes again"),
    ],
)
def test_what_sglang_would_not_retract_right(
    run: Run, problems: Problems, cuda: Surroundings, flags: str, words: str
) -> None:
    found = problems(f"{SGLANG} {RETRACT} {flags}", surroundings=cuda)
    assert [problem for problem in found if "--update-weight-pause-mode retract: " in problem and words in problem]
    assert run(f"{SGLANG} {RETRACT}", surroundings=cuda).weights.update_weight_pause_mode == "retract"
    other = problems(f"{SGLANG} --update-weight-pause-mode abort {flags} --no-such", surroundings=cuda)
    assert not any("pause-mode" in problem for problem in other)


def test_only_engines_that_get_weights_count(run: Run, cuda: Surroundings) -> None:
    run(f"{SGLANG} {RETRACT} --prefill-num-servers 1 --debug-rollout-only", surroundings=cuda)
