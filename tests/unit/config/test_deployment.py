"""Reading ``--sglang-config``, its rules, and what comes of it on a command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime.config.deployment import read_deployment
from slime.config.draft import Surroundings
from slime.config.engine_plan import plan_engines
from slime.config.plan import plan_text
from slime.config.schema import Config

from .conftest import QWEN3, Run, notices, write_model

Problems = Callable[..., list[str]]

SPEC_EXAMPLE = """
sglang:
  - name: actor
    update_weights: true
    num_gpus_per_engine: 2
    server_groups:
      - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 2, overrides: {chunked_prefill_size: 8192}}
      - {worker_type: decode,  num_gpus: 8, num_gpus_per_engine: 4}
  - name: ref
    model_path: /models/r
    engine_groups: [{worker_type: regular, num_gpus: 4}]
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def call(text: str) -> Path:
        path = tmp_path / "deployment.yaml"
        path.write_text(text)
        return path

    return call


Write = Callable[[str], Path]


@pytest.fixture
def many_gpus() -> Surroundings:
    return Surroundings(num_cuda_devices=64, sglang_installed=True, joins_cluster=True)


def faults(path: Path) -> list[str]:
    problems: list[str] = []
    read_deployment(str(path), problems)
    return problems


def test_models_and_groups_of_the_example(write: Write) -> None:
    problems: list[str] = []
    actor, ref = read_deployment(str(write(SPEC_EXAMPLE)), problems)
    assert problems == []
    assert (actor.name, actor.model_path, actor.update_weights, actor.num_gpus) == ("actor", None, True, 12)
    prefill, decode = actor.server_groups
    assert (prefill.worker_type, prefill.num_engines(1), prefill.overrides) == (
        "prefill",
        2,
        {"chunked_prefill_size": 8192},
    )
    assert (decode.worker_type, decode.num_engines(1)) == ("decode", 2)
    assert (ref.model_path, ref.update_weights) == ("/models/r", None)
    assert ref.server_groups[0].num_engines(2) == 2  # the flag decides where the file does not


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models: []", "no key 'sglang' at its root"),
        ("a: [", "not YAML"),
        ("sglang: {name: a}", "must be a list of at least one model"),
        ("sglang: [3]", "sglang[0]: must be a mapping, found 3"),
        ("sglang: [{server_groups: [{num_gpus: 1}]}]", "sglang[0]: name is missing"),
        ("sglang: [{name: a}]", "server_groups must be a list of at least one group"),
        ("sglang: [{name: a, server_groups: [{}]}]", "server_groups[0]: num_gpus is missing"),
        ("sglang: [{name: a, server_groups: [{num_gpus: 0}]}]", "num_gpus must be at least 1, found 0"),
        ("sglang: [{name: a, server_groups: [{num_gpus: true}]}]", "num_gpus must be an integer, found True"),
        ("sglang: [{name: a, server_groups: [{num_gpu: 1, num_gpus: 1}]}]", "'num_gpu'; did you mean num_gpus"),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, worker_type: router}]}]",
            "worker_type 'router'; accepted values are regular, prefill, decode, placeholder, encoder",
        ),
        ("sglang: [{name: a, update_weights: 1, server_groups: [{num_gpus: 1}]}]", "must be true or false, found 1"),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1, overrides: [x]}]}]",
            "overrides must map engine arguments to values",
        ),
        (
            "sglang: [{name: a, model_path: x, server_groups: [{num_gpus: 1, overrides: {model_path: y}}]}]",
            "one model has one model_path, found x and y",
        ),
        (
            "sglang: [{name: a, server_groups: [{num_gpus: 1}]}, {name: a, server_groups: [{num_gpus: 1}]}]",
            "2 models are named 'a'",
        ),
    ],
)
def test_each_fault_of_a_file_is_one_problem_with_its_place(write: Write, text: str, words: str) -> None:
    (problem,) = faults(write(text))
    assert words in problem
    assert "deployment.yaml" in problem


def test_a_file_that_is_not_there(problems: Problems) -> None:
    assert "cannot be read" in problems("--sglang-config /nowhere/x.yaml")[0]


# On a command line


def two_models(model: Path, **more: str) -> str:
    extra = "".join(f", {key}: {value}" for key, value in more.items())
    return (
        f"sglang: [{{name: actor, server_groups: [{{num_gpus: 2}}]}},"
        f" {{name: judge, model_path: {model}{extra},"
        " server_groups: [{num_gpus: 1, overrides: {max_total_tokens: 64}}]}]"
    )


