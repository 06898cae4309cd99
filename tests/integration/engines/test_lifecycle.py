"""Birth and death of the server, the router in front of it, and a model thread that fails."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

from slime.engines.embedded.flags import ServerFlags
from slime.engines.server import build_app
from tests.integration.engines.conftest import post
from tests.support.engine_process import engine_process, router_process
from tests.support.gloo import free_port

BODY = {"input_ids": list(range(30)), "sampling_params": {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}}


def command(model_path: Path, port: int, *flags: str) -> list[str]:
    base = [sys.executable, "-m", "slime.engines.server", "--model-path", str(model_path), "--port", str(port)]
    return [*base, "--device", "cpu", *flags]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_sigterm_ends_it_while_requests_run(model_path: Path) -> None:
    port = free_port()
    server = subprocess.Popen(command(model_path, port), stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert f"ready: {model_path} on http://127.0.0.1:{port}" in server.stdout.readline()
        url = f"http://127.0.0.1:{port}"
        body = BODY | {"sampling_params": {"max_new_tokens": 1900, "ignore_eos": True, "n": 8}}
        asking = subprocess.Popen(
            ["curl", "-s", "-X", "POST", url + "/generate", "-d", __import__("json").dumps(body)],
            stdout=subprocess.DEVNULL,
        )
        while not post(url, "/get_load", method="GET")[0]["num_running_reqs"]:
            time.sleep(0.01)
        server.send_signal(signal.SIGTERM)
        server.wait(10)
        asking.wait(10)
    finally:
        server.kill()
        server.wait(10)


def test_it_ends_with_its_parent(model_path: Path) -> None:
    starter = (
        "import subprocess, sys, time\n"
        f"p = subprocess.Popen({command(model_path, free_port())!r}, stdout=subprocess.PIPE, text=True)\n"
        "p.stdout.readline(); print(p.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        assert is_alive(pid)
        parent.kill()
        parent.wait(10)
        deadline = time.monotonic() + 10
        while is_alive(pid):
            assert time.monotonic() < deadline, "the orphan still runs"
            time.sleep(0.05)
    finally:
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_the_thread_that_started_it_may_end(model_path: Path) -> None:
    """The kernel's parent-death signal fires for threads too; the server must not take that for its parent's end."""
    import threading

    port = free_port()
    started: list[subprocess.Popen[str]] = []

    def start() -> None:
        started.append(subprocess.Popen(command(model_path, port), stdout=subprocess.PIPE, text=True))
        assert started[0].stdout is not None
        started[0].stdout.readline()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(60)
    try:
        time.sleep(1.5)
        assert started[0].poll() is None
        assert post(f"http://127.0.0.1:{port}", "/health", method="GET") == ""
    finally:
        started[0].kill()
        started[0].wait(10)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--modle-path", "x"], "--modle-path"),
        (["--max-running", "3"], "--max-running"),  # no abbreviations
        (["--max-total-tokens", "0"], "--max-total-tokens is 0"),
        (["--dtype", "int8"], "int8"),
        (["--tp-size", "2"], "--tp-size"),
    ],
)
def test_wrong_flags_are_reported(model_path: Path, flags: list[str], found: str) -> None:
    result = subprocess.run(command(model_path, 1, *flags), capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 2
    assert found in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_reported(model_path: Path, engine: str) -> None:
    port = int(engine.rsplit(":", 1)[1])
    result = subprocess.run(command(model_path, port), capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 1
    assert f"--port {port}" in result.stderr


async def test_a_failed_model_thread_is_reported_to_everyone(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app, engine = build_app(ServerFlags(model_path=str(model_path), skip_tokenizer_init=True))
    async with TestClient(TestServer(app)) as client:
        assert (await client.get("/health")).status == 200

        def explode() -> None:
            raise RuntimeError("no more memory")

        monkeypatch.setattr(engine.scheduler, "step", explode)
        replies = await asyncio.gather(*(client.post("/generate", json=BODY) for _ in range(3)))
        for reply in replies:
            assert reply.status == 503
            assert "no more memory" in (await reply.json())["error"]["message"]
        assert (await client.get("/health")).status == 503
        assert (await client.get("/health_generate")).status == 503
        late = await client.post("/generate", json=BODY)
        assert late.status == 503
        control = await client.post("/pause_generation", json={})
        assert control.status == 503


async def test_a_request_that_fails_leaves_the_others(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app, _ = build_app(ServerFlags(model_path=str(model_path), skip_tokenizer_init=True))
    async with TestClient(TestServer(app)) as client:

        def explode(*_: Any) -> None:
            raise ZeroDivisionError

        with monkeypatch.context() as patch:
            patch.setattr("slime.engines.embedded.serving.build_reply", explode)
            failed = await client.post("/generate", json=BODY)
        assert failed.status == 500
        assert "ZeroDivisionError" in (await failed.json())["error"]["message"]
        assert (await client.post("/generate", json=BODY)).status == 200


@pytest.mark.timeout(120)
async def test_two_engines_behind_the_real_router(model_path: Path) -> None:
    with engine_process(model_path, "--random-seed", "1") as a, engine_process(model_path, "--random-seed", "2") as b:
        for name, url in (("a", a), ("b", b)):
            post(url, "/update_weight_version", {"new_version": name})
        with router_process([a, b]) as router:
            sampling = {"max_new_tokens": 6, "sampling_seed": 3, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
            sampling |= {"stop_token_ids": [5], "ignore_eos": True, "skip_special_tokens": False, "no_stop_trim": True}
            body = {"input_ids": list(range(30)), "sampling_params": sampling, "return_logprob": True, "rid": "r"}
            async with aiohttp.ClientSession() as session:

                async def ask(i: int) -> dict[str, Any]:
                    async with session.post(router + "/generate", json=body | {"rid": f"r{i}"}) as reply:
                        assert reply.status == 200, await reply.text()
                        return await reply.json()

                replies = await asyncio.gather(*(ask(i) for i in range(10)))
            versions = [reply["meta_info"]["weight_version"] for reply in replies]
            assert sorted(versions) == ["a"] * 5 + ["b"] * 5
            assert {tuple(reply["output_ids"]) for reply in replies} == {tuple(replies[0]["output_ids"])}
            assert {reply["meta_info"]["id"] for reply in replies} == {f"r{i}" for i in range(10)}
            assert all(len(reply["meta_info"]["output_token_logprobs"]) == 6 for reply in replies)
            too_long = post(router, "/generate", {"input_ids": [1] * 3000}, expect=400)
            assert "longer than the model's context length" in str(too_long)
            workers = post(router, "/workers", method="GET")
            assert len(workers["workers"]) == 2
