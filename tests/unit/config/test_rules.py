"""Each rule by its effect on a parsed command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime.config import Config, DebugConfig
from slime.config.draft import Draft, Surroundings
from slime.config.rules.checkpoints import TRACKER_FILE, classify_checkpoint
from slime.config.rules.outputs import resolve_outputs

from .conftest import FakeMegatron, Run, write_model

Problems = Callable[..., list[str]]


def notices(config: Config) -> str:
    return "\n".join(config.notices)


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


def test_the_trainer_cannot_leave_a_gpu(run: Run, problems: Problems, cuda: Surroundings) -> None:
    config = run("--colocate --actor-num-gpus-per-node 8 --rollout-num-gpus 8", surroundings=cuda)
    assert (config.cluster.offload_train, config.cluster.offload_rollout) == (False, True)
    assert "the training state stays on the GPU" in notices(config)
    for flag in ("--offload", "--offload-train"):
        (problem,) = problems(flag, surroundings=cuda)
        assert f"{flag}: " in problem
        assert "not available in this version" in problem
    quiet = run("--no-offload-train --colocate --actor-num-gpus-per-node 8 --rollout-num-gpus 8", surroundings=cuda)
    assert "the training state stays" not in notices(quiet)


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


# Objective


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1", "Only one of kl_coef and kl_loss_coef can be set"),
        ("--advantage-estimator reinforce_plus_plus", "needs --normalize-advantages"),
        ("--use-rollout-logprobs --use-tis", "exclude each other"),
        ("--use-rollout-logprobs --use-icepop", "--use-rollout-logprobs and --use-icepop exclude each other"),
        ("--use-tis --use-icepop", "--use-tis and --use-icepop exclude each other"),
        ("--use-icepop --custom-tis-function-path a.b", "--use-icepop and --custom-tis-function-path exclude"),
        (
            "--use-tis --tis-mode clip --tis-lower-bound 3",
            "--tis-lower-bound 3 must not be larger than --tis-upper-bound 2",
        ),
        ("--use-rs --rs-upper-bound 0.1", "--rs-lower-bound 0.5 must not be larger than --rs-upper-bound 0.1"),
        ("--constant-loss-denominator 8 --calculate-per-token-loss", "exclude each other"),
        ("--advantage-estimator rloo --n-samples-per-prompt 1", "--n-samples-per-prompt is 1"),
        ("--overlong-buffer-len 17", "--overlong-buffer-len 17 must be at most --rollout-max-response-len"),
        ("--overlong-buffer-len 4 --custom-reward-post-process-path a.b", "--custom-reward-post-process-path exclude"),
        (
            "--overlong-buffer-len 4 --custom-convert-samples-to-train-data-path a.b",
            "--custom-convert-samples-to-train-data-path exclude",
        ),
        ("--loss-type custom_loss", "--custom-loss-function-path"),
        ("--custom-loss-function-path a.b", "--loss-type custom_loss"),
        ("--tis-clip-low 3", "--tis-clip-low 3 must not be larger than --tis-clip 2"),
        ("--only-train-params-name-list a --freeze-params-name-list b", "exclude each other"),
        ("--eps-clip-c 1", "--eps-clip-c must be > 1"),
        ("--use-routing-replay --disable-compute-advantages-and-returns", "replays the routing of the log-prob pass"),
        (
            "--use-tis --tis-batch-normalize --disable-compute-advantages-and-returns",
            "--tis-batch-normalize needs the log-prob pass",
        ),
    ],
)
def test_objective_faults(problems: Problems, flags: str, words: str) -> None:
    assert any(words in problem for problem in problems(flags))


def test_routing_replay(run: Run) -> None:
    config = run("--use-rollout-routing-replay --use-rollout-logprobs --disable-compute-advantages-and-returns")
    assert config.algorithm.use_routing_replay
    assert "for its routing only" not in notices(config)
    assert "runs the log-prob pass for its routing only" in notices(run("--use-routing-replay --use-rollout-logprobs"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--advantage-estimator grpo --kl-coef 0.1", "--kl-coef 0.1 does not enter the advantages"),
        ("--tis-level sequence", "--tis-level: no effect without --use-tis"),
        ("--use-rs --tis-mode clip", "--tis-mode: no effect without --use-tis"),
        ("--get-mismatch-metrics --tis-batch-normalize", "--tis-batch-normalize: no effect without --use-tis"),
        ("--use-tis --rs-veto-threshold 0.1", "--rs-veto-threshold: no effect without --use-rs"),
        ("--use-tis --tis-lower-bound 0.5", "no effect with --tis-mode truncate"),
        ("--custom-tis-function-path a.b", "no effect without --use-tis"),
        ("--overlong-penalty-factor 2", "no effect without --overlong-buffer-len"),
        ("--advantage-estimator cispo --eps-clip-c 2", "--eps-clip-c has no effect"),
    ],
)
def test_objective_notices(run: Run, flags: str, words: str) -> None:
    assert words in notices(run(flags))


@pytest.mark.parametrize(
    "flags",
    [
        "--use-tis --tis-level geometric --use-rs --rs-veto-threshold 1e-4 --tis-batch-normalize",
        "--use-rollout-logprobs --use-rs",
        "--use-rs --tis-upper-bound 3",
        "--get-mismatch-metrics",
        "--use-tis --rs-level token --tis-lower-bound 0.5 --custom-tis-function-path a.b",
        "--advantage-estimator rloo --kl-coef 0.1",
        "--overlong-buffer-len 16 --overlong-penalty-factor 0.5",
    ],
)
def test_objective_without_remarks(run: Run, flags: str) -> None:
    assert "no effect" not in notices(run(flags))


def test_bounds_of_weights_and_rejection(run: Run) -> None:
    def bounds(flags: str) -> tuple[float, ...]:
        algorithm = run(flags).algorithm
        return (*algorithm.tis_bounds, *algorithm.rs_bounds)

    assert bounds("") == (0.5, 2, 0.5, 2)
    assert bounds("--tis-clip 4 --tis-clip-low 0.1") == (0.1, 4, 0.1, 4)
    assert bounds("--tis-upper-bound 5 --rs-upper-bound 3") == (0.2, 5, 0.2, 3)
    assert bounds("--tis-lower-bound 0.9 --rs-lower-bound 0.7") == (0.9, 2, 0.7, 2)


def test_clip_bounds(run: Run) -> None:
    assert run("--eps-clip 0.3").algorithm.eps_clip_high == 0.3
    assert run("--eps-clip 0.3 --eps-clip-high 0.4").algorithm.eps_clip_high == 0.4


# Checkpoints


def test_kl_loss_without_reference_takes_the_initial_weights(run: Run, model_dir: Path) -> None:
    config = run("--use-kl-loss --kl-loss-coef 0.01")
    assert config.checkpoint.ref_load == str(model_dir)
    assert "--use-kl-loss without --ref-load" in notices(config)
    assert run().checkpoint.ref_load is None


def test_load_resumes_only_a_megatron_checkpoint(run: Run, tmp_path: Path, model_dir: Path) -> None:
    saved = tmp_path / "saved"
    fresh = run(f"--load {saved} --save {saved}")
    assert (fresh.checkpoint.load, fresh.checkpoint.resume) == (str(model_dir), False)
    assert "holds no checkpoint yet" in notices(fresh)
    saved.mkdir()
    (saved / TRACKER_FILE).write_text("3")
    again = run(f"--load {saved} --save {saved}")
    assert (again.checkpoint.load, again.checkpoint.resume) == (str(saved), True)
    other = write_model(tmp_path / "other")
    assert run(f"--load {other}").checkpoint.load == str(other)
    assert run().checkpoint.load == str(model_dir)


def megatron_dir(folder: Path, tracker: str = "7") -> Path:
    folder.mkdir()
    (folder / TRACKER_FILE).write_text(tracker)
    return folder


def test_only_resuming_continues_iterations(run: Run, tmp_path: Path) -> None:
    """Whatever is not resumed starts at 0, from whichever directory its weights come."""
    saved, ref, empty = megatron_dir(tmp_path / "saved"), megatron_dir(tmp_path / "ref"), tmp_path / "empty"
    release = megatron_dir(tmp_path / "release", "release")
    empty.mkdir()

    def start(flags: str) -> tuple[str | None, int | None, bool, int | None]:
        found = run(flags, megatron=Finetunable()).checkpoint
        return found.load, found.ckpt_step, found.resume, found.start_rollout_id

    assert start(f"--load {saved}") == (str(saved), None, True, None)
    assert start(f"--load {saved} --ckpt-step 3") == (str(saved), 3, True, None)
    assert start(f"--load {saved} --ref-load {saved}") == (str(saved), None, True, None)
    assert start(f"--load {saved} --finetune") == (str(saved), None, False, 0)
    assert start(f"--load {release}") == (str(release), None, False, 0)
    assert start(f"--load {empty} --ref-load {ref}") == (str(ref), None, False, 0)
    assert start(f"--ref-load {ref} --ref-ckpt-step 5") == (str(ref), 5, False, 0)
    assert start(f"--ref-load {ref} --start-rollout-id 4") == (str(ref), None, False, 4)
    assert start("")[2:] == (False, 0)


class Finetunable(FakeMegatron):
    NAMES = FakeMegatron.NAMES | {"--finetune"}


@pytest.mark.parametrize("flag", ["--save", "--save-hf", "--save-debug-rollout-data", "--load-debug-rollout-data"])
@pytest.mark.parametrize(
    ("path", "accepted"),
    [
        ("out/{rollout_id}", True),
        ("out/{rollout_id:06d}", True),
        ("out/{step}", False),
        ("out/{}", False),
        ("out/{rollout_id", False),
        ("out/{rollout_id:q}", False),
        ("out", True),
    ],
)
def test_templates_are_tried(run: Run, problems: Problems, flag: str, path: str, accepted: bool) -> None:
    if accepted and not (flag == "--save" and "{" in path):
        run([flag, path])
    else:
        found = problems([flag, path])
        assert any(f"{flag} {path}: " in problem for problem in found), found


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--load nowhere", "--load nowhere: no such directory"),
        ("--ref-load nowhere", "--ref-load nowhere: no such directory"),
        ("--ref-load .", "holds neither"),
        ("--load . --ckpt-step 3", "--ckpt-step 3: --load . holds no checkpoint"),
    ],
)
def test_checkpoint_faults(problems: Problems, flags: str, words: str) -> None:
    assert words in problems(flags)[0]


def test_classify(tmp_path: Path) -> None:
    assert classify_checkpoint(str(tmp_path / "x")) == "missing"
    assert classify_checkpoint(str(tmp_path)) == "empty"
    strange = write_model(tmp_path / "strange", {"model_type": "bert"})
    assert classify_checkpoint(str(strange)) == "empty"
