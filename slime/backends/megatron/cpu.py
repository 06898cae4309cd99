"""Run the stock megatron-core (0.19.x) on a machine without CUDA, over gloo.

Owns the complete, explicit list of what is substituted in third-party code for that, each row with
the upstream reason. ``install()`` goes before the first ``import megatron``; where CUDA exists only
the import of Python 3.11 is mended. Faults of the optimizer that GPUs share are not here but in
``optimizer_fixes``. Tests hold: every row is in force after ``install()``, a second call changes
nothing, another Megatron version is refused.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import types
import typing
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import typing_extensions
from torch import distributed as dist
from torch.utils import _device as torch_device

from slime.errors import ConfigError

SUPPORTED_VERSION = "0.19."
CPU = torch.device("cpu")
_MARK = "_slime_substitution"


@dataclass(frozen=True, slots=True, kw_only=True)
class Substitution:
    """One replaced attribute of a third-party module or class.

    Args:
        owner: Module path; a class in it follows after a colon.
        name: The attribute.
        build: Takes the original and returns the replacement.
        reason: Where upstream assumes CUDA, and what happens without the replacement.
    """

    owner: str
    name: str
    build: Callable[[Any], Any]
    reason: str

    def _owner(self) -> Any:
        module, _, cls = self.owner.partition(":")
        found = importlib.import_module(module)
        return getattr(found, cls) if cls else found

    def applied(self) -> bool:
        """Whether the attribute is our replacement."""
        return getattr(getattr(self._owner(), self.name), _MARK, False)

    def apply(self) -> None:
        """Replace the attribute unless that was done before."""
        owner = self._owner()
        original = getattr(owner, self.name)
        if getattr(original, _MARK, False):
            return
        replacement = self.build(original)
        setattr(replacement, _MARK, True)
        setattr(owner, self.name, replacement)


class NullStream:
    """Stands in for ``torch.cuda.Stream`` and ``Event``: on a CPU all work is already in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def _ignore(self, *args: object, **kwargs: object) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _ignore

    def record_event(self, *args: object) -> "NullStream":
        """The event of a finished stream."""
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NullStream)

    def __hash__(self) -> int:
        return 0

    def query(self) -> bool:
        """Always finished."""
        return True

    def elapsed_time(self, end: object) -> float:
        """Milliseconds between two events; nothing is timed here."""
        return 0.0


def _returning(value: Callable[[], Any]) -> Callable[[Any], Any]:
    """A replacement that ignores its arguments and returns ``value()``."""
    return lambda original: lambda *args, **kwargs: value()


