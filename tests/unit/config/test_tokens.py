from __future__ import annotations

import pytest

from slime.config.schema import all_flag_specs
from slime.config.tokens import group_tokens, read_values, unknown_flag

SPECS = {name: spec for spec in all_flag_specs() if spec.form != "none" for name in spec.names}


def read(text: str | list[str]) -> tuple[dict[str, object], list[str]]:
    groups, problems = group_tokens(text.split() if isinstance(text, str) else text)
    assert problems == []
    values, _, wrong = read_values(groups, SPECS)
    return values, wrong


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("--rollout-batch-size 4", {"rollout_batch_size": 4}),
        ("--rollout-batch-size=4", {"rollout_batch_size": 4}),
        ("--rollout-batch-size 4 --rollout-batch-size 5", {"rollout_batch_size": 5}),
        ("--log-probs-chunk-size -1", {"log_probs_chunk_size": -1}),
        ("--colocate", {"colocate": True}),
        ("--disable-grpo-std-normalization", {"grpo_std_normalization": False}),
        ("--offload-train", {"offload_train": True}),
        ("--no-offload-train", {"offload_train": False}),
        ("--rollout-stop-token-ids 1 2 3", {"rollout_stop_token_ids": (1, 2, 3)}),
        ("--rollout-stop=--end", {"rollout_stop": ("--end",)}),
        ("--eval-prompt-data a A --eval-prompt-data b B c C", {"eval_prompt_data": ("a", "A", "b", "B", "c", "C")}),
        ("--rollout-sample-hook-path x.y --rollout-sample-hook-path z.w", {"rollout_sample_hook_path": ("x.y", "z.w")}),
        ("--lambd 0.5", {"lambd": 0.5}),
    ],
)
def test_values(text: str, values: dict[str, object]) -> None:
    assert read(text) == (values, [])


def test_json() -> None:
    values, wrong = read(["--apply-chat-template-kwargs", '{"enable_thinking": false}'])
    assert (values, wrong) == ({"apply_chat_template_kwargs": {"enable_thinking": False}}, [])


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (["--rollout-batch-size"], ["--rollout-batch-size", "an integer"]),
        (["--rollout-batch-size", "four"], ["--rollout-batch-size", "an integer", "'four'"]),
        (["--rollout-batch-size", "4", "5"], ["takes one value", "4 5"]),
        (["--rollout-temperature", "hot"], ["a number", "'hot'"]),
        (["--rollout-temperature", "0"], ["--rollout-temperature must be > 0"]),
        (["--colocate", "true"], ["--colocate takes no value", "'true'"]),
        (["--no-offload-train", "1"], ["--no-offload-train takes no value"]),
        (["--kl-loss-type", "k9"], ["k1, k2, k3, low_var_kl"]),
        (["--train-env-vars", "{x}"], ["--train-env-vars", "JSON"]),
        (["--train-env-vars", "[1]"], ["JSON object", "[1]"]),
        (["--rollout-stop"], ["one or more values"]),
    ],
)
def test_unusable_values_name_flag_and_remedy(tokens: list[str], words: list[str]) -> None:
    values, wrong = read(tokens)
    assert values == {}
    assert len(wrong) == 1
    assert all(word in wrong[0] for word in words)


def test_a_value_before_the_first_flag_is_a_problem() -> None:
    groups, problems = group_tokens(["stray", "--colocate"])
    assert [group.flag for group in groups] == ["--colocate"]
    assert len(problems) == 1
    assert "'stray'" in problems[0]


def test_help_has_a_short_form() -> None:
    assert [group.flag for group in group_tokens(["-h"])[0]] == ["--help"]


@pytest.mark.parametrize(
    ("flag", "suggestion"),
    [
        ("--rolout-batch-size", "--rollout-batch-size"),
        ("--rollout_batch_size", "--rollout-batch-size"),
        ("--use-kl-los", "--use-kl-loss"),
        ("--colocated", "--colocate"),
        ("--global-batchsize", "--global-batch-size"),
        ("--rollout-max-resp", "--rollout-max-response-len"),
    ],
)
def test_nearest_name_comes_first(flag: str, suggestion: str) -> None:
    assert f"did you mean {suggestion}" in unknown_flag(flag, set(SPECS))


def test_no_suggestion_for_something_else() -> None:
    assert "did you mean" not in unknown_flag("--zzzzqqqq", set(SPECS))
