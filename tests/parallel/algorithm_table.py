"""Every algorithm and every option of the objective, with its formula, paper and reference test.

``python -m tests.parallel.algorithm_table`` prints it. A unit test holds that every row of ``ALGORITHMS`` and
every flag of the objective has an entry, and that every named test exists.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

from slime.algorithms import ALGORITHMS
from slime.config.flags import flag_specs
from slime.config.sections import AlgorithmConfig, RewardConfig

ROOT = Path(__file__).parents[2]

_REFERENCE = "tests/unit/algorithms/test_reference.py::test_objective"
_STEP = "tests/integration/megatron/test_step_reference.py::test_loss_gradient_norm_and_weights"
_HOOKS = "tests/integration/megatron/test_step_hooks.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        names: Estimators or flags (field names) that the line is about.
        formula: Short; A advantage, r ratio, w weight trainer / engine.
        paper: URL, or where else the formula comes from.
        test: Node id of the test that compares it with a slow reference.
    """

    names: tuple[str, ...]
    formula: str
    paper: str
    test: str


def _reference(name: str) -> str:
    return f"{_REFERENCE}[{name}]"


ESTIMATORS: tuple[Row, ...] = (
    Row(
        names=("grpo",),
        formula="A = (R - mean) / (std + 1e-6) of the group",
        paper="https://arxiv.org/abs/2402.03300",
        test=_reference("grpo"),
    ),
    Row(
        names=("gspo",),
        formula="GRPO's A; r = exp(mean over the sequence of log r_t)",
        paper="https://arxiv.org/abs/2507.18071",
        test=_reference("gspo"),
    ),
    Row(
        names=("cispo",),
        formula="GRPO's A; -stop(clip(r)) A log p",
        paper="https://arxiv.org/abs/2506.13585",
        test=_reference("cispo"),
    ),
    Row(
        names=("rloo",),
        formula="A = R - mean of the group's others - kl_coef sum of k_s from t on",
        paper="https://arxiv.org/abs/2402.14740",
        test=_reference("rloo_kl"),
    ),
    Row(
        names=("reinforce_plus_plus",),
        formula="A = sum of gamma^j r_(t+j), whitened",
        paper="https://arxiv.org/abs/2501.03262",
        test=_reference("reinforce_plus_plus"),
    ),
    Row(
        names=("reinforce_plus_plus_baseline",),
        formula="A = R - mean - kl_coef k_t, whitened",
        paper="https://arxiv.org/abs/2501.03262",
        test=_reference("reinforce_plus_plus_baseline"),
    ),
    Row(
        names=("ppo",),
        formula="A_t = delta_t + gamma lambda A_(t+1) with a critic",
        paper="https://arxiv.org/abs/1506.02438",
        test=_reference("ppo"),
    ),
)

_WHITENED = "tests/unit/algorithms/test_reduction.py::test_whitening_equals_the_formula_and_forgets_the_split"


