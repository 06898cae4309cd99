"""Training speed of one device: packed rows through the product's own training step, optimizer included.

    python -m bench.gpu.train_speed                                  # Qwen3-0.6B's shape, rows of 16,384 tokens
    python -m bench.gpu.train_speed --shape tiny --row-tokens 256 --sample-tokens 64 --device cpu --precision fp32

A step is ``MegatronWorker.train`` on a rollout that fills ``--rows`` rows: cutting, packing, one forward and backward
pass per row, one optimizer step, metrics. The target is 64,000 tokens per second with one row per step.
Prints each step, and with ``--profile`` the kernels that take most of the time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu.setting import SHAPES, Budget, announce, await_file, make_model, say, table, write_report
from slime.config import Config
from slime.types import RolloutBatch
from tests.support.training import make_config
from tests.support.workers import running_worker

TARGET = 64_000
WAIT_SECONDS = 150.0
PEAK_TFLOPS = 790.0
"""What an H200 reaches in bf16 matrix products."""


def main() -> None:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--row-tokens", type=int, default=16_384, help="tokens of a packed row")
    parser.add_argument("--sample-tokens", type=int, default=2_048, help="of them each sample's")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="rows per optimizer step")
    parser.add_argument("--steps", type=int, default=6, help="timed steps, after two that warm up")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--variants", nargs="+", default=["default"], choices=sorted(VARIANTS))
    parser.add_argument("--profile", action="store_true", help="also list the most expensive kernels of a step")
    parser.add_argument("--budget-seconds", type=float, default=240.0, help="begin nothing that may end later")
    parser.add_argument("--turns", action="store_true", help="also time the moves to host memory and back")
    parser.add_argument("--start-after", type=Path, help="file to wait for before anything is put on the device")
    parser.add_argument("--wait-for", type=Path, help="file of another measurement to wait for, once warm")
    parser.add_argument("--announce", type=Path, help="file to write at the end")
    parser.add_argument("--models", type=Path, help="where models are made and kept")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    options = parser.parse_args()
    budget = Budget(options.budget_seconds)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            model = make_model(options.models or Path(scratch), options.shape)
            await_file(options.start_after, WAIT_SECONDS)
            run(model, options, budget)
        finally:
            announce(options.announce)


def run(model: Path, options: argparse.Namespace, budget: Budget) -> None:
    """Every variant; the report is written after each, since the process may be ended before the next is done."""
    speeds: list[dict[str, str]] = []
    moves: list[dict[str, str]] = []
    for variant, rows in itertools.product(options.variants, options.rows):
        if not budget.allows(30.0):
            say(f"{variant}, {rows} rows: left out, the budget ends")
            continue
        with running_worker(config_of(model, variant, rows, options)) as worker:
            speeds.append(timed(worker, variant, rows, options, budget))
            if options.turns and not moves:
                moves = turns(worker)
        parts = [table(speeds)] + ([table(moves)] if moves else [])
        write_report(options.out, "train_speed", "Training speed", headline(options), *parts)


VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "default": ((), {}),
    "recomputed loss": ((), {"recompute_loss_function": True}),
    "recomputed layers": (
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        {},
    ),
}
FLAGS = ("--lr", "1e-6", "--lr-decay-style", "constant")


def headline(options: argparse.Namespace) -> str:
    """What was run."""
    samples = options.row_tokens // options.sample_tokens
    return (
        f"{options.shape}, {options.precision}: rows of {options.row_tokens} tokens ({samples} samples of "
        f"{options.sample_tokens}, {options.prompt_tokens} of them prompt), GRPO without a reference, Adam. Tokens per "
        f"second count rows only, padding excluded; a step includes packing, optimizer and metrics. MFU: "
        f"matrix products and attention over {PEAK_TFLOPS:.0f} TFLOP/s. Target: {TARGET} tokens per second."
    )


def config_of(model: Path, variant: str, rows: int, options: argparse.Namespace) -> Config:
    """The configuration of one variant, with so many rows per optimizer step."""
    argv, train = VARIANTS[variant]
    count = rows * (options.row_tokens // options.sample_tokens)
    data = {"global_batch_size": count, "rollout_batch_size": count, "n_samples_per_prompt": 1}
    data |= {"use_dynamic_batch_size": True}
    data |= {"max_tokens_per_gpu": options.row_tokens + options.row_tokens // options.sample_tokens}
    return make_config(
        model,
        (*FLAGS, *argv),
        cluster={"device": options.device},
        train={"precision": options.precision} | train,
        data=data,
        algorithm={"advantage_estimator": "grpo"},
    )


def timed(worker: Any, variant: str, rows: int, options: argparse.Namespace, budget: Budget) -> dict[str, str]:
    """Steps of one worker."""
    config = worker.config
    vocab, tokens = config.megatron.vocab_size, rows * options.row_tokens
    seconds, parts = [], []
    for step in range(options.steps + 2):
        batch = make_batch(rows, options, vocab, step)
        synchronize()
        started = time.perf_counter()
        metrics = worker.train(batch)
        synchronize()
        took = time.perf_counter() - started
        parts.append({name: value for name, value in metrics.items() if name.startswith("perf/")})
        say(
            f"{variant}, {rows} rows, step {step}: {took:.3f} s, {tokens / took:,.0f} tokens/s, loss "
            f"{metrics['train/loss']:.4f}, grad norm {metrics['train/grad_norm']:.3f}"
        )
        if step >= 2:
            seconds.append(took)
        if step == 1:
            await_file(options.wait_for, WAIT_SECONDS)
        if not budget.allows(took * 2):
            break
    if options.profile and rows == options.rows[0] and budget.allows(20.0):
        profile(worker, make_batch(rows, options, vocab, 99))
    best = statistics.median(seconds or [took])
    flops = rows * flops_of_row(worker, options)
    inside = statistics.median(part["perf/actor_train_time"] for part in parts[-len(seconds or [0]) :])
    return {
        "variant": variant,
        "rows per step": str(rows),
        "s per step (median)": f"{best:.3f}",
        "of it passes and optimizer": f"{inside:.3f}",
        "tokens/s": f"{tokens / best:,.0f}",
        "MFU": f"{flops / best / PEAK_TFLOPS / 1e12:.2f}",
        "of the target": f"{tokens / best / TARGET:.2f}",
        "peak GiB": f"{peak_gib():.1f}",
    }


def turns(worker: Any) -> list[dict[str, str]]:
    """Leave and come back, twice; checks that the weights are what they were."""
    before = [p.detach().cpu().clone() for p in worker.chunks[0].parameters()]
    found = []
    for move in ("sleep", "hold_parameters", "sleep", "wake_up") * 2:
        started = time.perf_counter()
        getattr(worker, move)()
        synchronize()
        took = time.perf_counter() - started
        memory = {name: f"{value / 2**30:.2f}" for name, value in worker.device_memory.items()}
        found.append({"move": move, "s": f"{took:.3f}", "GiB": ", ".join(f"{k} {v}" for k, v in memory.items())})
        say(f"{move}: {took:.3f} s, {found[-1]['GiB']}")
    same = all(torch.equal(p.detach().cpu(), b) for p, b in zip(worker.chunks[0].parameters(), before, strict=True))
    assert same, "the weights changed on their way"
    say("weights came back bit for bit")
    return found


def make_batch(rows: int, options: argparse.Namespace, vocab: int, seed: int) -> RolloutBatch:
    """Random samples that fill rows exactly: a sample's last token is not part of its row."""
    rng = np.random.default_rng(seed)
    count, length = rows * (options.row_tokens // options.sample_tokens), options.sample_tokens + 1
    response = length - options.prompt_tokens
    rewards = [float(value) for value in rng.normal(size=count)]
    return RolloutBatch(
        rollout_id=seed,
        tokens=[rng.integers(0, min(vocab, 100_000), size=length).astype(np.int32) for _ in range(count)],
        response_lengths=[response] * count,
        loss_masks=[np.ones(response, dtype=np.float32) for _ in range(count)],
        rewards=rewards,
        raw_rewards=rewards,
        truncated=[False] * count,
        sample_indices=list(range(count)),
        group_ids=list(range(count)),
        rollout_ids=list(range(count)),
        rollout_mask_sums=[float(response)] * count,
        weight_versions=[("1",)] * count,
        rollout_log_probs=[np.full(response, -np.log(vocab), dtype=np.float32) for _ in range(count)],
    )


def flops_of_row(worker: Any, options: argparse.Namespace) -> float:
    """Forward and backward of one row: 6 per weight and token, and causal attention."""
    values = worker.config.megatron
    weights = sum(p.numel() for name, p in worker.chunks[0].named_parameters() if p.dim() == 2)
    if values["untie_embeddings_and_output_weights"]:
        weights -= values["padded_vocab_size"] * values["hidden_size"]  # the embedding multiplies nothing
    samples, width = options.row_tokens // options.sample_tokens, values["num_attention_heads"] * values["kv_channels"]
    attention = 6.0 * values["num_layers"] * width * samples * options.sample_tokens**2
    return 6.0 * weights * options.row_tokens + attention


def profile(worker: Any, batch: RolloutBatch) -> None:
    """Print the operators of one step by their own device time."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=kinds) as recorded:
        worker.train(batch)
        synchronize()
    key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    say(recorded.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=70))


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_gib() -> float:
    """Largest memory of tensors so far."""
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else float("nan")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
