"""Each rule by its effect on a parsed command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime.config import DebugConfig
from slime.config.draft import Draft, Surroundings
from slime.config.rules.outputs import resolve_outputs

from .conftest import Run, notices

Problems = Callable[..., list[str]]


# Placement and precision


@pytest.mark.parametrize(
    ("flags", "gpus", "device", "precision", "backend"),
    [
        ("", 0, "cpu", "fp32", "gloo"),
        ("", 8, "cuda", "bf16", "nccl"),
        ("--device cpu", 8, "cpu", "fp32", "gloo"),
        ("--bf16", 0, "cpu", "bf16", "gloo"),
        ("--fp16", 8, "cuda", "fp16", "nccl"),
        ("--precision fp32", 8, "cuda", "fp32", "nccl"),
        ("--distributed-backend gloo", 8, "cuda", "bf16", "gloo"),
    ],
)
def test_device_and_precision(run: Run, flags: str, gpus: int, device: str, precision: str, backend: str) -> None:
    config = run(flags, surroundings=Surroundings(num_cuda_devices=gpus))
    assert (config.cluster.device, config.train.precision) == (device, precision)
    assert config.cluster.distributed_backend == backend


def test_a_broadcast_to_the_trainers_own_gpu_is_refused(run: Run, problems: Problems) -> None:
    gpu = Surroundings(num_cuda_devices=8)
    found = problems("--colocate --update-weight-transport broadcast", surroundings=gpu)
    assert "cannot be in one NCCL group" in found[0]
    for flags in ("--update-weight-transport broadcast --actor-num-gpus-per-node 4", "--colocate"):
        assert run(flags, surroundings=gpu).cluster.device == "cuda"
    assert run("--colocate --update-weight-transport broadcast").weights.update_weight_transport == "broadcast"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--device cuda", "no CUDA device"),
        ("--fp16", "fp16 training needs CUDA"),
        ("--bf16 --fp16", "--bf16 and --fp16 exclude"),
        ("--precision fp32 --bf16", "--precision fp32 and --bf16"),
    ],
)
def test_device_and_precision_faults(problems: Problems, flags: str, words: str) -> None:
    assert words in problems(flags)[0]


def test_a_machine_without_gpu_is_told_what_runs(run: Run) -> None:
    expected = "no CUDA device: 2 trainer and 1 engine processes run on the CPU, trainers over gloo"
    assert expected in notices(run())


def test_colocate_shares_and_offloads(run: Run, cuda: Surroundings) -> None:
    flags = "--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus 8"
    config = run(flags)
    assert (config.cluster.offload_train, config.cluster.offload_rollout) == (True, True)
    config = run(flags + " --no-offload-train")
    assert (config.cluster.offload_train, config.cluster.offload_rollout) == (False, True)


def test_the_trainer_leaves_its_gpu_when_something_shares_it(run: Run, cuda: Surroundings) -> None:
    config = run("--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus 8", surroundings=cuda)
    assert (config.cluster.offload_train, config.cluster.offload_rollout) == (True, True)
    critic = run("--advantage-estimator ppo", surroundings=cuda)
    assert (critic.cluster.offload_train, critic.cluster.offload_rollout) == (True, False)
    assert run("--offload-train", surroundings=cuda).cluster.offload_train is True


@pytest.mark.parametrize("flag", ["--use-nccl-ub", "--optimizer-cuda-graph"])
def test_a_trainer_that_leaves_is_not_bound_to_addresses(
    run: Run, problems: Problems, cuda: Surroundings, flag: str
) -> None:
    found = problems(f"--offload-train {flag}", surroundings=cuda)
    assert any(f"{flag} binds" in problem and "--no-offload-train" in problem for problem in found)
    for stays in (f"--no-offload-train {flag}", flag):
        assert run(stays, surroundings=cuda).cluster.offload_train is False


def test_rollout_gpus_default_to_the_trainers_when_colocated(run: Run, model_dir: Path, prompts: Path) -> None:
    flags = f"--colocate --actor-num-gpus-per-node 4 --prompt-data {prompts} --hf-checkpoint {model_dir}"
    assert run(flags, base=False).cluster.rollout_num_gpus == 4


def test_split_placement_keeps_both_sides_loaded(run: Run) -> None:
    cluster = run().cluster
    assert (cluster.offload_train, cluster.offload_rollout) == (False, False)
    assert run("--offload").cluster.offload_train is True


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--actor-num-gpus-per-node 8 --rollout-num-gpus 8", "needs 16 GPUs"),
        ("--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2", "--rollout-num-gpus-per-engine 2"),
        ("--rollout-num-gpus 0", "--rollout-num-gpus 0 starts no engine"),
        ("--offload --no-offload-train", "--no-offload-train"),
        ("--actor-num-gpus-per-node 0", "--actor-num-gpus-per-node must be at least 1"),
    ],
)
def test_placement_faults(problems: Problems, cuda: Surroundings, flags: str, words: str) -> None:
    assert any(words in problem for problem in problems(flags, surroundings=cuda))


def test_debug_rollout_only_sizes_the_trainer_after_the_engines(run: Run) -> None:
    config = run("--debug-rollout-only --rollout-num-gpus 16")
    assert (config.cluster.actor_num_nodes, config.cluster.actor_num_gpus_per_node) == (2, 8)


def test_replay_trains_without_engines(run: Run) -> None:
    config = run("--load-debug-rollout-data /tmp/{rollout_id}.pt")
    assert config.debug.debug_train_only is True
    assert config.num_engines == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--debug-rollout-only --debug-train-only", "--debug-rollout-only and --debug-train-only exclude"),
        (
            "--save-debug-train-data x/{rollout_id} --save-debug-rollout-data x/{rollout_id}",
            "--save-debug-train-data must not be equal to --save-debug-rollout-data.",
        ),
        ("--use-tensorboard", "tensorboard is not installed"),
    ],
)
def test_debug_faults(problems: Problems, flags: str, words: str) -> None:
    assert words in problems(flags)[0]


def test_dump_details_sets_both_dumps() -> None:
    draft = Draft(surroundings=Surroundings(), debug=DebugConfig(dump_details="d"))
    resolve_outputs(draft)
    debug = draft.debug
    assert debug.save_debug_rollout_data == "d/rollout_data/{rollout_id}.pt"
    assert debug.save_debug_train_data == "d/train_data/{rollout_id}.pt"


def test_dumps_and_correct_samples_are_available(run: Run) -> None:
    config = run("--dump-details d --log-correct-samples")
    assert config.debug.save_debug_train_data == "d/train_data/{rollout_id}.pt"
    assert config.logging.log_correct_samples


def test_outputs_live_under_one_directory(run: Run, cuda: Surroundings) -> None:
    config = run("--actor-num-gpus-per-node 4 --save-interval 2", surroundings=cuda)
    assert config.logging.output_dir == "outputs/t0"
    assert config.logging.use_tensorboard is True
    assert config.checkpoint.save == "outputs/t0/checkpoints"
    assert "--save-interval without --save" in notices(config)
    assert run("--tb-experiment-name a/b").logging.output_dir == "outputs/a_b"


# Batches


@pytest.mark.parametrize(
    ("flags", "batch", "steps"),
    [
        ("", 32, 1),
        ("--global-batch-size 32", 32, 1),
        ("--global-batch-size 8", 8, 4),
        ("--num-steps-per-rollout 2", 16, 2),
        ("--num-steps-per-rollout 2 --global-batch-size 16", 16, 2),
    ],
)
def test_batch_identity(run: Run, flags: str, batch: int, steps: int) -> None:
    data = run(flags).data
    assert (data.global_batch_size, data.num_steps_per_rollout) == (batch, steps)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--global-batch-size 7", ["32 samples", "--global-batch-size 7", "Nearest --global-batch-size that fits: 8"]),
        ("--global-batch-size 64", ["--global-batch-size 64", "fits: 32"]),
        ("--num-steps-per-rollout 3", ["--num-steps-per-rollout 3", "must divide 32"]),
        ("--num-steps-per-rollout 2 --global-batch-size 8", ["Use --global-batch-size 16"]),
        ("--global-batch-size 1", ["less than the 2 data-parallel ranks"]),
        ("--over-sampling-batch-size 3", ["at least --rollout-batch-size 4"]),
        ("--use-dynamic-batch-size", ["--max-tokens-per-gpu"]),
        ("--balance-by-flops", ["--use-dynamic-batch-size"]),
    ],
)
def test_batch_faults(problems: Problems, flags: str, words: list[str]) -> None:
    (problem,) = problems(flags)
    assert all(word in problem for word in words), problem


def test_batch_derivations(run: Run) -> None:
    config = run("--use-dynamic-batch-size --max-tokens-per-gpu 100 --balance-by-flops")
    assert config.data.balance_data is True
    assert config.data.log_probs_max_tokens_per_gpu == 100
    assert config.rollout.over_sampling_batch_size == 4
    assert config.algorithm.grpo_std_normalization is True
    single = run("--n-samples-per-prompt 1")
    assert single.algorithm.grpo_std_normalization is False


def test_num_rollout_wins_over_epochs(run: Run) -> None:
    config = run("--num-epoch 2")
    assert (config.data.num_rollout, config.data.num_epoch) == (3, None)
    assert "wins" in notices(config)


# Lengths


@pytest.mark.parametrize(
    ("flags", "prompt", "response"),
    [
        ("--rollout-max-context-len 100", 99, 16),
        ("--rollout-max-context-len 100 --rollout-max-prompt-len 50", 50, 16),
    ],
)
def test_lengths(run: Run, flags: str, prompt: int, response: int) -> None:
    config = run(flags)
    assert (config.rollout.rollout_max_prompt_len, config.rollout.rollout_max_response_len) == (prompt, response)
    assert config.eval.eval_max_prompt_len == prompt


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rollout-max-context-len 100 --rollout-max-prompt-len 100", "minus 1 (99)"),
        ("--eval-max-context-len 10 --eval-max-prompt-len 10", "minus 1 (9)"),
        ("--rollout-max-context-len 5000", "4096 positions"),
    ],
)
def test_length_faults(problems: Problems, flags: str, words: str) -> None:
    assert words in problems(flags)[0]
