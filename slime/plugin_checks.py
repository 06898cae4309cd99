"""Check every plug-in flag of a configuration before anything starts: it loads, and its signature fits.

The table below is the list of hooks with what slime passes to each. It leaves out calling them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from slime.config import Config
from slime.config.schema import all_flag_specs
from slime.errors import PluginError
from slime.plugins import PluginKind, check_signature, load_plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One plug-in flag.

    Attributes:
        dest: Field that holds the path.
        expected: Signature shown to the user.
        required: Arguments slime passes by position, in order; unused for the kinds with several call forms.
        keywords: Arguments slime passes by name.
        kind: How a bare file is searched.
    """

    dest: str
    expected: str
    required: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    kind: PluginKind = "other"


HOOKS: tuple[Hook, ...] = (
    Hook(
        dest="rollout_function_path",
        expected="fn(args, rollout_id, data_source, evaluation=False)",
        required=("args", "rollout_id", "data_source"),
    ),
    Hook(
        dest="eval_function_path",
        expected="fn(args, rollout_id, data_source, evaluation=False)",
        required=("args", "rollout_id", "data_source"),
    ),
    Hook(
        dest="custom_generate_function_path",
        expected="async fn(args, sample, sampling_params) or async custom_generate(args, samples, evaluation=False)",
        kind="generate",
    ),
    Hook(dest="dynamic_sampling_filter_path", expected="fn(args, samples)", required=("args", "samples")),
    Hook(
        dest="buffer_filter_path",
        expected="fn(args, rollout_id, buffer, num_samples)",
        required=("args", "rollout_id", "buffer", "num_samples"),
    ),
    Hook(dest="rollout_sample_filter_path", expected="fn(args, groups)", required=("args", "groups")),
    Hook(
        dest="rollout_all_samples_process_path",
        expected="fn(args, all_groups, data_source)",
        required=("args", "all_groups", "data_source"),
    ),
    Hook(dest="data_source_path", expected="class with __init__(args)", required=("args",)),
    Hook(dest="custom_reward_post_process_path", expected="fn(args, samples)", required=("args", "samples")),
    Hook(dest="custom_convert_samples_to_train_data_path", expected="fn(args, samples)", required=("args", "samples")),
    Hook(
        dest="custom_rollout_log_function_path",
        expected="fn(rollout_id, args, samples, rollout_extra_metrics, rollout_time)",
        required=("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time"),
    ),
    Hook(
        dest="custom_eval_rollout_log_function_path",
        expected="fn(rollout_id, args, data, extra_metrics)",
        required=("rollout_id", "args", "data", "extra_metrics"),
    ),
    Hook(
        dest="custom_loss_function_path",
        expected="fn(args, batch, logits, sum_of_sample_mean)",
        required=("args", "batch", "logits", "sum_of_sample_mean"),
    ),
    Hook(dest="custom_advantage_function_path", expected="fn(args, rollout_data)", required=("args", "rollout_data")),
    Hook(
        dest="custom_pg_loss_reducer_function_path",
        expected="fn(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)",
        required=("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss"),
    ),
    Hook(
        dest="custom_model_provider_path",
        expected="fn(pre_process, post_process, vp_stage=None)",
        required=("pre_process", "post_process"),
    ),
    Hook(dest="custom_megatron_init_path", expected="fn(args)", required=("args",)),
    Hook(
        dest="custom_megatron_before_log_prob_hook_path",
        expected="fn(args, model, store_prefix)",
        required=("args", "model", "store_prefix"),
    ),
    Hook(
        dest="custom_megatron_before_train_step_hook_path",
        expected="fn(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)",
        required=("args", "rollout_id", "step_id", "model", "optimizer", "opt_param_scheduler"),
    ),
    Hook(
        dest="custom_tis_function_path",
        expected="fn(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, "
        "response_lengths, **kwargs)",
        keywords=(
            *("args", "pg_loss", "train_log_probs", "rollout_log_probs"),
            *("loss_masks", "total_lengths", "response_lengths"),
        ),
    ),
    Hook(
        dest="rollout_data_postprocess_path",
        expected="fn(args, rollout_id, rollout_data)",
        required=("args", "rollout_id", "rollout_data"),
    ),
    Hook(
        dest="rollout_sample_hook_path",
        expected="fn(args, sample, rollout_id=None, evaluation=False)",
        required=("args", "sample"),
    ),
    Hook(
        dest="custom_update_weight_post_write_path",
        expected="fn(args, version_dir, rollout_engines)",
        required=("args", "version_dir", "rollout_engines"),
    ),
    Hook(dest="sglang_custom_pull_weights_pre_read_hook", expected="fn(directory)", required=("directory",)),
    Hook(dest="custom_rm_path", expected="async fn(args, sample) or async fn(args, samples)", kind="reward"),
    Hook(dest="eval_custom_rm_path", expected="async fn(args, sample) or async fn(args, samples)", kind="reward"),
)
"""Every plug-in flag. The kinds generate and reward have several call forms; their own check is below."""


