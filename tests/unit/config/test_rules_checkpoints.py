"""Rules of checkpoints and other files: where a run starts, what paths are accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime.config.rules.checkpoints import TRACKER_FILE, classify_checkpoint

from .conftest import FakeMegatron, Run, notices, write_model

Problems = Callable[..., list[str]]


def test_kl_loss_without_reference_takes_the_initial_weights(run: Run, model_dir: Path) -> None:
    config = run("--use-kl-loss --kl-loss-coef 0.01")
    assert config.checkpoint.ref_load == str(model_dir)
    assert "--use-kl-loss without --ref-load" in notices(config)
    assert run().checkpoint.ref_load is None


def test_load_resumes_only_a_megatron_checkpoint(run: Run, tmp_path: Path, model_dir: Path) -> None:
    saved = tmp_path / "saved"
    fresh = run(f"--load {saved} --save {saved}")
    assert (fresh.checkpoint.load, fresh.checkpoint.resume) == (str(model_dir), False)
    assert "holds no checkpoint yet" in notices(fresh)
    saved.mkdir()
    (saved / TRACKER_FILE).write_text("3")
    again = run(f"--load {saved} --save {saved}")
    assert (again.checkpoint.load, again.checkpoint.resume) == (str(saved), True)
    other = write_model(tmp_path / "other")
    assert run(f"--load {other}").checkpoint.load == str(other)
    assert run().checkpoint.load == str(model_dir)


def megatron_dir(folder: Path, tracker: str = "7") -> Path:
    for step in (3, 5, 7):
        (folder / f"iter_{step:07d}").mkdir(parents=True)
    (folder / TRACKER_FILE).write_text(tracker)
    return folder


def test_only_resuming_continues_iterations(run: Run, tmp_path: Path) -> None:
    """Whatever is not resumed starts at 0, from whichever directory its weights come."""
    saved, ref, empty = megatron_dir(tmp_path / "saved"), megatron_dir(tmp_path / "ref"), tmp_path / "empty"
    release = megatron_dir(tmp_path / "release", "release")
    empty.mkdir()

    def start(flags: str) -> tuple[str | None, int | None, bool, int | None]:
        found = run(flags, megatron=Finetunable()).checkpoint
        return found.load, found.ckpt_step, found.resume, found.start_rollout_id

    assert start(f"--load {saved}") == (str(saved), None, True, None)
    assert start(f"--load {saved} --ckpt-step 3") == (str(saved), 3, True, None)
    assert start(f"--load {saved} --ref-load {saved}") == (str(saved), None, True, None)
    assert start(f"--load {saved} --finetune") == (str(saved), None, False, 0)
    assert start(f"--load {release}") == (str(release), None, False, 0)
    assert start(f"--load {empty} --ref-load {ref}") == (str(ref), None, False, 0)
    assert start(f"--ref-load {ref} --ref-ckpt-step 5") == (str(ref), 5, False, 0)
    assert start(f"--ref-load {ref} --start-rollout-id 4") == (str(ref), None, False, 4)
    assert start("")[2:] == (False, 0)


class Finetunable(FakeMegatron):
    NAMES = FakeMegatron.NAMES | {"--finetune"}


@pytest.mark.parametrize("flag", ["--save", "--save-hf", "--save-debug-rollout-data", "--load-debug-rollout-data"])
@pytest.mark.parametrize(
    ("path", "accepted"),
    [
        ("out/{rollout_id}", True),
        ("out/{rollout_id:06d}", True),
        ("out/{step}", False),
        ("out/{}", False),
        ("out/{rollout_id", False),
        ("out/{rollout_id:q}", False),
        ("out", True),
    ],
)
def test_templates_are_tried(run: Run, problems: Problems, flag: str, path: str, accepted: bool) -> None:
    if accepted and not (flag == "--save" and "{" in path):
        run([flag, path])
    else:
        found = problems([flag, path])
        assert any(f"{flag} {path}: " in problem for problem in found), found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--load nowhere", "--load nowhere: no such directory"),
        ("--ref-load nowhere", "--ref-load nowhere: no such directory"),
        ("--ref-load .", "holds neither"),
        ("--load . --ckpt-step 3", "--ckpt-step 3: --load . holds no checkpoint"),
    ],
)
def test_checkpoint_faults(problems: Problems, flags: str, words: str) -> None:
    assert words in problems(flags)[0]


def test_classify(tmp_path: Path) -> None:
    assert classify_checkpoint(str(tmp_path / "x")) == "missing"
    assert classify_checkpoint(str(tmp_path)) == "empty"
    strange = write_model(tmp_path / "strange", {"model_type": "bert"})
    assert classify_checkpoint(str(strange)) == "empty"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--load SAVED --ckpt-step 9", "--ckpt-step 9: --load SAVED has no such iteration; there: 3, 5, 7"),
        (
            "--ref-load SAVED --ref-ckpt-step 4",
            "--ref-ckpt-step 4: --ref-load SAVED has no such iteration; there: 3, 5, 7",
        ),
        (
            "--use-opd --opd-type megatron --opd-teacher-load SAVED --opd-teacher-ckpt-step 8",
            "--opd-teacher-ckpt-step 8: --opd-teacher-load SAVED has no such iteration; there: 3, 5, 7",
        ),
    ],
)
def test_an_iteration_that_is_asked_for_exists(
    run: Run, problems: Problems, tmp_path: Path, flags: str, words: str
) -> None:
    saved = megatron_dir(tmp_path / "saved")
    assert problems(flags.replace("SAVED", str(saved))) == [words.replace("SAVED", str(saved))]
    flag, step = flags.split()[-2:]
    run(flags.replace("SAVED", str(saved)).replace(f"{flag} {step}", f"{flag} 3"))
