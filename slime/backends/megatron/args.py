"""Megatron's flags: parsed by Megatron's own parser, derived from the checkpoint, checked, made plain.

Owns the Megatron side of the command line (``MegatronFlagFamily``), the defaults that slime forces on
it, and the way back from plain configuration values to the namespace Megatron's code reads. Which model
flags follow from a Hugging Face ``config.json`` is ``hf_flags``'s. Works in a process without any
process group. Tests hold: no misspelt or abbreviated flag passes; all problems are reported together;
the environment and torch's global state are left as they were; a namespace survives JSON.
"""

import argparse
import contextlib
import importlib.util
import io
import logging
import os
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NoReturn

import torch

from slime.backends.megatron import cpu
from slime.backends.megatron.expert_flags import expert_problems, force_expert_values
from slime.backends.megatron.hf_flags import check_model_values, model_values
from slime.config import Config, MegatronConfig, MegatronContext
from slime.errors import ConfigError

cpu.install()

from megatron.core.transformer.cuda_graph_config import CudaGraphModule, InferenceCudaGraphScope  # noqa: E402
from megatron.core.transformer.enums import AttnBackend  # noqa: E402
from megatron.training.arguments import add_megatron_arguments, validate_args  # noqa: E402

_ENUMS: Mapping[str, type[Enum]] = {
    enum.__name__: enum for enum in (AttnBackend, CudaGraphModule, InferenceCudaGraphScope)
}
SEQ_LENGTH = 4096
"""Placeholder: rows are packed to a token budget, so no length is fixed."""


class _Refused(Exception):
    """A parser error, carried to where all of them are collected."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


def _parser() -> _Parser:
    parser = _Parser(prog="megatron", allow_abbrev=False, add_help=False)
    add_megatron_arguments(parser)
    return parser


class MegatronFlagFamily:
    """Megatron's flags on slime's command line (see ``slime.config.families.FlagFamily``)."""

    def __init__(self) -> None:
        self._parser = _parser()

    def flag_names(self) -> frozenset[str]:
        """Every option string of Megatron's parser."""
        return frozenset(name for action in self._parser._actions for name in action.option_strings)

    def parse(self, argv: Sequence[str], context: MegatronContext) -> MegatronConfig:
        """Parse, derive, force, cross-check and validate Megatron's values.

        Args:
            argv: Megatron's tokens only.
            context: What slime resolved before.

        Raises:
            ConfigError: With all problems found.
        """
        args, explicit, problems = self._parse_tokens(argv)
        notices: list[str] = []
        if context.hf is not None:
            derived = model_values(context.hf)
            problems += check_model_values(derived, vars(args), explicit, context.hf)
            vars(args).update({dest: value for dest, value in derived.items() if dest not in explicit})
        _apply_context(args, explicit, context)
        notices += _apply_forced(args, explicit, context)
        problems += _own_checks(args, context)
        if problems:
            raise ConfigError(problems)
        if context.hf is not None:
            _validate(args)
        _apply_run_values(args, context)
        return MegatronConfig(
            argv=tuple(argv),
            explicit=explicit,
            values={name: _encode(value) for name, value in sorted(vars(args).items())},
            notices=tuple(notices),
        )

    def _parse_tokens(self, argv: Sequence[str]) -> tuple[argparse.Namespace, frozenset[str], list[str]]:
        """Parse flag by flag, so that one bad value does not hide the next."""
        args = self._parser.parse_args([])
        known = self._parser._option_string_actions
        explicit: set[str] = set()
        problems: list[str] = []
        for group in _groups(argv, known):
            flag = group[0].split("=", 1)[0]
            if flag not in known:
                problems.append(f"{group[0]}: not a Megatron flag")
                continue
            try:
                self._parser.parse_args(group, namespace=args)
                explicit.add(known[flag].dest)
            except _Refused as error:
                problems.append(f"{flag}: {str(error).removeprefix(f'argument {flag}: ')}")
        return args, frozenset(explicit), problems


def _groups(argv: Sequence[str], known: Mapping[str, Any]) -> list[list[str]]:
    groups: list[list[str]] = []
    for token in argv:
        if not groups or token.split("=", 1)[0] in known or token.startswith("--"):
            groups.append([token])
        else:
            groups[-1].append(token)
    return groups


def _apply_context(args: argparse.Namespace, explicit: frozenset[str], context: MegatronContext) -> None:
    """Values that slime's own sections hold, and the defaults it resets."""
    args.world_size, args.rank, args.local_rank = context.world_size, 0, 0
    args._is_global_batch_size_explicitly_specified = True
    args.bf16, args.fp16 = context.precision == "bf16", context.precision == "fp16"
    args.micro_batch_size = context.micro_batch_size
    args.global_batch_size = context.global_batch_size
    args.train_iters = context.train_iters
    args.calculate_per_token_loss = context.algorithm.calculate_per_token_loss
    args.distributed_timeout_minutes = context.cluster.distributed_timeout_minutes
    args.distributed_backend = "nccl" if context.device == "cuda" else "gloo"
    args.mtp_num_layers = context.train.mtp_num_layers
    resets = {"seed": context.default_seed, "lr": context.default_lr, "clip_grad": context.default_clip_grad}
    vars(args).update({dest: value for dest, value in resets.items() if dest not in explicit})