def check_plugins(config: Config) -> list[str]:
    """Load every plug-in the configuration names and check its signature.

    A path that is still the default is ours and is not loaded.

    Returns:
        Problems, each naming flag and path.
    """
    specs = {spec.dest: spec for spec in all_flag_specs()}
    problems: list[str] = []
    defaults = {str(specs[hook.dest].default) for hook in HOOKS}
    for hook in HOOKS:
        spec = specs[hook.dest]
        value: Any = getattr(getattr(config, spec.section), hook.dest)
        paths = cast("Sequence[str]", value if isinstance(value, tuple) else () if value is None else (value,))
        problems += [p for path in paths if path not in defaults for p in _check(hook, spec.name, path)]
    for dataset in config.eval.eval_datasets:
        where = f"evaluation set {dataset.name}: "
        own = ((dataset.custom_rm_path, _hook("custom_rm_path")), (dataset.custom_generate_function_path, _generate()))
        problems += [p for path, hook in own if path is not None for p in _check(hook, where + hook.dest, path)]
    return list(dict.fromkeys(problems))


def _hook(dest: str) -> Hook:
    return next(hook for hook in HOOKS if hook.dest == dest)


def _generate() -> Hook:
    return _hook("custom_generate_function_path")


def _check(hook: Hook, flag: str, path: str) -> list[str]:
    try:
        target = load_plugin(path, flag=flag, kind=hook.kind)
        where = f"{flag} {path}"
        if hook.kind == "reward":
            _check_reward(target, where)
        elif hook.kind == "generate":
            _check_generate(target, where, hook.expected)
        else:
            check_signature(target, flag=where, expected=hook.expected, required=hook.required, keywords=hook.keywords)
    except PluginError as error:
        return [str(error)]
    return []


def _check_reward(target: Any, where: str) -> None:
    if inspect.isclass(target):
        if not callable(getattr(target, "compute_reward", None)):
            raise PluginError(f"{where}: class {target.__name__} has no compute_reward(prompts, responses)")
        check_signature(target, flag=where, expected="class with __init__(model_path)", required=("model_path",))
        return
    check_signature(
        target, flag=where, expected="async fn(args, sample) or fn(args, samples)", required=("args", "sample")
    )


def _check_generate(target: Callable[..., Any], where: str, expected: str) -> None:
    if not callable(target):
        raise PluginError(f"{where}: {target!r} is not callable; expected {expected}")
    call: Any = target if inspect.isroutine(target) else type(target).__call__
    if not inspect.iscoroutinefunction(call) and not inspect.isclass(target):
        raise PluginError(f"{where}: must be an async function; expected {expected}")
    takes_list = "samples" in inspect.signature(target).parameters
    required = ("args", "samples") if takes_list else ("args", "sample", "sampling_params")
    check_signature(target, flag=where, expected=expected, required=required)
