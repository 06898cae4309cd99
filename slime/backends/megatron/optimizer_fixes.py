"""Mend checkpoints of ``DistributedOptimizer``: loading with ``torch.optim.AdamW``, and the memory of saving.

Megatron uses torch's AdamW where neither Transformer Engine nor Apex is installed, on GPUs as on
CPUs, and then 0.19.x loads its state wrongly. Owns those two corrections, and that saving describes the
state by ``optimizer_state`` instead of copying it several times. They are applied explicitly, by
``apply()``, before an optimizer is built.
"""

from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from slime.backends.megatron.optimizer_state import whole_parameter_state

_MARK = "_slime_fixed"


def apply() -> None:
    """Correct ``DistributedOptimizer`` in place; a second call changes nothing.

    ``_set_main_param_and_optimizer_states`` looks up 'step' in the state of each parameter, which
    torch's optimizer has but the checkpoint keeps in the parameter groups: KeyError. And
    ``load_state_dict`` gives ONE step tensor to all parameters, which AdamW then advances once per
    parameter, so that its bias correction is silently wrong from the second step on.
    ``sharded_param_state_fully_reshardable`` copies the state of all ranks to each when saving.
    """
    if getattr(DistributedOptimizer, _MARK, False):
        return
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load = DistributedOptimizer.load_state_dict

    def set_states_with_step(self: Any, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        set_states(self, model_param, {"step": None, **tensors})

    def load_with_own_steps(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    describe = DistributedOptimizer.sharded_param_state_fully_reshardable

    def describe_in_place(
        self: Any, model_state: Any, is_loading: bool = False, metadata: dict[str, Any] | None = None
    ) -> Any:
        return describe(self, model_state, True, metadata) if is_loading else whole_parameter_state(self, model_state)

    DistributedOptimizer.sharded_param_state_fully_reshardable = describe_in_place
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_with_step
    DistributedOptimizer.load_state_dict = load_with_own_steps
    setattr(DistributedOptimizer, _MARK, True)
