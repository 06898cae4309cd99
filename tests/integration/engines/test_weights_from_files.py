"""Weights through files into engine processes: whole checkpoints and deltas, and what can go wrong with them."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.errors import PluginError, SlimeError, WeightSyncError
from slime.weights import delta_files
from slime.weights.checksum import tensor_checksum
from slime.weights.delta import DeltaForm, DeltaPublisher
from slime.weights.disk import CheckpointPublisher
from slime.weights.endpoint import EngineEndpoint
from slime.weights.from_files import FileSettings, FileUpdater, PostWriteHook
from slime.weights.host_pull import pull
from slime.weights.pull_request import PullReport, PullRequest
from tests.integration.engines.conftest import post
from tests.support.engine_process import engine_process
from tests.support.gloo import Rank, run_ranks
from tests.support.tiny_models import make_tiny_model, tiny_weights
from tests.support.weight_updates import let_go

Weights = dict[str, torch.Tensor]
BODY = {"input_ids": list(range(30)), "sampling_params": {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}}


@pytest.fixture(scope="module")
def engines(model_path: Path) -> Iterator[list[str]]:
    with (
        engine_process(model_path, "--skip-tokenizer-init") as a,
        engine_process(model_path, "--skip-tokenizer-init") as b,
    ):
        yield [a, b]


class Host:
    """Pulls in this process, as the actor beside an engine does; remembers what it did."""

    def __init__(self) -> None:
        self.reports: list[PullReport] = []
        self.during: Any = None

    def __call__(self, request: PullRequest) -> list[PullReport]:
        if self.during is not None:
            self.during()
        self.reports.append(pull(request))
        return self.reports[-1:]


def endpoints(urls: Sequence[str], local: Path | None, hosts: Sequence[Host] = ()) -> list[EngineEndpoint]:
    return [
        EngineEndpoint(
            url=url,
            name=f"engine {i}",
            backend="embedded",
            local_dir=None if local is None else str(local / f"host{i}"),
            pull=hosts[i] if hosts else None,
        )
        for i, url in enumerate(urls)
    ]


def updater(publisher: Any, hook: PostWriteHook | None = None, timeout_seconds: float = 60.0) -> FileUpdater:
    settings = FileSettings(
        timeout_seconds=timeout_seconds, post_write=hook, pause_mode=lambda _: "retract", verifier=None
    )
    return FileUpdater(settings, lambda: publisher, rank=0, world_size=1)


def delta(disk: Path, model: Path, encoding: Any = "xor") -> DeltaPublisher:
    return DeltaPublisher(disk, model, DeltaForm(encoding=encoding, checksum_format="xxh3-128"), pre_read_hook=None)


def full(disk: Path, model: Path, **options: bool) -> CheckpointPublisher:
    settings = {"keep_files": False, "is_pulled": False, **options}
    return CheckpointPublisher(disk, model, **settings, pre_read_hook=None)


def initial(model_path: Path, seed: int = 0) -> Weights:
    return tiny_weights(json.loads((model_path / "config.json").read_text()), seed)


def stepped(weights: Weights, *names: str) -> Weights:
    """After an optimizer step that moved some tensors a little."""
    return {k: t + 1e-3 * torch.randn_like(t) if k in names or not names else t for k, t in weights.items()}


def buckets(weights: Weights) -> Iterator[list[tuple[str, torch.Tensor]]]:
    items = list(weights.items())
    yield items[:5]
    yield items[5:]


def assert_held(urls: Sequence[str], weights: Weights, version: str) -> None:
    expected = {name: tensor_checksum(tensor) for name, tensor in weights.items()}
    for url in urls:
        assert post(url, "/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"] == expected
        assert post(url, "/generate", BODY)["meta_info"]["weight_version"] == version


def test_whole_checkpoints(engines: list[str], model_path: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, bool, int]] = []

    def hook(directory: str, engines: Sequence[EngineEndpoint]) -> None:
        seen.append((Path(directory).name, (Path(directory) / "tokenizer.json").is_file(), len(engines)))

    way = updater(full(tmp_path, model_path), hook)
    way.connect(endpoints(engines, None))
    for version in ("1", "2"):
        weights = initial(model_path, 10 + int(version))
        report = way.update(buckets(weights), version)
        assert (report.tensors, report.bytes) == (len(weights), sum(t.nbytes for t in weights.values()))
        assert_held(engines, weights, version)
        assert list(tmp_path.iterdir()) == []
    assert seen == [("weight_v000001", True, 2), ("weight_v000002", True, 2)]


def test_whole_checkpoints_through_local_disks(engines: list[str], model_path: Path, tmp_path: Path) -> None:
    hosts = [Host(), Host()]
    disk = tmp_path / "shared"
    way = updater(full(disk, model_path, keep_files=True, is_pulled=True))
    way.connect(endpoints(engines, tmp_path, hosts))
    for version in ("3", "4"):
        weights = initial(model_path, 10 + int(version))
        way.update(buckets(weights), version)
        assert_held(engines, weights, version)
    assert sorted(path.name for path in disk.iterdir()) == ["weight_v000003", "weight_v000004"]
    assert [report.copied_bytes > 0 for host in hosts for report in host.reports] == [True] * 4


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_deltas_from_the_first_weights_on(engines: list[str], model_path: Path, tmp_path: Path, encoding: str) -> None:
    """Loaded weights are not those of --hf-checkpoint: version 1 brings them before anything is generated."""
    hosts = [Host(), Host()]
    way = updater(delta(tmp_path / "shared", model_path, encoding))
    way.connect(endpoints(engines, tmp_path, hosts))
    resumed = stepped(initial(model_path))
    first = way.update(buckets(resumed), "1")
    assert 0.3 < first.metrics["perf/update_weights_density"] < 1
    assert_held(engines, resumed, "1")
    changed = "model.layers.0.self_attn.q_proj.weight"
    trained = stepped(resumed, changed)
    second = way.update(buckets(trained), "2")
    assert_held(engines, trained, "2")
    differing = sum(a != b for a, b in zip(raw(resumed[changed]), raw(trained[changed]), strict=True))
    total = sum(t.nbytes for t in trained.values())
    assert second.metrics["perf/update_weights_density"] == pytest.approx(differing / total)
    assert 0 < second.bytes < 0.2 * total
    assert [r.patched_tensors for r in hosts[0].reports] == [len(resumed), 1]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def test_equal_weights_are_an_empty_first_version(engines: list[str], model_path: Path, tmp_path: Path) -> None:
    way = updater(delta(tmp_path / "shared", model_path))
    way.connect(endpoints(engines, tmp_path, [Host(), Host()]))
    report = way.update(buckets(initial(model_path)), "1")
    assert (report.bytes, report.metrics["perf/update_weights_density"]) == (0, 0)
    assert not list((tmp_path / "shared").rglob("*.safetensors"))
    assert_held(engines, initial(model_path), "1")


def test_another_dtype_gets_a_base_of_its_own(engines: list[str], tmp_path: Path) -> None:
    half = make_tiny_model(tmp_path / "half", "qwen3", torch_dtype="bfloat16")
    weights = initial(half, 5)
    weights = {name: tensor.float() + 1e-6 for name, tensor in weights.items()}
    way = updater(delta(tmp_path / "shared", half))
    way.connect(endpoints(engines, tmp_path, [Host(), Host()]))
    for version in ("1", "2"):
        way.update(buckets(weights), version)
        assert_held(engines, weights, version)
        weights = stepped(weights)
    assert json.loads((tmp_path / "shared" / "base" / "config.json").read_text())["torch_dtype"] == "float32"


def test_a_restarted_engine_gets_base_and_all_deltas(engines: list[str], model_path: Path, tmp_path: Path) -> None:
    way = updater(delta(tmp_path / "shared", model_path))
    way.connect(endpoints(engines[:1], tmp_path, [Host()]))
    weights = initial(model_path)
    for version in ("1", "2", "3"):
        weights = stepped(weights)
        way.update(buckets(weights), version)
    hosts = [Host(), Host()]
    way.connect(endpoints(engines, tmp_path, hosts))
    report = way.update(buckets(weights), "3")  # nothing was trained since
    assert report.bytes == 0
    assert_held(engines, weights, "3")
    assert [host.reports[0].patched_tensors for host in hosts] == [0, 3 * len(weights)]
    weights = stepped(weights)
    way.update(buckets(weights), "4")
    assert_held(engines, weights, "4")


def test_generation_goes_on_while_hosts_pull(engines: list[str], model_path: Path, tmp_path: Path) -> None:
    host = Host()
    way = updater(delta(tmp_path / "shared", model_path))
    way.connect(endpoints(engines[:1], tmp_path, [host]))
    weights = initial(model_path)
    way.update(buckets(weights), "1")
    answers: list[str] = []
    host.during = lambda: answers.append(post(engines[0], "/generate", BODY)["meta_info"]["weight_version"])
    way.update(buckets(stepped(weights)), "2")
    assert answers == ["1"]


def test_damaged_deltas_end_in_an_error_and_engines_go_on(engines: list[str], model_path: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"

    def damage(directory: str, engines: Sequence[EngineEndpoint]) -> None:
        if directory.endswith("2"):
            (file,) = Path(directory).glob("*.safetensors")
            content = bytearray(file.read_bytes())
            content[-1] ^= 0xFF
            file.write_bytes(content)

    way = updater(delta(shared, model_path), damage)
    way.connect(endpoints(engines, tmp_path, [Host(), Host()]))
    weights = initial(model_path)
    way.update(buckets(weights), "1")
    with pytest.raises(WeightSyncError, match=r"engine \d: host \S+: .*weight_v000002/model-00001-of-00001"):
        way.update(buckets(stepped(weights)), "2")
    assert_held(engines, weights, "1")


def test_a_changed_local_checkpoint_is_repaired(engines: list[str], model_path: Path, tmp_path: Path) -> None:
    host = Host()
    way = updater(delta(tmp_path / "shared", model_path))
    way.connect(endpoints(engines[:1], tmp_path, [host]))
    weights = initial(model_path)
    way.update(buckets(weights), "1")
    file = tmp_path / "host0" / "model.safetensors"
    shutil.copy(make_tiny_model(tmp_path / "other", "qwen3", seed=9) / file.name, file)
    weights = stepped(weights)
    way.update(buckets(weights), "2")
    assert_held(engines[:1], weights, "2")
    assert [report.copied_bytes > 0 for report in host.reports] == [True, True]


def test_a_gap_is_named(engines: list[str], model_path: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    hosts = [Host()]
    way = updater(delta(shared, model_path))
    way.connect(endpoints(engines[:1], tmp_path, hosts))
    weights = initial(model_path)
    way.update(buckets(weights), "1")
    shutil.rmtree(shared / "weight_v000001")
    shutil.rmtree(tmp_path / "host0")
    with pytest.raises(WeightSyncError, match=r"weight_v000001/\S+ cannot be seen here"):
        pull_briefly(hosts[0], way, weights)


def pull_briefly(host: Host, way: FileUpdater, weights: Weights) -> None:
    """Update while files may become visible within a moment only."""
    from dataclasses import replace

    briefly = [replace(e, pull=lambda request: host(replace(request, visible_seconds=0.1))) for e in way._endpoints]
    way._endpoints = tuple(briefly)
    way.update(buckets(stepped(weights)), "2")


def test_a_writer_killed_between_two_files_leaves_no_version(
    engines: list[str], model_path: Path, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    weights = initial(model_path)
    child = os.fork()
    if child == 0:
        real, left = delta_files._save_file, [2]

        def killed(*args: Any, **kwargs: Any) -> None:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            real(*args, **kwargs)

        delta_files._save_file = killed
        delta_files.DeltaWriter.__init__.__kwdefaults__["shard_bytes"] = 0
        delta(shared, model_path).publish(buckets(stepped(weights)), 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [path.name for path in shared.iterdir()] == [".weight_v000001.incomplete"]
    assert len(list(shared.rglob("*.safetensors"))) == 2
    way = updater(delta(shared, model_path))
    way.connect(endpoints(engines, tmp_path, [Host(), Host()]))
    weights = stepped(weights)
    way.update(buckets(weights), "1")
    assert_held(engines, weights, "1")


def test_a_directory_that_engines_cannot_see_is_named(engines: list[str], model_path: Path, tmp_path: Path) -> None:
    def hide(directory: str, engines: Sequence[EngineEndpoint]) -> None:
        shutil.rmtree(directory)

    before = initial(model_path, 1)
    way = updater(full(tmp_path, model_path))
    way.connect(endpoints(engines, None))
    way.update(buckets(before), "1")
    blind = updater(full(tmp_path, model_path), hide)
    blind.connect(endpoints(engines, None))
    with pytest.raises(WeightSyncError, match=r"engine \d: .*weight_v000002.*must see this directory"):
        blind.update(buckets(initial(model_path, 2)), "2")
    let_go(engines)
    assert_held(engines, before, "1")


def test_a_failing_hook_is_named(engines: list[str], model_path: Path, tmp_path: Path) -> None:
    def hook(directory: str, engines: Sequence[EngineEndpoint]) -> None:
        raise KeyError("bucket")

    way = updater(full(tmp_path, model_path), hook)
    way.connect(endpoints(engines, None))
    with pytest.raises(PluginError, match=r"--custom-update-weight-post-write-path failed .*KeyError: 'bucket'"):
        way.update(buckets(initial(model_path)), "1")


def test_a_disk_that_cannot_be_written_is_named(engines: list[str], model_path: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for publisher in (full(blocked, model_path), delta(blocked, model_path)):
        way = updater(publisher)
        way.connect(endpoints(engines, tmp_path, [Host(), Host()]))
        consumed = buckets(initial(model_path))
        with pytest.raises(WeightSyncError, match=r"version 1 cannot be written.*file"):
            way.update(consumed, "1")
        assert next(consumed, None) is None, "other ranks would be left in the gathering"


def update_on_two_ranks(rank: Rank, model: Path, disk: Path, failing: str) -> str:
    """Each rank's part of one update without engines to reach; what it ends with."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{rank.port}", rank=rank.rank, world_size=rank.world_size
    )

    def hook(directory: str, engines: Sequence[EngineEndpoint]) -> None:
        (disk / f"seen_by_{rank.rank}").write_text(Path(directory).name)
        if failing == "hook":
            assert rank.rank == 0

    settings = FileSettings(timeout_seconds=20, post_write=hook, pause_mode=lambda _: "retract", verifier=None)
    publisher = full(model if failing == "disk" else disk, model / "config.json" if failing == "disk" else model)
    way = FileUpdater(settings, lambda: publisher, rank=rank.rank, world_size=rank.world_size)
    way.connect(())
    weights = initial(model)
    try:
        way.update(buckets(weights) if rank.rank == 0 else iter([[], []]), "1")
    except SlimeError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        way.close()
    return "done"


@pytest.mark.parametrize("failing", ["disk", "hook"])
def test_a_failure_of_one_rank_ends_the_update_on_all(model_path: Path, tmp_path: Path, failing: str) -> None:
    first, second = run_ranks(2, update_on_two_ranks, model_path, tmp_path, failing, timeout_seconds=60)
    if failing == "disk":
        assert first.startswith("WeightSyncError: weight version 1 cannot be written")
        assert second == f"WeightSyncError: trainer rank 0: {first.partition(': ')[2]}"
        assert not list(tmp_path.iterdir())
    else:
        assert first.startswith("WeightSyncError: trainer rank 1: --custom-update-weight-post-write-path failed")
        assert second.startswith("PluginError: --custom-update-weight-post-write-path failed")
        assert {path.read_text() for path in tmp_path.glob("seen_by_*")} == {"weight_v000001"}
