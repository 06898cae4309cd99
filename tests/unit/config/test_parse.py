from __future__ import annotations

import argparse
import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from slime.config import ArgsView, Config
from slime.config.engine_families import ArgparseFamily, strict_parser
from slime.config.engine_flags import SGLANG_FLAGS, SGLANG_SECRETS
from slime.config.parse import parse
from slime.config.router_flags import ROUTER_FLAGS, ROUTER_SECRETS
from slime.config.schema import all_flag_specs
from slime.errors import ConfigError

from .conftest import FakeMegatron, Run

Problems = Callable[..., list[str]]


def test_values_reach_their_sections(run: Run) -> None:
    config = run("--kl-loss-type k3 --disable-rewards-normalization --max-turns 5")
    assert config.algorithm.kl_loss_type == "k3"
    assert config.algorithm.rewards_normalization is False
    assert config.rollout.max_turns == 5
    assert config.hf is not None
    assert config.hf.model_type == "qwen3"


def test_families_are_split_by_leading_flag(run: Run) -> None:
    megatron = FakeMegatron()
    config = run(
        "--lr 1e-5 --tensor-model-parallel-size 2 --sglang-mem-fraction-static 0.8 --sglang-cuda-graph-bs 1 2 4 "
        "--router-policy round_robin --recompute-activations --sglang-server-concurrency 7",
        megatron=megatron,
    )
    assert config.megatron.argv == ("--lr", "1e-5", "--tensor-model-parallel-size", "2", "--recompute-activations")
    assert config.megatron.tensor_model_parallel_size == 2
    assert config.sglang == {"mem_fraction_static": 0.8, "cuda_graph_bs": [1, 2, 4]}
    assert config.router == {"policy": "round_robin"}
    assert config.engine.sglang_server_concurrency == 7
    (context,) = megatron.contexts
    assert (context.world_size, context.device, context.precision) == (2, "cpu", "fp32")
    assert (context.global_batch_size, context.train_iters) == (32, 3)


def test_no_problem_hides_another(problems: Problems) -> None:
    found = problems(
        "--rolout-seed 1 --rollout-temperature 0 --kl-coef 0.1 --kl-loss-coef 0.1 --over-sampling-batch-size 1 "
        "--global-batch-size 7 --sglang-tp-size 2 --sglang-nonsense 1 --router-policy nowhere --lr bad "
        "--use-opd --opd-type sglang --custom-config-path nowhere.yaml --num-layers"
    )
    text = "\n".join(found)
    for word in (
        "--rolout-seed",
        "--rollout-temperature",
        "kl_coef",
        "--over-sampling-batch-size",
        "--global-batch-size",
        "--sglang-tp-size",
        "--sglang-nonsense",
        "--router-policy",
        "--lr: bad value",
        "--opd-type sglang",
        "--custom-config-path",
    ):
        assert word in text, word
    assert len(found) == len(set(found))


@pytest.mark.parametrize("flag", ["--rollout-batch", "--recompute-activation", "--adv"])
def test_abbreviations_are_refused(problems: Problems, flag: str) -> None:
    (problem,) = problems(f"{flag} 1")
    assert f"unknown flag {flag}" in problem


def test_megatron_flags_are_suggested_too(problems: Problems) -> None:
    assert "--tensor-model-parallel-size" in problems("--tensor-model-paralel-size 2")[0]


def test_without_a_megatron_family_its_flags_are_unknown(problems: Problems) -> None:
    assert "unknown flag --lr" in problems("--lr 1", megatron=None)[0]


def test_model_flags_without_anything_behind_them_are_named_as_such(problems: Problems) -> None:
    (problem,) = problems("--post-mlp-layernorm")
    assert "not available in this version" in problem


def test_config_survives_json_and_pickle(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "eval.jsonl"
    data.write_text('{"prompt": "x", "label": "y"}\n')
    config = run(
        f"--lr 1 --router-policy random --sglang-cuda-graph-bs 1 2 --eval-prompt-data set {data} --eval-interval 2 "
        "--rollout-stop a b --rollout-stop-token-ids 1 2"
    )
    assert config.eval.eval_datasets[0].stop == ("a", "b")
    assert Config.from_json(config.to_json()) == config
    assert pickle.loads(pickle.dumps(config)) == config
    json.loads(config.to_json())


def test_secrets_are_not_written(run: Run) -> None:
    config = run("--wandb-key hush-1 --router-api-key hush-2")
    assert config.logging.wandb_key == "hush-1"
    assert config.router["api_key"] == "hush-2"
    config = replace(config, sglang={"api_key": "hush-3"})
    assert "hush" not in config.to_json()
    again = Config.from_json(config.to_json())
    assert again == replace(config, sglang={}, router={}, logging=replace(config.logging, wandb_key=None))


def test_every_flag_that_sounds_like_a_secret_is_one() -> None:
    suspicious = {s.dest for s in all_flag_specs() if re.search(r"password|secret|token$|(^|_)key$", s.dest)}
    columns = {
        s for s in suspicious if s.endswith(("input_key", "label_key", "metadata_key", "tool_key", "reward_key"))
    }
    assert suspicious - columns == {s.dest for s in all_flag_specs() if s.info.secret}
    for table, secrets in ((SGLANG_FLAGS, SGLANG_SECRETS), (ROUTER_FLAGS, ROUTER_SECRETS)):
        assert {n for n in table if re.search(r"password|api_key|_url$", n)} == secrets


def test_json_with_a_wrong_value_is_refused(run: Run) -> None:
    data = json.loads(run().to_json())
    data["rollout"]["rollout_temperature"] = 0
    with pytest.raises(ConfigError, match="rollout-temperature"):
        Config.from_json(json.dumps(data))


def write_yaml(tmp_path: Path, text: str) -> str:
    file = tmp_path / "custom.yaml"
    file.write_text(text)
    return f"--custom-config-path {file}"


def test_custom_config_overrides_adds_and_reaches_megatron(run: Run, tmp_path: Path) -> None:
    flag = write_yaml(tmp_path, "rollout_temperature: 2\nmy_value: [1, 2]\nlr: 0.5\nrecompute_activations: true\n")
    config = run(f"--rollout-temperature 1 {flag}")
    assert config.rollout.rollout_temperature == 2.0
    assert config.custom == {"my_value": [1, 2]}
    assert config.megatron.argv == ("--lr", "0.5", "--recompute-activations")
    args = ArgsView(config)
    assert (args.my_value, args.rollout_temperature) == ([1, 2], 2.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rollout_temperature: hot", "rollout_temperature must be float"),
        ("rollout_temperature: 0", "--rollout-temperature must be > 0"),
        ("colocate: 1", "colocate must be bool"),
        ("rollout_batch_size: true", "rollout_batch_size must be int"),
        ("- 1", "must be a mapping"),
        ("a: [", "not YAML"),
        ("when: 2020-01-01", "when"),
    ],
)
def test_custom_config_faults(problems: Problems, tmp_path: Path, text: str, words: str) -> None:
    (problem,) = problems(write_yaml(tmp_path, text))
    assert "--custom-config-path" in problem
    assert words in problem


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sglang_page_size: 7", "give --sglang-page-size on the command line"),
        ("router-policy: random", "give --router-policy on the command line"),
        ("rolout_seed: 3", "did you mean rollout_seed?"),
        ("tensor_model_paralel_size: 2", "did you mean tensor_model_parallel_size?"),
    ],
)
def test_custom_entries_that_would_do_nothing_are_refused(
    problems: Problems, tmp_path: Path, text: str, words: str
) -> None:
    (problem,) = problems(write_yaml(tmp_path, text))
    assert words in problem


