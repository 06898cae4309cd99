"""The user functions of a rollout: loaded once, told apart by signature, called in one place.

Owns the two custom-generate forms and the sample hooks. Whatever a user function returns is
checked here. Tests hold the accepted forms, the refusals and that ``evaluation`` is passed only to
functions that take it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.errors import PluginError
from slime.plugins import load_plugin
from slime.rollout.types import GroupItem, iter_samples
from slime.types import Sample

GENERATE_FLAG = "--custom-generate-function-path"
HOOK_FLAG = "--rollout-sample-hook-path"


@dataclass(frozen=True, slots=True)
class CustomGenerate:
    """A user's generate function.

    Args:
        fn: The function.
        path: Where it came from, for messages.
        takes_list: Form (b): a list of samples in, a list out, ``generate_single`` provided.
        takes_evaluation: Whether it accepts the keyword ``evaluation``.
    """

    fn: Callable[..., Any]
    path: str
    takes_list: bool
    takes_evaluation: bool

    @classmethod
    def load(cls, path: str) -> CustomGenerate:
        """Load ``path`` and tell its form from its parameter names.

        Raises:
            PluginError: Not found, or neither form.
        """
        fn = load_plugin(path, flag=GENERATE_FLAG, kind="generate")
        parameters = _parameters(fn, GENERATE_FLAG, path)
        takes_evaluation = _accepts(parameters, "evaluation")
        positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        var_positional = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
        takes_list = "samples" in positional
        if not takes_list and not var_positional and len(positional) < 3:
            raise PluginError(
                f"{GENERATE_FLAG} {path}: found parameters ({', '.join(parameters)}); accepted are "
                "(args, sample, sampling_params[, evaluation]) and (args, samples[, evaluation])"
            )
        return cls(fn=fn, path=path, takes_list=takes_list, takes_evaluation=takes_evaluation)

    async def call(self, *positional: Any, evaluation: bool) -> Any:
        """Await the function.

        Raises:
            PluginError: It is not asynchronous.
        """
        keywords = {"evaluation": evaluation} if self.takes_evaluation else {}
        result = self.fn(*positional, **keywords)
        if not inspect.isawaitable(result):
            raise PluginError(f"{GENERATE_FLAG} {self.path} must be `async def`; it returned {type(result).__name__}")
        return await result

    def module_globals(self) -> dict[str, Any]:
        """The names that the function's code sees as globals."""
        fn = self.fn
        while isinstance(fn, functools.partial):
            fn = fn.func
        fn = inspect.unwrap(fn)
        function = fn if hasattr(fn, "__globals__") else type(fn).__call__
        return getattr(function, "__globals__", {})


def check_generated(result: Any, path: str) -> GroupItem:
    """Pass on a sample or a non-empty list of samples whose columns are consistent.

    Raises:
        PluginError: Something else was returned.
        ValueError: A response-aligned column does not fit the response.
    """
    items = result if isinstance(result, list) else [result]
    if not items or not all(isinstance(item, Sample) for item in items):
        kinds = [type(item).__name__ for item in items]
        raise PluginError(
            f"{GENERATE_FLAG} {path} returned {kinds or 'an empty list'}; expected Sample or list[Sample]"
        )
    for sample in items:
        sample.check_alignment()
    return result


@dataclass(frozen=True, slots=True)
class RolloutHooks:
    """Every user function that the default rollout calls.

    Args:
        generate: ``--custom-generate-function-path``.
        sample_hooks: ``--rollout-sample-hook-path``, in order, with the keywords each accepts.
        dynamic_filter: ``--dynamic-sampling-filter-path``.
        sample_filter: ``--rollout-sample-filter-path``.
        all_samples: ``--rollout-all-samples-process-path``.
    """

    generate: CustomGenerate | None = None
    sample_hooks: tuple[tuple[Callable[..., Any], frozenset[str]], ...] = ()
    dynamic_filter: Callable[..., Any] | None = None
    sample_filter: Callable[..., Any] | None = None
    all_samples: Callable[..., Any] | None = None

    @classmethod
    def load(cls, args: Any) -> RolloutHooks:
        """Load what the flags name, before any engine is asked for anything.

        Raises:
            PluginError: One of them cannot be loaded.
        """
        path = args.custom_generate_function_path
        hooks: list[tuple[Callable[..., Any], frozenset[str]]] = []
        for hook_path in args.rollout_sample_hook_path or ():
            fn = load_plugin(hook_path, flag=HOOK_FLAG, kind="other")
            parameters = _parameters(fn, HOOK_FLAG, hook_path)
            hooks.append((fn, frozenset(k for k in ("rollout_id", "evaluation") if _accepts(parameters, k))))
        return cls(
            generate=CustomGenerate.load(path) if path else None,
            sample_hooks=tuple(hooks),
            dynamic_filter=_optional(args.dynamic_sampling_filter_path, "--dynamic-sampling-filter-path"),
            sample_filter=_optional(args.rollout_sample_filter_path, "--rollout-sample-filter-path"),
            all_samples=_optional(args.rollout_all_samples_process_path, "--rollout-all-samples-process-path"),
        )

    async def run_sample_hooks(self, args: Any, item: GroupItem, *, rollout_id: int, evaluation: bool) -> GroupItem:
        """Pass each sample of ``item`` through every hook.

        Raises:
            TypeError: A hook returned neither a sample nor None.
        """
        if not self.sample_hooks:
            return item
        keywords = {"rollout_id": rollout_id, "evaluation": evaluation}
        results: list[Sample] = []
        for sample in iter_samples([item]):
            for fn, accepted in self.sample_hooks:
                output = fn(args, sample, **{k: v for k, v in keywords.items() if k in accepted})
                if inspect.isawaitable(output):
                    output = await output
                if output is None:
                    continue
                if not isinstance(output, Sample):
                    name = getattr(fn, "__qualname__", repr(fn))
                    raise TypeError(f"{HOOK_FLAG}: {name} returned {type(output).__name__}; expected Sample or None")
                sample = output
            results.append(sample)
        return results if isinstance(item, list) else results[0]


def _optional(path: str | None, flag: str) -> Callable[..., Any] | None:
    return load_plugin(path, flag=flag, kind="other") if path else None


def _parameters(fn: Callable[..., Any], flag: str, path: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(fn).parameters
    except (TypeError, ValueError) as error:
        raise PluginError(f"{flag} {path}: {fn!r} is not a function whose signature can be read") from error


def _accepts(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
