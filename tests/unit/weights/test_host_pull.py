"""Whatever happens to a pull, the next one ends with exactly the published bytes or with an error that says why."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from slime.errors import WaitTimeoutError, WeightSyncError
from slime.weights import host_pull
from slime.weights.delta_files import DeltaWriter
from slime.weights.host_pull import pull
from slime.weights.pull_request import PullReport, PullRequest

Weights = dict[str, torch.Tensor]


class Publisher:
    """The trainer's side: a base and versions that each change a part of the weights."""

    def __init__(self, root: Path, encoding: Any = "xor", chain: str = "run") -> None:
        self.base, self.disk, self.local = root / "base", root / "disk", root / "local"
        self.base.mkdir()
        self.disk.mkdir()
        self.encoding, self.chain = encoding, chain
        generator = torch.Generator().manual_seed(0)
        self.weights = {name: torch.randn(5, 7, generator=generator) for name in ("a", "b", "c")}
        save_file({"a": self.weights["a"]}, self.base / "model-00001-of-00002.safetensors")
        save_file({k: self.weights[k] for k in "bc"}, self.base / "model-00002-of-00002.safetensors")
        files = {"a": "model-00001-of-00002.safetensors", **dict.fromkeys("bc", "model-00002-of-00002.safetensors")}
        (self.base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        (self.base / "config.json").write_text("{}")
        (self.base / ".cache").write_text("not part of the model")
        self.version = 0
        self.history: list[Weights] = [self.weights]

    def publish(self, *changed: str) -> Path:
        new = {name: t + 1e-3 if name in changed else t for name, t in self.weights.items()}
        self.version += 1
        delta = DeltaWriter(
            self.disk, self.version, chain=self.chain, encoding=self.encoding, checksum_format="xxh3-128"
        )
        for name, tensor in new.items():
            delta.add(name, raw(self.weights[name]), raw(tensor))
        self.weights = new
        self.history.append(new)
        return delta.finish()

    def request(self, version: int | None = None, **changes: Any) -> PullRequest:
        request = PullRequest(
            local_dir=str(self.local),
            base_dir=str(self.base),
            base_version=0,
            disk_dir=str(self.disk),
            version=self.version if version is None else version,
            chain=self.chain,
            timeout_seconds=5.0,
            visible_seconds=0.2,
        )
        return replace(request, **changes)


def raw(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.frombuffer(tensor.numpy().tobytes(), dtype=np.uint8)


def held(local: Path) -> Weights:
    """What an engine would load."""
    index = json.loads((local / "model.safetensors.index.json").read_text())
    found: Weights = {}
    for name, file in index["weight_map"].items():
        with safe_open(local / file, framework="pt") as reader:
            found[name] = reader.get_tensor(name)
    return found


def same(a: Weights, b: Weights) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_base_then_every_version(tmp_path: Path, encoding: str) -> None:
    publisher = Publisher(tmp_path, encoding)
    publisher.publish("a", "c")
    first = pull(publisher.request())
    base_bytes = sum(p.stat().st_size for p in publisher.base.iterdir() if not p.name.startswith("."))
    assert (first.copied_bytes, first.patched_tensors) == (base_bytes, 2)
    assert same(held(publisher.local), publisher.weights)
    assert (publisher.local / "config.json").is_file()
    assert not (publisher.local / ".cache").exists()
    publisher.publish("b")
    publisher.publish()
    second = pull(publisher.request())
    assert (second.copied_bytes, second.patched_tensors) == (0, 1)
    assert same(held(publisher.local), publisher.weights)
    third = pull(publisher.request())
    assert (third.copied_bytes, third.patched_tensors) == (0, 0)
    assert not same(held(publisher.local), publisher.history[0])


def test_the_base_is_never_touched(publisher: Publisher) -> None:
    before = {path: path.read_bytes() for path in publisher.base.iterdir()}
    publisher.publish("a", "b", "c")
    pull(publisher.request())
    assert {path: path.read_bytes() for path in publisher.base.iterdir()} == before


def restart(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"boot": "another"}


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state | {"chain": "of an earlier run"},
        lambda state: state | {"version": 7},
        restart,
        lambda state: {"version": 1},
        lambda state: [],
    ],
    ids=["other run", "ahead", "host restarted", "incomplete", "nonsense"],
)
def test_a_state_that_does_not_count_starts_from_the_base(publisher: Publisher, change: Callable[[Any], Any]) -> None:
    publisher.publish("a")
    pull(publisher.request())
    state = publisher.local / ".weight_sync" / "state.json"
    state.write_text(json.dumps(change(json.loads(state.read_text()))))
    for file in publisher.local.glob("*.safetensors"):
        file.write_bytes(b"left by something else")
    assert pull(publisher.request()).copied_bytes > 0
    assert same(held(publisher.local), publisher.weights)


def test_a_whole_checkpoint_is_a_base_without_deltas(publisher: Publisher) -> None:
    whole = publisher.disk / "weight_v000004"
    shutil.copytree(publisher.base, whole)
    request = publisher.request(4, base_dir=str(whole), base_version=4)
    assert pull(request).copied_bytes > 0
    assert pull(request).copied_bytes == 0
    save_file({"a": torch.ones(2)}, whole / "model-00001-of-00002.safetensors")
    assert pull(replace(request, version=5, base_version=5)).copied_bytes > 0
    assert torch.equal(held(publisher.local)["a"], torch.ones(2))


