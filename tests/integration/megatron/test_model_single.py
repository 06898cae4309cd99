"""The model in one process: log-probs, shared prompts, precision, recomputation, export."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from slime.errors import CheckpointError, ConfigError, WaitTimeoutError
from tests.support.gloo import free_port
from tests.support.tiny_models import Family, make_tiny_model
from tests.support.training import loaded_model, make_config, make_critic_config, start

from slime.backends.megatron import parallel  # isort: skip
from slime.backends.megatron.attention import PackedLayout, pack_row  # isort: skip
from slime.backends.megatron.export import iter_hf_buckets, load_hf, save_hf  # isort: skip
from slime.backends.megatron.layers import routers  # isort: skip

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_tied_llama3_rope": ("llama", {"tie_word_embeddings": True, "rope_scaling": LLAMA3_SCALING}),
    "llama_linear_rope": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "glm4_moe": ("glm4_moe", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3_yarn": ("deepseek_v3", {"rope_scaling": YARN}),
    "moonlight": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5}),
}


@pytest.fixture(autouse=True)
def _leave_groups() -> Iterator[None]:
    yield
    parallel.destroy()


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, overrides = FAMILIES[request.param]
    return make_tiny_model(tmp_path / "model", family, **overrides)


def random_tokens(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 250, (count,), generator=torch.Generator().manual_seed(seed))


def test_logits_of_packed_sequences_equal_transformers(folder: Path) -> None:
    config = make_config(folder)
    state = start(config)
    (model,) = loaded_model(config, state)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lengths = [37, 5, 130, 22, 1]
    layout = PackedLayout.of_sequences(lengths, multiple=16)
    tokens = random_tokens(layout.num_tokens)
    row = pack_row(layout, dtype=torch.float32, device=state.device)
    with torch.no_grad():
        parts = tokens[: sum(lengths)].split(lengths)
        expected = torch.cat([reference(part[None]).logits[0] for part in parts])
        found = model(tokens[None], row)[: sum(lengths)]
        torch.testing.assert_close(found[:, : expected.size(1)], expected, rtol=0, atol=1e-5)
        log_probs, expected_log_probs = found.log_softmax(-1), expected.log_softmax(-1)
        torch.testing.assert_close(log_probs[:, : expected.size(1)], expected_log_probs, rtol=0, atol=1e-5)
        chosen = torch.tensor([5, 0, 5, 190])
        torch.testing.assert_close(model(tokens[None], row, chosen), found[chosen], rtol=0, atol=2e-6)


def loss_and_grads(
    model: torch.nn.Module, layout: PackedLayout, tokens: torch.Tensor, index: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    row = pack_row(layout, dtype=torch.float32, device=torch.device("cpu"))
    loss = F.cross_entropy(model(tokens[None], row, index), targets)
    loss.backward()
    grads = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grads[name], parameter.grad = parameter.grad, None
    return loss.detach(), grads


def unshared(layout: PackedLayout, tokens: torch.Tensor) -> tuple[PackedLayout, torch.Tensor, torch.Tensor]:
    """The same responses with a copy of the prompt each: layout, tokens, predicting tokens."""
    sequences, index, start_token = [], [], 0
    for segment in layout.segments:
        if segment.prefix is None:
            continue
        prompt = layout.segments[segment.prefix]
        sequences.append(torch.cat([tokens[prompt.start : prompt.end], tokens[segment.start : segment.end]]))
        index.append(torch.arange(segment.length) + start_token + prompt.length - 1)
        start_token += prompt.length + segment.length
    return PackedLayout.of_sequences([len(s) for s in sequences]), torch.cat(sequences), torch.cat(index)


def test_shared_prompts_give_the_loss_and_gradients_of_copies(folder: Path) -> None:
    config = make_config(folder)
    (model,) = loaded_model(config, start(config))
    layout = PackedLayout.of_groups([(30, [50, 9, 33]), (110, [20, 1, 60, 64]), (4, [4])], multiple=8)
    tokens = random_tokens(layout.num_tokens)
    responses = [i for i, s in enumerate(layout.segments) if s.prefix is not None]
    index = torch.cat([layout.predictors(i) for i in responses])
    targets = torch.cat([tokens[layout.segments[i].start : layout.segments[i].end] for i in responses])
    loss, grads = loss_and_grads(model, layout, tokens, index, targets)
    other_loss, other_grads = loss_and_grads(model, *unshared(layout, tokens), targets)
    torch.testing.assert_close(loss, other_loss, rtol=1e-6, atol=0)
    assert any(grad.abs().max() > 1e-2 for grad in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(grad, other_grads[name], rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    ("family", "argv"),
    [
        ("qwen3", ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]),
        ("qwen3", ["--recompute-activations"]),
        ("deepseek_v3", ["--recompute-granularity", "selective", "--recompute-modules", "mla_up_proj", "moe"]),
    ],
    ids=["full", "selective", "latents_and_experts"],
)
def test_recomputation_changes_nothing(tmp_path: Path, family: Family, argv: list[str]) -> None:
    folder = make_tiny_model(tmp_path, family)
    layout = PackedLayout.of_groups([(5, [9, 3])])
    tokens = random_tokens(layout.num_tokens)
    index = torch.arange(4, 10)
    results = []
    for flags in ([], argv):
        config = make_config(folder, flags)
        (model,) = loaded_model(config, start(config))
        model.train()
        results.append(loss_and_grads(model, layout, tokens, index, tokens[index + 1]))
        parallel.destroy()
    (loss, grads), (other_loss, other_grads) = results
    assert loss == other_loss
    for name, grad in grads.items():
        torch.testing.assert_close(grad, other_grads[name], rtol=0, atol=1e-7)


def test_bf16_agrees_with_transformers_in_bf16(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", torch_dtype="bfloat16")
    config = make_config(folder, train={"precision": "bf16"})
    state = start(config)
    (model,) = loaded_model(config, state)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokens = random_tokens(60)
    row = pack_row(PackedLayout.of_sequences([60]), dtype=torch.bfloat16, device=state.device)
    with torch.no_grad():
        found = model(tokens[None], row, fp32_output=False)
        assert found.dtype == torch.bfloat16
        expected = reference(tokens[None]).logits[0]
    difference = found[:, : expected.size(1)].float().log_softmax(-1) - expected.float().log_softmax(-1)
    assert difference.abs().mean() < 0.02


def test_routing_in_bf16_keeps_the_expert_bias_in_fp32(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "deepseek_v3", torch_dtype="bfloat16")
    config = make_config(folder, train={"precision": "bf16"})
    chunks = loaded_model(config, start(config))
    before = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert not torch.equal(before[name], before[name].bfloat16().float())
    for bucket in iter_hf_buckets(chunks, config, 1 << 30):
        after = dict(bucket)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert [(layer, router.expert_bias.dtype) for layer, router in routers(chunks)] == [(1, torch.float32)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_saved_is_what_was_loaded(tmp_path: Path, dtype: str) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen2", torch_dtype=dtype, tie_word_embeddings=True)
    config = make_config(folder, train={"precision": "bf16" if dtype == "bfloat16" else "fp32"})
    chunks = loaded_model(config, start(config))
    out = tmp_path / "saved" / "step_1"
    save_hf(chunks, config, out)
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name]), name
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype
    assert {p.name for p in out.iterdir()} == {p.name for p in folder.iterdir()}
    save_hf(chunks, config, out)  # replaces
    assert [p.name for p in out.parent.iterdir()] == ["step_1"]


def test_buckets_keep_to_their_size(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    config = make_config(folder)
    chunks = loaded_model(config, start(config))
    limit = 40_000
    sizes = []
    names: list[str] = []
    for bucket in iter_hf_buckets(chunks, config, limit):
        sizes.append([tensor.numel() * tensor.element_size() for _, tensor in bucket])
        names += [name for name, _ in bucket]
    assert all(sum(size) <= limit or len(size) == 1 for size in sizes)
    assert any(len(size) > 1 for size in sizes)
    assert any(size[0] > limit for size in sizes)
    assert sorted(names) == sorted(load_file(folder / "model.safetensors"))


def test_an_incomplete_or_foreign_checkpoint_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama")
    config = make_config(folder)
    chunks = loaded_model(config, start(config))
    other = make_tiny_model(tmp_path / "other", "llama", intermediate_size=192)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight.*\(384, 64\).*the model has \(256, 64\)"):
        load_hf(chunks, config, other)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, other / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.layers\.1\.mlp\.down_proj\.weight' is missing"):
        load_hf(chunks, config, other)


def test_a_missing_rank_is_reported_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(make_tiny_model(tmp_path, "llama"), num_processes=2)
    real = parallel.datetime.timedelta
    monkeypatch.setattr(parallel.datetime, "timedelta", lambda minutes: real(seconds=2 * minutes))
    with pytest.raises(WaitTimeoutError, match=r"rank 0 waited .* for all 2 ranks at 127\.0\.0\.1"):
        parallel.initialize(config, rank=0, world_size=2, master_addr="127.0.0.1", master_port=free_port())


def test_a_wrong_number_of_processes_is_refused(tmp_path: Path) -> None:
    config = make_config(make_tiny_model(tmp_path, "llama"), num_processes=2)
    with pytest.raises(ConfigError, match="3 training processes were started"):
        parallel.initialize(config, rank=0, world_size=3, master_addr="127.0.0.1", master_port=free_port())


def provide_model(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    """A user's model provider, as established ones are written: plain GPTModel from Megatron's args."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training import get_args
    from megatron.training.argument_utils import core_transformer_config_from_args

    from slime.backends.megatron.layers import block_spec

    args = get_args()
    config = core_transformer_config_from_args(args)
    return GPTModel(
        config,
        block_spec(config, vp_stage),
        args.padded_vocab_size,
        args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
    )