OPTIONS: tuple[Row, ...] = (
    Row(
        names=("loss_type",),
        formula="policy_loss: below; sft_loss: -log p; custom_loss: yours",
        paper="maximum likelihood",
        test="tests/unit/algorithms/test_reference.py::test_sft_loss",
    ),
    Row(
        names=("grpo_std_normalization",),
        formula="A = R - mean (Dr. GRPO)",
        paper="https://arxiv.org/abs/2503.20783",
        test=_reference("grpo_no_std"),
    ),
    Row(
        names=("constant_loss_denominator",),
        formula="sum of tokens / constant, mean over rollouts (Dr. GRPO)",
        paper="https://arxiv.org/abs/2503.20783",
        test=_reference("dr_grpo"),
    ),
    Row(
        names=("rewards_normalization",),
        formula="A = R",
        paper="REINFORCE",
        test="tests/unit/data/test_batch.py::test_who_gets_a_baseline",
    ),
    Row(
        names=("calculate_per_token_loss",),
        formula="sum of all tokens / number of all tokens (DAPO)",
        paper="https://arxiv.org/abs/2503.14476",
        test=_reference("token_level"),
    ),
    Row(
        names=("eps_clip", "eps_clip_high"),
        formula="max(-r A, -clip(r, 1 - low, 1 + high) A)",
        paper="https://arxiv.org/abs/1707.06347 https://arxiv.org/abs/2503.14476",
        test=_reference("clip_higher"),
    ),
    Row(
        names=("eps_clip_c",),
        formula="A < 0: min(that, -c A)",
        paper="https://arxiv.org/abs/1912.09729",
        test=_reference("dual_clip"),
    ),
    Row(
        names=("overlong_buffer_len", "overlong_penalty_factor"),
        formula="R += -factor clip((n - (max - buffer)) / buffer, 0, 1)",
        paper="https://arxiv.org/abs/2503.14476",
        test="tests/unit/algorithms/test_baselines.py::test_overlong_penalty",
    ),
    Row(
        names=("value_clip",),
        formula="max((V - G)^2, (V_old + clip(V - V_old) - G)^2)",
        paper="https://arxiv.org/abs/2005.12729",
        test="tests/unit/algorithms/test_reference.py::test_value_loss",
    ),
    Row(
        names=("gamma", "lambd"),
        formula="discount, GAE's lambda",
        paper="https://arxiv.org/abs/1506.02438",
        test="tests/unit/algorithms/test_advantages.py::test_generalized_advantages_equal_the_recursion",
    ),
    Row(
        names=("normalize_advantages",),
        formula="(A - mean) / sqrt(var + 1e-8) over all ranks",
        paper="https://arxiv.org/abs/2501.03262",
        test=_WHITENED,
    ),
    Row(
        names=("kl_coef",),
        formula="reward or advantage - kl_coef k_t",
        paper="http://joschu.net/blog/kl-approx.html",
        test="tests/integration/megatron/test_step_reference.py::test_reinforce_plus_plus_with_kl_penalty",
    ),
    Row(
        names=("use_kl_loss", "kl_loss_coef"),
        formula="loss + coef KL(policy || reference)",
        paper="https://arxiv.org/abs/2402.03300",
        test="tests/integration/megatron/test_step_reference.py::test_kl_loss_and_rollout_metrics",
    ),
    Row(
        names=("kl_loss_type",),
        formula="k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d; low_var_kl = k3 within +-10",
        paper="http://joschu.net/blog/kl-approx.html",
        test="tests/unit/algorithms/test_kl.py::test_estimators_equal_their_formulas",
    ),
    Row(
        names=("use_unbiased_kl",),
        formula="r KL",
        paper="https://arxiv.org/abs/2512.02556",
        test=_reference("kl_unbiased"),
    ),
    Row(
        names=("entropy_coef",),
        formula="loss - coef entropy",
        paper="https://arxiv.org/abs/1602.01783",
        test=_reference("entropy"),
    ),
    Row(
        names=("use_opsm", "opsm_delta"),
        formula="A < 0 and mean(log p_old - log p) > delta: 0",
        paper="https://arxiv.org/abs/2512.02556",
        test=_reference("opsm"),
    ),
    Row(
        names=("use_rollout_logprobs",),
        formula="r is taken to the engine's log-probs",
        paper="https://fengyao.notion.site/off-policy-rl",
        test=_reference("rollout_logprobs"),
    ),
    Row(
        names=("use_tis", "tis_clip", "tis_clip_low"),
        formula="loss clip(w, low, high)",
        paper="https://fengyao.notion.site/off-policy-rl",
        test=_reference("tis_truncate"),
    ),
    Row(
        names=("tis_mode", "tis_upper_bound", "tis_lower_bound"),
        formula="truncate: min(w, high); clip: both bounds; mask: outside leaves the loss",
        paper="https://richardli.xyz/rl-collapse",
        test=_reference("tis_mask"),
    ),
    Row(
        names=("tis_level",),
        formula="w of the token, product over the sequence, geometric mean",
        paper="https://richardli.xyz/rl-collapse",
        test=_reference("tis_sequence"),
    ),
    Row(
        names=("tis_batch_normalize",),
        formula="w / mean w of the rollout",
        paper="https://richardli.xyz/rl-collapse",
        test=_reference("tis_normalised"),
    ),
    Row(
        names=("use_icepop",),
        formula="w outside [low, high]: policy term 0",
        paper="https://arxiv.org/abs/2510.18855",
        test=_reference("icepop"),
    ),
    Row(
        names=("use_rs", "rs_level", "rs_upper_bound", "rs_lower_bound"),
        formula="tokens with w outside the bounds leave the loss",
        paper="https://richardli.xyz/rl-collapse",
        test=_reference("rs_geometric"),
    ),
    Row(
        names=("rs_veto_threshold",),
        formula="one w_t < veto takes its sequence out",
        paper="https://richardli.xyz/rl-collapse",
        test=_reference("rs_veto"),
    ),
    Row(
        names=("get_mismatch_metrics",),
        formula="exp(-mean log p) of trainer and engine; loss unchanged",
        paper="https://richardli.xyz/rl-collapse",
        test="tests/unit/algorithms/test_reference.py::test_measuring_changes_nothing_and_gives_perplexities",
    ),
    Row(
        names=("use_opd", "opd_kl_coef"),
        formula="A - coef (log p_student - log p_teacher)",
        paper="https://arxiv.org/abs/2306.08543",
        test="tests/integration/megatron/test_distillation.py::test_grpo",
    ),
    Row(
        names=("custom_loss_function_path",),
        formula="yours",
        paper="-",
        test=f"{_HOOKS}::test_custom_loss",
    ),
    Row(
        names=("custom_advantage_function_path",),
        formula="yours",
        paper="-",
        test=f"{_HOOKS}::test_custom_advantage",
    ),
    Row(
        names=("custom_tis_function_path",),
        formula="yours",
        paper="-",
        test=f"{_HOOKS}::test_custom_tis",
    ),
    Row(
        names=("custom_pg_loss_reducer_function_path",),
        formula="yours",
        paper="-",
        test="tests/unit/algorithms/test_objective.py::test_custom_reducer_serves_the_policy_term_only",
    ),
)

