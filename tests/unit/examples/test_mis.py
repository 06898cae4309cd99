"""The established helper's import path and settings give the built-in correction."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from examples.train_infer_mismatch_helper import mis
from slime.algorithms.corrections import EngineGap, engine_correction
from slime.backends.megatron.engine_correction import rejection_of, weighting_of
from slime.config import ArgsView
from slime.config.sections import AlgorithmConfig
from slime.plugin_checks import check_plugins
from slime.plugins import load_plugin
from tests.unit.config.conftest import Run, base_argv, model_dir, prompts, run  # noqa: F401  fixtures

PATH = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
YAML = yaml.safe_load(Path(mis.__file__).with_name("mis.yaml").read_text(encoding="utf-8"))
LENGTHS = [4, 1, 6]


def columns(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    trainer, engine, loss = (torch.randn(sum(LENGTHS), generator=generator) for _ in range(3))
    mask = (torch.rand(sum(LENGTHS), generator=generator) > 0.2).float()
    return {"trainer": trainer, "engine": engine, "loss": loss, "mask": mask}


def call(settings: dict[str, Any], x: dict[str, Any], normaliser: float = 1.0) -> Any:
    function = load_plugin(PATH, flag="--custom-tis-function-path")
    return function(
        SimpleNamespace(**settings),
        pg_loss=x["loss"],
        train_log_probs=list(x["trainer"].split(LENGTHS)),
        rollout_log_probs=list(x["engine"].split(LENGTHS)),
        loss_masks=list(x["mask"].split(LENGTHS)),
        total_lengths=[n + 3 for n in LENGTHS],
        response_lengths=LENGTHS,
        weight_normaliser=normaliser,
    )


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
@pytest.mark.parametrize("rejects", [False, True])
def test_equals_the_built_in_correction(level: str, mode: str, rejects: bool) -> None:
    x = columns()
    settings = YAML | {"use_tis": True, "tis_level": level, "tis_mode": mode, "use_rs": rejects, "rs_level": level}
    loss, masks, metrics = call(settings, x, normaliser=0.7)
    section = AlgorithmConfig(**settings)
    gap = EngineGap(trainer=x["trainer"] * x["mask"], engine=x["engine"] * x["mask"], mask=x["mask"], lengths=LENGTHS)
    want = engine_correction(weighting_of(section), rejection_of(section), normaliser=0.7)(x["loss"], gap)
    torch.testing.assert_close(loss, want.loss)
    assert torch.equal(torch.cat(masks), want.mask)
    assert all([len(row) for row in rows] == LENGTHS for rows in metrics.values())
    torch.testing.assert_close(torch.cat(metrics["tis_weight_before_bound"]), want.metrics["tis"])
    expected = {"tis_weight_after_bound", "is_ratio_mean_final", "is_ratio_min_final", "is_ratio_max_final", "k3_kl"}
    expected |= {"rs_mask_fraction_low", "rs_mask_fraction_high", "catastrophic_seq_fraction"} if rejects else set()
    assert expected <= metrics.keys()


def test_without_use_tis_it_only_measures() -> None:
    x = columns()
    loss, masks, metrics = call(YAML | {"use_tis": False, "use_rs": True}, x)
    assert loss is x["loss"]
    assert torch.equal(torch.cat(masks), x["mask"])
    assert set(metrics) >= {"train_ppl", "rollout_ppl", "log_ppl_diff", "kl", "k3_kl"}


def test_every_setting_of_the_example_file_is_a_flag() -> None:
    assert set(YAML) <= set(mis.SETTINGS)
    assert AlgorithmConfig(**YAML).tis_bounds == (0.5, 2.0)


def test_the_example_is_a_command_line(run: Run) -> None:  # noqa: F811
    file = Path(mis.__file__).with_name("mis.yaml")
    config = run(["--use-tis", "--custom-tis-function-path", PATH, "--custom-config-path", str(file)])
    assert check_plugins(config) == []
    assert not [notice for notice in config.notices if "tis" in notice or "rs-" in notice]
    args = ArgsView(config)
    assert {name: getattr(args, name) for name in YAML} == YAML
    loss, _, metrics = mis.compute_mis_weights_with_cp(
        args,
        pg_loss=torch.ones(1),
        train_log_probs=[torch.zeros(1)],
        rollout_log_probs=[torch.full((1,), -3.0)],
        loss_masks=[torch.ones(1)],
        total_lengths=[2],
        response_lengths=[1],
    )
    assert loss.item() == 2.0
    assert metrics["tis_truncate_fraction"][0].item() == 1
