import argparse
import dataclasses
import sys

import pytest

from slime.cluster.engine_commands import EngineProcessSetting, engine_command, flags_of
from slime.cluster.router import router_arguments, router_values
from slime.config import ClusterConfig, Config, EngineConfig, RolloutConfig, TrainConfig
from slime.config.deployment import ModelDeployment, ServerGroup
from slime.config.engine_plan import plan_engines
from slime.errors import ConfigError


def make_config(**sections):
    base = Config(
        cluster=ClusterConfig(device="cpu", rollout_num_gpus=2, actor_num_gpus_per_node=1),
        train=TrainConfig(precision="fp32"),
        rollout=RolloutConfig(hf_checkpoint="/models/tiny"),
        engine=EngineConfig(rollout_backend="embedded"),
    )
    return dataclasses.replace(base, **sections)


def test_flags_of_values():
    values = {"a_b": 1, "on": True, "off": False, "unset": None, "many": [1, 2], "zero": 0}
    assert flags_of(values) == ["--a-b", "1", "--on", "--many", "1", "2", "--zero", "0"]


def command_of(config, index=0, **setting):
    planned = plan_engines(config).engines[index]
    return engine_command(config, planned, EngineProcessSetting(host="127.0.0.1", **setting))


def test_embedded_command_has_address_precision_and_the_users_values_last():
    config = make_config(sglang={"context_length": 512, "dtype": "bfloat16"})
    command = command_of(config, 1, port=15001, nccl_port=15002)
    assert command[:3] == [sys.executable, "-m", "slime.engines.server"]
    pairs = dict(zip(command[3::2], command[4::2], strict=True))
    assert pairs["--model-path"] == "/models/tiny"
    assert pairs["--port"] == "15001"
    assert pairs["--dtype"] == "bfloat16"
    assert pairs["--context-length"] == "512"
    assert pairs["--random-seed"] == "43"  # --rollout-seed plus the engine's number
    config = make_config(sglang={"cuda_graph_max_bs": 8})
    assert "--cuda-graph-max-bs" not in command_of(config, port=1, nccl_port=2)


def sglang_config(**cluster):
    return make_config(
        cluster=ClusterConfig(device="cuda", actor_num_gpus_per_node=8, rollout_num_gpus=8, **cluster),
        engine=EngineConfig(rollout_backend="sglang"),
    )


def value_of(command, flag):
    return command[command.index(flag) + 1]


def test_sglang_command_divides_tensor_from_pipeline_parallel():
    config = sglang_config(rollout_num_gpus_per_engine=4, offload_rollout=True, colocate=True)
    config = dataclasses.replace(config, sglang={"pp_size": 2, "log_level": "INFO"})
    command = command_of(config, 1, port=1, nccl_port=7, base_gpu_id=4, dist_init_addr="10.0.0.1:9")
    assert command[2] == "sglang.launch_server"
    assert value_of(command, "--tp-size") == "2"
    assert value_of(command, "--base-gpu-id") == "4"
    assert value_of(command, "--log-level") == "info"
    assert (value_of(command, "--nnodes"), value_of(command, "--node-rank")) == ("1", "0")
    assert (value_of(command, "--dist-init-addr"), value_of(command, "--nccl-port")) == ("10.0.0.1:9", "7")
    assert value_of(command, "--random-seed") == "46"  # --rollout-seed plus the GPUs before it
    assert "--enable-memory-saver" in command
    assert "--enable-weights-cpu-backup" not in command  # the trainer sends them again


def test_an_engine_that_shares_no_gpu_keeps_its_memory():
    command = command_of(sglang_config(offload_rollout=True), port=1, nccl_port=2)
    assert "--enable-memory-saver" not in command


def test_a_group_overrides_the_engine_flags_and_a_frozen_model_keeps_a_copy_of_its_weights():
    group = ServerGroup(num_gpus=8, num_gpus_per_engine=8, overrides={"chunked_prefill_size": 64, "page_size": None})
    model = ModelDeployment(name="ref", model_path="/models/r", server_groups=(group,))
    config = dataclasses.replace(
        sglang_config(offload_rollout=True, colocate=True),
        deployment=(model,),
        sglang={"chunked_prefill_size": 32, "page_size": 4, "context_length": 9},
    )
    command = command_of(config, port=1, nccl_port=2)
    assert value_of(command, "--model-path") == "/models/r"
    assert (value_of(command, "--chunked-prefill-size"), value_of(command, "--context-length")) == ("64", "9")
    assert "--page-size" not in command
    assert "--enable-weights-cpu-backup" in command


