"""Whether an engine that holds something else is noticed: against servers that sum up tensors of their own."""

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.errors import WaitTimeoutError, WeightSyncError
from slime.weights.checksum import tensor_checksum
from slime.weights.control import Deadline, EngineCalls
from slime.weights.endpoint import EngineEndpoint
from slime.weights.verify import Verification, Verifiers, WeightVerifier

MODEL = {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "intermediate_size": 64,
    "dtype": "float32",
}
LAYERS = 4


def sent_weights(seed: int) -> dict[str, Tensor]:
    """A model in which only attention and norms are left."""
    generator = torch.Generator().manual_seed(seed)
    weights = {"model.embed_tokens.weight": torch.randn(64, 8, generator=generator)}
    for layer in range(LAYERS):
        for name, rows in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8)):
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.randn(rows, 8, generator=generator)
        weights[f"model.layers.{layer}.input_layernorm.weight"] = torch.randn(8, generator=generator)
    return weights


def fused(weights: dict[str, Tensor], rank: int, size: int) -> dict[str, Tensor]:
    """What process ``rank`` of an SGLang server holds of them."""
    held = {"model.embed_tokens.weight": weights["model.embed_tokens.weight"].chunk(size)[rank].clone()}
    for layer in range(LAYERS):
        start = f"model.layers.{layer}."
        parts = [weights[f"{start}self_attn.{p}_proj.weight"].chunk(size)[rank] for p in "qkv"]
        held[start + "self_attn.qkv_proj.weight"] = torch.cat(parts)
        held[start + "input_layernorm.weight"] = weights[start + "input_layernorm.weight"].clone()
    return held


class Engine:
    """A server that answers ``/server_info`` and ``/weights_checker``, like SGLang or like the embedded engine."""

    def __init__(self, *, is_ours: bool = False, size: int = 1, can_skip: bool = True, is_old: bool = False) -> None:
        self.is_ours = is_ours
        self.size = size
        self.can_skip = can_skip
        self.info_path = "/get_server_info" if is_old else "/server_info"
        self.before_answer: Callable[[], object] = lambda: None
        self.ranks: list[dict[str, Tensor]] = [{} for _ in range(size)]
        self.refusal = ""
        self.skipped: list[list[str]] = []
        self.actions: list[str] = []
        self.url = ""

    def hold(self, weights: dict[str, Tensor]) -> None:
        self.ranks = [dict(weights)] if self.is_ours else [fused(weights, rank, self.size) for rank in range(self.size)]

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == self.info_path:
            return 200, {"tp_size": self.size, "device": "cpu", "dtype": "float32"}
        if path != "/weights_checker":
            return 404, None
        self.before_answer()
        if self.refusal:
            return 400, {"success": False, "message": self.refusal}
        self.actions.append(body["action"])
        if body["action"] == "reset_tensors":
            self.ranks = [{name: torch.zeros_like(tensor) for name, tensor in held.items()} for held in self.ranks]
        skip: list[str] = body.get("skip_tensor_list") or []
        self.skipped.append(skip)
        sum_up: Callable[[Tensor], str] = tensor_checksum if self.is_ours else sha
        ranks: list[dict[str, Any]] = []
        for rank, held in enumerate(self.ranks):
            names = [name for name in held if not (self.can_skip and any(pattern in name for pattern in skip))]
            ranks.append({"checksums": {name: sum_up(held[name]) for name in names}})
            if not self.is_ours:
                ranks[-1]["parallelism_info"] = [{"role": "target", "tp_rank": rank, "tp_size": self.size}]
        return 200, {"success": True, "message": "", "ranks": ranks[::-1]}

    def endpoint(self, number: int) -> EngineEndpoint:
        return EngineEndpoint(url=self.url, name=f"engine {number}", backend="embedded" if self.is_ours else "sglang")