def test_a_missing_version_is_an_error_and_the_next_pull_recovers(publisher: Publisher) -> None:
    first = publisher.publish("a")
    publisher.publish("b")
    hidden = first.rename(first.with_name("hidden"))
    with pytest.raises(WeightSyncError, match=r"weight_v000001/.*index\.json cannot be seen here"):
        pull(publisher.request())
    hidden.rename(first)
    pull(publisher.request())
    assert same(held(publisher.local), publisher.weights)


def test_a_version_of_another_run_is_refused(publisher: Publisher) -> None:
    publisher.publish("a")
    with pytest.raises(WeightSyncError, match="does another run publish into the same --update-weight-disk-dir"):
        pull(publisher.request(chain="other"))


def test_a_version_under_a_wrong_number_is_refused(publisher: Publisher) -> None:
    publisher.publish("a")
    second = publisher.publish("b")
    shutil.rmtree(second)
    shutil.copytree(publisher.disk / "weight_v000001", second)
    with pytest.raises(WeightSyncError, match=r"leads from version 0 to 1 .*version 2 of run is needed"):
        pull(publisher.request())


def test_every_damaged_byte_of_a_delta_is_noticed(publisher: Publisher) -> None:
    out = publisher.publish("a")
    (file,) = out.glob("*.safetensors")
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    noticed = unused = 0
    for position in range(start, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        file.write_bytes(damaged)
        state = publisher.local / ".weight_sync" / "state.json"
        state.unlink(missing_ok=True)
        with contextlib.suppress(WeightSyncError):
            pull(publisher.request())
            assert same(held(publisher.local), publisher.weights)  # a bit that zstd does not use
            unused += 1
            continue
        assert not state.exists()
        noticed += 1
    assert noticed > 5 * unused
    file.write_bytes(whole)
    pull(publisher.request())
    assert same(held(publisher.local), publisher.weights)


def test_a_local_file_that_somebody_changed_is_noticed_and_repaired(publisher: Publisher) -> None:
    publisher.publish("a")
    pull(publisher.request())
    save_file({"a": torch.zeros(5, 7)}, publisher.local / "model-00001-of-00002.safetensors")
    publisher.publish("a")
    with pytest.raises(WeightSyncError, match=r"tensor a has xxh3-128 \w{32} .*, \w{32} is expected"):
        pull(publisher.request())
    assert pull(publisher.request()).copied_bytes > 0
    assert same(held(publisher.local), publisher.weights)


@pytest.mark.parametrize("survivors", [0, 1, 2])
def test_a_pull_killed_between_two_tensors_starts_over(publisher: Publisher, survivors: int) -> None:
    publisher.publish("a", "b", "c")
    pull(publisher.request())
    publisher.publish("a", "b", "c")
    child = os.fork()
    if child == 0:
        left, real = [survivors], host_pull.apply

        def killed(*args: Any) -> None:
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            real(*args)

        host_pull.apply = killed
        pull(publisher.request())
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert same(held(publisher.local), publisher.history[1]) == (survivors == 0)
    assert pull(publisher.request()).copied_bytes > 0
    assert same(held(publisher.local), publisher.weights)


def test_the_first_pull_of_a_host_may_meet_another(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sees a new directory, the other makes it its own before the first has looked what is in it."""
    real = Path.is_dir

    def is_dir(path: Path) -> bool:
        found = real(path)
        if path == publisher.local and not found:
            monkeypatch.setattr(Path, "is_dir", real)
            pull(publisher.request())
            return True
        return found

    monkeypatch.setattr(Path, "is_dir", is_dir)
    assert pull(publisher.request()).copied_bytes == 0


def test_pulls_of_one_host_take_turns(publisher: Publisher) -> None:
    publisher.publish("a", "b")
    reports: list[PullReport] = []
    threads = [threading.Thread(target=lambda: reports.append(pull(publisher.request()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(report.patched_tensors for report in reports) == [0, 0, 0, 2]
    assert same(held(publisher.local), publisher.weights)


def test_the_wait_for_another_pull_is_bounded(publisher: Publisher) -> None:
    pull(publisher.request())
    with (publisher.local / ".weight_sync" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(WaitTimeoutError, match="waited 0 s for another pull into"):
            pull(publisher.request(timeout_seconds=0.1))
    pull(publisher.request())


def test_a_directory_with_other_files_is_refused_untouched(publisher: Publisher) -> None:
    publisher.local.mkdir()
    (publisher.local / "thesis.tex").write_text("mine")
    with pytest.raises(WeightSyncError, match="holds files that no weight sync wrote"):
        pull(publisher.request())
    assert [path.name for path in publisher.local.iterdir()] == ["thesis.tex"]


def test_a_full_disk_is_named(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(WeightSyncError, match=r"has 0\.0 GiB free, the checkpoint .*/base needs"):
        pull(publisher.request())


def test_a_directory_that_cannot_be_made_is_named(publisher: Publisher) -> None:
    publisher.local.write_text("a file")
    with pytest.raises(WeightSyncError, match=r"host \S+: .*local"):
        pull(publisher.request())


def test_the_hook_sees_every_directory_before_it_is_read(publisher: Publisher, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    (tmp_path / "hook.py").write_text(
        f"def before(directory):\n    with open({str(seen)!r}, 'a') as file:\n        file.write(directory + '\\n')\n"
    )
    first = publisher.publish("a")
    request = publisher.request(pre_read_hook=f"{tmp_path / 'hook.py'}:before")
    pull(request)
    pull(request)
    assert seen.read_text().split() == [str(publisher.base), str(first)]
