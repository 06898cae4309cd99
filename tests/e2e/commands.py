"""Command lines of small real runs, and what is left of a run afterwards."""

import json
import os
import pty
import selectors
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from slime.observability.tracking import read_metrics
from tests.support.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]

PLUGINS = '''
import asyncio
import os
import signal
from pathlib import Path

calls = 0


def letters(args, sample, **kwargs):
    """Share of lower-case letters in the response: varies between samples of an untrained model."""
    assert args.num_rollout is not None
    return sum(c in "abcdefghijklm" for c in sample.response) / max(len(sample.response), 1)


async def stall_evaluation(args, sample, **kwargs):
    if "eval" in str(sample.prompt):
        await stall(args)
    return letters(args, sample)


async def stall_second_rollout(args, sample, **kwargs):
    global calls
    calls += 1
    if calls > 16:
        await stall(args)
    return letters(args, sample)


async def stall(args):
    mark(args)
    await asyncio.sleep(600)


async def slowly(args, sample, **kwargs):
    await asyncio.sleep(0.15 * (sample.index % 16))
    return letters(args, sample)


def stop_engine(args, rollout_id, step_id, model, optimizer, scheduler):
    """Before the first optimizer step: the weight sync after it then waits for an engine that is stopped."""
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "cmdline").read_bytes().split(b"\\0")
        except OSError:
            continue
        if b"slime.engines.server" in words and args.hf_checkpoint.encode() in words:
            os.kill(int(folder.name), signal.SIGSTOP)
    mark(args)


def mark(args):
    (Path(args.output_dir) / "reached").touch()
'''


def make_inputs(folder: Path) -> dict[str, Path]:
    """A tiny model, prompts and plug-ins below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_tiny_model(folder / "model", "qwen3")
    for name, count in (("train", 24), ("eval", 4)):
        rows = [{"prompt": f"{name} {i}: say something", "label": str(i)} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "plugins.py").write_text(PLUGINS)
    return {name: folder / name for name in ("train.jsonl", "eval.jsonl", "plugins.py")} | {"model": model}


def arguments(inputs: dict[str, Path], output: Path, num_rollout: int, *extra: str) -> list[str]:
    """Arguments of a run of ``num_rollout`` rollouts with 4 x 4 samples."""
    return [
        "--hf-checkpoint", str(inputs["model"]),
        "--prompt-data", str(inputs["train.jsonl"]),
        "--input-key", "prompt",
        "--label-key", "label",
        "--rollout-shuffle",
        "--apply-chat-template",
        "--custom-rm-path", f"{inputs['plugins.py']}:letters",
        "--actor-num-nodes", "1",
        "--actor-num-gpus-per-node", "1",
        "--rollout-num-gpus", "1",
        "--num-rollout", str(num_rollout),
        "--rollout-batch-size", "4",
        "--n-samples-per-prompt", "4",
        "--global-batch-size", "16",
        "--micro-batch-size", "8",
        "--rollout-max-response-len", "8",
        "--lr", "1e-3",
        "--output-dir", str(output),
        *extra,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    """The environment of a run: one thread, no proxies to look for."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def without(argv: list[str], flag: str) -> list[str]:
    """``argv`` without a flag and its value."""
    at = argv.index(flag)
    return argv[:at] + argv[at + 2 :]


def run_on_terminal(script: str, argv: list[str], timeout: float = 180) -> tuple[int, str]:
    """Run with a terminal for standard output and error; exit code and everything shown."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (40, 160))
    process = subprocess.Popen(
        [sys.executable, str(ROOT / script), *argv],
        stdout=follower,
        stderr=follower,
        cwd=ROOT,
        env=environment(),
        start_new_session=True,
    )
    os.close(follower)
    shown, deadline = bytearray(), time.monotonic() + timeout
    try:
        with selectors.DefaultSelector() as selector:  # select() itself takes no descriptor above 1023
            selector.register(leader, selectors.EVENT_READ)
            while time.monotonic() < deadline:
                if selector.select(1.0):
                    try:
                        shown += os.read(leader, 65536)
                    except OSError:  # how Linux says that nobody has the terminal open any more
                        break
        return process.wait(max(deadline - time.monotonic(), 1)), shown.decode(errors="replace")
    finally:
        os.close(leader)
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait(10)


def start(script: str, argv: list[str], log: Path) -> subprocess.Popen:
    """Start ``script`` in a process group of its own, its output going to ``log``."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, str(ROOT / script), *argv],
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(),
            start_new_session=True,
        )


def run(script: str, argv: list[str], log: Path, timeout: float = 180) -> int:
    """Run to the end; kills the whole group when it takes too long."""
    process = start(script, argv, log)
    try:
        return process.wait(timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait(10)


def series(output: Path, key: str) -> list[float]:
    """All values of a metric in the order in which they were logged."""
    return [row[key] for row in read_metrics(output / "metrics.jsonl") if key in row]


def processes_of(text: str) -> list[str]:
    """Command lines of live processes that mention ``text`` in their arguments or environment, without this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            where = (folder / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if state not in "ZX" and (text in command or text in where):
            found.append(f"{folder.name} {command[:120]}")
    return found


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Poll until ``condition`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {seconds} s"
        time.sleep(0.01)


def assert_nothing_left(mark: str) -> None:
    """No process of the run, which would mention its directory or carry its mark, and no scratch directory."""
    wait_for(lambda: not processes_of(mark), f"end of {processes_of(mark)}", seconds=15)
    wait_for(lambda: not orphaned_scratch(), f"removal of {orphaned_scratch()}", seconds=5)


def orphaned_scratch() -> list[Path]:
    """Scratch directories, which are named after their driver, whose driver is gone.

    Those of runs before this process are not of the tests: somebody may have killed a run with its guardian.
    """
    since = psutil.Process().create_time()
    named = [path for path in Path("/tmp").glob("slime-*-*") if path.name.split("-")[1].isdigit()]
    orphans = [path for path in named if not Path("/proc", path.name.split("-")[1]).exists()]
    return [path for path in orphans if path.exists() and path.stat().st_mtime >= since]
