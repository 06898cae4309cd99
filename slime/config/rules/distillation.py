"""On-policy distillation: who the teacher is and how its log-probs get to the trainer."""

from __future__ import annotations

from slime.config.draft import Draft
from slime.config.rules.checkpoints import TRACKER_FILE, classify_checkpoint, iteration_problems
from slime.config.rules.inputs import default_of
from slime.config.rules.same_model import other_model
from slime.config.sections import DataConfig, RolloutConfig

TEACHER_MODULE = "slime.rollout.on_policy_distillation"
TEACHER_REWARD = f"{TEACHER_MODULE}.reward_func"
TEACHER_POST_PROCESS = f"{TEACHER_MODULE}.post_process_rewards"


def check_distillation(draft: Draft) -> None:
    """Check what ``--use-opd`` needs and excludes."""
    algorithm = draft.algorithm
    if not algorithm.use_opd:
        _check_unused(draft)
        return
    if algorithm.opd_type is None:
        draft.problems.append("--use-opd needs --opd-type sglang or --opd-type megatron")
    if algorithm.loss_type == "sft_loss" or not algorithm.compute_advantages_and_returns:
        found = (
            "--loss-type sft_loss" if algorithm.loss_type == "sft_loss" else "--disable-compute-advantages-and-returns"
        )
        draft.problems.append(f"--use-opd changes the advantages, and {found} has none; remove one of them")
    if algorithm.opd_type == "megatron":
        draft.problems += _weights_problems(draft)
    elif algorithm.opd_type == "sglang":
        draft.problems += _server_problems(draft)


def _check_unused(draft: Draft) -> None:
    if draft.algorithm.opd_teacher_load is not None:
        draft.problems.append("--opd-teacher-load needs --use-opd")
    for dest in ("opd_type", "opd_kl_coef", "opd_teacher_ckpt_step"):
        if dest in draft.given:
            draft.notices.append(f"{draft.flag_of(dest)} has no effect without --use-opd")


def _weights_problems(draft: Draft) -> list[str]:
    path, step = draft.algorithm.opd_teacher_load, draft.algorithm.opd_teacher_ckpt_step
    if path is None:
        return ["--opd-type megatron needs --opd-teacher-load, the directory of the teacher's weights"]
    where = f"--opd-teacher-load {path}"
    kind = classify_checkpoint(path)
    if kind == "missing":
        return [f"{where}: no such directory; name the teacher's weights"]
    if kind == "empty":
        return [
            f"{where}: neither a Megatron checkpoint ({TRACKER_FILE}) nor a Hugging Face model of a supported family"
        ]
    if kind == "megatron":
        return iteration_problems("--opd-teacher-ckpt-step", step, "--opd-teacher-load", path)
    problems = _difference_problems(draft, where)
    if step is not None:
        problems.append(f"--opd-teacher-ckpt-step {step}: {where} holds no Megatron checkpoint")
    return problems


def _difference_problems(draft: Draft, where: str) -> list[str]:
    """The teacher's weights are computed with in the student's model: what differs would be silently wrong."""
    differing = other_model(draft, draft.algorithm.opd_teacher_load or "", ours="student")
    problem = (
        f"{where}: the teacher takes turns with the student in the trainer's model, so both need the same "
        f"architecture; found {', '.join(differing)}. Serve another architecture with the same tokenizer by an "
        "inference server and use --opd-type sglang"
    )
    return [problem] if differing else []


def _server_problems(draft: Draft) -> list[str]:
    algorithm, reward = draft.algorithm, draft.reward
    problems: list[str] = []
    if algorithm.opd_teacher_load is not None:
        problems.append(
            "--opd-type sglang excludes --opd-teacher-load: the teacher is the inference server at --rm-url; remove one"
        )
    if algorithm.opd_teacher_ckpt_step is not None:
        problems.append("--opd-type sglang excludes --opd-teacher-ckpt-step: the server chose its weights")
    asks = reward.custom_rm_path in (TEACHER_REWARD, TEACHER_REWARD.replace(".reward_func", ":reward_func"))
    if asks and reward.rm_url is None:
        problems.append(
            f"--custom-rm-path {reward.custom_rm_path} needs --rm-url, the /generate address of the teacher"
        )
    if (asks and reward.custom_reward_post_process_path is None) or _nobody_asks(draft):
        problems.append(
            "--opd-type sglang: nothing sets the teacher's log-probs of the samples; give --custom-rm-path "
            f"{TEACHER_REWARD} and --custom-reward-post-process-path {TEACHER_POST_PROCESS}, or functions of your own "
            "that set sample.teacher_log_probs"
        )
    return problems


def _nobody_asks(draft: Draft) -> bool:
    """Whether every function that could set ``sample.teacher_log_probs`` is ours."""
    reward, rollout, data = draft.reward, draft.rollout, draft.data
    own = (
        reward.custom_rm_path,
        reward.custom_reward_post_process_path,
        reward.custom_convert_samples_to_train_data_path,
        rollout.custom_generate_function_path,
        draft.debug.load_debug_rollout_data,
    )
    replaced = rollout.rollout_function_path != default_of(
        RolloutConfig, "rollout_function_path"
    ) or data.data_source_path != default_of(DataConfig, "data_source_path")
    return not replaced and all(path is None for path in own)
