"""Held-out likelihood and accuracy of model directories, computed by transformers, apart from the trainer."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass(frozen=True)
class Score:
    """Of one model: mean negative log-likelihood of an answer's tokens, and the share of exact greedy answers."""

    nll: float
    accuracy: float


@torch.no_grad()
def score(model_dir: Path, conversations: list[list[dict[str, Any]]]) -> Score:
    """Score the last turn of each conversation given those before it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    nll, num_tokens, num_exact = 0.0, 0, 0
    for messages in conversations:
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, tokenize=False)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        assert whole.startswith(prompt), "this chat template changes what came before"
        ids = tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"]
        length = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
        log_probs = torch.log_softmax(model(ids).logits[0, length - 1 : -1].double(), dim=-1)
        answer = ids[0, length:]
        nll -= log_probs.gather(1, answer[:, None]).sum().item()
        num_tokens += len(answer)
        # Greedy decoding writes the answer exactly if each of its tokens is the likeliest after those before it.
        num_exact += bool((log_probs.argmax(-1) == answer).all())
    return Score(nll / num_tokens, num_exact / len(conversations))


def main(argv: list[str] | None = None) -> int:
    """Command line: ``python -m examples.sft.result DATA BEFORE AFTER``; exit code 1 if it did not get better."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("data", type=Path, help="jsonl file with one conversation in 'messages' a row")
    parser.add_argument("before", type=Path, help="model directory")
    parser.add_argument("after", type=Path, help="model directory")
    args = parser.parse_args(argv)
    rows = [json.loads(line)["messages"] for line in args.data.read_text(encoding="utf-8").splitlines()]
    before, after = score(args.before, rows), score(args.after, rows)
    for name, found in (("before", before), ("after", after)):
        print(
            f"Held out, {name}: negative log-likelihood {found.nll:.4f} (perplexity {math.exp(found.nll):.3f}), "
            f"exact answers {found.accuracy:.3f}"
        )
    return int(after.nll >= before.nll)


if __name__ == "__main__":
    sys.exit(main())
