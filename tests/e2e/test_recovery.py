"""A run whose engines are killed and frozen in the middle of rollouts, as a user starts it."""

import pytest

from slime.data.record import load_rollout
from tests.e2e.commands import arguments, assert_nothing_left, make_inputs, run, series

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PLUGINS = '''
import os
import signal
from pathlib import Path


def letters(args, sample, **kwargs):
    if sample.index >= 16:
        hurt_once(args, "killed", signal.SIGKILL)
    if sample.index >= 32:
        hurt_once(args, "frozen", signal.SIGSTOP)
    if sample.index >= 48:
        hurt_once(args, "all", signal.SIGKILL)
    return sum(c in "abcdefghijklm" for c in sample.response) / max(len(sample.response), 1)


def hurt_once(args, what, signum):
    """Signal an engine, or all, when the first sample of a rollout is graded: others are under way."""
    mark = Path(args.output_dir) / what
    if mark.exists():
        return
    mark.touch()
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\\0")
        except OSError:
            continue
        if b"slime.engines.server" in words and args.hf_checkpoint.encode() in words:
            os.kill(int(folder.name), signum)
            if what != "all":
                return
'''


def test_a_run_goes_on_when_engines_are_killed_and_frozen(tmp_path):
    inputs, output, log = make_inputs(tmp_path / "inputs"), tmp_path / "out", tmp_path / "log"
    (tmp_path / "recovery_plugins.py").write_text(PLUGINS)
    dumps = str(tmp_path / "dumps" / "{rollout_id}.pt")
    extra = ["--rollout-num-gpus", "2", "--rollout-max-response-len", "400", "--micro-batch-size", "4"]
    extra += ["--custom-rm-path", f"{tmp_path / 'recovery_plugins.py'}:letters", "--save-debug-rollout-data", dumps]
    extra += ["--use-fault-tolerance", "--rollout-health-check-interval", "1", "--rollout-health-check-timeout", "2"]
    assert run("train.py", arguments(inputs, output, 4, *extra), log, timeout=240) == 0, log.read_text()
    assert_nothing_left(str(tmp_path))
    assert all((output / name).exists() for name in ("killed", "frozen", "all"))

    for step in range(4):
        samples = load_rollout(dumps, step)
        assert sorted(sample.index for sample in samples) == list(range(16 * step, 16 * step + 16))
        for sample in samples:
            sample.check_alignment()
            assert set(sample.weight_versions) == {str(step + 1)}
    restarts = series(output, "rollout/engine_restarts")  # a failure at the end of a rollout counts for the next
    assert (restarts[0], restarts[-1], sum(restarts)) == (0.0, 2.0, 4.0)
    assert len(series(output, "rollout/requests_reissued")) == 4
    # Whatever a new engine generated was generated with the trainer's weights.
    assert max(series(output, "train/train_rollout_logprob_abs_diff")) < 1e-4
    shown = log.read_text()
    assert shown.count("is replaced: ") == 4
    assert "SIGKILL" in shown
    assert "failed its health checks" in shown
    assert shown.count("in the middle of a rollout: no other is left") == 1
    assert "4 engine or router restarts" in shown
