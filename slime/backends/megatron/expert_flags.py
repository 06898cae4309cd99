"""Megatron's mixture-of-experts flags: what slime forces on them, and what it refuses.

Owns the flags that no ``config.json`` decides: dispatch, kernels, parallel sizes, balancing. Tests hold:
the flags of established model scripts are accepted; what would silently train something else is not.
"""

from argparse import Namespace
from typing import Any


def force_expert_values(args: Namespace, explicit: frozenset[str]) -> list[str]:
    """Set what packed rows and the absence of Transformer Engine require; what the user should know of it."""
    notices: list[str] = []
    idle = sorted(name for name in explicit if name.startswith("moe_"))
    if idle and not args.num_experts:
        flags = ", ".join("--" + name.replace("_", "-") for name in idle)
        notices.append(f"{flags}: no effect on a model without experts")
    if args.moe_token_dispatcher_type == "allgather":
        args.moe_token_dispatcher_type = "alltoall"  # the only one that takes rows of any length
    if args.moe_grouped_gemm and args.num_experts:
        notices.append(
            "--moe-grouped-gemm: experts run in torch's grouped matrix products on CUDA in bf16, "
            "one after the other elsewhere"
        )
    for name, flag in (("moe_permute_fusion", "--moe-permute-fusion"), ("moe_router_fusion", "--moe-router-fusion")):
        if vars(args)[name]:
            notices.append(f"{flag} has no effect: its kernel belongs to Transformer Engine")
            vars(args)[name] = False
    if args.num_experts and "moe_router_dtype" not in explicit:
        args.moe_router_dtype = "fp32"
    if "moe_router_bias_update_rate" not in explicit:
        args.moe_router_bias_update_rate = 0.0
    return notices


def expert_problems(args: Namespace, world_size: int) -> list[str]:
    """One sentence for each flag, or pair of flags, that cannot work."""
    if not args.num_experts:
        return [
            f"{flag} {size} divides experts, and this model has none; leave it out"
            for flag, size in (
                ("--expert-model-parallel-size", args.expert_model_parallel_size),
                ("--expert-tensor-parallel-size", args.expert_tensor_parallel_size),
            )
            if (size or 1) > 1
        ]
    tp, ep, pp = args.tensor_model_parallel_size, args.expert_model_parallel_size, args.pipeline_model_parallel_size
    etp = tp if args.expert_tensor_parallel_size is None else args.expert_tensor_parallel_size
    problems: list[str] = []
    if world_size % (etp * ep * pp):
        problems.append(
            f"--expert-tensor-parallel-size {etp} x --expert-model-parallel-size {ep} x "
            f"--pipeline-model-parallel-size {pp} = {etp * ep * pp} does not divide the {world_size} training processes"
        )
    if args.num_experts % ep:
        problems.append(f"--num-experts {args.num_experts} cannot be split over --expert-model-parallel-size {ep}")
    for flag, value, size_flag, size in (
        ("--moe-ffn-hidden-size", args.moe_ffn_hidden_size, "--expert-tensor-parallel-size", etp),
        (
            *("--moe-shared-expert-intermediate-size", args.moe_shared_expert_intermediate_size),
            *("--tensor-model-parallel-size", tp),
        ),
    ):
        if value and value % size:
            problems.append(f"{flag} {value} cannot be split over {size_flag} {size}")
    if tp > 1 and not args.sequence_parallel:
        problems.append(
            f"--tensor-model-parallel-size {tp} with a mixture of experts needs --sequence-parallel: "
            "the experts of a tensor-parallel group would compute the same tokens"
        )
    return problems + _unsupported(args)


def _unsupported(args: Namespace) -> list[str]:
    problems: list[str] = []
    packed = "it would depend on how samples are packed into rows"
    coefficients = _as_list(args.moe_aux_loss_coeff)
    if any(coefficients):
        problems.append(f"--moe-aux-loss-coeff {' '.join(map(str, coefficients))}: {packed}; give 0")
    for flag, value in (
        ("--moe-z-loss-coeff", args.moe_z_loss_coeff),
        ("--moe-expert-capacity-factor", args.moe_expert_capacity_factor),
        ("--moe-input-jitter-eps", args.moe_input_jitter_eps),
    ):
        if value:
            problems.append(f"{flag} {value}: {packed}; leave it out")
    problems += [
        f"--moe-router-load-balancing-type {kind}: {packed}; give none"
        for kind in _as_list(args.moe_router_load_balancing_type)
        if kind in ("sinkhorn", "quantile_balancing")
    ]
    if args.moe_router_enable_expert_bias and args.moe_router_bias_update_rate:
        problems.append(
            f"--moe-router-bias-update-rate {args.moe_router_bias_update_rate}: Megatron would count padding as "
            "load of the experts; give 0, which keeps the checkpoint's expert bias"
        )
    if args.moe_token_dispatcher_type == "flex":
        problems.append("--moe-token-dispatcher-type flex needs DeepEP's kernels; give alltoall")
    return problems


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