def test_embedded_engines_of_two_models(run: Run, write: Write, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    config = run(f"--rollout-num-gpus 3 --sglang-config {write(two_models(other))}")
    plan = plan_engines(config)
    assert [(e.model, e.slots, e.updatable) for e in plan.engines] == [
        ("actor", (2,), True),
        ("actor", (3,), True),
        ("judge", (4,), False),
    ]
    assert config.num_engines == 3
    assert "model judge is served from" in notices(config)
    assert Config.from_json(config.to_json()) == config
    text = plan_text(config)
    assert (
        f"engine 2: embedded, CPU process 4, model judge from {other}, keeps its weights, max_total_tokens=64" in text
    )
    assert "router of actor: in front of 2 engine(s), the default one" in text
    assert "model judge is served" not in notices(
        run(f"--rollout-num-gpus 3 --sglang-config {write(two_models(other, update_weights='false'))}")
    )


def test_the_file_says_how_many_gpus_generate(base_argv: list[str], run: Run, problems: Problems, write: Write) -> None:
    path = write("sglang: [{name: a, server_groups: [{num_gpus: 2}, {num_gpus: 1, worker_type: placeholder}]}]")
    at = base_argv.index("--rollout-num-gpus")
    del base_argv[at : at + 2]
    config = run(f"--sglang-config {path}")
    assert (config.cluster.rollout_num_gpus, config.num_engines) == (3, 2)
    assert "3 GPUs in total, --rollout-num-gpus is 1" in problems(f"--sglang-config {path} --rollout-num-gpus 1")[0]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ("[{num_gpus: 1, worker_type: placeholder}]", "placeholders only"),
        ("[{num_gpus: 1, worker_type: encoder}]", "needs prefill or regular engines"),
        ("[{num_gpus: 1, worker_type: prefill}]", "no decode group"),
        ("[{num_gpus: 1, worker_type: decode}]", "no prefill group"),
        (
            "[{num_gpus: 1, worker_type: prefill}, {num_gpus: 1, worker_type: decode}, {num_gpus: 1}]",
            "a regular group would stay idle",
        ),
        ("[{num_gpus: 3, num_gpus_per_engine: 2}]", "num_gpus 3 is not a multiple of its 2 per engine"),
        ("[{num_gpus: 12, num_gpus_per_engine: 12}]", "multiple of --num-gpus-per-node 8"),
        ("[{num_gpus: 1, overrides: {tp_size: 2}}]", "tp_size cannot be given: use --rollout-num-gpus-per-engine"),
        (
            "[{num_gpus: 1, overrides: {chunked_prefil_size: 2}}]",
            "did you mean chunked_prefill_size",
        ),
        ("[{num_gpus: 2, num_gpus_per_engine: 2, overrides: {pp_size: 2}}]", "take weights from disk only"),
        ("[{num_gpus: 4, num_gpus_per_engine: 4, overrides: {pp_size: 3}}]", "not a multiple of --sglang-pp-size 3"),
        ("[{num_gpus: 2, num_gpus_per_engine: 2, overrides: {dp_size: 2}}]", "needs --sglang-enable-dp-attention"),
        ("[{num_gpus: 1, overrides: {chunked_prefill_size: x}}]", "needs an integer, found 'x'"),
    ],
)
def test_groups_that_cannot_work(
    base_argv: list[str], problems: Problems, write: Write, many_gpus: Surroundings, groups: str, words: str
) -> None:
    at = base_argv.index("--rollout-num-gpus")
    del base_argv[at : at + 2]
    path = write(f"sglang: [{{name: a, server_groups: {groups}}}]")
    found = problems(f"--sglang-config {path} --rollout-backend sglang", surroundings=many_gpus)
    assert any(words in problem for problem in found), found


def test_what_the_embedded_engine_cannot_do(problems: Problems, write: Write) -> None:
    groups = "[{num_gpus: 2, num_gpus_per_engine: 2, worker_type: prefill}, {num_gpus: 1, worker_type: decode}]"
    path = write(f"sglang: [{{name: a, server_groups: {groups}}}]")
    found = "\n".join(problems(f"--rollout-num-gpus 3 --sglang-config {path}"))
    assert "the embedded engine has no prefill form" in found
    assert "the embedded engine has no decode form" in found
    assert "runs in one process" in found
    path = write("sglang: [{name: a, server_groups: [{num_gpus: 1, overrides: {enable_lora: true}}]}]")
    assert f"--sglang-config {path}: sglang[0].server_groups[0].overrides: --sglang-enable-lora" in "\n".join(
        problems(f"--sglang-config {path}")
    )


