"""What a stock SGLang server is told."""

from __future__ import annotations

from typing import Any

import pytest

from slime.cluster.engine_commands import EngineProcessSetting, engine_command, engine_environment
from slime.cluster.sglang_command import cpu_environment, cpu_presets, sglang_flags
from slime.config import ClusterConfig, Config, EngineConfig, RolloutConfig, TrainConfig
from slime.config.engine_plan import plan_engines
from slime.config.hf import HfModel

SMALL: dict[str, Any] = {
    "num_hidden_layers": 30, "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192,
}  # fmt: skip


def make_config(device: str = "cpu", per_engine: int = 1, **sglang: Any) -> Config:
    return Config(
        cluster=ClusterConfig(
            device=device,
            rollout_num_gpus=2 * per_engine,
            rollout_num_gpus_per_engine=per_engine,
            colocate=True,
            offload_rollout=True,
        ),
        train=TrainConfig(precision="fp32"),
        rollout=RolloutConfig(hf_checkpoint="/models/tiny"),
        engine=EngineConfig(rollout_backend="sglang"),
        hf=HfModel(path="/models/tiny", config=SMALL, model_type="llama"),
        sglang=sglang,
    )


def test_every_form_of_a_value_is_written_for_sglangs_parser() -> None:
    values = {
        "enable_metrics": True,
        "disable_radix_cache": False,
        "dllm_fdfo": False,  # a flag with both forms
        "fp8_gemm_runner_backend": "triton",  # whose flag is called otherwise
        "cuda_graph_bs_decode": [1, 2],
        "mm_process_config": {"image": {"max_pixels": 4}},
        "api_key": None,
        "schedule_conservativeness": 0.5,
    }
    assert sglang_flags(values) == [
        "--enable-metrics",
        "--no-dllm-fdfo",
        "--fp8-gemm-backend", "triton",
        "--cuda-graph-bs-decode", "1", "2",
        "--mm-process-config", '{"image": {"max_pixels": 4}}',
        "--schedule-conservativeness", "0.5",
    ]  # fmt: skip


def test_presets_of_a_cpu_bound_memory_and_what_the_user_gives_wins() -> None:
    presets = cpu_presets(make_config(), {})
    assert presets["attention_backend"] == "torch_native"
    assert presets["sleep_on_idle"] is True
    assert presets["max_running_requests"] == 128
    # 2 GiB / (30 layers x keys and values x 3 heads x 64 x 4 bytes)
    assert presets["max_total_tokens"] == (2 << 30) // (30 * 2 * 3 * 64 * 4)
    given = {"attention_backend": "intel_amx", "max_total_tokens": 99, "max_running_requests": 4, "sleep_on_idle": True}
    assert cpu_presets(make_config(), given) == {}
    assert "max_total_tokens" not in cpu_presets(make_config(), {"mem_fraction_static": 0.3})


def test_memory_of_latents_and_of_long_contexts() -> None:
    latent = HfModel(
        path="m",
        model_type="deepseek_v3",
        config={"num_hidden_layers": 27, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 4096},
    )
    config = Config(train=TrainConfig(precision="bf16"), engine=EngineConfig(rollout_backend="sglang"), hf=latent)
    assert cpu_presets(config, {})["max_total_tokens"] == (2 << 30) // (27 * 576 * 2)
    large = {**SMALL, "num_hidden_layers": 80, "num_key_value_heads": 64, "max_position_embeddings": 131072}
    config = Config(
        train=TrainConfig(precision="fp32"),
        engine=EngineConfig(rollout_backend="sglang"),
        hf=HfModel(path="m", model_type="llama", config=large),
    )
    assert cpu_presets(config, {})["max_total_tokens"] == 2 * 32768
    assert cpu_presets(config, {"context_length": 1000})["max_total_tokens"] == 2000


@pytest.mark.parametrize(
    ("first", "ranks", "num_processes", "cores", "expected"),
    [
        (0, 1, 1, range(4), "0,1,2,3"),
        (1, 1, 2, range(4), "2,3"),
        (2, 2, 4, range(8), "4,5|6,7"),
        (1, 2, 4, range(8), "2,3|4,5"),  # after an engine of another size
        (2, 1, 3, range(2), "0"),  # fewer cores than engines: shared
        (0, 4, 4, [5, 7], "5|7|5|7"),
    ],
)
def test_cores_are_shared_out(first: int, ranks: int, num_processes: int, cores: list[int], expected: str) -> None:
    found = cpu_environment(first=first, ranks=ranks, num_processes=num_processes, cores=list(cores))
    assert found == {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_CPU_OMP_THREADS_BIND": expected}


def test_command_on_a_cpu_and_on_a_gpu() -> None:
    setting = EngineProcessSetting(host="h", port=1, nccl_port=2)
    (planned, *_) = plan_engines(make_config()).engines
    command = engine_command(make_config(log_level="INFO"), planned, setting)
    assert command[command.index("--attention-backend") + 1] == "torch_native"
    assert command[command.index("--dtype") + 1] == "float32"
    assert command[command.index("--log-level") + 1] == "info"
    assert "--skip-server-warmup" in command
    assert "--enable-memory-saver" not in command  # it needs CUDA
    environment = engine_environment(make_config(), planned, num_processes=2, cores=[0, 1])
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    command = engine_command(make_config("cuda"), planned, setting)
    assert "--enable-memory-saver" in command
    assert "--attention-backend" not in command
    assert engine_environment(make_config("cuda"), planned, num_processes=2, cores=[0, 1]) == {}
