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

from .conftest import Run, notices, write_model

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
        ("[{num_gpus: 1, overrides: {chunked_prefil_size: 2}}]", "--sglang-chunked-prefill-size"),
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
    assert "model a, regular group: --sglang-enable-lora" in problems(f"--sglang-config {path}")[0]


def test_some_model_must_get_the_trained_weights(run: Run, problems: Problems, write: Write, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other")
    path = write(f"sglang: [{{name: a, model_path: {other}, server_groups: [{{num_gpus: 1}}]}}]")
    assert "no model gets the trainer's weights" in problems(f"--sglang-config {path}")[0]
    alone = run(f"--sglang-config {path} --debug-rollout-only")
    assert plan_engines(alone).default_router.model == "a"


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