def _apply_forced(args: argparse.Namespace, explicit: frozenset[str], context: MegatronContext) -> list[str]:
    """Values without which packed rows, or a machine without Transformer Engine, cannot work."""
    notices: list[str] = []
    if "transformer_impl" in explicit and args.transformer_impl != "local":
        notices.append(
            "--transformer-impl: slime builds the model from Megatron's local modules around its own attention"
        )
    args.transformer_impl = "local"
    args.use_distributed_optimizer = True
    notices += force_expert_values(args, explicit)
    args.use_persistent_ckpt_worker = args.ckpt_assume_constant_structure = True
    args.ckpt_fully_parallel_load = args.dist_ckpt_optim_fully_reshardable = True
    # Kernels of Transformer Engine and Apex.
    args.apply_rope_fusion = args.masked_softmax_fusion = False
    args.no_persist_layer_norm = True
    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
        args.gradient_accumulation_fusion = False
    if context.device == "cpu":
        args.bias_gelu_fusion = args.bias_swiglu_fusion = args.bias_dropout_fusion = False
        args.use_cpu_initialization = True
    if "hidden_dropout" not in explicit:
        args.hidden_dropout = 0.0
    if "seq_length" not in explicit:
        args.seq_length = min(SEQ_LENGTH, args.max_position_embeddings or SEQ_LENGTH)
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    if args.use_rope_scaling and "rotary_scaling_factor" in explicit and "rope_scaling_factor" not in explicit:
        args.rope_scaling_factor = args.rotary_scaling_factor
    if not args.multi_latent_attention:
        args.rope_type = None
    return notices


def _own_checks(args: argparse.Namespace, context: MegatronContext) -> list[str]:
    """What Megatron would refuse without naming a flag, or would not notice."""
    problems: list[str] = []
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    if context.world_size % (tp * pp * cp):
        problems.append(
            f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = "
            f"{tp * pp * cp} does not divide the {context.world_size} training processes "
            "(--actor-num-nodes x --actor-num-gpus-per-node)"
        )
    for flag, value in (
        ("--num-attention-heads", args.num_attention_heads),
        ("--num-query-groups", args.num_query_groups if args.group_query_attention else None),
        ("--ffn-hidden-size", args.ffn_hidden_size),
    ):
        if value and value % tp:
            problems.append(f"{flag} {value} cannot be split over --tensor-model-parallel-size {tp}")
    if args.sequence_parallel and tp == 1:
        problems.append("--sequence-parallel splits work of tensor-parallel ranks: raise --tensor-model-parallel-size")
    if pp == 1:
        problems += [
            f"--decoder-{end}-pipeline-num-layers needs --pipeline-model-parallel-size above 1"
            for end in ("first", "last")
            if vars(args)[f"decoder_{end}_pipeline_num_layers"] is not None
        ]
    if args.attention_dropout:
        problems.append(
            f"--attention-dropout {args.attention_dropout}: attention over packed rows has no dropout; give 0"
        )
    if args.fp8 or args.fp4:
        problems.append("--fp8-format and --fp4-format need Transformer Engine layers, which slime does not build")
    if context.algorithm.use_routing_replay and not args.num_experts:
        flag = (
            "--use-rollout-routing-replay" if context.algorithm.use_rollout_routing_replay else "--use-routing-replay"
        )
        problems.append(f"{flag} needs a model with experts; this one has none (--num-experts)")
    return problems + expert_problems(args, context.world_size)


def _validate(args: argparse.Namespace) -> None:
    """Megatron's own checks, without what they print and without what they leave behind."""
    output = io.StringIO()
    environment = dict(os.environ)
    deterministic = torch.are_deterministic_algorithms_enabled()
    level = logging.root.manager.disable
    eval_batch = args.eval_global_batch_size, args.eval_micro_batch_size
    try:
        # Set for the training processes by their launcher; here only so that the check passes.
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        # Megatron's evaluation does not run; its batch only has to be divisible.
        args.eval_micro_batch_size = 1
        args.eval_global_batch_size = args.world_size
        logging.disable(logging.WARNING)
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            validate_args(args)
    except (AssertionError, ValueError, RuntimeError, NotImplementedError, ImportError) as error:
        raise ConfigError(f"Megatron refuses these flags: {str(error) or _last_frame(error)}") from error
    except SystemExit as error:
        raise ConfigError(f"Megatron refuses these flags: {output.getvalue().strip()[-500:]}") from error
    finally:
        logging.disable(level)
        torch.use_deterministic_algorithms(deterministic)
        os.environ.clear()
        os.environ.update(environment)
    args.eval_global_batch_size, args.eval_micro_batch_size = eval_batch


def _last_frame(error: BaseException) -> str:
    """The source line of an assertion that came without words."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None:
        return repr(error)
    return f"assertion in line {traceback.tb_lineno} of {traceback.tb_frame.f_code.co_filename}"


def _apply_run_values(args: argparse.Namespace, context: MegatronContext) -> None:
    """Values that must not take part in Megatron's validation, which would act on or overwrite them."""
    args.variable_seq_lengths = True  # rows differ in length; pipeline stages then tell each other the shapes
    args.load, args.save = context.checkpoint.load, context.checkpoint.save
    args.save_interval = context.checkpoint.save_interval
    args.async_save, args.no_save_optim = context.checkpoint.async_save, context.checkpoint.no_save_optim
    args.padded_vocab_size = context.train.padded_vocab_size
    if args.padded_vocab_size is None and args.vocab_size is not None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple


def _encode(value: Any) -> Any:
    """A Megatron value as JSON data: dtypes and enumeration members by their names."""
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    return value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, str):
        return value
    owner, _, member = value.partition(".")
    if owner == "torch" and isinstance(getattr(torch, member, None), torch.dtype):
        return getattr(torch, member)
    if owner in _ENUMS and member in _ENUMS[owner].__members__:
        return _ENUMS[owner][member]
    return value


def namespace(config: Config) -> argparse.Namespace:
    """Megatron's ``args``, rebuilt from the configuration; a fresh object each time."""
    return argparse.Namespace(**{name: _decode(value) for name, value in config.megatron.values.items()})
