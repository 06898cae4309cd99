"""Lets stock SGLang start on a CPU without AMX instructions. For tests only: put this folder on PYTHONPATH.

SGLang's packages for NVIDIA GPUs are imported by name on a CPU as well, although nothing of them is called
there: every layer falls back to plain torch. Python imports this module at the start of each interpreter, of the
processes that SGLang spawns too; it changes nothing until one of the modules below is imported. It stands in for
what is missing and nothing else: the code under test stays SGLang's.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

KERNELS = "sgl_kernel"
"""The package of CUDA kernels: names of it are imported, no function of it may be called."""


class _Kernel:
    """Anything in that package: it has attributes, and it cannot be called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{self._name} is a CUDA kernel; this machine has none")


class _KernelModule(ModuleType):
    """A module in which every public name exists."""

    def __getattr__(self, name: str) -> _Kernel:
        return getattr(_Kernel(self.__name__), name)


class _KernelFinder(MetaPathFinder, Loader):
    """Finds ``sgl_kernel`` and all of its submodules, unless the real package is installed: it is asked last."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == KERNELS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _KernelModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _ImportHooks(MetaPathFinder):
    """Runs a function just before or just after a module is executed; asked first, finds nothing itself."""

    def __init__(self, before: dict[str, Callable[[], None]], after: dict[str, Callable[[ModuleType], None]]) -> None:
        self._before = before
        self._after = after

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name in self._before:
            self._before.pop(name)()
        after = self._after.pop(name, None)
        if after is None:
            return None
        spec = importlib.util.find_spec(name)  # the hook is popped: this finds the real module
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_then_hook(module: ModuleType) -> None:
            execute(module)
            after(module)

        spec.loader.exec_module = execute_then_hook  # type: ignore[method-assign]
        return spec


def _declare_vision_operators() -> None:
    """The published torchvision needs a CUDA torch for its operators, and their names even to be imported."""
    import torch
    from torchvision.extension import _has_ops

    if _has_ops():  # both are CUDA builds
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)  # the declarations end with the object


def _host_memory_stays_unpinned(module: ModuleType) -> None:
    """Buffers of the experts chosen per token are registered with CUDA although the tokens are on the CPU."""
    module._cuda_host_register = lambda *args, **kwargs: None  # type: ignore[attr-defined]


_kept: list[Any] = []
sys.meta_path.append(_KernelFinder())
sys.meta_path.insert(
    0,
    _ImportHooks(
        before={"torchvision._meta_registrations": _declare_vision_operators},
        after={"sglang.srt.mem_cache.pool_host.common": _host_memory_stays_unpinned},
    ),
)
