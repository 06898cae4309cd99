"""Every `train.py` command in README, docs and examples is accepted by the real command line (``--dry-run``)."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.sft.make_data import main as make_conversations
from tests.support.tiny_models import make_tiny_model
from tools.generate_comparison_data import main as generate_data

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented_commands() -> Iterator[tuple[str, list[str]]]:
    """Yield (page, tokens of the command) for complete commands; an ellipsis marks an excerpt."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                tokens = shlex.split(line, comments=True)
                if any(token in ("train.py", "train_async.py") for token in tokens) and "..." not in tokens:
                    yield page.name, tokens


COMMANDS = list(documented_commands())


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the documents mention, at a small size."""
    folder = tmp_path_factory.mktemp("documented")
    make_tiny_model(folder / "models" / "SmolLM2-135M-Instruct")
    generate_data(["--num-train", "32", "--num-eval", "8", "--output", str(folder / "data" / "quickstart")])
    shutil.copy(folder / "data" / "quickstart" / "train.jsonl", folder / "train.jsonl")
    make_conversations(["--input", str(folder / "data" / "quickstart"), "--output", str(folder / "talks")])
    shutil.copy(folder / "talks" / "train.jsonl", folder / "conversations.jsonl")
    shutil.copy(ROOT / "examples" / "quickstart" / "reward.py", folder / "reward.py")
    return folder


def dry_run(script: str, flags: list[str], folder: Path) -> None:
    command = [sys.executable, str(ROOT / script), *flags, "--dry-run"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr


def test_there_are_commands_to_check() -> None:
    assert "README.md" in {page for page, _ in COMMANDS}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("page", "tokens"), COMMANDS, ids=[page for page, _ in COMMANDS])
def test_documented_command_is_accepted(page: str, tokens: list[str], workspace: Path) -> None:
    script = next(i for i, token in enumerate(tokens) if token in ("train.py", "train_async.py"))
    dry_run(tokens[script], tokens[script + 1 :], workspace)


EXAMPLES = {
    "quickstart": ("quickstart", "train.py", "examples/quickstart/result.py", {}),
    "sft": ("sft", "train_async.py", "examples.sft.result", {}),
    "teacher in the trainer": ("on_policy_distillation", "train.py", "examples.on_policy_distillation.result", {}),
    "teacher behind an address": (
        *("on_policy_distillation", "train.py", "examples.on_policy_distillation.result"),
        {"TEACHER_TYPE": "sglang"},
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_command_is_accepted(name: str, workspace: Path, tmp_path: Path) -> None:
    """The script's own command, taken by a stand-in for the interpreter that writes down its arguments."""
    folder, script, what_follows, more = EXAMPLES[name]
    recorder = tmp_path / "python"
    recorder.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" >> {shlex.quote(str(tmp_path / 'argv'))}\n")
    recorder.chmod(0o755)
    shutil.copytree(workspace / "talks", tmp_path / "output" / "data")
    model = str(workspace / "models" / "SmolLM2-135M-Instruct")
    settings = {
        "PYTHON": str(recorder),
        "OUTPUT": str(tmp_path / "output"),
        "MODEL": model,
        "TEACHER": model,
        "DATA": str(workspace / "data" / "quickstart"),
        **more,
    }
    command = ["bash", str(ROOT / "examples" / folder / "run.sh")]
    subprocess.run(command, env={**os.environ, **settings}, timeout=60, check=True)
    arguments = (tmp_path / "argv").read_text().splitlines()
    flags = arguments[arguments.index(script) + 1 : arguments.index(what_follows)]
    if flags[-1] == "-m":
        del flags[-1]
    assert "--prompt-data" in flags
    dry_run(script, flags, ROOT)