def test_kinds_of_engines_are_told_what_they_are():
    groups = [ServerGroup(worker_type=kind, num_gpus=2) for kind in ("encoder", "prefill", "decode", "placeholder")]
    config = dataclasses.replace(
        sglang_config(rollout_num_gpus_per_engine=2),
        deployment=(ModelDeployment(name="m", server_groups=tuple(groups)),),
    )
    assert "--encoder-only" in command_of(config, 0, port=1, nccl_port=2)
    prefill = command_of(config, 1, port=1, nccl_port=2, bootstrap_port=5, encoder_urls=("http://e:1", "http://e:2"))
    assert value_of(prefill, "--disaggregation-mode") == "prefill"
    assert value_of(prefill, "--disaggregation-bootstrap-port") == "5"
    at = prefill.index("--encoder-urls")
    assert prefill[at + 1 : at + 3] == ["http://e:1", "http://e:2"]
    assert "--language-only" in prefill
    decode = command_of(config, 2, port=1, nccl_port=2)
    assert value_of(decode, "--disaggregation-mode") == "decode"
    assert "--disaggregation-bootstrap-port" not in decode


def test_every_process_of_an_engine_over_nodes_knows_its_place():
    config = sglang_config(rollout_num_gpus_per_engine=8, num_gpus_per_node=4)
    planned = plan_engines(config).engines[0]
    setting = EngineProcessSetting(host="b", port=1, nccl_port=2, node_rank=1, dist_init_addr="a:3")
    command = engine_command(config, planned, setting)
    assert (value_of(command, "--nnodes"), value_of(command, "--node-rank")) == ("2", "1")
    assert (value_of(command, "--dist-init-addr"), value_of(command, "--tp-size")) == ("a:3", "8")


def test_router_defaults_and_the_users_policy():
    values = router_values(make_config(), host="127.0.0.1", port=3001, prometheus_port=4001)
    assert values["policy"] == "round_robin"
    assert values["disable_circuit_breaker"] is True
    assert values["pd_disaggregation"] is False
    assert router_values(make_config(), host="h", port=1, prometheus_port=2, disaggregated=True)["pd_disaggregation"]
    assert values["request_timeout_secs"] == 14400
    chosen = router_values(make_config(router={"policy": "cache_aware"}), host="h", port=1, prometheus_port=2)
    assert chosen["policy"] == "cache_aware"


def test_router_arguments_that_are_written_otherwise_than_its_api_takes_them():
    known = {"policy", "control_plane_api_keys", "jwt_role_mapping"}
    values = {"policy": "manual", "control_plane_api_keys": ["1:ops:admin:se:cret"], "jwt_role_mapping": ["A=admin"]}
    found = router_arguments(values, known)
    assert found["control_plane_api_keys"] == [("1", "ops", "se:cret", "admin")]
    assert found["jwt_role_mapping"] == {"A": "admin"}
    with pytest.raises(ConfigError, match="write id:name:role:key"):
        router_arguments({"control_plane_api_keys": ["1:ops"]}, known)


def test_an_older_router_lacks_a_preset_but_not_what_the_user_gave():
    assert router_arguments({"balance_abs_threshold": 1, "policy": "manual"}, {"policy"}) == {"policy": "manual"}
    with pytest.raises(ConfigError, match="has no --router-queue-size"):
        router_arguments({"queue_size": 1}, {"policy"})


def test_the_installed_router_reads_keys_and_roles_as_its_own_command_line_does():
    router_args = pytest.importorskip("sglang_router.router_args")
    parser = argparse.ArgumentParser()
    router_args.RouterArgs.add_cli_args(parser)
    given = ["--control-plane-api-keys", "1:ops:admin:secret", "--jwt-role-mapping", "A=admin", "B=user"]
    theirs = router_args.RouterArgs.from_cli_args(parser.parse_args(given))
    values = {"control_plane_api_keys": ["1:ops:admin:secret"], "jwt_role_mapping": ["A=admin", "B=user"]}
    ours = router_arguments(values, router_args.RouterArgs.__dataclass_fields__)
    assert ours["control_plane_api_keys"] == theirs.control_plane_api_keys
    assert ours["jwt_role_mapping"] == theirs.jwt_role_mapping
