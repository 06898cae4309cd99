"""Rows of layers whose MLP is a mixture of experts."""

from slime.weights.families.dense import layer_rule
from slime.weights.ops import Rename, Rule, SplitGateUp

_EXPERT = "mlp.experts.local_experts.{expert}."

ROUTER = layer_rule("mlp.router.weight", "mlp.gate.weight", Rename())
EXPERT_BIAS = layer_rule("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", Rename())
SHARED_GATE = layer_rule("mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight", Rename())
EXPERTS = (
    layer_rule(
        _EXPERT + "linear_fc1.weight",
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"),
        SplitGateUp(),
    ),
    layer_rule(_EXPERT + "linear_fc2.weight", "mlp.experts.{expert}.down_proj.weight", Rename(split=1)),
)


def shared_expert(hf: str) -> tuple[Rule, ...]:
    """The expert that every token visits; ``hf`` is its name in the Hugging Face model."""
    return (
        layer_rule(
            "mlp.shared_experts.linear_fc1.weight",
            (f"mlp.{hf}.gate_proj.weight", f"mlp.{hf}.up_proj.weight"),
            SplitGateUp(),
        ),
        layer_rule("mlp.shared_experts.linear_fc2.weight", f"mlp.{hf}.down_proj.weight", Rename(split=1)),
    )