def test_a_custom_model_provider(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    logits: list[torch.Tensor] = []
    tokens = random_tokens(12)
    for provider in (None, f"{__file__}:provide_model"):
        config = make_config(folder, train={"custom_model_provider_path": provider})
        state = start(config)
        (model,) = loaded_model(config, state)
        row = pack_row(PackedLayout.of_sequences([12]), dtype=torch.float32, device=state.device)
        with torch.no_grad():
            logits.append(model(tokens[None], row))
        parallel.destroy()
    assert torch.equal(*logits)


def test_frozen_parameters_have_no_gradient(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama")
    for train, trained in (
        ({"only_train_params_name_list": (r"layers\.1\.mlp", "final")}, 3),
        ({"freeze_params_name_list": ("decoder", "embedding")}, 1),
    ):
        config = make_config(folder, train=train)
        (model,) = loaded_model(config, start(config), wrap_with_ddp=True)
        assert sum(parameter.requires_grad for parameter in model.parameters()) == trained
        parallel.destroy()
    config = make_config(folder, train={"only_train_params_name_list": ("nothing",)})
    with pytest.raises(ConfigError, match="--only-train-params-name-list nothing leaves no parameter"):
        loaded_model(config, start(config))


@pytest.mark.parametrize(
    "train",
    [{"only_train_params_name_list": (r"layers\.1\.mlp",)}, {"freeze_params_name_list": ("output_layer", "emb")}],
)
def test_a_value_head_is_never_frozen(tmp_path: Path, train: dict[str, Any]) -> None:
    config = make_critic_config(make_tiny_model(tmp_path, "llama"), train=train)
    (model,) = loaded_model(config, start(config))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"output_layer.weight", "output_layer.bias"} < trained
    assert len(trained) < len(list(model.parameters()))


@pytest.mark.timeout(60)
def test_importing_the_backend_says_nothing() -> None:
    modules: Sequence[str] = ("args", "attention", "export", "model", "parallel")
    code = "from slime.backends.megatron import cpu; cpu.install()\n"
    code += "".join(f"import slime.backends.megatron.{module}\n" for module in modules)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert "Apex" not in result.stderr
