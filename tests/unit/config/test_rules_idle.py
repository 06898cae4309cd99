"""Flags that cannot work, and flags that were given in vain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Run


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rollout-top-k 0", "--rollout-top-k 0 keeps no token; give -1 for all tokens, or at least 1"),
        ("--eval-top-k 0", "--eval-top-k 0 keeps no token"),
        ("--log-probs-chunk-size -2", "--log-probs-chunk-size must be at least -1, found -2"),
        ("--dump-details FILE", "--dump-details FILE: is a file; name a directory"),
        (
            "--advantage-estimator ppo --loss-type sft_loss",
            "trains a critic on returns; remove --loss-type sft_loss, or use an estimator without a critic",
        ),
    ],
)
def test_values_that_cannot_work(problems: Callable[..., list[str]], prompts: Path, flags: str, words: str) -> None:
    (problem,) = problems(flags.replace("FILE", str(prompts)))
    assert words.replace("FILE", str(prompts)) in problem


@pytest.mark.parametrize(
    ("flags", "remark"),
    [
        ("--max-logprob-diff-action stop", "--max-logprob-diff-action has no effect without --max-logprob-diff"),
        ("--max-logprob-diff-action stop --max-logprob-diff 1", ""),
        ("--tis-clip 3", "--tis-clip: no effect without --use-tis or --use-icepop"),
        ("--tis-clip 3 --use-icepop", ""),
        ("--opsm-delta 0.1", "--opsm-delta has no effect without --use-opsm"),
        ("--use-unbiased-kl", "--use-unbiased-kl has no effect without --use-kl-loss"),
        ("--async-save", "--async-save has no effect without --save or --save-interval"),
        ("--async-save --save-interval 1", ""),
        ("--gamma 0.9 --lambd 0.9", "--gamma: no effect with --advantage-estimator grpo"),
        ("--gamma 0.9 --lambd 0.9", "--lambd: no effect with --advantage-estimator grpo"),
        ("--value-clip 0.1 --advantage-estimator rloo", "--value-clip: no effect with --advantage-estimator rloo"),
        ("--gamma 0.9 --lambd 0.9 --value-clip 0.1 --advantage-estimator ppo", ""),
        ("--gamma 0.9 --advantage-estimator reinforce_plus_plus --normalize-advantages", ""),
        ("--gamma 0.9 --custom-advantage-function-path mine.py:advantages", ""),
        ("--use-tis --kl-coef 0.1 --loss-type sft_loss", "--use-tis, --kl-coef: no effect with --loss-type sft_loss"),
        ("--constant-loss-denominator 16 --loss-type sft_loss", ""),
        (
            "--dump-details details --save-debug-rollout-data own/{rollout_id}.pt",
            "--save-debug-rollout-data has no effect: --dump-details details decides",
        ),
    ],
)
def test_what_was_given_in_vain_is_named(run: Run, flags: str, remark: str) -> None:
    found = "\n".join(run(flags).notices)
    assert remark in found if remark else "no effect" not in found
