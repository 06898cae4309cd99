"""Flags of weights through files: what needs what is said before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime.config.draft import Draft, Surroundings
from slime.config.rules.weight_files import check_weight_files
from slime.config.sections import RolloutConfig, WeightsConfig

from .conftest import Run, notices

Problems = Callable[..., list[str]]

DISK = "--update-weight-transport disk --update-weight-disk-dir shared"
DELTA = f"{DISK} --update-weight-mode delta --update-weight-local-checkpoint-dir local"


@pytest.mark.parametrize("flags", [DISK, DELTA, f"{DISK} --update-weight-local-checkpoint-dir local"])
def test_complete_settings_are_accepted(run: Run, flags: str) -> None:
    config = run(flags)
    assert config.weights.update_weight_disk_dir == "shared"
    assert "no effect" not in notices(config)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--update-weight-transport disk", "needs --update-weight-disk-dir"),
        (
            "--update-weight-mode delta --update-weight-local-checkpoint-dir local",
            "requires --update-weight-transport=disk, found nccl",
        ),
        (f"{DISK} --update-weight-mode delta", "requires --update-weight-local-checkpoint-dir"),
        (f"{DELTA} --colocate", "not supported with --colocate"),
        (f"{DISK} --update-weight-local-checkpoint-dir shared/here", "lies in --update-weight-disk-dir shared"),
    ],
)
def test_what_is_missing_is_named(problems: Problems, flags: str, words: str) -> None:
    assert any(words in problem for problem in problems(flags)), problems(flags)


def test_nothing_of_ours_is_on_the_host_of_an_external_engine() -> None:
    weights = WeightsConfig(
        update_weight_transport="disk", update_weight_disk_dir="shared", update_weight_local_checkpoint_dir="local"
    )
    rollout = RolloutConfig(rollout_external_engine_addrs=("1.2.3.4:5",))
    draft = Draft(surroundings=Surroundings(), weights=weights, rollout=rollout)
    check_weight_files(draft)
    (problem,) = draft.problems
    assert "is on the host of an engine of --rollout-external-engine-addrs" in problem


def test_all_that_is_missing_is_named_together(problems: Problems) -> None:
    found = problems("--update-weight-mode delta --colocate")
    assert [words for words in ("=disk", "--colocate", "-checkpoint-dir") if any(words in p for p in found)] == [
        "=disk",
        "--colocate",
        "-checkpoint-dir",
    ]


def test_directories_must_not_be_files(problems: Problems, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (problem,) = problems(f"--update-weight-transport disk --update-weight-disk-dir {file}/below")
    assert problem == f"--update-weight-disk-dir {file}/below: {file} is a file; name a directory"


def test_published_versions_have_a_directory_of_their_own(problems: Problems, tmp_path: Path, model_dir: Path) -> None:
    disk = "--update-weight-transport disk --update-weight-disk-dir"
    (problem,) = problems(f"{disk} {tmp_path}/host/versions --update-weight-local-checkpoint-dir {tmp_path}/host")
    assert f"lies in --update-weight-local-checkpoint-dir {tmp_path}/host" in problem
    (problem,) = problems(f"{disk} {model_dir}/../{model_dir.name}")
    assert "is --hf-checkpoint" in problem


def test_a_directory_that_cannot_be_made(run: Run, problems: Problems, tmp_path: Path) -> None:
    disk = "--update-weight-transport disk --update-weight-disk-dir"
    (problem,) = problems(f"{disk} /proc/slime/versions")
    assert problem.startswith("--update-weight-disk-dir /proc/slime/versions: /proc cannot be written (")
    run(f"{disk} {tmp_path}/new/versions")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".slime-*"))


def test_the_checkpoint_itself_is_never_patched(problems: Problems, model_dir: Path) -> None:
    (problem,) = problems(f"{DISK} --update-weight-local-checkpoint-dir {model_dir}")
    assert f"lies in --hf-checkpoint {model_dir}" in problem


def test_the_hook_of_the_hosts_is_ours_whatever_sglang_is_installed(run: Run) -> None:
    config = run(f"{DELTA} --sglang-custom-pull-weights-pre-read-hook os.path:exists")
    assert config.weights.sglang_custom_pull_weights_pre_read_hook == "os.path:exists"
    assert config.sglang == {}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--update-weight-disk-dir d --update-weight-local-checkpoint-dir l", "without --update-weight-transport disk"),
        (f"{DISK} --update-weight-delta-encoding xor", "without --update-weight-mode delta"),
        (f"{DELTA} --update-weight-disk-keep-files", "which always keeps its files"),
        (
            f"{DISK} --sglang-custom-pull-weights-pre-read-hook os.path:exists",
            "pre-read-hook: no effect without --update-weight-local-checkpoint-dir",
        ),
    ],
)
def test_what_is_given_in_vain_is_named(run: Run, flags: str, words: str) -> None:
    assert words in notices(run(flags))
