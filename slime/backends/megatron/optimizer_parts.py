"""The optimizer's state of a checkpoint, for an optimizer of another number of parts.

Under expert parallelism Megatron (0.19.x) keeps experts in an optimizer of their own, else one optimizer has
everything. The tensors of the state are found by the parameter's name; what is not a tensor (learning rates,
step counts) lies in the groups of each part. Owns bringing those to the parts at hand. Tests hold: a run
continues with the same losses with and without expert parallelism.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.optimizer.optimizer import param_group_identifier_keys

_OF_EXPERTS = "is_expert_parallel"


def fit_parts(optimizer: Any, loaded: dict[Any, Any]) -> dict[Any, Any]:
    """Give every part of ``optimizer`` the groups that belong to its parameters.

    Args:
        optimizer: Megatron's chained optimizer.
        loaded: The checkpoint's state of it, with the tensors that this optimizer asked for.
    """
    parts = optimizer.chained_optimizers
    saved = [entry for entry in (loaded, *_numbered(loaded)) if "optimizer" in entry]
    if len(saved) == len(parts):
        return loaded
    groups = [group for entry in saved for group in entry["optimizer"]["param_groups"]]
    fitted: dict[Any, Any] = {}
    for index, part in enumerate(parts):
        own = loaded if len(parts) == 1 else loaded[index]
        fitted[index] = {
            **{key: value for key, value in saved[0].items() if not isinstance(key, int)},
            "optimizer": {
                **saved[0]["optimizer"],
                "param_groups": [_group_for(wanted, groups) for wanted in part.optimizer.param_groups],
            },
            "param_state": own["param_state"],
        }
    return fitted[0] if len(parts) == 1 else fitted


def _numbered(loaded: Mapping[Any, Any]) -> list[dict[Any, Any]]:
    return [loaded[key] for key in sorted(key for key in loaded if isinstance(key, int))]


def _group_for(wanted: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The saved group of the same kind, by whether it is of experts only if there is a choice."""
    kind = [key for key in param_group_identifier_keys if key != _OF_EXPERTS]
    same = [group for group in groups if all(group.get(key) == wanted.get(key) for key in kind)]
    if not same:
        raise KeyError(f"no parameter group of the checkpoint has { ({key: wanted.get(key) for key in kind}) }")
    best = next((group for group in same if group.get(_OF_EXPERTS) == wanted.get(_OF_EXPERTS)), same[0])
    return {**best, _OF_EXPERTS: wanted.get(_OF_EXPERTS)}
