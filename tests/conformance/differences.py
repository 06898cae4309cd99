"""Where the engines differ on purpose: one row each, probed on both, and shown in ``docs/engines.md``.

``python -m tests.conformance.differences`` writes the table into the page.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.targets import PROMPT, Kind, Target, exchange

PAGE = Path(__file__).resolve().parents[2] / "docs" / "engines.md"
_BEGIN = "<!-- differences: written by python -m tests.conformance.differences -->"
_END = "<!-- end of differences -->"
_ARRAY = "model.layers.0.self_attn.q_proj.weight"


@dataclass(frozen=True)
class Difference:
    """One intended difference.

    Args:
        topic: What it is about.
        embedded: What the embedded engine does, in words.
        sglang: What SGLang does, in words.
        probe: Asks an engine; its result shows what it does.
        expected: The result by engine.
    """

    topic: str
    embedded: str
    sglang: str
    probe: Callable[[Target], Any]
    expected: dict[Kind, Any]


def _generate_status(**body: Any) -> Callable[[Target], Any]:
    def probe(target: Target) -> Any:
        sampling = {"max_new_tokens": 4, "ignore_eos": True} | body.get("sampling_params", {})
        return exchange(target.url, "/generate", {"input_ids": PROMPT, **body, "sampling_params": sampling})[0]

    return probe


def _repeats_with_a_seed(target: Target) -> bool:
    sampling = {"max_new_tokens": 24, "ignore_eos": True, "sampling_seed": 7}
    return len({tuple(target.generate(input_ids=PROMPT, sampling_params=sampling)["output_ids"]) for _ in "12"}) == 1


def _checksum_names(target: Target) -> bool:
    names = target.post("/weights_checker", {"action": "checksum"})["ranks"][0]["checksums"]
    return _ARRAY in names


def _status(path: str, body: dict[str, Any] | None = None) -> Callable[[Target], int]:
    return lambda target: target.status(path, body)


DIFFERENCES = (
    Difference(
        "`sampling_seed`",
        "honoured: the same seed gives the same tokens, in any batch",
        "honoured only with `--sglang-enable-deterministic-inference`, which needs CUDA",
        _repeats_with_a_seed,
        {"embedded": True, "sglang": False},
    ),
    Difference(
        "unknown top-level field of `/generate`",
        "refused (400), so that a misspelt one is noticed",
        "ignored",
        _generate_status(return_logprobs=True),
        {"embedded": 400, "sglang": 200},
    ),
    Difference(
        "grammars (`regex`, `json_schema`, `ebnf`)",
        "refused (400)",
        "constrained by its grammar backend",
        _generate_status(sampling_params={"regex": "[0-9]+"}),
        {"embedded": 400, "sglang": 200},
    ),
    Difference(
        "`logit_bias`",
        "refused (400)",
        "added to the logits",
        _generate_status(sampling_params={"logit_bias": {"65": 1.0}}),
        {"embedded": 400, "sglang": 200},
    ),
    Difference(
        "names of `/weights_checker` checksums",
        "those of the Hugging Face checkpoint",
        "those of its fused parameters (`qkv_proj`, `gate_up_proj`)",
        _checksum_names,
        {"embedded": True, "sglang": False},
    ),
    Difference(
        "`/get_weights_by_name`",
        "every tensor of the checkpoint",
        "some model classes only; not Qwen3",
        _status("/get_weights_by_name", {"name": _ARRAY}),
        {"embedded": 200, "sglang": 400},
    ),
    Difference(
        "OpenAI endpoints (`/v1/chat/completions`, `/v1/completions`)",
        "none (404)",
        "served",
        _status("/v1/completions", {"model": "default", "prompt": "x", "max_tokens": 2}),
        {"embedded": 404, "sglang": 200},
    ),
)


def table() -> str:
    """The rows in Markdown."""
    lines = ["| | embedded engine | SGLang |", "|---|---|---|"]
    lines += [f"| {row.topic} | {row.embedded} | {row.sglang} |" for row in DIFFERENCES]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """``page`` with the present table between its two marks."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert begin, f"{PAGE} lacks the mark before the table"
    assert end, f"{PAGE} lacks the mark after the table"
    return f"{before}{_BEGIN}\n\n{table()}\n\n{_END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    sys.stdout.write(f"{PAGE}: {len(DIFFERENCES)} rows\n")