def test_an_empty_custom_config_changes_nothing(run: Run, tmp_path: Path) -> None:
    assert run(write_yaml(tmp_path, "")).custom == {}


def test_a_users_own_parser(run: Run) -> None:
    parser = strict_parser()
    parser.add_argument("--my-number", type=int)
    family = ArgparseFamily(prefix="", parser=parser)
    assert run("--my-number 3", custom=family).custom == {"my_number": 3}
    with pytest.raises(ConfigError, match="--my-number"):
        run("--my-number x", custom=family)
    assert isinstance(parser, argparse.ArgumentParser)


def test_preflights_see_the_resolved_config_and_report_together(run: Run, prompts: Path) -> None:
    seen: list[Config] = []

    def preflight(config: Config) -> list[str]:
        seen.append(config)
        return ["from preflight"]

    with pytest.raises(ConfigError) as caught:
        run("--global-batch-size 7", preflights=[preflight])
    assert caught.value.problems[-1] == "from preflight"
    assert len(caught.value.problems) == 2
    assert seen[0].data.prompt_data == str(prompts)


def test_preflights_do_not_see_files_already_reported(run: Run) -> None:
    def preflight(config: Config) -> list[str]:
        return [f"again: {config.data.prompt_data}"] if config.data.prompt_data else []

    with pytest.raises(ConfigError) as caught:
        run("--prompt-data nowhere.jsonl", preflights=[preflight])
    assert len(caught.value.problems) == 1


def test_megatron_is_not_asked_about_a_wrong_command_line_without_its_flags(run: Run) -> None:
    megatron = FakeMegatron()
    with pytest.raises(ConfigError):
        run("--global-batch-size 7", megatron=megatron)
    assert megatron.contexts == []


def test_missing_essentials_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        parse([], megatron=None)
    text = "\n".join(caught.value.problems)
    assert "--hf-checkpoint is missing" in text
    assert "--prompt-data is missing" in text


SEED = {
    "quick start": "--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --advantage-estimator grpo "
    "--use-kl-loss --kl-loss-coef 0.001 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 "
    "--num-rollout 3000 --prompt-data {prompts}",
    "standard": "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --advantage-estimator grpo "
    "--use-kl-loss --kl-loss-coef 0.001 --prompt-data {prompts} --input-key prompt --label-key label "
    "--apply-chat-template --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 "
    "--num-rollout 3000 --save-interval 100 --eval-interval 50",
    "async": "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --advantage-estimator grpo "
    "--async-buffer-size 4 --update-weights-interval 2 --prompt-data {prompts}",
    "multi-turn": "--custom-generate-function-path custom_generate.py --max-turns 5 --prompt-data {prompts}",
    "colocated": "--colocate --actor-num-gpus-per-node 8 --sglang-mem-fraction-static 0.4 --prompt-data {prompts}",
    "evaluation": "--prompt-data {prompts} --eval-prompt-data aime {prompts} --eval-prompt-data gsm8k {prompts} "
    "--n-samples-per-eval-prompt 16 --eval-interval 5",
    "out of memory": "--prompt-data {prompts} --recompute-activations --micro-batch-size 1",
    "slow data": "--prompt-data {prompts} --num-data-workers 4 --streaming-data",
    "engine crash": "--prompt-data {prompts} --sglang-mem-fraction-static 0.85 --rollout-batch-size 16",
}


@pytest.mark.parametrize("name", SEED)
def test_documented_commands_are_accepted(run: Run, model_dir: Path, prompts: Path, name: str) -> None:
    config = run(SEED[name].format(prompts=prompts) + f" --hf-checkpoint {model_dir}", base=False)
    assert config.data.input_key == "prompt"
    assert config.data.label_key == "label"
    assert config.data.num_rollout is not None or config.data.num_epoch == 1
