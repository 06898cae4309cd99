"""Turn a Llama-shaped GGUF file into an ordinary Hugging Face model directory.

Owns the way from one ``.gguf`` file to ``config.json``, ``model.safetensors``, the tokenizer files and
``generation_config.json``, which any program that reads Hugging Face directories can load. Quantised
blocks are expanded to the exact values that they stand for. Left out: architectures other than Llama and
tokenizers other than byte-level BPE, which are refused by name.

Invariants that tests hold: the directory appears complete or not at all; weights are those that
``transformers`` reads from the same file; digits are split one by one where the GGUF says so.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

COMPLETE_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# GGUF names the way text is cut before the merges, and nothing in the file says how that is done.
PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

CONTROL_TOKEN = 3
USER_DEFINED_TOKEN = 4


class GgufError(ValueError):
    """The GGUF file holds something that this converter does not understand."""


def convert(gguf_path: Path, output_dir: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Write ``output_dir`` from ``gguf_path``; does nothing when the directory is already complete.

    Args:
        gguf_path: a Llama-architecture GGUF file.
        output_dir: directory to create. It is written aside and renamed, so that it is never seen half full.
        dtype: element type of the stored weights.

    Raises:
        GgufError: the architecture, the tokenizer or a tensor is of an unknown kind, or ``output_dir`` exists
            and is not a complete model directory.
    """
    if is_complete(output_dir):
        return
    if output_dir.exists():
        raise GgufError(f"{output_dir} exists but is no complete model directory: remove it or choose another --output")
    reader = GGUFReader(str(gguf_path))
    fields = read_fields(reader)
    config = build_config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors), dtype=dtype)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{output_dir.name}.", dir=output_dir.parent))
    try:
        write_json(aside / "config.json", config)
        write_json(aside / "generation_config.json", build_generation_config(config))
        write_tokenizer(aside, fields, config)
        weights = {name: tensor.to(dtype) for name, tensor in iter_weights(reader.tensors, config)}
        save_file(weights, aside / "model.safetensors", metadata={"format": "pt"})
        # Temporary directories and safetensors files are private; a model directory is an ordinary one.
        aside.chmod(0o755)
        (aside / "model.safetensors").chmod(0o644)
        aside.rename(output_dir)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def is_complete(model_dir: Path) -> bool:
    """Whether every file that ``convert`` writes is there."""
    return all((model_dir / name).is_file() for name in COMPLETE_FILES)


def read_fields(reader: GGUFReader) -> dict[str, Any]:
    """Return the file's metadata as plain Python values.

    Raises:
        GgufError: the architecture is not ``llama``.
    """
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise GgufError(f"GGUF architecture is {architecture!r}; this converter reads 'llama' only")
    return fields


def build_config(fields: Mapping[str, Any], *, tied: bool, dtype: torch.dtype) -> dict[str, Any]:
    """Return ``config.json`` for a Llama model described by GGUF metadata."""
    if any(name.startswith("llama.rope.scaling") for name in fields):
        raise GgufError("GGUF file asks for rope scaling, which this converter does not translate")
    hidden_size = int(fields["llama.embedding_length"])
    num_heads = int(fields["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "head_dim": int(fields.get("llama.rope.dimension_count", hidden_size // num_heads)),
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", num_heads)),
        "pad_token_id": int(fields.get("tokenizer.ggml.padding_token_id", fields["tokenizer.ggml.eos_token_id"])),
        "pretraining_tp": 1,
        "rms_norm_eps": shortest_float32(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": shortest_float32(fields.get("llama.rope.freq_base", 10000.0)),
        "tie_word_embeddings": tied,
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def build_generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``generation_config.json``: where generation starts, ends and pads."""
    return {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def shortest_float32(value: float) -> float:
    """Return the decimal that was meant by a number GGUF keeps as float32: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def iter_weights(tensors: list[ReaderTensor], config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, fp32 tensor) for every tensor of the file.

    Raises:
        GgufError: a tensor's name is not one of a Llama model.
    """
    for tensor in tqdm(tensors, desc="expand weights", unit="tensor", leave=False):
        name = hf_name(tensor.name)
        values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if ".q_proj." in name:
            values = unpermute_rope(values, int(config["num_attention_heads"]))
        elif ".k_proj." in name:
            values = unpermute_rope(values, int(config["num_key_value_heads"]))
        # GGUF memory is mapped read-only: F32 tensors would share it.
        yield name, torch.from_numpy(values.copy() if values.base is not None else values)


def hf_name(gguf_name: str) -> str:
    """Translate a tensor name, as ``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if gguf_name in TOP_NAMES:
        return TOP_NAMES[gguf_name]
    parts = gguf_name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in LAYER_NAMES and parts[3] == "weight":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.weight"
    raise GgufError(f"GGUF tensor {gguf_name!r} is not one of a Llama model")


def unpermute_rope(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of rotary pairs.

    Args:
        weight: [num_heads * head_dim, hidden], rows of a head ordered (pair, half).
        num_heads: heads in ``weight``: query or key/value heads.

    Returns:
        The same shape, rows of a head ordered (half, pair) as Hugging Face keeps them.
    """
    rows, hidden = weight.shape
    head_dim = rows // num_heads
    paired = weight.reshape(num_heads, head_dim // 2, 2, hidden)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows, hidden)


def build_tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    """Build the byte-level BPE tokenizer that GGUF metadata describes.

    Raises:
        GgufError: the tokenizer is not byte-level BPE, or cuts text in a way this converter does not know.
    """
    kind, pre = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise GgufError(f"GGUF tokenizer is {kind!r} with pre-tokenizer {pre!r}; known: 'gpt2' with one of {known}")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind_of_token in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if kind_of_token == CONTROL_TOKEN:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind_of_token == USER_DEFINED_TOKEN:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    return tokenizer


def write_tokenizer(directory: Path, fields: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Write ``tokenizer.json``, ``tokenizer_config.json``, ``special_tokens_map.json`` and the chat template."""
    build_tokenizer(fields).save(str(directory / "tokenizer.json"))
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    special = {
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": tokens[int(fields.get("tokenizer.ggml.unknown_token_id", config["bos_token_id"]))],
    }
    tokenizer_config: dict[str, Any] = {
        **special,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        # Readable by transformers 4.x as well as 5.x, which would write "TokenizersBackend".
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    template = fields.get("tokenizer.chat_template")
    if template is not None:
        tokenizer_config["chat_template"] = template
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    write_json(directory / "special_tokens_map.json", special)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write ``value`` as indented JSON."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Command line: ``python -m tools.convert_gguf_to_hf --gguf FILE --output DIR``."""
    parser = argparse.ArgumentParser(description=main.__doc__, allow_abbrev=False)
    parser.add_argument("--gguf", type=Path, required=True, help="GGUF file to read")
    parser.add_argument("--output", type=Path, required=True, help="model directory to create")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="element type of the stored weights")
    args = parser.parse_args(argv)
    if not args.gguf.is_file():
        print(f"error: --gguf {args.gguf} is not a file", file=sys.stderr)
        return 2
    try:
        convert(args.gguf, args.output, dtype=DTYPES[args.dtype])
    except GgufError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
