import dataclasses
import sys

from slime.cluster.engine_commands import engine_command, flags_of
from slime.cluster.router import router_values
from slime.config import ClusterConfig, Config, EngineConfig, RolloutConfig, TrainConfig


def make_config(**sections):
    base = Config(
        cluster=ClusterConfig(device="cpu", rollout_num_gpus=2),
        train=TrainConfig(precision="fp32"),
        rollout=RolloutConfig(hf_checkpoint="/models/tiny"),
        engine=EngineConfig(rollout_backend="embedded"),
    )
    return dataclasses.replace(base, **sections)


def test_flags_of_values():
    values = {"a_b": 1, "on": True, "off": False, "unset": None, "many": [1, 2], "zero": 0}
    assert flags_of(values) == ["--a-b", "1", "--on", "--many", "1", "2", "--zero", "0"]


def test_embedded_command_has_address_precision_and_the_users_values_last():
    config = make_config(sglang={"context_length": 512, "dtype": "bfloat16"})
    command = engine_command(config, index=1, host="127.0.0.1", port=15001, base_gpu_id=0)
    assert command[:3] == [sys.executable, "-m", "slime.engines.server"]
    pairs = dict(zip(command[3::2], command[4::2], strict=True))
    assert pairs["--model-path"] == "/models/tiny"
    assert pairs["--port"] == "15001"
    assert pairs["--dtype"] == "bfloat16"
    assert pairs["--context-length"] == "512"
    assert pairs["--random-seed"] == "43"  # --rollout-seed plus the engine's number
    config = make_config(sglang={"cuda_graph_max_bs": 8})
    assert "--cuda-graph-max-bs" not in engine_command(config, index=0, host="h", port=1, base_gpu_id=0)


def test_sglang_command_divides_tensor_from_pipeline_parallel():
    cluster = ClusterConfig(device="cuda", rollout_num_gpus=8, rollout_num_gpus_per_engine=4, offload_rollout=True)
    config = make_config(
        cluster=cluster, engine=EngineConfig(rollout_backend="sglang"), sglang={"pp_size": 2, "log_level": "info"}
    )
    command = engine_command(config, index=1, host="h", port=1, base_gpu_id=4)
    assert command[2] == "sglang.launch_server"
    assert command[command.index("--tp-size") + 1] == "2"
    assert command[command.index("--base-gpu-id") + 1] == "4"
    assert "--enable-memory-saver" in command


def test_router_defaults_and_the_users_policy():
    values = router_values(make_config(), host="127.0.0.1", port=3001, prometheus_port=4001)
    assert values["policy"] == "round_robin"
    assert values["disable_circuit_breaker"] is True
    assert values["request_timeout_secs"] == 14400
    chosen = router_values(make_config(router={"policy": "cache_aware"}), host="h", port=1, prometheus_port=2)
    assert chosen["policy"] == "cache_aware"
