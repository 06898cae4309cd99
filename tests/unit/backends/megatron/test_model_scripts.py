"""``scripts/models/*.sh`` of mixture-of-experts models against the ``config.json`` of the models they are for."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron.args import MegatronFlagFamily
from slime.backends.megatron.hf_flags import check_model_values, model_values
from slime.config.hf import HfModel, normalize_config

SCRIPTS = Path(__file__).parents[4] / "scripts" / "models"

QWEN3 = {
    "model_type": "qwen3_moe", "vocab_size": 151936, "head_dim": 128, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
    "num_attention_heads": 128, "vocab_size": 129280, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "attention_bias": False,
}  # fmt: skip
KIMI = DEEPSEEK | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "vocab_size": 163840, "rope_theta": 50000.0,
    "rope_scaling": DEEPSEEK["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0},
    "n_routed_experts": 384, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
}  # fmt: skip
GLM = {
    "model_type": "glm4_moe", "vocab_size": 151552, "head_dim": 128, "num_attention_heads": 96,
    "num_key_value_heads": 8, "rope_theta": 1000000, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
    "attention_bias": True, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-30B-A3B": QWEN3 | {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "moe_intermediate_size": 768,
    },
    "qwen3-235B-A22B": QWEN3 | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3-5layer": DEEPSEEK | {"num_hidden_layers": 5},
    "deepseek-v3-20layer": DEEPSEEK | {"num_hidden_layers": 20},
    "kimi-k2": KIMI,
    "kimi-k2-thinking": KIMI | {
        "rms_norm_eps": 1e-5, "rope_scaling": KIMI["rope_scaling"] | {"factor": 64.0},
    },
    "moonlight": DEEPSEEK | {
        "hidden_size": 2048, "intermediate_size": 11264, "num_hidden_layers": 27, "num_attention_heads": 16,
        "vocab_size": 163840, "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": None, "q_lora_rank": None,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446,
    },
    "glm4.5-106B-A12B": GLM | {
        "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46, "n_routed_experts": 128,
        "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False,
    },
    "glm4.5-355B-A32B": GLM | {
        "hidden_size": 5120, "intermediate_size": 12288, "num_hidden_layers": 92, "n_routed_experts": 160,
        "moe_intermediate_size": 1536, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True,
    },
}  # fmt: skip


def model_args(name: str) -> list[str]:
    command = f'set -eu; source "{SCRIPTS / name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    env = {"PATH": "/usr/bin:/bin"}
    result = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=10, check=True)
    return result.stdout.splitlines()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_script_fits_its_model(name: str) -> None:
    hf = HfModel(path=name, config=normalize_config(CONFIGS[name]), model_type=CONFIGS[name]["model_type"])
    args, explicit, problems = MegatronFlagFamily()._parse_tokens(model_args(name))
    derived = model_values(hf)
    assert [*problems, *check_model_values(derived, vars(args), explicit, hf)] == []
    # The shape of the model is in the script, not only in the checkpoint.
    structural = {"num_experts", "moe_layer_freq", "q_lora_rank", "kv_lora_rank", "v_head_dim", "moe_router_topk"}
    assert structural & derived.keys() <= explicit | {"q_lora_rank"}


def test_every_mixture_has_a_config_here() -> None:
    mixtures = {path.stem for path in SCRIPTS.glob("*.sh") if "--num-experts" in model_args(path.stem)}
    assert mixtures == set(CONFIGS)
