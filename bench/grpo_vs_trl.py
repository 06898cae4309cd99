"""Complete GRPO steps per second: this product against TRL's GRPOTrainer, on the quickstart's work.

Both sides get the same model directory, prompts, prompts per step, samples per prompt, response length,
temperature, learning rate, threads and malloc settings, one after the other on an otherwise idle machine.
A complete step is everything between two weight versions: generate, score, train and, here, bring the
engine to the new weights and compare checksums. TRL runs at its fastest setting on a CPU: fp32 weights
with bf16 autocast where the processor has bf16 instructions, micro-batches of 16, no gradient
checkpointing, no reference model.

    make bench-trl
    .venv/bin/python bench/grpo_vs_trl.py --trl-python .venv-trl/bin/python [--steps 8]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROMPTS_PER_STEP = 8
SAMPLES_PER_PROMPT = 8
SAMPLES_PER_STEP = PROMPTS_PER_STEP * SAMPLES_PER_PROMPT
RESPONSE_LENGTH = 8
LEARNING_RATE = 1e-5
# The first steps fault in memory and fill caches on both sides.
WARMUP_STEPS = 2
SIDE_TIMEOUT_SECONDS = 1800

MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}


@dataclass(frozen=True)
class SideResult:
    """Seconds of each complete step after the warm-up, and the mean training reward of all steps."""

    step_seconds: list[float]
    mean_reward: float

    @property
    def samples_per_second(self) -> float:
        """Throughput of a median step."""
        return SAMPLES_PER_STEP / statistics.median(self.step_seconds)


def has_native_bf16() -> bool:
    """Whether this processor multiplies bf16 in hardware."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and re.search(r"\b(avx512_bf16|amx_bf16)\b", cpuinfo.read_text()) is not None


def environment(threads: int) -> dict[str, str]:
    """Return the environment of both sides."""
    return {
        **os.environ,
        **MALLOC_SETTINGS,
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def run_product(args: argparse.Namespace, output: Path) -> SideResult:
    """Run ``args.steps`` steps through the quickstart script and read its ``metrics.jsonl``."""
    command = [str(ROOT / "examples/quickstart/run.sh"), "--num-rollout", str(args.steps)]
    command += ["--eval-interval", str(args.steps), "--save-interval", str(args.steps)]
    names: dict[str, object] = {
        "OUTPUT": output,
        "MODEL": args.model,
        "DATA": args.data,
        "SEED": args.seed,
        "PYTHON": sys.executable,
    }
    names["DYNAMIC_SAMPLING"] = "0"  # TRL's trainer has no such filter: it trains on every group
    env = {**environment(args.threads), **{name: str(value) for name, value in names.items()}}
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=SIDE_TIMEOUT_SECONDS, stdin=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    # The last step also writes a checkpoint, which TRL's side does not.
    seconds = [row["perf/step_time"] - row.get("perf/save_model_time", 0.0) for row in rows if "perf/step_time" in row]
    rewards = [row["rollout/raw_reward"] for row in rows if "rollout/raw_reward" in row]
    return SideResult(seconds[WARMUP_STEPS:], statistics.mean(rewards))


def run_trl(args: argparse.Namespace, output: Path) -> SideResult:
    """Run ``args.steps`` steps through TRL, in its own environment."""
    command = [str(args.trl_python), str(Path(__file__).resolve()), "--inside-trl", str(output)]
    command += ["--model", str(args.model), "--data", str(args.data), "--steps", str(args.steps)]
    command += ["--seed", str(args.seed), "--threads", str(args.threads)]
    env = environment(args.threads)
    subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=SIDE_TIMEOUT_SECONDS, stdin=subprocess.DEVNULL)
    result = json.loads(output.read_text())
    return SideResult(result["step_seconds"][WARMUP_STEPS:], statistics.mean(result["rewards"]))


def train_with_trl(args: argparse.Namespace) -> None:
    """TRL's side, in TRL's environment: train, and write step times and rewards as JSON."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    lines = (args.data / "train.jsonl").read_text().splitlines()
    dataset = Dataset.from_list([json.loads(line) for line in lines])
    rewards: list[float] = []

    def only_number_reward(completions: list, label: list[str], **_: object) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        found = [re.findall(r"\d+", text) for text in texts]
        scores = [float(numbers == [want]) for numbers, want in zip(found, label, strict=True)]
        rewards.append(statistics.mean(scores))
        return scores

    class StepClock(TrainerCallback):
        """Seconds between the ends of optimizer steps."""

        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.last = 0.0

        def on_train_begin(self, *_: object, **__: object) -> None:
            self.last = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            now = time.perf_counter()
            self.seconds.append(now - self.last)
            self.last = now

    clock = StepClock()
    with tempfile.TemporaryDirectory(prefix="trl-") as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=has_native_bf16(),
            per_device_train_batch_size=16,
            gradient_accumulation_steps=SAMPLES_PER_STEP // 16,
            num_generations=SAMPLES_PER_PROMPT,
            max_completion_length=RESPONSE_LENGTH,
            max_steps=args.steps,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            temperature=1.0,
            beta=0.0,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_steps=1,
            report_to="none",
            seed=args.seed,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32),
            processing_class=AutoTokenizer.from_pretrained(args.model, padding_side="left"),
            reward_funcs=only_number_reward,
            args=config,
            train_dataset=dataset,
            callbacks=[clock],
        )
        trainer.train()
    args.inside_trl.write_text(json.dumps({"step_seconds": clock.seconds, "rewards": rewards}))


def report(product: SideResult, trl: SideResult) -> str:
    """Return the table and the ratio."""
    lines = [f"{'':<10} {'step s (median)':>16} {'min':>7} {'max':>7} {'samples/s':>10} {'mean reward':>12}"]
    for name, side in (("slime", product), ("TRL", trl)):
        median = statistics.median(side.step_seconds)
        low, high = min(side.step_seconds), max(side.step_seconds)
        lines.append(
            f"{name:<10} {median:>16.2f} {low:>7.2f} {high:>7.2f} {side.samples_per_second:>10.2f}"
            f" {side.mean_reward:>12.3f}"
        )
    ratio = product.samples_per_second / trl.samples_per_second
    lines.append(f"ratio of samples/s over complete steps: {ratio:.2f}")
    return "\n".join(lines)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="GRPO steps per second against TRL", allow_abbrev=False)
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment with requirements/bench.txt")
    parser.add_argument("--model", type=Path, default=ROOT / "models/SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, default=ROOT / "data/quickstart")
    parser.add_argument("--steps", type=int, default=8, help=f"steps of each side, {WARMUP_STEPS} of them warm-up")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--inside-trl", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.inside_trl is None and args.trl_python is None:
        parser.error("--trl-python is required: make bench-trl prepares it")
    if args.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be above {WARMUP_STEPS}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run both sides and print the ratio."""
    args = parse_arguments(argv)
    if args.inside_trl is not None:
        train_with_trl(args)
        return 0
    with tempfile.TemporaryDirectory(prefix="grpo-vs-trl-") as scratch:
        product = run_product(args, Path(scratch) / "slime")
        trl = run_trl(args, Path(scratch) / "trl.json")
    print(f"\n{PROMPTS_PER_STEP} prompts x {SAMPLES_PER_PROMPT} samples, {args.threads} threads, {args.steps} steps")
    print(report(product, trl))
    return 0


if __name__ == "__main__":
    sys.exit(main())
