"""The whole loop on one device: generation, training and weight syncs in turns, and where its time and memory go.

    python -m bench.gpu.colocated                      # Qwen3-0.6B's shape, SGLang, 32 prompts of 8 samples, 512 tokens
    python -m bench.gpu.colocated --shape tiny --device cpu --backend embedded --prompts 4 --response-tokens 16

Runs the verbs of ``train.py``. After the first rollout the same requests are posted to the same engine directly,
in one batch: what generation could reach without the loop. Prints every number when it is known, and writes
the report after every step. Further flags of ``train.py`` follow ``--``; SGLang's own, as a server takes them, are
given in one string by ``--server-flags``.

Where Megatron must stay out of the engines' path, ``--megatron-path`` gives it to the driver and the trainer alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.gpu.setting import SHAPES, Budget, announce, await_file, make_model, say, table, write_report
from slime.errors import SlimeError

GIB = float(1 << 30)
WAIT_SECONDS = 60.0
PROMPT = "Continue the list of numbers and words, one after the other, with commas: "
MOMENTS = ("engines_released", "trainer_awake", "weights_meet", "trainer_asleep", "engines_awake")

MOVES = ("perf/wake_up_time", "perf/hold_parameters_time", "perf/sleep_time")


def main() -> None:
    """Command line; see the module."""
    argv = sys.argv[1:]
    end = argv.index("--") if "--" in argv else len(argv)
    own, further = argv[:end], argv[end + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--backend", default="sglang", choices=("sglang", "embedded"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="per prompt")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--row-tokens", type=int, default=16_384)
    parser.add_argument("--server-flags", default="", help="SGLang's flags as its server takes them")
    parser.add_argument("--megatron-path", help="folder that holds megatron, for the driver and the trainer alone")
    parser.add_argument("--budget-seconds", type=float, default=240.0, help="begin no step that may end later")
    parser.add_argument("--models", type=Path, help="where models are made and kept")
    parser.add_argument("--announce", type=Path, help="file to write when everything is up, or has failed")
    parser.add_argument("--wait-for", type=Path, help="file of another measurement to wait for before the first step")
    parser.add_argument("--run-dir", type=Path, help="where the run writes its metrics and logs")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    options = parser.parse_args(own)
    if options.megatron_path:
        sys.path.insert(0, options.megatron_path)
    with tempfile.TemporaryDirectory() as scratch:
        command = arguments(options, Path(scratch), further)
        say("train.py " + shlex.join(command))
        try:
            Measurement(options, Budget(options.budget_seconds)).run(command)
        except SlimeError as error:
            say(f"failed: {type(error).__name__}: {error}")
            sys.exit(1)
        finally:
            announce(options.announce)


def arguments(options: argparse.Namespace, folder: Path, further: list[str]) -> list[str]:
    """The command line of the run."""
    model = make_model(options.models or folder, options.shape)
    prompts = folder / "prompts.jsonl"
    rows = [(f"{i:04d} " + PROMPT * 8)[: options.prompt_tokens] for i in range(options.prompts * 2)]
    prompts.write_text("".join(json.dumps({"prompt": row, "label": str(i)}) + "\n" for i, row in enumerate(rows)))
    argv = ["--hf-checkpoint", str(model), "--prompt-data", str(prompts), "--input-key", "prompt"]
    argv += ["--label-key", "label", "--rm-type", "random", "--advantage-estimator", "grpo", "--device", options.device]
    argv += ["--colocate", "--actor-num-gpus-per-node", "1", "--rollout-backend", options.backend]
    argv += ["--num-rollout", str(options.steps), "--rollout-batch-size", str(options.prompts)]
    argv += ["--n-samples-per-prompt", str(options.samples), "--global-batch-size"]
    argv += [str(options.prompts * options.samples), "--rollout-max-response-len", str(options.response_tokens)]
    argv += ["--use-dynamic-batch-size", "--max-tokens-per-gpu", str(options.row_tokens), "--lr", "1e-6"]
    argv += ["--output-dir", str(options.run_dir or folder / "run")]
    if options.megatron_path:
        # What the driver's environment has is what engines get; the trainer needs one folder more.
        path = os.pathsep.join([options.megatron_path, os.environ.get("PYTHONPATH", "")])
        argv += ["--train-env-vars", json.dumps({"PYTHONPATH": path})]
    for token in shlex.split(options.server_flags):
        argv.append(f"--sglang-{token.removeprefix('--')}" if token.startswith("--") else token)
    return argv + further


class Measurement:
    """One run and what is known of it so far."""

    def __init__(self, options: argparse.Namespace, budget: Budget) -> None:
        self._options = options
        self._budget = budget
        self._steps: list[dict[str, float]] = []
        self._direct: dict[str, float] = {}

    def run(self, argv: list[str]) -> None:
        """Launch, loop, report."""
        from slime.cli import parse_args
        from slime.cluster.launch import launch

        started = time.monotonic()
        config = parse_args(argv)
        with launch(config) as run:
            say(f"up after {time.monotonic() - started:.1f} s")
            announce(self._options.announce)
            await_file(self._options.wait_for, WAIT_SECONDS)
            first = timed(run.sync_weights)
            say(f"first weight sync {first:.2f} s")
            for step in run.steps():
                if step and not self._budget.allows(1.5 * self._steps[-1]["step"]):
                    say(f"step {step} and later are left out: the budget ends")
                    break
                self._steps.append(self._step(run, step))
                self._report()

    def _step(self, run: Any, step: int) -> dict[str, float]:
        seconds: dict[str, float] = {}
        rollout: list[Any] = []
        began = time.monotonic()
        with run.generating():
            seconds["generate"] = timed(lambda: rollout.append(run.rollout.generate(step)))
        if step == 0:
            pause = time.monotonic()
            self._post_directly(run, rollout[0].batch)
            began += time.monotonic() - pause
        turn = time.monotonic()
        with run.training():
            seconds["to trainer"] = time.monotonic() - turn
            metrics: dict[str, float] = {}
            seconds["train"] = timed(lambda: metrics.update(run.trainer.train(step, rollout[0])))
        seconds["sync"] = timed(run.sync_weights)
        seconds["step"] = time.monotonic() - began
        record = dict(run.reporter.pending(step))
        seconds["tokens"] = rollout[0].report.num_samples * record["rollout/response_len/mean"]
        wanted = ("perf/update_weights_time", "perf/sleep_time", "perf/wake_up_time", "perf/hold_parameters_time")
        difference = "train/train_rollout_logprob_abs_diff"
        seconds |= {name: value for name, value in record.items() if name in wanted or name.startswith("memory/")}
        seconds["difference"] = metrics[difference]
        say(f"step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in seconds.items()))
        return seconds

    def _post_directly(self, run: Any, batch_ref: Any) -> None:
        """The requests of a rollout in one batch to its engine, twice; the second time counts."""
        import ray

        from slime import http_control

        batch = ray.get(batch_ref, timeout=60)
        lengths = list(batch.response_lengths)
        prompts = [row[: len(row) - n].tolist() for row, n in zip(batch.tokens, lengths, strict=True)]
        sampling = [{"temperature": 1.0, "max_new_tokens": n, "ignore_eos": True} for n in lengths]
        payload = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
        url = run._engines.urls[0]
        for attempt in range(2):
            http_control.request(f"{url}/flush_cache", {}, timeout_seconds=30)
            took = timed(lambda: http_control.request(f"{url}/generate", payload, timeout_seconds=300))
            self._direct = {"seconds": took, "tokens": float(sum(lengths))}
            say(f"posted directly, {attempt}: {took:.2f} s, {sum(lengths) / took:,.0f} tokens/s")
            if not self._budget.allows(3 * took):
                break
        http_control.request(f"{url}/flush_cache", {}, timeout_seconds=30)

    def _report(self) -> None:
        options = self._options
        title = (
            f"{options.shape}, {options.backend} engine, {options.prompts} x {options.samples} samples of "
            f"{options.prompt_tokens} + {options.response_tokens} tokens, GRPO, one {options.device} device."
        )
        parts = [title, table(self._rows()), self._summary()]
        if self._memory():
            parts.append(table(self._memory()))
        write_report(options.out, "colocated", "Training and generation on one device", *parts)

    def _rows(self) -> list[dict[str, str]]:
        names = ("generate", "to trainer", "train", "sync", "step")
        return [
            {"step": str(i), **{f"{name} s": f"{step[name]:.2f}" for name in names}}
            | {
                "response tokens/s": f"{step['tokens'] / step['generate']:,.0f}",
                "sent and verified s": f"{step.get('perf/update_weights_time', float('nan')):.3f}",
                "outside generation, training, sync": f"{outside(step):.1%}",
                "mean abs log-prob difference": f"{step['difference']:.4f}",
            }
            for i, step in enumerate(self._steps)
        ]

    def _summary(self) -> str:
        later = self._steps[1:] or self._steps
        loop = statistics.median(step["tokens"] / step["generate"] for step in later)
        lines = []
        if self._direct:
            direct = self._direct["tokens"] / self._direct["seconds"]
            lines.append(
                f"Generation in the loop {loop:,.0f} tokens/s (median without the first step), the same requests "
                f"posted directly {direct:,.0f}: {loop / direct:.2f} of it."
            )
        moves = {name: [step[name] for step in later if name in step] for name in MOVES}
        known = [f"{name} {statistics.median(values):.3f} s" for name, values in moves.items() if values]
        if known:
            lines.append("Medians of the trainer's moves: " + ", ".join(known) + ".")
        return "\n".join(lines)

    def _memory(self) -> list[dict[str, str]]:
        found = []
        for moment in MOMENTS:
            key = f"memory/{moment}_device_bytes"
            values = [step for step in self._steps if key in step]
            if values:
                own = f"memory/{moment}_trainer_bytes"
                found.append(
                    {
                        "moment": moment.replace("_", " "),
                        "device GiB, first step": f"{values[0][key] / GIB:.2f}",
                        "last step": f"{values[-1][key] / GIB:.2f}",
                        "trainer's tensors GiB, first step": f"{values[0][own] / GIB:.2f}",
                        "trainer's, last step": f"{values[-1][own] / GIB:.2f}",
                    }
                )
        return found


def outside(step: Mapping[str, float]) -> float:
    """Share of a step in which nothing is generated, trained or synchronised."""
    return 1.0 - (step["generate"] + step["train"] + step["sync"]) / step["step"]


def timed(function: Callable[[], Any]) -> float:
    """Seconds of a call."""
    started = time.monotonic()
    function()
    return time.monotonic() - started


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
