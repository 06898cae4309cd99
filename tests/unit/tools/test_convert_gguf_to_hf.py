"""The converter on a tiny GGUF file that the test writes itself, against independent references."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import convert_gguf_to_hf
from tools.convert_gguf_to_hf import GgufError, convert, hf_name, is_complete, shortest_float32, unpermute_rope

HIDDEN, HEADS, KV_HEADS, LAYERS, FFN = 64, 4, 2, 2, 96
CHARACTERS = ["Ġ", "Ċ", *"abcdefghijklmnopqrstuvwxyz0123456789?."]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["1 2", "a b", "Ġ 1", "Ġ a"]
TOKENS = [*SPECIAL, *CHARACTERS, "12", "ab", "Ġ1", "Ġa"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def permute_for_llama_cpp(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave rotary pairs row by row: the reference for what a GGUF file holds."""
    head_dim = weight.shape[0] // num_heads
    order = [
        head * head_dim + half * (head_dim // 2) + pair
        for head in range(num_heads)
        for pair in range(head_dim // 2)
        for half in range(2)
    ]
    return weight[order]


def write_gguf(
    path: Path, *, architecture: str = "llama", pre: str = "smollm", tied: bool = True
) -> dict[str, np.ndarray]:
    """Write a model of two layers; return the Hugging Face weights it stands for, block rounding included."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)

    expected: dict[str, np.ndarray] = {}

    def add(name: str, hf: str, shape: tuple[int, ...], kind: gguf.GGMLQuantizationType, heads: int = 0) -> None:
        array = (generator.standard_normal(shape) * 0.1).astype(np.float32)
        if kind is gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, array)
            expected[hf] = array
            return
        stored = permute_for_llama_cpp(array, heads) if heads else array
        writer.add_tensor(name, gguf.quantize(stored, kind), raw_dtype=kind)
        expected[hf] = gguf.dequantize(gguf.quantize(array, kind), kind)

    q8, q4, f32 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.F32
    kv_size = HIDDEN // HEADS * KV_HEADS
    add("token_embd.weight", "model.embed_tokens.weight", (len(TOKENS), HIDDEN), q8)
    add("output_norm.weight", "model.norm.weight", (HIDDEN,), f32)
    if not tied:
        add("output.weight", "lm_head.weight", (len(TOKENS), HIDDEN), q8)
    for i in range(LAYERS):
        ours, theirs = f"blk.{i}", f"model.layers.{i}"
        add(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight", (HIDDEN,), f32)
        add(f"{ours}.attn_q.weight", f"{theirs}.self_attn.q_proj.weight", (HIDDEN, HIDDEN), q4, HEADS)
        add(f"{ours}.attn_k.weight", f"{theirs}.self_attn.k_proj.weight", (kv_size, HIDDEN), q4, KV_HEADS)
        add(f"{ours}.attn_v.weight", f"{theirs}.self_attn.v_proj.weight", (kv_size, HIDDEN), q4)
        add(f"{ours}.attn_output.weight", f"{theirs}.self_attn.o_proj.weight", (HIDDEN, HIDDEN), q4)
        add(f"{ours}.ffn_norm.weight", f"{theirs}.post_attention_layernorm.weight", (HIDDEN,), f32)
        add(f"{ours}.ffn_gate.weight", f"{theirs}.mlp.gate_proj.weight", (FFN, HIDDEN), q4)
        add(f"{ours}.ffn_up.weight", f"{theirs}.mlp.up_proj.weight", (FFN, HIDDEN), q4)
        add(f"{ours}.ffn_down.weight", f"{theirs}.mlp.down_proj.weight", (HIDDEN, FFN), q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    root = tmp_path_factory.mktemp("gguf")
    expected = write_gguf(root / "tiny.gguf")
    convert(root / "tiny.gguf", root / "model")
    return root / "model", expected


def test_transformers_loads_exactly_the_weights_of_the_file(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, expected = converted
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    state = model.state_dict()
    for name, array in expected.items():
        np.testing.assert_array_equal(state[name].numpy(), array, err_msg=name)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.config.rms_norm_eps == 1e-5
    assert model.config.rope_parameters["rope_theta"] == 100000.0
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 2)


def test_untied_head_is_kept(tmp_path: Path) -> None:
    expected = write_gguf(tmp_path / "tiny.gguf", tied=False)
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(model.lm_head.weight.detach().numpy(), expected["lm_head.weight"])


def test_digits_are_split_one_by_one(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    # The vocabulary holds merges for "12" and " 1", which must not be used across digits.
    assert tokenizer.convert_ids_to_tokens(tokenizer("ab 12").input_ids) == ["ab", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer("ab 12?").input_ids) == "ab 12?"


def test_gpt2_pre_tokenizer_keeps_merged_digits(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", pre="gpt-2")
    convert(tmp_path / "tiny.gguf", tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.encode("12").tokens == ["12"]


def test_special_tokens_and_chat_template(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted[0])
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (
        1,
        2,
        2,
        0,
    )
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], return_dict=True)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|im_start|>", "ab", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"


def test_second_run_does_nothing(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    directory, _ = converted
    before = (directory / "model.safetensors").stat().st_mtime_ns
    convert(directory.parent / "no such file.gguf", directory)
    assert (directory / "model.safetensors").stat().st_mtime_ns == before


def test_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf")

    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert_gguf_to_hf, "save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_foreign_directory_is_not_overwritten(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(GgufError, match="no complete model directory"):
        convert(tmp_path / "tiny.gguf", tmp_path / "model")
    assert not is_complete(tmp_path / "model")
    assert (tmp_path / "model" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("changes", "message"), [({"architecture": "mamba"}, "architecture is 'mamba'"), ({"pre": "llama-bpe"}, "smollm")]
)
def test_unknown_kinds_are_refused_by_name(
    tmp_path: Path, changes: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(tmp_path / "tiny.gguf", **changes)
    arguments = ["--gguf", str(tmp_path / "tiny.gguf"), "--output", str(tmp_path / "model")]
    assert convert_gguf_to_hf.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


def test_unpermute_undoes_the_reference_permutation() -> None:
    weight = np.arange(4 * 6 * 3, dtype=np.float32).reshape(24, 3)
    np.testing.assert_array_equal(unpermute_rope(permute_for_llama_cpp(weight, 4), 4), weight)


def test_names_and_numbers() -> None:
    assert hf_name("blk.11.ffn_down.weight") == "model.layers.11.mlp.down_proj.weight"
    with pytest.raises(GgufError, match=r"rope_freqs\.weight"):
        hf_name("rope_freqs.weight")
    assert shortest_float32(9.999999747378752e-06) == 1e-05


def test_config_is_plain_json(converted: tuple[Path, dict[str, np.ndarray]]) -> None:
    config = json.loads((converted[0] / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == len(TOKENS)
    assert "quantization_config" not in config
