"""The decoder against transformers, in float32."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.engines.embedded.shape import read_shape
from slime.errors import ConfigError
from tests.support.tiny_models import make_tiny_model
from tests.unit.engines.driver import GREEDY, Driver, prompt_of

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 64,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, all biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama, one kv head, llama3 rope": ("llama", {"num_key_value_heads": 1, "rope_scaling": LLAMA3_ROPE}),
    "llama, linear rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama, transformers 5 rope": (
        "llama",
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    "llama, head_dim": ("llama", {"head_dim": 24}),
    "llama, packed weights": ("llama", {"hidden_size": 288, "num_attention_heads": 6, "intermediate_size": 300}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3, yarn": ("qwen3", {"rope_scaling": YARN}),
    "qwen2_moe, dense first layer, gated shared expert": ("qwen2_moe", {}),
    "qwen2_moe, every second layer": ("qwen2_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}),
    "qwen2_moe, weights that sum to one": ("qwen2_moe", {"norm_topk_prob": True, "num_hidden_layers": 3}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, weights as they are": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "qwen3_moe, packed weights": ("qwen3_moe", {"hidden_size": 256, "moe_intermediate_size": 256}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, groups, no biases, no norms": (
        "glm4_moe",
        {"n_group": 4, "topk_group": 2, "attention_bias": False, "use_qk_norm": False, "first_k_dense_replace": 0},
    ),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, queries not compressed, one group": (
        "deepseek_v3",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 2},
    ),
    "deepseek_v3, yarn with mscale": ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek_v3, yarn with two mscales": (
        "deepseek_v3",
        {"rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}, "num_hidden_layers": 3},
    ),
    "deepseek_v3, halves instead of pairs": ("deepseek_v3", {"rope_interleave": False, "norm_topk_prob": False}),
}


def reference_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """``[T, V]`` float32 logits of transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_log_probs_of_prompt_and_output_equal_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    path = make_tiny_model(tmp_path, family, **overrides)
    driver = Driver(path, prefill_tokens=16)  # the prompt takes three chunks
    prompt = prompt_of(40)
    request = driver.generate(prompt, sampling=GREEDY | {"max_new_tokens": 12}, logprob_start_len=0, top_logprobs_num=2)
    tokens = prompt + request.output_ids
    expected = torch.log_softmax(reference_logits(path, tokens), -1)
    scored = expected[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    got = torch.tensor([*(request.input_log_probs or [])[1:], *request.output_log_probs])
    torch.testing.assert_close(got, scored, atol=1e-5, rtol=2e-6)  # log-probs down to -20
    assert request.output_ids == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert request.input_log_probs is not None
    assert request.input_log_probs[0] is None
    top = expected[len(prompt) - 1 : -1].topk(2, dim=-1)
    torch.testing.assert_close(
        torch.tensor([row[0] for row in request.output_top if row]), top.values, atol=1e-5, rtol=0
    )
    assert [row[1] for row in request.output_top if row] == top.indices.tolist()


def test_bfloat16_is_close_to_float32(tmp_path: Path) -> None:
    from slime.engines.embedded.attention import PromptAttention, PromptChunk
    from slime.engines.embedded.cache import KvBudget
    from slime.engines.embedded.model import Decoder
    from slime.engines.embedded.prefix import PrefixCache

    path = make_tiny_model(tmp_path, "qwen3")
    shape = read_shape(path)
    tokens = prompt_of(24)
    model = Decoder(shape, dtype=torch.bfloat16, device=torch.device("cpu"))
    model.weights.load(path)
    cache = PrefixCache(shape.cache, dtype=torch.bfloat16, device=torch.device("cpu"), budget=KvBudget(1000))
    entry = cache.create(np.array(tokens, dtype=np.int32))
    prompts = PromptAttention([PromptChunk(entry, 0, 24)], shape.cache)
    positions = torch.arange(24)
    with torch.inference_mode():
        logits = model.forward(torch.tensor(tokens), positions, prompts, None, 24, positions)
    expected = reference_logits(path, tokens)
    error = (logits.float() - expected).abs().mean() / expected.abs().mean()
    assert error < 0.03


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "longrope"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ({"use_sliding_window": True}, "sliding"),
    ],
)
def test_other_models_are_refused(overrides: dict[str, Any], found: str, tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | overrides
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=found):
        read_shape(tmp_path)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_shape(tmp_path / "nowhere")
