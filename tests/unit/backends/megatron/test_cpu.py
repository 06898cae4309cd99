"""The CPU substitutions: all in force, harmless twice, guarded by version, gentle to others."""

from __future__ import annotations

import importlib.metadata

import pytest
import torch
from torch import distributed as dist

from slime.backends.megatron import cpu
from slime.errors import ConfigError

cpu.install()

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is substituted where CUDA exists")
ROWS = (*cpu.TORCH_SUBSTITUTIONS, *cpu.MEGATRON_SUBSTITUTIONS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.owner}.{row.name}")
def test_every_row_is_in_force_and_says_why(row: cpu.Substitution) -> None:
    assert row.applied()
    assert row.reason


def test_no_attribute_is_substituted_twice() -> None:
    assert len({(row.owner, row.name) for row in ROWS}) == len(ROWS)


def test_a_second_call_changes_nothing() -> None:
    before = torch.zeros, torch.cuda.current_device, torch.Tensor.type, dist.all_gather
    cpu.install()
    assert before == (torch.zeros, torch.cuda.current_device, torch.Tensor.type, dist.all_gather)


def test_what_megatron_asks_for_is_on_the_cpu() -> None:
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.empty(2, device=torch.device("cuda", 0), pin_memory=True).device.type == "cpu"
    assert torch.ones(2).cuda().device.type == "cpu"
    assert torch.ones(2).type() == "torch.cuda.FloatTensor"
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.Event().record()


def test_others_do_not_notice() -> None:
    assert not torch.cuda.is_available()
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
        assert torch.arange(2).device.type == "meta"
    assert torch.ones(2).type(torch.int64).dtype == torch.int64


@pytest.mark.parametrize("version", ["0.18.0", "0.20.1"])
def test_another_megatron_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=rf"megatron-core {version}.*0\.19\.x"):
        cpu.check_version()
