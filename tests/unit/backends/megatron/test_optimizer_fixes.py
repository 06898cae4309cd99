"""Corrections of the distributed optimizer's checkpoint loading."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron import cpu

cpu.install()

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: E402

from slime.backends.megatron import optimizer_fixes  # noqa: E402


def test_a_second_call_changes_nothing() -> None:
    optimizer_fixes.apply()
    before = DistributedOptimizer.load_state_dict, DistributedOptimizer._set_main_param_and_optimizer_states
    optimizer_fixes.apply()
    assert before == (DistributedOptimizer.load_state_dict, DistributedOptimizer._set_main_param_and_optimizer_states)


def test_each_parameter_gets_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream hands one tensor to all; AdamW then advances it once per parameter."""

    def upstream_load(self: SimpleNamespace, state_dict: dict[str, torch.Tensor]) -> None:
        self.optimizer.state = {name: {"step": state_dict["step"]} for name in "ab"}

    monkeypatch.setattr(DistributedOptimizer, "_slime_fixed", False, raising=False)
    monkeypatch.setattr(DistributedOptimizer, "load_state_dict", upstream_load)
    monkeypatch.setattr(
        DistributedOptimizer,
        "_set_main_param_and_optimizer_states",
        DistributedOptimizer._set_main_param_and_optimizer_states,
    )
    optimizer_fixes.apply()
    optimizer = SimpleNamespace(optimizer=SimpleNamespace(state={}))
    DistributedOptimizer.load_state_dict(optimizer, {"step": torch.tensor(3.0)})
    first, second = (state["step"] for state in optimizer.optimizer.state.values())
    first += 1
    assert (first.item(), second.item()) == (4.0, 3.0)