def sha(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


@contextmanager
def serving(*engines: Engine) -> Iterator[list[EngineEndpoint]]:
    servers: list[ThreadingHTTPServer] = []
    for engine in engines:

        class Handler(BaseHTTPRequestHandler):
            of = engine

            def do_GET(self) -> None:
                self._reply({})

            def do_POST(self) -> None:
                self._reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _reply(self, body: dict[str, Any]) -> None:
                status, reply = self.of.answer(self.path, body)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(reply).encode())

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        engine.url = f"http://127.0.0.1:{server.server_port}"
        servers.append(server)
    try:
        yield [engine.endpoint(number) for number, engine in enumerate(engines)]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def verifier(endpoints: list[EngineEndpoint], share: float | None = None) -> WeightVerifier:
    return WeightVerifier(EngineCalls(endpoints, Deadline(10)), model=MODEL, share=share)


def sync(checker: WeightVerifier, weights: dict[str, Tensor], version: str, send_seconds: float = 10.0) -> Verification:
    checker.begin()
    items = list(weights.items())
    with checker.adding(items[:5]):
        pass
    checker.add(items[5:])
    return checker.check(version, send_seconds=send_seconds)


def test_engines_of_both_kinds_and_of_several_processes() -> None:
    engines = [Engine(is_ours=True), Engine(), Engine(size=2)]
    with serving(*engines) as endpoints:
        checker = verifier(endpoints)
        for seed in (1, 2):
            weights = sent_weights(seed)
            for engine in engines:
                engine.hold(weights)
            result = sync(checker, weights, str(seed))
            assert result.verified == (1 + 4 * LAYERS) + 3 * (1 + 2 * LAYERS)
            assert (result.deferred, result.unverified) == (0, 0)
            assert result.metrics["perf/update_weights_verified"] == result.verified


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.2.self_attn.qkv_proj.weight"])
def test_a_wrong_value_is_named_with_engine_process_versions_and_checksums(name: str) -> None:
    engines = [Engine(size=2), Engine(size=2)]
    old, new = sent_weights(1), sent_weights(2)
    with serving(*engines) as endpoints:
        checker = verifier(endpoints)
        for engine in engines:
            engine.hold(old)
        sync(checker, old, "4")
        for engine in engines:
            engine.hold(new)
        engines[1].ranks[1][name][-1, -1] += 1
        with pytest.raises(WeightSyncError) as caught:
            sync(checker, new, "5")
    message = str(caught.value)
    assert message.startswith(f"engine 1 at {engines[1].url}, process 1 does not hold version 5 of {name}: ")
    assert f"its checksum is {sha(engines[1].ranks[1][name])}, {sha(fused(new, 1, 2)[name])} was sent" in message
    assert "before this update the engine had version 4" in message
    assert len(message.splitlines()) == 1


def test_a_value_that_was_not_updated_is_recognised() -> None:
    engine = Engine(is_ours=True)
    old, new = sent_weights(1), sent_weights(2)
    name = "model.layers.3.self_attn.k_proj.weight"
    with serving(engine) as endpoints:
        checker = verifier(endpoints)
        engine.hold(old)
        sync(checker, old, "4")
        engine.hold(new | {name: old[name]})
        with pytest.raises(
            WeightSyncError, match=rf"of {name}: .* {tensor_checksum(old[name])}, which is that of version 4"
        ):
            sync(checker, new, "5")


def test_many_differences_are_counted() -> None:
    engine = Engine()
    with serving(engine) as endpoints:
        engine.hold(sent_weights(1))
        with pytest.raises(WeightSyncError) as caught:
            sync(verifier(endpoints), sent_weights(2), "2")
    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    assert lines[-1] == f"engine 0 at {engine.url}: {1 + 2 * LAYERS - 5} more"


