"""The model at every parallel layout against transformers and against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional as F

from tests.support.gloo import Rank, run_ranks
from tests.support.tiny_models import as_in_files, make_tiny_model
from tests.support.training import cpu  # noqa: F401  (installs the CPU substitutions before Megatron)

from megatron.core.distributed import finalize_model_grads  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy  # isort: skip
from megatron.core.utils import get_model_config  # isort: skip

from slime.backends.megatron import parallel
from slime.backends.megatron.attention import PackedLayout, PackedRow, pack_row
from slime.backends.megatron.export import iter_hf_buckets
from slime.backends.megatron.model import build_optimizer
from tests.support.training import loaded_model, make_config, start

GROUPS = (((7, (5, 9, 3)), (11, (20, 1))), ((4, (4,)), (13, (2, 8, 8)), (1, (6,))))
"""Two micro-batches of prompts with their responses."""
# First step of Adam with lr 1 and eps 1 is g / (|g| + 1): weights then show the gradients linearly.
OPTIMIZER = ["--lr", "1", "--adam-eps", "1", "--weight-decay", "0", "--clip-grad", "0", "--lr-decay-style", "constant"]


def tokens_of(layout: PackedLayout, seed: int) -> torch.Tensor:
    return torch.randint(0, 250, (layout.num_tokens,), generator=torch.Generator().manual_seed(seed))


def predicted(layout: PackedLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose logits are used, and the tokens that they predict."""
    responses = [i for i, s in enumerate(layout.segments) if s.prefix is not None]
    index = torch.cat([layout.predictors(i) for i in responses])
    targets = torch.cat([torch.arange(layout.segments[i].start, layout.segments[i].end) for i in responses])
    return index, targets


def local_part(row: PackedRow, index: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the predictions those whose logits this context-parallel rank computes, in its own places."""
    place = torch.full((row.layout.num_tokens,), -1)
    place[row.index] = torch.arange(row.index.numel())
    here = place[index] >= 0
    return place[index[here]], targets[here]


def train_once(rank: Rank, model_dir: str, argv: list[str]) -> tuple[float, dict[str, torch.Tensor]]:
    """One optimizer step on both micro-batches: the mean loss and, on rank 0, the new weights."""
    algorithm = {"calculate_per_token_loss": True}
    config = make_config(model_dir, [*OPTIMIZER, *argv], num_processes=rank.world_size, algorithm=algorithm)
    state = start(config, rank)
    chunks = loaded_model(config, state, wrap_with_ddp=True)
    optimizer, _ = build_optimizer(config, chunks)
    model_config = get_model_config(chunks[0])
    model_config.finalize_model_grads_func = finalize_model_grads
    multiple = 8 * state.cp_size
    layouts = [PackedLayout.of_groups(groups, multiple=multiple) for groups in GROUPS]

    def forward_step(data: Any, model: Any) -> Any:
        i, layout = next(data)
        row = pack_row(layout, dtype=torch.float32, device=state.device, cp_rank=state.cp_rank, cp_size=state.cp_size)
        tokens = tokens_of(layout, i)
        index, targets = local_part(row, *predicted(layout))

        def loss_of(logits: torch.Tensor) -> Any:
            losses = vocab_parallel_cross_entropy(logits.float(), tokens[targets])
            total = losses.sum()
            return total, torch.tensor(targets.numel()), {"loss": total.detach()}

        return model(tokens[row.index][None], row, index), loss_of

    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(list(enumerate(layouts))) for _ in chunks]
        if len(chunks) > 1
        else iter(list(enumerate(layouts))),
        model=chunks,
        num_microbatches=len(layouts),
        seq_length=1,
        micro_batch_size=1,
    )
    loss = sum((r["loss"] for r in results), torch.zeros(()))
    torch.distributed.all_reduce(loss)
    loss /= state.tp_size * state.dp_size * sum(predicted(layout)[0].numel() for layout in layouts)
    optimizer.step()
    weights = {name: t.clone() for bucket in iter_hf_buckets(chunks, config, 2**20) for name, t in bucket}
    parallel.destroy()
    return loss.item(), weights


def transformers_step(model_dir: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """The same step without packing, Megatron or our attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    losses = []
    for i, groups in enumerate(GROUPS):
        layout = PackedLayout.of_groups(groups)
        padded = PackedLayout.of_groups(groups, multiple=8)
        tokens = tokens_of(padded, i)[: layout.num_tokens]
        for segment in layout.segments:
            if segment.prefix is None:
                continue
            prompt = layout.segments[segment.prefix]
            sequence = torch.cat([tokens[prompt.start : prompt.end], tokens[segment.start : segment.end]])
            logits = model(sequence[None]).logits[0, prompt.length - 1 : -1]
            losses.append(F.cross_entropy(logits, sequence[prompt.length :], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    weights = dict(model.state_dict())  # for the buffers, which stay as they are
    for name, parameter in model.named_parameters():
        weights[name] = parameter.detach() - parameter.grad / (parameter.grad.abs() + 1)
    return loss.item(), as_in_files(weights)


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    family = request.param
    folder = tmp_path_factory.mktemp(family)
    # The embedding is tied in one family; the last pipeline stage then keeps a copy of it.
    make_tiny_model(folder, family, num_hidden_layers=4, tie_word_embeddings=family == "qwen2")
    return folder, *transformers_step(folder)


LAYOUTS = {
    "one": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "tp2_sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "cp2": (2, ["--context-parallel-size", "2"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "dp2": (2, []),
    "pp2_vpp2": (
        2,
        ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
    ),
    "cp2_ep2": (2, ["--context-parallel-size", "2", "--expert-model-parallel-size", "2"]),
    "tp2_sp_ep2": (
        4,
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--expert-model-parallel-size", "2"],
    ),
    "tp2_sp_pp2_cp2": (
        8,
        [
            *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
            *("--pipeline-model-parallel-size", "2", "--context-parallel-size", "2"),
        ],
    ),
}
CASES = [
    *((family, layout) for family in ("llama", "qwen2", "qwen3") for layout in ("tp2_sp", "pp2")),
    *(("llama", layout) for layout in ("one", "tp2", "dp2")),
    *(("qwen2", layout) for layout in ("pp2_vpp2", "tp2_sp_pp2_cp2")),
    ("qwen3", "cp2"),
    ("qwen3_moe", "tp2_sp_ep2"),
    ("deepseek_v3", "cp2_ep2"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("reference", "layout"), sorted(CASES), indirect=["reference"])
def test_training_step_equals_transformers(reference: Any, layout: str) -> None:
    folder, loss, weights = reference
    world_size, argv = LAYOUTS[layout]
    results = run_ranks(world_size, train_once, str(folder), argv, timeout_seconds=240)
    found_loss, found = results[0]
    assert found_loss == pytest.approx(loss, abs=2e-6)
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")
