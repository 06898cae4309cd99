"""``python train_async.py`` that changes weights in the middle of rollouts, against the weights of every version."""

import pytest

from slime.data.record import load_rollout
from tests.e2e.commands import arguments, assert_nothing_left, make_inputs, run, series, without
from tests.support.version_check import transformers_log_probs, worst_difference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROLLOUTS = 3
LENGTH = 1800
GENERATE = """
async def without_end(args, sample, sampling_params):
    from slime.rollout.sglang_rollout import generate

    return await generate(args, sample, {**sampling_params, "ignore_eos": True})
"""


def test_log_probs_are_those_of_the_weights_that_each_span_names(tmp_path):
    inputs = make_inputs(tmp_path / "inputs")
    (tmp_path / "endless.py").write_text(GENERATE)
    argv = arguments(inputs, tmp_path / "out", ROLLOUTS)
    for flag in ("--rollout-max-response-len", "--global-batch-size", "--n-samples-per-prompt", "--micro-batch-size"):
        argv = without(argv, flag)
    argv += [
        "--rollout-max-response-len", str(LENGTH),
        "--n-samples-per-prompt", "2",
        "--global-batch-size", "8",
        "--micro-batch-size", "1",
        "--custom-generate-function-path", f"{tmp_path / 'endless.py'}:without_end",
        "--update-weights-during-rollout",
        "--update-weight-pause-mode", "abort",
        "--save", str(tmp_path / "ckpt"),
        "--save-interval", "1",
        "--save-hf", str(tmp_path / "hf" / "{rollout_id}"),
        "--save-debug-rollout-data", str(tmp_path / "dumps" / "{rollout_id}.pt"),
    ]  # fmt: skip
    assert run("train_async.py", argv, tmp_path / "log") == 0, (tmp_path / "log").read_text()
    assert_nothing_left(str(tmp_path))
    # Version 1 is what the engines started with; each trained rollout makes the next one.
    paths = {"1": inputs["model"]} | {str(k + 2): tmp_path / "hf" / str(k) for k in range(ROLLOUTS - 1)}
    models = {version: transformers_log_probs(path) for version, path in paths.items()}
    mixed = 0
    for step in range(ROLLOUTS):
        for sample in load_rollout(str(tmp_path / "dumps" / "{rollout_id}.pt"), step):
            spans = sample.weight_version_spans
            assert (spans[0].start, spans[-1].end) == (0, LENGTH)
            assert [int(span.version) for span in spans] == sorted({int(span.version) for span in spans})
            mixed += len(spans) > 1
            worst = worst_difference(sample.tokens, sample.rollout_log_probs, spans, models)
            assert max(worst.values()) <= 1e-5
    assert mixed, "no weights changed inside a rollout: generation was over before training was"
    shares = series(tmp_path / "out", "rollout/weight_version/stale_token_share")
    assert len(shares) == ROLLOUTS
    assert any(0 < share < 1 for share in shares)