def test_what_cannot_be_compared_is_named_once_and_always_counted(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    weights = sent_weights(1)
    with serving(engine) as endpoints, caplog.at_level(logging.WARNING):
        checker = verifier(endpoints)
        engine.hold(weights)
        engine.ranks[0]["model.rotary.table"] = torch.ones(3)
        del engine.ranks[0]["model.layers.0.input_layernorm.weight"]
        for _ in range(2):
            result = sync(checker, weights | {"model.strange.weight": torch.ones(2)}, "1")
            assert result.verified == 2 * LAYERS
            assert result.unverified == 3
    named = [record.getMessage() for record in caplog.records]
    assert named == [
        "engine 0: not verified, because the table of engine tensors does not have it: model.strange.weight",
        "engine 0: not verified, because the engine does not list it: model.layers.0.input_layernorm.weight",
        "engine 0: not verified, because it was not sent: model.rotary.table",
    ]


def test_an_engine_without_checksums_is_counted_as_unverified(caplog: pytest.LogCaptureFixture) -> None:
    engines = [Engine(), Engine(is_ours=True)]
    engines[0].refusal = "Torch not compiled with CUDA enabled"
    weights = sent_weights(1)
    with serving(*engines) as endpoints, caplog.at_level(logging.WARNING):
        checker = verifier(endpoints)
        engines[1].hold(weights)
        for _ in range(2):
            result = sync(checker, weights, "1")
            assert (result.verified, result.unverified) == (len(weights), len(weights))
    assert len(caplog.records) == 1
    assert "Torch not compiled with CUDA" in caplog.text


def test_a_part_of_the_tensors_is_asked_for_and_the_rest_is_deferred() -> None:
    engine = Engine()
    weights = sent_weights(1)
    seen: set[str] = set()
    with serving(engine) as endpoints:
        checker = verifier(endpoints, share=0.08)
        engine.hold(weights)
        assert sync(checker, weights, "0", send_seconds=1e-9).verified == len(engine.ranks[0])
        for version in range(1, 6):  # five units, one at a time
            result = sync(checker, weights, str(version), send_seconds=1e-9)
            assert result.verified + result.deferred == len(engine.ranks[0])
            assert 1 <= result.verified <= 2
            seen |= {name for name in engine.ranks[0] if not any(p in name for p in engine.skipped[-1])}
        assert seen == engine.ranks[0].keys()
        wrong = "model.layers.1.input_layernorm.weight"
        engine.ranks[0][wrong] = torch.zeros(8)
        with pytest.raises(WeightSyncError, match=wrong):
            sync_often(checker, weights)


def sync_often(checker: WeightVerifier, weights: dict[str, Tensor]) -> None:
    for version in range(6, 11):
        sync(checker, weights, str(version), send_seconds=1e-9)


def test_an_engine_that_cannot_leave_tensors_out_is_not_asked_every_time() -> None:
    engine = Engine(can_skip=False)
    weights = sent_weights(1)
    with serving(engine) as endpoints:
        checker = verifier(endpoints, share=0.08)
        engine.hold(weights)
        results = [sync(checker, weights, str(version), send_seconds=1e-9) for version in range(4)]
    assert len(engine.skipped) == 2, "the first time, and once more to find out"
    assert [result.verified > 0 for result in results] == [True, True, False, False]
    assert results[-1].deferred == len(weights)


@pytest.mark.parametrize(("family", "shared"), [("glm4_moe", "shared_experts"), ("qwen2_moe", "shared_expert")])
def test_experts_that_hold_the_shared_one_are_not_compared(family: str, shared: str) -> None:
    model = MODEL | {"model_type": family, "num_experts": 1}
    prefix = "model.layers.0.mlp."
    parts = {"gate": torch.ones(4, 8), "up": torch.ones(4, 8) * 2}
    sent = {f"{prefix}experts.0.{name}_proj.weight": tensor for name, tensor in parts.items()}
    sent |= {f"{prefix}{shared}.{name}_proj.weight": tensor * 3 for name, tensor in parts.items()}
    engine = Engine()
    engine.ranks = [{f"{prefix}experts.w13_weight": torch.zeros(2, 8, 8)}]
    with serving(engine) as endpoints:
        checker = WeightVerifier(EngineCalls(endpoints, Deadline(10)), model=model, share=None)
        result = sync(checker, sent, "1")
    assert (result.verified, result.unverified) == (0, 3)


def test_the_first_update_must_bring_what_was_loaded() -> None:
    engines = [Engine(size=2), Engine(is_ours=True)]
    loaded, trained = sent_weights(1), sent_weights(2)
    with serving(*engines) as endpoints:
        verifiers = Verifiers(model=MODEL, check_equal=True)
        for weights in (loaded, trained):  # engines that came later loaded what the trainer no longer has
            checker = verifiers.of(EngineCalls(endpoints, Deadline(10)))
            for engine in engines:
                engine.hold(loaded)
                engine.actions.clear()
            checker.begin()
            checker.reset()
            checker.add(weights.items())
            for engine in engines:
                engine.hold(weights)
            assert checker.check("1", send_seconds=1e-9).deferred == 0
            if weights is loaded:
                assert engines[0].actions == ["checksum", "reset_tensors", "checksum", "checksum"]
                assert engines[1].actions == ["snapshot", "reset_tensors", "checksum", "compare"]
            assert sync(checker, weights, "2", send_seconds=1e-9).deferred == 0, "everything every time"
        assert engines[0].actions == ["checksum", "checksum"]


def test_a_trainer_with_other_weights_than_were_loaded_is_told_of_the_flag() -> None:
    engine = Engine()
    with serving(engine) as endpoints:
        checker = WeightVerifier(EngineCalls(endpoints, Deadline(10)), model=MODEL, check_equal=True)
        engine.hold(sent_weights(1))
        checker.begin()
        checker.reset()
        checker.add(sent_weights(2).items())
        engine.hold(sent_weights(2))
        with pytest.raises(WeightSyncError, match=r"--check-weight-update-equal: .* other weights than the engines"):
            checker.check("1", send_seconds=1.0)


def test_checks_end_with_the_deadline_of_the_update_and_name_the_engine() -> None:
    engine = Engine()
    weights = sent_weights(1)
    over = threading.Event()
    with serving(engine, Engine()) as endpoints:
        calls = EngineCalls(endpoints, Deadline(1.0))
        checker = WeightVerifier(calls, model=MODEL, share=None, check_equal=True)
        engine.before_answer = lambda: over.wait(10)
        try:
            for ask in (checker.reset, lambda: checker.check("1", send_seconds=1.0)):
                calls.deadline.restart()
                checker.begin()
                checker.add(weights.items())
                started = time.monotonic()
                with pytest.raises(WaitTimeoutError, match=r"^engine 0: the trainer waited 1 s for .*/weights_checker"):
                    ask()
                assert time.monotonic() - started < 3
        finally:
            over.set()


def test_a_refusal_before_the_first_update_names_the_engine() -> None:
    engine = Engine(is_ours=True)
    with serving(engine) as endpoints:
        checker = WeightVerifier(EngineCalls(endpoints, Deadline(10)), model=MODEL, check_equal=True)
        engine.refusal = "busy"
        with pytest.raises(WeightSyncError, match=r"^snapshot was refused by engine 0: .* answered 400"):
            checker.reset()


def test_engines_that_tell_what_they_are_at_the_old_address_are_compared() -> None:
    engine = Engine(is_old=True)
    weights = sent_weights(1)
    with serving(engine) as endpoints:
        checker = WeightVerifier(EngineCalls(endpoints, Deadline(10)), model=MODEL, share=None, check_equal=True)
        engine.hold(weights)
        checker.begin()
        checker.reset()
        assert engine.actions == ["checksum", "reset_tensors"]
        checker.add(weights.items())
        engine.hold(weights)
        result = checker.check("1", send_seconds=1.0)
    assert result.unverified == 0
    assert result.verified > 0