def _on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory for which device "cuda" means the CPU and memory is never pinned."""

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = CPU
        return original(*args, **kwargs)

    return factory


def _itself(original: Any) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self


def _cuda_type_name(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        if isinstance(name, str) and name.startswith("torch.") and name.count(".") == 1:
            return name.replace("torch.", "torch.cuda.")
        return name

    return type_name


def _barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return original(group=group, async_op=async_op)

    return barrier


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if all(output.shape == tensor.shape for output in outputs):
            return original(outputs, tensor, group=group, async_op=async_op)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        for output, rank in zip(outputs, ranks, strict=True):
            if rank == dist.get_rank():
                output.copy_(tensor)
            dist.broadcast(output, src=rank, group=group)
        return None

    return all_gather


def _reduce_scatter(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_scatter(
        output: torch.Tensor,
        inputs: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if all(tensor.shape == output.shape for tensor in inputs):
            return original(output, inputs, op=op, group=group, async_op=async_op)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        for tensor, rank in zip(inputs, ranks, strict=True):
            part = tensor.clone(memory_format=torch.contiguous_format)
            dist.reduce(part, dst=rank, op=op, group=group)
            if rank == dist.get_rank():
                output.copy_(part)
        return None

    return reduce_scatter


def _split_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return to_cpu


def _device_properties() -> types.SimpleNamespace:
    return types.SimpleNamespace(name="cpu", major=9, minor=0, total_memory=0, multi_processor_count=1)


def _torch_row(name: str, build: Callable[[Any], Any], reason: str, owner: str = "torch.cuda") -> Substitution:
    return Substitution(owner=owner, name=name, build=build, reason=reason)


_FACTORY_REASON = 'optimizer, clip_grads and schedules create tensors with device="cuda"; rope_utils pins memory'
_FACTORIES = (
    *("arange", "as_tensor", "empty", "empty_like", "full", "full_like", "ones", "ones_like"),
    *("rand", "randint", "randn", "tensor", "zeros", "zeros_like"),
)

TORCH_SUBSTITUTIONS: tuple[Substitution, ...] = (
    _torch_row("current_device", _returning(lambda: CPU), "the device of every buffer (param_and_grad_buffer)"),
    _torch_row("current_stream", _returning(NullStream), "param_and_grad_buffer and token_dispatcher order streams"),
    _torch_row("default_stream", _returning(NullStream), "as current_stream, with overlap"),
    _torch_row("stream", _returning(contextlib.nullcontext), "side streams of DDP and of checkpoint saving"),
    _torch_row(
        "Stream", lambda original: type("Stream", (NullStream,), {}), "the all-to-all token dispatcher makes one"
    ),
    _torch_row("Event", lambda original: type("Event", (NullStream,), {}), "the all-to-all token dispatcher makes one"),
    _torch_row("synchronize", _returning(lambda: None), "called before checkpoints and by pipeline schedules"),
    _torch_row("empty_cache", _returning(lambda: None), "called around checkpoints"),
    _torch_row("set_device", _returning(lambda: None), "called by checkpoint writers"),
    _torch_row("get_device_properties", _returning(_device_properties), "validate_args asks for the architecture"),
    _torch_row("get_rng_state", _returning(torch.get_rng_state), "model_parallel_cuda_manual_seed and recomputation"),
    _torch_row(
        "set_rng_state",
        lambda original: lambda state, *args, **kwargs: torch.set_rng_state(state),
        "recomputation restores the generator",
    ),
    _torch_row(
        "manual_seed",
        lambda original: lambda seed: torch.default_generator.manual_seed(int(seed)),
        "CUDA seeds are queued without a device; the tracker's states would be wrong",
    ),
    *(_torch_row(name, _on_cpu, _FACTORY_REASON, "torch") for name in _FACTORIES),
    _torch_row("cuda", _itself, "rope_utils and tied embeddings move tensors to the device", "torch:Tensor"),
    _torch_row("pin_memory", _itself, "checkpoint staging and CPU offload", "torch:Tensor"),
    _torch_row("record_stream", _returning(lambda: None), "memory of side streams", "torch:Tensor"),
    _torch_row("type", _cuda_type_name, "optimizers compare type() with torch.cuda.* names", "torch:Tensor"),
    _torch_row("cuda", _itself, "models are moved to the device", "torch.nn:Module"),
    _torch_row("barrier", _barrier, "gloo refuses device_ids", "torch.distributed"),
    _torch_row(
        "all_gather", _all_gather, "gloo wants equal sizes; expert tensor parallelism has not", "torch.distributed"
    ),
    _torch_row("reduce_scatter", _reduce_scatter, "as all_gather", "torch.distributed"),
)

MEGATRON_SUBSTITUTIONS: tuple[Substitution, ...] = (
    Substitution(
        owner="megatron.core.tensor_parallel.random",
        name="_set_cuda_rng_state",
        build=lambda original: lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
        reason="pokes torch.cuda.default_generators; dropout under tensor parallelism forks it",
    ),
    Substitution(
        owner="megatron.core.tensor_parallel.random",
        name="_get_cuda_rng_state",
        build=lambda original: lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
        reason="as _set_cuda_rng_state",
    ),
    Substitution(
        owner="megatron.core.transformer.moe.token_dispatcher",
        name="maybe_move_tensor_to_cpu",
        build=_split_sizes,
        reason="split sizes become numpy only when they come from a CUDA tensor; gloo refuses tensors",
    ),
)


def _stub_modules() -> None:
    """Put stand-ins for the two modules that cannot be imported, or do harm, without a GPU.

    ``paged_stash`` imports triton unguarded and comes with ``import megatron.core`` itself;
    ``megatron.core.jit`` compiles with torch.compile, which on a CPU needs a C++ compiler at run time.
    """
    if importlib.util.find_spec("triton") is None:
        stash = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")
        vars(stash).update(GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None)
        sys.modules.setdefault(stash.__name__, stash)
    jit = types.ModuleType("megatron.core.jit")
    vars(jit).update(noop_decorator=lambda function: function, jit_fuser=lambda function: function)
    vars(jit).update(enable_jit_fuser=lambda: None, disable_jit_fuser=lambda: None)
    sys.modules.setdefault(jit.__name__, jit)


def check_version() -> None:
    """Raise ConfigError unless the installed megatron-core is one these substitutions were written for."""
    try:
        version = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            "megatron-core is not installed; training needs megatron-core 0.19.x (see the setup instructions)"
        ) from None
    if not version.startswith(SUPPORTED_VERSION):
        raise ConfigError(
            f"megatron-core {version} is installed; slime's CPU mode is written for {SUPPORTED_VERSION}x: "
            "install that version"
        )


def install() -> None:
    """Make ``import megatron`` work here; on a machine without CUDA, make Megatron run on the CPU.

    Idempotent. Call it before the first ``import megatron``.

    Raises:
        ConfigError: Another megatron-core version, or none, is installed.
    """
    if not hasattr(typing, "override"):  # Python 3.11: megatron.training imports it from typing (3.12)
        vars(typing)["override"] = typing_extensions.override
    # Said some eight times over by `import megatron` and no news: slime needs neither.
    warnings.filterwarnings("ignore", category=UserWarning, message=".*(Apex|Transformer Engine|transformer-engine)")
    warnings.filterwarnings("ignore", category=UserWarning, message="Could not determine rank")
    if torch.cuda.is_available():
        return
    check_version()
    _stub_modules()
    # `with torch.device(...)` looks factories up in this set, filled at first use: it must hold the
    # originals, which our factories call, or models built under it would silently not follow it.
    torch_device._device_constructors()
    for row in (*TORCH_SUBSTITUTIONS, *MEGATRON_SUBSTITUTIONS):
        row.apply()
