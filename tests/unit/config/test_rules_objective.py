"""Rules of the objective: what is refused, what is remarked on, what follows."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .conftest import Run, notices

Problems = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "Only one of kl_coef and kl_loss_coef can be set"),
        ("--advantage-estimator reinforce_plus_plus", "needs --normalize-advantages"),
        ("--use-rollout-logprobs --use-tis", "exclude each other"),
        ("--use-rollout-logprobs --use-icepop", "--use-rollout-logprobs and --use-icepop exclude each other"),
        ("--use-tis --use-icepop", "--use-tis and --use-icepop exclude each other"),
        ("--use-icepop --custom-tis-function-path a.b", "--use-icepop and --custom-tis-function-path exclude"),
        (
            "--use-tis --tis-mode clip --tis-lower-bound 3",
            "--tis-lower-bound 3 must not be larger than --tis-upper-bound 2",
        ),
        ("--use-rs --rs-upper-bound 0.1", "--rs-lower-bound 0.5 must not be larger than --rs-upper-bound 0.1"),
        ("--constant-loss-denominator 8 --calculate-per-token-loss", "exclude each other"),
        ("--advantage-estimator rloo --n-samples-per-prompt 1", "--n-samples-per-prompt is 1"),
        ("--overlong-buffer-len 17", "--overlong-buffer-len 17 must be at most --rollout-max-response-len"),
        ("--overlong-buffer-len 4 --custom-reward-post-process-path a.b", "--custom-reward-post-process-path exclude"),
        (
            "--overlong-buffer-len 4 --custom-convert-samples-to-train-data-path a.b",
            "--custom-convert-samples-to-train-data-path exclude",
        ),
        ("--loss-type custom_loss", "--custom-loss-function-path"),
        ("--custom-loss-function-path a.b", "--loss-type custom_loss"),
        ("--tis-clip-low 3", "--tis-clip-low 3 must not be larger than --tis-clip 2"),
        ("--only-train-params-name-list a --freeze-params-name-list b", "exclude each other"),
        ("--eps-clip-c 1", "--eps-clip-c must be > 1"),
        ("--use-routing-replay --disable-compute-advantages-and-returns", "replays the routing of the log-prob pass"),
        (
            "--use-tis --tis-batch-normalize --disable-compute-advantages-and-returns",
            "--tis-batch-normalize needs the log-prob pass",
        ),
    ],
)
def test_objective_faults(problems: Problems, flags: str, words: str) -> None:
    assert any(words in problem for problem in problems(flags))


def test_routing_replay(run: Run) -> None:
    config = run("--use-rollout-routing-replay --use-rollout-logprobs --disable-compute-advantages-and-returns")
    assert config.algorithm.use_routing_replay
    assert "for its routing only" not in notices(config)
    assert "runs the log-prob pass for its routing only" in notices(run("--use-routing-replay --use-rollout-logprobs"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--advantage-estimator grpo --kl-coef 0.1", "--kl-coef 0.1 does not enter the advantages"),
        ("--tis-level sequence", "--tis-level: no effect without --use-tis"),
        ("--use-rs --tis-mode clip", "--tis-mode: no effect without --use-tis"),
        ("--get-mismatch-metrics --tis-batch-normalize", "--tis-batch-normalize: no effect without --use-tis"),
        ("--use-tis --rs-veto-threshold 0.1", "--rs-veto-threshold: no effect without --use-rs"),
        ("--use-tis --tis-lower-bound 0.5", "no effect with --tis-mode truncate"),
        ("--custom-tis-function-path a.b", "no effect without --use-tis"),
        ("--overlong-penalty-factor 2", "no effect without --overlong-buffer-len"),
        ("--advantage-estimator cispo --eps-clip-c 2", "--eps-clip-c has no effect"),
    ],
)
def test_objective_notices(run: Run, flags: str, words: str) -> None:
    assert words in notices(run(flags))


@pytest.mark.parametrize(
    "flags",
    [
        "--use-tis --tis-level geometric --use-rs --rs-veto-threshold 1e-4 --tis-batch-normalize",
        "--use-rollout-logprobs --use-rs",
        "--use-rs --tis-upper-bound 3",
        "--get-mismatch-metrics",
        "--use-tis --rs-level token --tis-lower-bound 0.5 --custom-tis-function-path a.b",
        "--advantage-estimator rloo --kl-coef 0.1",
        "--overlong-buffer-len 16 --overlong-penalty-factor 0.5",
    ],
)
def test_objective_without_remarks(run: Run, flags: str) -> None:
    assert "no effect" not in notices(run(flags))


def test_bounds_of_weights_and_rejection(run: Run) -> None:
    def bounds(flags: str) -> tuple[float, ...]:
        algorithm = run(flags).algorithm
        return (*algorithm.tis_bounds, *algorithm.rs_bounds)

    assert bounds("") == (0.5, 2, 0.5, 2)
    assert bounds("--tis-clip 4 --tis-clip-low 0.1") == (0.1, 4, 0.1, 4)
    assert bounds("--tis-upper-bound 5 --rs-upper-bound 3") == (0.2, 5, 0.2, 3)
    assert bounds("--tis-lower-bound 0.9 --rs-lower-bound 0.7") == (0.9, 2, 0.7, 2)


def test_clip_bounds(run: Run) -> None:
    assert run("--eps-clip 0.3").algorithm.eps_clip_high == 0.3
    assert run("--eps-clip 0.3 --eps-clip-high 0.4").algorithm.eps_clip_high == 0.4