NOT_FORMULAS: dict[str, str] = {
    "advantage_estimator": "its values are rows of their own",
    "compute_advantages_and_returns": "says whether they are computed",
    "ref_update_interval": "says when the reference is replaced",
    "use_rollout_entropy": "says when the entropy is measured",
    "reset_optimizer_states": "concerns the optimizer",
    "use_stateless_adam": "concerns the optimizer",
    "use_routing_replay": "concerns the model's forward pass",
    "use_rollout_routing_replay": "concerns the model's forward pass",
    "opd_type": "says where the teacher runs",
    "opd_teacher_load": "says where the teacher is",
    "opd_teacher_ckpt_step": "says where the teacher is",
    "num_critic_only_steps": "says which model is trained",
    "max_logprob_diff": "bounds a monitor",
    "max_logprob_diff_action": "bounds a monitor",
}
"""Flags of the section that have no formula, and why."""


def objective_flags() -> set[str]:
    """Field names of every flag that needs a row."""
    flags = {spec.dest for spec in flag_specs(AlgorithmConfig, "algorithm")} - set(NOT_FORMULAS)
    return flags | {spec.dest for spec in flag_specs(RewardConfig, "reward") if spec.dest.startswith("overlong_")}


def reference_problem(node: str) -> str | None:
    """Why a node id names no test, or None. A parameter must be a string that its file contains."""
    path, _, rest = node.partition("::")
    name, _, parameter = rest.partition("[")
    file = ROOT / path
    if not file.is_file():
        return f"{path} does not exist"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if name not in {item.name for item in tree.body if isinstance(item, ast.FunctionDef)}:
        return f"{path} has no test {name}"
    strings = {item.value for item in ast.walk(tree) if isinstance(item, ast.Constant) and isinstance(item.value, str)}
    if parameter and parameter.removesuffix("]") not in strings:
        return f"{node}: no such parameter"
    return None


def table() -> str:
    """The table as text; columns are estimator or flags, formula, paper, test."""
    flags = {spec.dest: spec.name for section in (AlgorithmConfig, RewardConfig) for spec in flag_specs(section, "")}
    lines = [("algorithm or option", "formula", "paper", "reference test")]
    lines += [(", ".join(row.names), row.formula, row.paper, row.test) for row in ESTIMATORS]
    lines += [(" ".join(flags[name] for name in row.names), row.formula, row.paper, row.test) for row in OPTIONS]
    widths = [max(len(line[i]) for line in lines) for i in range(3)]
    text = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(line[:3], widths, strict=True)), line[3]])
        for line in lines
    ]
    return "\n".join([text[0], "-" * max(map(len, text)), *text[1:]])


def problems() -> list[str]:
    """What the table lacks or names wrongly."""
    found = [f"no row for the estimator {name}" for name in set(ALGORITHMS) - {n for r in ESTIMATORS for n in r.names}]
    listed = [name for row in OPTIONS for name in row.names]
    found += [f"no row for the flag {name}" for name in objective_flags() - set(listed)]
    found += [f"a row for {name}, which is no flag" for name in set(listed) - objective_flags()]
    found += [f"{name} is listed twice" for name in sorted(set(listed)) if listed.count(name) > 1]
    found += [problem for row in (*ESTIMATORS, *OPTIONS) if (problem := reference_problem(row.test)) is not None]
    return sorted(found)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
    sys.exit("\n".join(problems()) or 0)
