"""Prompts from rows: columns, templates, limits, order."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from slime.config.eval_datasets import EvalDatasetConfig
from slime.data.dataset import Dataset, filter_long_prompt, get_source, load_eval_dataset, load_train_dataset
from slime.data.store import BadRowPolicy
from slime.errors import DataError
from slime.types import Sample
from tests.support.prompts import data_args, make_tokenizer


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "data.jsonl"


def test_columns(file: Path) -> None:
    rows = [{"prompt": "a", "label": "1", "metadata": {"k": [1]}}, {"prompt": "b", "label": 2, "metadata": None}]
    dataset = Dataset(write(file, rows), None, prompt_key="prompt", label_key="label")
    assert [(s.prompt, s.label, s.metadata) for s in dataset.samples] == [("a", "1", {"k": [1]}), ("b", 2, {})]


def test_template_and_its_arguments(file: Path, thinking_tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    rows = [
        {"prompt": "q"},
        {"prompt": messages},
        {"prompt": "q", "apply_chat_template_kwargs": {"enable_thinking": True}},
    ]
    dataset = Dataset(
        write(file, rows),
        thinking_tokenizer,
        prompt_key="prompt",
        apply_chat_template=True,
        apply_chat_template_kwargs={"enable_thinking": False},
    )
    tail = "<|im_start|>assistant\n"
    assert [s.prompt for s in dataset.samples] == [
        f"<|im_start|>user\nq<|im_end|>\n{tail}<think>\n\n</think>\n\n",
        f"<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n{tail}<think>\n\n</think>\n\n",
        f"<|im_start|>user\nq<|im_end|>\n{tail}",
    ]
    assert dataset.samples[2].apply_chat_template_kwargs == {"enable_thinking": True}


def test_without_template_prompts_stay_as_they_are(file: Path) -> None:
    messages = [{"role": "user", "content": "q"}]
    dataset = Dataset(write(file, [{"prompt": "q"}, {"prompt": messages}]), None, prompt_key="prompt")
    assert [s.prompt for s in dataset.samples] == ["q", messages]


@pytest.mark.parametrize("form", [lambda t: t, json.dumps])
def test_tools_reach_metadata_and_template(file: Path, thinking_tokenizer: PreTrainedTokenizerFast, form: Any) -> None:
    tools = [{"type": "function", "function": {"name": "search"}}]
    path = write(file, [{"prompt": "q", "tools": form(tools)}])
    dataset = Dataset(path, thinking_tokenizer, prompt_key="prompt", tool_key="tools", apply_chat_template=True)
    assert dataset.samples[0].metadata == {"tools": tools}
    assert '"name": "search"' in str(dataset.samples[0].prompt)


def test_array_of_tools() -> None:
    from slime.data.templates import read_tools

    assert read_tools({"t": np.array([{"a": 1}])}, "t", "f:1") == [{"a": 1}]


def test_multimodal_placeholders_become_typed_items(file: Path) -> None:
    rows = [{"prompt": "see <image> and <image>, hear <audio>", "images": ["a.png", "b.png"], "sounds": ["c.wav"]}]
    keys = {"image": "images", "audio": "sounds"}
    sample = Dataset(write(file, rows), None, prompt_key="prompt", multimodal_keys=keys).samples[0]
    content = [
        {"type": "text", "text": "see "},
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": " and "},
        {"type": "image", "image": "b.png"},
        {"type": "text", "text": ", hear "},
        {"type": "audio", "audio": "c.wav"},
    ]
    assert sample.prompt == [{"role": "user", "content": content}]
    assert sample.multimodal_inputs == {"images": ["a.png", "b.png"], "audio": ["c.wav"]}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "no placeholder", "images": ["a"]}, "1 items of column 'images' have no <image>"),
        ({"prompt": "<image><image>", "images": ["a"]}, "more <image> placeholders than items"),
        ({"prompt": "<image>"}, "more <image> placeholders than items"),
    ],
)
def test_multimodal_counts_must_fit(file: Path, row: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        Dataset(write(file, [row]), None, prompt_key="prompt", multimodal_keys={"image": "images"})


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"question": "q", "label": 1}, r":2: no prompt column 'prompt' \(--input-key prompt\).*label, question"),
        ({"prompt": "q"}, r":2: no label column 'label' \(--label-key label\).*prompt"),
        ({"prompt": 3, "label": 1}, r":2: the prompt must be a string or a list of messages.*int"),
        ({"prompt": [], "label": 1}, r":2: the message list is empty"),
        ({"prompt": ["hi"], "label": 1}, r":2: a message must be"),
        ({"prompt": "q", "label": 1, "metadata": "x"}, r":2: metadata column 'metadata' must be an object.*str"),
        ({"prompt": "q", "label": 1, "tools": "{"}, r":2: tools column 'tools' is a string but not JSON"),
        ({"prompt": "q", "label": 1, "tools": {"a": 1}}, r":2: tools column 'tools' must be a list"),
        ('{"prompt": "q", ', r":2: not a JSON object"),
    ],
)
def test_bad_rows_stop_with_their_place(file: Path, row: Any, text: str) -> None:
    path = write(file, [{"prompt": "q", "label": 1}, row])
    with pytest.raises(DataError, match=text):
        Dataset(path, None, prompt_key="prompt", label_key="label", tool_key="tools")


def test_skipping_bad_rows_up_to_a_share(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(file, [{"prompt": "a"}, "broken", {"prompt": "b"}, {"prompt": "c"}])
    dataset = Dataset(path, None, prompt_key="prompt", bad_rows=BadRowPolicy(skip=True, max_fraction=0.25))
    assert [s.prompt for s in dataset.samples] == ["a", "b", "c"]
    assert f"{path}:2" in caplog.text
    with pytest.raises(DataError, match=r"1 of 4 rows are bad, more than --max-bad-row-fraction 0.2"):
        Dataset(path, None, prompt_key="prompt", bad_rows=BadRowPolicy(skip=True, max_fraction=0.2))


def test_long_prompts_are_left_out(file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(file, [{"prompt": "x" * n} for n in (3, 9, 5, 8)])
    dataset = Dataset(path, tokenizer, None, 8, prompt_key="prompt")
    assert [len(s.prompt) for s in dataset.samples] == [3, 5, 8]


def test_long_message_lists_are_left_out_by_their_rendering(file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": [{"role": "user", "content": "x" * n}]} for n in (1, 2)]
    fixed = len(
        tokenizer.encode(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
        )
    )
    dataset = Dataset(write(file, rows), tokenizer, None, fixed + 1, prompt_key="prompt")
    assert [s.prompt[0]["content"] for s in dataset.samples] == ["x"]
    plain = make_tokenizer(None)
    assert len(filter_long_prompt(dataset.samples, plain, None, 1)) == 1
    assert filter_long_prompt(dataset.samples, plain, None, 0) == []


def test_nothing_left_names_the_flag(file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(file, [{"prompt": "long prompt"}] * 3)
    text = "nothing left after filtering 3 prompts longer than 4 tokens .--rollout-max-prompt-len"
    with pytest.raises(DataError, match=text):
        Dataset(path, tokenizer, None, 4, prompt_key="prompt")


def test_filter_of_an_empty_set(tokenizer: PreTrainedTokenizerFast) -> None:
    assert filter_long_prompt([], tokenizer, None, 3) == []
    samples = [Sample(prompt="long prompt")]
    assert filter_long_prompt(samples, tokenizer, None, None) == samples


def test_empty_file(file: Path) -> None:
    with pytest.raises(DataError, match=r"no rows"):
        Dataset(write(file, []), None, prompt_key="prompt")


def test_template_missing(file: Path) -> None:
    with pytest.raises(DataError, match=r"--apply-chat-template.*no chat template"):
        Dataset(write(file, [{"prompt": "q"}]), make_tokenizer(None), prompt_key="prompt", apply_chat_template=True)


def test_template_that_refuses(file: Path) -> None:
    tokenizer = make_tokenizer("{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match=r":1: the chat template refused the prompt: no system role"):
        Dataset(write(file, [{"prompt": "q"}]), tokenizer, prompt_key="prompt", apply_chat_template=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_shuffle_is_a_permutation_of_the_original_order(file: Path, streaming: bool) -> None:
    path = write(file, [{"prompt": str(i)} for i in range(20)])
    dataset = Dataset(path, None, prompt_key="prompt", seed=7, streaming=streaming)

    def order() -> list[str]:
        return [sample.prompt for i in range(len(dataset)) if (sample := dataset.at(i)) is not None]

    orders: dict[int, list[str]] = {}
    for epoch in (3, 1, 3, 2, 1):
        dataset.shuffle(epoch)
        expected = [str(i) for i in range(20)]
        random.Random(7 + epoch).shuffle(expected)
        assert order() == expected
        orders[epoch] = order()
    assert orders[1] != orders[2] != orders[3]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(("streaming", "workers"), [(True, 0), (False, 2), (True, 2)])
@pytest.mark.timeout(60)
def test_workers_and_streaming_give_the_same_samples(
    file: Path, tokenizer: PreTrainedTokenizerFast, streaming: bool, workers: int, shuffled: bool
) -> None:
    rows: list[Any] = [{"prompt": f"prompt {i}", "label": i} for i in range(120)]
    rows[17], rows[70] = "broken", {"prompt": "x" * 90, "label": 0}
    path = write(file, rows)

    def load(**how: Any) -> Dataset:
        policy = BadRowPolicy(skip=True, max_fraction=0.1)
        keys = {"prompt_key": "prompt", "label_key": "label", "apply_chat_template": True}
        return Dataset(path, tokenizer, None, 95, bad_rows=policy, **keys, **how)

    plain, other = load(), load(streaming=streaming, num_workers=workers)
    if shuffled:
        other.shuffle(1)
    found = [s.to_dict() for i in range(len(other)) if (s := other.at(i)) is not None]
    other.close()
    key = lambda row: row["label"]  # noqa: E731
    expected = sorted((s.to_dict() for s in plain.samples), key=key)
    assert len(expected) == 118
    assert (sorted(found, key=key) if shuffled else found) == expected


def test_streaming_starts_anywhere_and_reports_bad_rows_when_reached(file: Path) -> None:
    path = write(file, [{"prompt": "a"}, {"prompt": "b"}, "broken"])
    dataset = Dataset(path, None, prompt_key="prompt", streaming=True)
    assert [dataset.at(i).prompt for i in (1, 0, 1)] == ["b", "a", "b"]  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r":3: not a JSON object"):
        dataset.at(2)
    with pytest.raises(DataError, match=r"--streaming-data"):
        _ = dataset.samples


def test_settings_reach_the_data_set(file: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write(file, [{"q": "question", "a": "1"}, {"q": "a much longer question", "a": "2"}])
    args = data_args(path, input_key="q", label_key="a", rollout_max_prompt_len=10)
    assert [s.label for s in load_train_dataset(args, tokenizer).samples] == ["1"]
    with pytest.raises(DataError, match=r"--prompt-data"):
        load_train_dataset(data_args(None), tokenizer)
    eval_args = SimpleNamespace(
        eval_max_prompt_len=4, num_data_workers=None, skip_bad_rows=False, max_bad_row_fraction=0.01
    )
    config = EvalDatasetConfig(name="set", path=path, input_key="q", label_key="a")
    with pytest.raises(DataError, match=r"--eval-max-prompt-len"):
        load_eval_dataset(eval_args, config, tokenizer)


def test_sources() -> None:
    sample = Sample(metadata={"source_name": "web"})
    assert get_source(sample) == "web"
    sample.source = "own"  # type: ignore[attr-defined]
    assert get_source(sample) == "own"
    assert get_source(Sample()) == "unknown"
