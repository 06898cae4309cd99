"""Whole runs with a second, frozen model that grades, and with engines that ran before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slime.http_control import request
from tests.e2e.commands import ROOT, arguments, environment, make_inputs, without
from tests.support.engine_process import engine_process
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

JUDGE = '''
import aiohttp


async def judged(args, sample, **kwargs):
    """The judge's first token decides; every answer says with which weights it was made."""
    ip, port = args.sglang_model_routers["judge"]
    payload = {"input_ids": sample.tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    async with aiohttp.ClientSession() as session, session.post(f"http://{ip}:{port}/generate", json=payload) as reply:
        answer = await reply.json()
    with open(args.output_dir + "/versions", "a") as log:
        log.write(f"{answer['meta_info']['weight_version']} {sample.weight_versions[-1]}\\n")
    return answer["output_ids"][0] % 7 / 7
'''


def test_a_frozen_judge_keeps_its_weights_while_the_policy_gets_new_ones(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    judge = make_tiny_model(tmp_path / "judge", "llama")
    (tmp_path / "judge.py").write_text(JUDGE)
    (tmp_path / "models.yaml").write_text(
        "sglang:\n"
        f"  - {{name: judge, model_path: {judge}, update_weights: false, server_groups: [{{num_gpus: 1}}]}}\n"
        "  - {name: policy, server_groups: [{num_gpus: 1}]}\n"
    )
    argv = without(without(arguments(inputs, tmp_path / "out", 2), "--rollout-num-gpus"), "--custom-rm-path")
    argv += ["--sglang-config", str(tmp_path / "models.yaml"), "--custom-rm-path", f"{tmp_path / 'judge.py'}:judged"]
    train(argv)
    lines = (tmp_path / "out" / "versions").read_text().splitlines()
    assert {line.split()[0] for line in lines} == {"default"}
    assert {line.split()[1] for line in lines} == {"1", "2"}
    assert len(lines) >= 32  # two rollouts of 4 x 4 samples


def test_engines_that_ran_before_get_the_trained_weights_and_run_on(tmp_path: Path) -> None:
    inputs = make_inputs(tmp_path)
    argv = without(arguments(inputs, tmp_path / "out", 1), "--rollout-num-gpus")
    with engine_process(inputs["model"]) as first, engine_process(inputs["model"]) as second:
        refused = train([*argv, "--rollout-external-engine-addrs", first, "--sglang-context-length", "7"], expected=2)
        assert f"{first} does not fit this command line: it has context_length" in refused
        train([*argv, "--rollout-external-engine-addrs", first, second.removeprefix("http://")])
        for url in (first, second):
            assert request(f"{url}/model_info", timeout_seconds=10)["weight_version"] == "2"


def train(argv: list[str], *, expected: int = 0) -> str:
    """Run ``train.py``; what it said."""
    command = [sys.executable, str(ROOT / "train.py"), *argv]
    run = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == expected, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout + run.stderr
