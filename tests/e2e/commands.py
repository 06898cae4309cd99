"""Command lines of small real runs, and what is left of a run afterwards."""

import json
import os
import subprocess
import sys
from pathlib import Path

from slime.observability.tracking import read_metrics
from tests.support.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]

REWARD = '''
def letters(args, sample, **kwargs):
    """Share of lower-case letters in the response: varies between samples of an untrained model."""
    return sum(c in "abcdefghijklm" for c in sample.response) / max(len(sample.response), 1)
'''


def make_inputs(folder: Path) -> dict[str, Path]:
    """A tiny model, prompts and a reward below ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_tiny_model(folder / "model", "qwen3")
    for name, count in (("train", 24), ("eval", 4)):
        rows = [{"prompt": f"{name} {i}: say something", "label": str(i)} for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    return {name: folder / name for name in ("train.jsonl", "eval.jsonl", "reward.py")} | {"model": model}


def arguments(inputs: dict[str, Path], output: Path, num_rollout: int, *extra: str) -> list[str]:
    """Arguments of a run of ``num_rollout`` rollouts with 4 x 4 samples."""
    return [
        "--hf-checkpoint", str(inputs["model"]),
        "--prompt-data", str(inputs["train.jsonl"]),
        "--input-key", "prompt",
        "--label-key", "label",
        "--rollout-shuffle",
        "--apply-chat-template",
        "--custom-rm-path", f"{inputs['reward.py']}:letters",
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
