"""What a run knows about how its trainer and its engines compute, for the diagnosis of ``--max-logprob-diff``.

Owns the translation of Megatron's values, of an engine's answers and of the ``config.json`` that it loaded into the
same few words. What cannot be learned stays unknown: a diagnosis must not end a run. Tests hold: both translations
of one checkpoint are equal.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.config import Config
from slime.config.hf import normalize_config, read_config_json
from slime.config.sections import RolloutConfig
from slime.engines.features import ask_server_info
from slime.errors import SlimeError
from slime.observability.logprob_diagnosis import LogprobFacts, SideFacts

logger = logging.getLogger(__name__)

_SECONDS = 10.0
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32"}
_PLAIN_KV = ("auto", "bfloat16", "bf16", "float16", "float32")


def logprob_facts(config: Config, engine_urls: Sequence[str]) -> LogprobFacts:
    """Facts of both sides; asks the first engine.

    Args:
        config: The resolved configuration.
        engine_urls: The engines of the run, which are all alike.
    """
    rollout = config.rollout
    truncation = []
    if rollout.rollout_top_p != 1.0:
        truncation.append(f"--rollout-top-p {rollout.rollout_top_p:g}")
    if rollout.rollout_top_k > 0:
        truncation.append(f"--rollout-top-k {rollout.rollout_top_k}")
    own = rollout.custom_generate_function_path is not None
    own = own or rollout.rollout_function_path != RolloutConfig().rollout_function_path
    return LogprobFacts(
        trainer=trainer_facts(config),
        engine=engine_facts(_server_info(engine_urls[0])) if engine_urls else SideFacts(),
        temperature=rollout.rollout_temperature,
        truncation=" ".join(truncation),
        own_generation=own,
    )


def trainer_facts(config: Config) -> SideFacts:
    """What the trainer computes with."""
    megatron = config.megatron
    scaling: str | None = "none"
    if megatron.get("multi_latent_attention", False):
        scaling = None  # another family of rules, with names of its own
    elif megatron.get("use_rope_scaling", False):
        scaling = f"llama3 {float(megatron['rope_scaling_factor']):g}"
    elif megatron.get("rotary_seq_len_interpolation_factor"):
        scaling = f"linear {float(megatron['rotary_seq_len_interpolation_factor']):g}"
    return SideFacts(
        precision=config.train.precision,
        rope_base=float(megatron["rotary_base"]),
        rope_scaling=scaling,
        norm_epsilon=float(megatron["layernorm_epsilon"]),
    )


def engine_facts(info: Mapping[str, Any]) -> SideFacts:
    """What an engine computes with.

    Args:
        info: Its ``/server_info``: the flags it was started with, and its dtype.
    """
    model = _model_config(info)
    dtype = str(info.get("dtype") or "auto")
    if dtype == "auto":
        dtype = str(model.get("dtype") or model.get("torch_dtype") or "")
    quantized = [f"{info['quantization']} weights"] if info.get("quantization") else []
    kv = str(info.get("kv_cache_dtype") or "auto")
    if kv not in _PLAIN_KV:
        quantized.append(f"a key-value cache in {kv}")
    if not model:
        return SideFacts(precision=_PRECISIONS.get(dtype), quantized=", ".join(quantized))
    scaling: Mapping[str, Any] | None = model["rope_scaling"]
    theta, epsilon = model["rope_theta"], model.get("rms_norm_eps")
    return SideFacts(
        precision=_PRECISIONS.get(dtype),
        quantized=", ".join(quantized),
        rope_base=10000.0 if theta is None else float(theta),
        rope_scaling=f"{scaling['rope_type']} {float(scaling.get('factor', 1)):g}" if scaling else "none",
        norm_epsilon=None if epsilon is None else float(epsilon),
    )


def _server_info(url: str) -> Mapping[str, Any]:
    try:
        return ask_server_info(url, timeout_seconds=_SECONDS)
    except SlimeError as error:
        logger.info("%s does not tell how it computes: %s", url, error)
        return {}


def _model_config(info: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's ``config.json`` with the overrides of its command line; empty if it cannot be read here."""
    try:
        content = read_config_json(Path(str(info["model_path"])) / "config.json")
        content |= json.loads(info.get("json_model_override_args") or "{}")
        return normalize_config(content)
    except (SlimeError, KeyError, ValueError, TypeError) as error:
        logger.info("the engine's config.json is not known here: %s", error)
        return {}
