"""``--release-train``: what it settles, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from slime.config.draft import Surroundings

from .conftest import Run

Problems = Callable[..., list[str]]

RELEASE = "--release-train --save s --update-weight-transport disk --update-weight-disk-dir d"


def test_every_rollout_is_saved(run: Run) -> None:
    assert run(RELEASE).checkpoint.save_interval == 1


def test_sharing_devices_moves_the_engines_only(run: Run, cuda: Surroundings) -> None:
    config = run(f"{RELEASE} --colocate --rollout-num-gpus 2", surroundings=cuda)
    assert (config.cluster.offload_train, config.cluster.offload_rollout) == (False, True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--release-train --update-weight-transport disk --update-weight-disk-dir d", "needs --save"),
        ("--release-train --save s", "--update-weight-transport disk, found full and nccl"),
        (f"{RELEASE} --update-weight-mode delta --update-weight-local-checkpoint-dir l", "found delta and disk"),
        (f"{RELEASE} --save-interval 2", "--save-interval 2: rollouts between two checkpoints"),
        (f"{RELEASE} --no-save-optim", "--no-save-optim exclude each other"),
        (f"{RELEASE} --advantage-estimator ppo", "works without a critic"),
        (f"{RELEASE} --check-weight-update-equal", "--check-weight-update-equal exclude each other"),
        (f"{RELEASE} --keep-old-actor", "--keep-old-actor exclude each other"),
        (f"{RELEASE} --offload-train", "--offload-train and --release-train exclude each other"),
        (f"{RELEASE} --colocate --offload", "--offload and --release-train exclude each other"),
    ],
)
def test_what_a_checkpoint_does_not_hold_is_refused(problems: Problems, flags: str, words: str) -> None:
    assert any(words in problem for problem in problems(flags)), problems(flags)
