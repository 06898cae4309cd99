"""Embedded engine against ``transformers.generate``: tokens per second on the same requests, in one run.

transformers gets all requests at once as one full static batch, its best case. The engine gets them over HTTP, each
request on its own, one after the other, and returns log-probs too. Both run in processes of their own with the same
dtype, threads and malloc settings, in turns; neither stops at eos, so both make the same number of tokens.

    python bench/engine_vs_transformers.py --dtype bfloat16 --num-requests 32 --prompt-len 32 --max-new-tokens 128

Without ``--model-path`` a random Llama of 135 million parameters is made (SmolLM2-135M's shape).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MALLOC = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}
LLAMA_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 2,
}


def make_model(path: Path) -> None:
    """Write a random model of ``LLAMA_135M``'s shape."""
    import torch
    from safetensors.torch import save_file

    c = LLAMA_135M
    hidden, inter, kv = c["hidden_size"], c["intermediate_size"], c["num_key_value_heads"] * c["head_dim"]
    generator = torch.Generator().manual_seed(0)

    def random_weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    weights = {"model.embed_tokens.weight": random_weight(c["vocab_size"], hidden)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", inter, hidden),
            ("mlp.up_proj", inter, hidden),
            ("mlp.down_proj", hidden, inter),
        ):
            weights[f"{at}{name}.weight"] = random_weight(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    (path / "config.json").write_text(json.dumps(c))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def serve_transformers(args: argparse.Namespace) -> None:
    """Child process: generate one static batch for each line on stdin, answer with the seconds it took."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model_path, dtype=getattr(torch, args.dtype)).eval()
    model.generation_config.eos_token_id = None
    for line in sys.stdin:
        ids = torch.tensor(json.loads(line))
        started = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=args.max_new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        assert out.shape[1] - ids.shape[1] == args.max_new_tokens
        sys.stdout.write(f"{seconds}\n")
        sys.stdout.flush()


async def run_engine(url: str, prompts: list[list[int]], args: argparse.Namespace) -> float:
    """Send each prompt as its own request, ``--gap-ms`` apart; seconds from the first request to the last answer."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=args.timeout_seconds)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(prompt: list[int], delay: float) -> None:
            await asyncio.sleep(delay)
            sampling = {"max_new_tokens": args.max_new_tokens, "temperature": 1.0, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
            async with session.post(url + "/generate", json=body) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
                assert len(answer["output_ids"]) == args.max_new_tokens
                assert len(answer["meta_info"]["output_token_logprobs"]) == args.max_new_tokens

        started = time.perf_counter()
        await asyncio.gather(*(one(prompt, i * args.gap_ms / 1000) for i, prompt in enumerate(prompts)))
        seconds = time.perf_counter() - started
        await (await session.post(url + "/flush_cache")).read()
        return seconds


def make_prompts(args: argparse.Namespace, seed: int) -> list[list[int]]:
    """Random prompts; each is repeated for the samples of its group."""
    vocab = json.loads((Path(args.model_path) / "config.json").read_text())["vocab_size"]
    source = random.Random(seed)
    distinct = [[source.randrange(vocab) for _ in range(args.prompt_len)] for _ in range(args.num_requests)]
    return [distinct[i // args.group_size] for i in range(args.num_requests)]


def compare(args: argparse.Namespace) -> float:
    """Run both in turns; returns engine over transformers."""
    environment = os.environ | MALLOC | {"OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": str(Path.cwd())}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ["--model-path", args.model_path, "--dtype", args.dtype]
    server_command = [sys.executable, "-m", "slime.engines.server", *common, "--port", str(port), "--device", "cpu"]
    child_options = [*common, "--threads", str(args.threads), "--max-new-tokens", str(args.max_new_tokens)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    server = subprocess.Popen([*server_command, "--skip-tokenizer-init", "--log-level", "warning"], **pipes)
    child = subprocess.Popen([sys.executable, __file__, "--transformers-child", *child_options], **pipes)
    try:
        if "ready" not in server.stdout.readline():
            raise SystemExit("the engine did not start")
        rates: dict[str, list[float]] = {"transformers": [], "engine": []}
        tokens = args.num_requests * args.max_new_tokens
        for i in range(args.rounds + 1):
            prompts = make_prompts(args, seed=i)
            child.stdin.write(json.dumps(prompts) + "\n")
            child.stdin.flush()
            theirs = float(child.stdout.readline())
            ours = asyncio.run(run_engine(f"http://127.0.0.1:{port}", prompts, args))
            if i:  # the first round warms both up
                rates["transformers"].append(tokens / theirs)
                rates["engine"].append(tokens / ours)
                print(
                    f"round {i}: transformers {tokens / theirs:.0f} tok/s, engine {tokens / ours:.0f} tok/s", flush=True
                )
    finally:
        child.stdin.close()
        for process in (child, server):
            process.terminate()
            process.wait(20)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratio = medians["engine"] / medians["transformers"]
    shape = (
        f"{args.num_requests} requests ({args.group_size} per prompt), {args.prompt_len} + {args.max_new_tokens} tokens"
    )
    print(f"{args.dtype}, {args.threads} threads, {shape}")
    print(f"transformers {medians['transformers']:.0f} tok/s, engine {medians['engine']:.0f} tok/s, ratio {ratio:.2f}")
    return ratio


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model-path", help="Hugging Face directory; a random 135M Llama by default")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--num-requests", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=1, help="requests with the same prompt")
    parser.add_argument("--prompt-len", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gap-ms", type=float, default=5.0, help="time between two requests")
    parser.add_argument("--timeout-seconds", type=float, default=600.0)
    parser.add_argument("--transformers-child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.transformers_child:
        serve_transformers(args)
    elif args.model_path:
        compare(args)
    else:
        with tempfile.TemporaryDirectory() as folder:
            make_model(Path(folder))
            args.model_path = folder
            compare(args)


if __name__ == "__main__":
    main()
