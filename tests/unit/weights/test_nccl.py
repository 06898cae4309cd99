"""Which processes get which settings of NCCL."""

import pytest

from slime.config import ClusterConfig, Config
from slime.weights.nccl import nccl_environment


def test_multicast_is_off_on_gpus_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"):
        monkeypatch.delenv(name, raising=False)
    gpu = Config(cluster=ClusterConfig(device="cuda"))
    assert nccl_environment(gpu) == {"NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}
    assert nccl_environment(Config(cluster=ClusterConfig(device="cpu"))) == {}
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert nccl_environment(gpu) == {"NCCL_CUMEM_ENABLE": "0"}
