"""Faults of the first rows are found without loading anything."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.config import Config, DataConfig, DebugConfig, EvalConfig, EvalDatasetConfig, RolloutConfig
from slime.data.preflight import preflight


def config(path: Path | str, *, debug: DebugConfig | None = None, **data: Any) -> Config:
    keys = {"input_key": "prompt", "label_key": "label", **data}
    return Config(data=DataConfig(prompt_data=str(path), **keys), debug=debug or DebugConfig())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}", "label": i}) + "\n" for i in range(50)) + "broken\n")
    return file


def test_good_file(path: Path) -> None:
    assert preflight(config(path)) == []
    assert preflight(config(f"{path}@[10:]")) == []
    assert preflight(config(path, apply_chat_template=True)) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"input_key": "question"}, "no prompt column 'question' (--input-key question); columns found: label, prompt"),
        ({"label_key": "answer"}, "no label column 'answer' (--label-key answer); columns found: label, prompt"),
        ({"metadata_key": "label"}, "metadata column 'label' must be an object"),
    ],
)
def test_wrong_columns_are_reported_once(path: Path, changes: dict[str, str], text: str) -> None:
    (fault,) = preflight(config(path, **changes))
    assert fault.startswith(f"--prompt-data: {path}:1: ")
    assert text in fault


def test_broken_row(path: Path) -> None:
    path.write_text('{"prompt": "a", "label": 1}\n\n{broken\n')
    (fault,) = preflight(config(path))
    assert f"{path}:3: not a JSON object" in fault
    assert preflight(config(path, skip_bad_rows=True)) == []
    path.write_text("{broken\n")
    assert len(preflight(config(path, skip_bad_rows=True))) == 1


def test_missing_empty_and_odd_files(tmp_path: Path) -> None:
    assert preflight(config(tmp_path / "no.jsonl")) == [f"--prompt-data {tmp_path / 'no.jsonl'}: no such file"]
    (tmp_path / "a.jsonl").write_text("\n")
    assert "no rows" in preflight(config(tmp_path / "a.jsonl"))[0]
    (tmp_path / "a.csv").write_text("\n")
    assert ".jsonl and .parquet" in preflight(config(tmp_path / "a.csv"))[0]


def test_files_that_are_not_ours_to_read(tmp_path: Path) -> None:
    missing = tmp_path / "no.jsonl"
    assert preflight(config(missing, rollout_global_dataset=False)) == []
    assert preflight(config(missing, data_source_path="mine.Source")) == []
    (tmp_path / "eval[1]").mkdir()
    (tmp_path / "eval[1]" / "000003.pt").touch()
    replay = DebugConfig(load_debug_rollout_data=f"{tmp_path}/eval[1]/{{rollout_id:06d}}.pt")
    assert preflight(config(missing, debug=replay)) == []


def test_dumps_to_train_on_must_exist(path: Path, tmp_path: Path) -> None:
    template = f"{tmp_path}/dumps/{{rollout_id}}.pt"
    (fault,) = preflight(config(path, debug=DebugConfig(load_debug_rollout_data=template)))
    assert fault.startswith(f"--load-debug-rollout-data {template}: no such file; ")
    # A template that cannot be filled in is reported by the rules.
    assert preflight(config(path, debug=DebugConfig(load_debug_rollout_data="{step}.pt"))) == []


def test_supervised_runs_need_conversations(path: Path, tmp_path: Path) -> None:
    supervised = RolloutConfig(rollout_function_path="slime.rollout.sft_rollout.generate_rollout")
    (fault,) = preflight(replace(config(path), rollout=supervised))
    assert fault.startswith(
        f"--prompt-data: {path}:1: supervised fine-tuning needs a message list in 'prompt', found str"
    )
    assert "--input-key" in fault
    rows = tmp_path / "conversations.jsonl"
    rows.write_text('{"prompt": [{"role": "user", "content": "a"}], "label": 1}\n')
    assert preflight(replace(config(rows), rollout=supervised)) == []


def test_evaluation_sets_are_checked_as_well(path: Path, tmp_path: Path) -> None:
    sets = (
        EvalDatasetConfig(name="good", path=str(path), input_key="prompt"),
        EvalDatasetConfig(name="gone", path=str(tmp_path / "no.jsonl"), input_key="prompt"),
        EvalDatasetConfig(name="odd", path=str(path), input_key="prompt", label_key="answer"),
    )
    gone, odd = preflight(Config(eval=EvalConfig(eval_datasets=sets)))
    assert gone == f"--eval-prompt-data gone {tmp_path / 'no.jsonl'}: no such file"
    assert "--eval-prompt-data odd" in odd
    assert "--label-key or --eval-label-key" in odd


def test_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}]), tmp_path / "a.parquet")
    assert "row 1: no label column" in preflight(config(tmp_path / "a.parquet"))[0]
    assert preflight(config(tmp_path / "a.parquet", label_key=None)) == []


def test_no_heavy_import() -> None:
    code = (
        "import sys, slime.data.preflight, slime.rewards.registry;"
        "print([m for m in ('torch', 'transformers', 'sympy', 'aiohttp', 'pyarrow', 'megatron') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
