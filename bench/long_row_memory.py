"""Memory of one training step on a long row with a real vocabulary: with whole logits, and with chunks.

    python -m bench.long_row_memory                    # 65,536 tokens, 151,936 words, chunks only: 7 minutes, 1.2 GiB
    python -m bench.long_row_memory --tokens 4096 --whole

A model of tiny width, so that what is measured are the logits: one row of responses goes through the trainer's
own worker (old log-probs, loss, gradient, update). Prints the peak of the allocator beside the bytes that the
logits of the row would take.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))

import numpy as np

from tests.support.memory import peak_bytes
from tests.support.rollouts import make_rollout
from tests.support.tiny_models import make_tiny_model
from tests.support.training import make_config
from tests.support.workers import LINEAR_ADAM, running_worker

RESPONSE = 1024


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=65_536, help="response tokens of the row")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--chunk", type=int, default=256, help="--log-probs-chunk-size")
    parser.add_argument("--whole", action="store_true", help="also without --recompute-loss-function")
    options = parser.parse_args()
    logits = options.tokens * options.vocabulary * 4
    print(f"{options.tokens} tokens x {options.vocabulary} words: logits of {logits / 2**30:.2f} GiB in fp32")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(
            Path(folder) / "model", "qwen3", vocab_size=options.vocabulary, hidden_size=32, tie_word_embeddings=True
        )
        chunk = options.chunk * options.vocabulary * 4
        measure(model, options.tokens, "chunks", recompute_loss_function=True, log_probs_chunk_size=options.chunk)
        print(f"  one chunk: {chunk / 2**30:.2f} GiB; head's weight: {options.vocabulary * 32 * 4 / 2**30:.3f} GiB")
        if options.whole:
            measure(model, options.tokens, "whole logits")


def measure(model: Path, tokens: int, name: str, **flags: Any) -> None:
    """Train one row twice and print the peak of the second time."""
    batch = make_rollout(num_groups=1, group_size=tokens // RESPONSE, fan_out=False, max_response=RESPONSE)
    lengths = [RESPONSE] * len(batch)
    rows = [row[: len(row) - n] for row, n in zip(batch.tokens, batch.response_lengths, strict=True)]
    full = replace(
        batch,
        tokens=[make_row(prompt, i) for i, prompt in enumerate(rows)],
        response_lengths=lengths,
        loss_masks=[np.ones(RESPONSE, dtype=np.float32) for _ in lengths],
        rollout_mask_sums=[float(RESPONSE)] * len(lengths),
        rollout_log_probs=None,
    )
    data = {"global_batch_size": len(full), "use_dynamic_batch_size": True, "max_tokens_per_gpu": 2 * tokens}
    algorithm = {"entropy_coef": 0.01, "advantage_estimator": "gspo"}
    config = make_config(model, LINEAR_ADAM, data=data, algorithm=algorithm, train={"precision": "fp32", **flags})
    with running_worker(config) as worker:
        started = time.monotonic()
        peak = peak_bytes(lambda: worker.train(full))
        print(f"  {name}: peak {peak / 2**30:.2f} GiB in {time.monotonic() - started:.0f} s", flush=True)


def make_row(prompt: np.ndarray, seed: int) -> np.ndarray:
    """The prompt and a random response."""
    response = np.random.default_rng(seed).integers(0, 250, size=RESPONSE)
    return np.concatenate([prompt, response]).astype(np.int32)


if __name__ == "__main__":
    main()