def test_some_model_must_get_the_trained_weights(run: Run, problems: Problems, write: Write, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    path = write(f"sglang: [{{name: a, model_path: {other}, server_groups: [{{num_gpus: 1}}]}}]")
    assert "no model gets the trainer's weights" in problems(f"--sglang-config {path}")[0]
    alone = run(f"--sglang-config {path} --debug-rollout-only")
    assert plan_engines(alone).default_router.model == "a"


def test_an_override_is_named_with_its_place_in_the_file(problems: Problems, write: Write) -> None:
    """Counted in the file, whatever stands before it."""
    good, bad = "{num_gpus: 1}", "{num_gpus: 1, overrides: {max_total_token: 64}}"
    path = write(f"sglang: [{{name: a, server_groups: [{good}]}}, {{name: b, engine_groups: [{good}, {bad}]}}]")
    (problem,) = problems(f"--rollout-num-gpus 3 --sglang-config {path}")
    where = f"--sglang-config {path}: sglang[1].server_groups[1].overrides: "
    assert problem == where + "unknown argument 'max_total_token'; did you mean max_total_tokens?"


def test_a_frozen_model_may_have_stages(
    base_argv: list[str], run: Run, write: Write, tmp_path: Path, many_gpus: Surroundings
) -> None:
    other = write_model(tmp_path / "other")
    stages = "{num_gpus: 2, num_gpus_per_engine: 2, overrides: {pp_size: 2}}"
    path = write(
        "sglang: [{name: a, server_groups: [{num_gpus: 1}]},"
        f" {{name: b, model_path: {other}, update_weights: false, server_groups: [{stages}]}}]"
    )
    config = run(f"--rollout-num-gpus 3 --rollout-backend sglang --sglang-config {path}", surroundings=many_gpus)
    assert config.deployment[1].server_groups[0].overrides == {"pp_size": 2}


# Paths of models


def served(path: Path | str, update: str = "false") -> str:
    return (
        "sglang: [{name: actor, server_groups: [{num_gpus: 1}]},"
        f" {{name: judge, model_path: {path}, update_weights: {update}, server_groups: [{{num_gpus: 1}}]}}]"
    )


def test_another_spelling_of_the_checkpoint_is_the_checkpoint(
    run: Run, write: Write, model_dir: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(model_dir)
    path = write(f"sglang: [{{name: a, model_path: {link}/../link, server_groups: [{{num_gpus: 1}}]}}]")
    assert [engine.updatable for engine in plan_engines(run(f"--sglang-config {path}")).engines] == [True]


def test_a_model_that_is_not_there(
    run: Run, problems: Problems, write: Write, tmp_path: Path, many_gpus: Surroundings
) -> None:
    flags = "--rollout-num-gpus 2 --sglang-config"
    sglang = "--rollout-backend sglang"
    (problem,) = problems(f"{flags} {write(served('/nowhere/m'))} {sglang}", surroundings=many_gpus)
    assert "model judge: model_path /nowhere/m: does not exist" in problem
    hub = write(served("org/name-1.5"))
    assert run(f"{flags} {hub} {sglang}", surroundings=many_gpus).deployment[1].model_path == "org/name-1.5"
    assert "org/name-1.5: does not exist" in problems(f"{flags} {hub}")[0]
    (tmp_path / "empty").mkdir()
    assert "has no config.json" in problems(f"{flags} {write(served(tmp_path / 'empty'))}")[0]


def test_trained_weights_go_into_the_same_model_only(
    run: Run, problems: Problems, write: Write, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", {**QWEN3, "num_hidden_layers": 3})
    flags = "--rollout-num-gpus 2 --sglang-config"
    (problem,) = problems(f"{flags} {write(served(other, 'true'))}")
    assert f"model judge: model_path {other}: weights of another model than --hf-checkpoint" in problem
    assert "num_hidden_layers 3 (there: 2)" in problem
    run(f"{flags} {write(served(other))}")
    run(f"{flags} {write(served(write_model(tmp_path / 'same'), 'true'))}")


def test_memory_is_counted_for_each_model_and_size(run: Run, write: Write, tmp_path: Path, model_dir: Path) -> None:
    other = write_model(tmp_path / "other")
    (other / "second.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    text = plan_text(run(f"--rollout-num-gpus 2 --sglang-config {write(served(other))}"))
    assert f"engine of 1 with {model_dir}, each process: 0.1 KiB" in text  # 32 parameters of four bytes
    assert f"engine of 1 with {other}, each process: 0.2 KiB" in text
    assert "engine, each process: 0.1 KiB" in plan_text(run())


# --prefill-num-servers


def test_prefill_servers_are_cut_from_the_rollout_gpus(run: Run, problems: Problems, many_gpus: Surroundings) -> None:
    flags = "--rollout-backend sglang --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 --prefill-num-servers"
    plan = plan_engines(run(f"{flags} 1", surroundings=many_gpus))
    assert [(e.worker_type, e.slots) for e in plan.engines] == [
        ("prefill", (2, 3)),
        ("decode", (4, 5)),
        ("decode", (6, 7)),
        ("decode", (8, 9)),
    ]
    assert plan.default_router.disaggregated
    assert "leave no GPU" in problems(f"{flags} 4", surroundings=many_gpus)[0]
    assert "no prefill form" in problems("--rollout-num-gpus 2 --prefill-num-servers 1")[0]


def test_prefill_and_decode_engines_cannot_serve_what_goes_past_the_router(
    problems: Problems, many_gpus: Surroundings
) -> None:
    flags = "--rollout-backend sglang --rollout-num-gpus 2 --prefill-num-servers 1 --rollout-top-p 0.9"
    assert "--rollout-top-p 0.9 asks engines for more" in problems(flags, surroundings=many_gpus)[0]


def test_one_way_to_say_it(problems: Problems, write: Write) -> None:
    path = write("sglang: [{name: a, server_groups: [{num_gpus: 1}]}]")
    both = problems(f"--sglang-config {path} --prefill-num-servers 1")
    assert "--prefill-num-servers and --sglang-config exclude each other" in both
