"""What only one of the two loops can do, and what releases memory for nobody."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime.config.draft import Surroundings

from .conftest import Run, notices

Problems = Callable[..., list[str]]

AHEAD = Surroundings(loop="ahead")
IN_TURN = Surroundings(loop="in turn")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--colocate", "so --colocate is not possible; use train.py"),
        ("--offload-rollout", "remove --offload-rollout"),
        ("--offload", "(--offload implies it)"),
    ],
)
def test_nothing_takes_turns_with_generation_ahead(problems: Problems, run: Run, flags: str, words: str) -> None:
    (problem,) = problems(flags, surroundings=AHEAD)
    assert words in problem
    run(flags, surroundings=IN_TURN)
    run(flags)  # a program of a user's own


def test_both_are_told_together(problems: Problems) -> None:
    assert len(problems("--colocate --offload-rollout", surroundings=AHEAD)) == 2


def test_flags_of_generation_ahead_are_named_where_there_is_none(run: Run) -> None:
    flags = "--update-weights-during-rollout --async-buffer-size 2"
    said = notices(run(flags, surroundings=IN_TURN))
    assert "--update-weights-during-rollout has no effect in train.py; use train_async.py" in said
    assert "--async-buffer-size has no effect in train.py; use train_async.py" in said
    assert "train_async.py" not in notices(run(surroundings=IN_TURN))
    assert "no effect" not in notices(run(flags, surroundings=AHEAD))


@pytest.mark.parametrize("flag", ["--offload-rollout", "--offload"])
def test_engines_on_gpus_of_their_own_release_nothing(run: Run, flag: str) -> None:
    words = "--offload-rollout has no effect without --colocate"
    assert words in notices(run(flag))
    assert words not in notices(run(f"{flag} --colocate --rollout-num-gpus 2"))
    assert words not in notices(run("--no-offload-rollout"))
