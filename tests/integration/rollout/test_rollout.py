"""Whole rollouts through the real router on a real engine; log-probs against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slime.rollout.pipeline import generate_rollout
from slime.types import Sample, Status
from tests.support.rollout_args import ListSource, eval_set, open_context

pytestmark = pytest.mark.timeout(180)

PLUGINS = "tests.integration.rollout.plugins"
TOLERANCE = 2e-4

LIST_FORM = """
async def custom_generate(args, samples, evaluation=False):
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            response = await generate_single(conversation)
            conversation.append({"role": "assistant", "content": response})
            conversation.append({"role": "tool", "content": f"result {turn}"})
        sample.response = response
        sample.reward = float(len(response))
    return samples
"""


@pytest.fixture(scope="module")
def reference(model_path: Path):
    """Log-probs of every token of a sequence given those before it, in float32 by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, torch_dtype=torch.float32).eval()

    @torch.no_grad()
    def log_probs(tokens: list[int]) -> list[float]:
        ids = torch.tensor(tokens)
        logits = model(ids[None]).logits[0].double()
        picked = torch.log_softmax(logits[:-1], -1).gather(1, ids[1:, None])[:, 0]
        return picked.tolist()

    return log_probs


def check_log_probs(reference, sample: Sample) -> int:
    """Compare the generated tokens of a sample; returns how many there are."""
    expected = reference(sample.tokens)[-sample.response_length :]
    compared = 0
    for want, have, trained in zip(expected, sample.rollout_log_probs, sample.loss_mask, strict=True):
        if trained:
            assert have == pytest.approx(want, abs=TOLERANCE)
            compared += 1
        else:
            assert have == 0.0
    return compared


def test_a_rollout_of_groups(model_path, router_url, reference):
    flags = {"rm_type": None, "custom_rm_path": f"{PLUGINS}.length_reward", "n_samples_per_prompt": 4}
    with open_context(model_path, router_url, **flags) as context:
        output = context.generate(generate_rollout, 0, ListSource(["What is 2 + 2?", "Say hello."], 4))
        assert context.limit.in_use == 0
    assert [[s.index for s in g] for g in output.samples] == [[4 * i + j for j in range(4)] for i in range(4)]
    for group in output.samples:
        assert len({tuple(s.tokens) for s in group}) > 1, "samples of a group must differ"
        for sample in group:
            assert check_log_probs(reference, sample) == sample.response_length > 0
            assert sample.status in (Status.COMPLETED, Status.TRUNCATED)
            assert sample.weight_versions == ["default"]
            assert sample.reward == float(sum(sample.tokens) % 97)
            assert sample.prefix_cache_info.total_prompt_tokens > 0


def test_a_per_sample_function_by_module_path(model_path, router_url, reference):
    flags = {"custom_generate_function_path": f"{PLUGINS}.two_turns", "custom": {"tokens_per_turn": 6}}
    with open_context(model_path, router_url, **flags) as context:
        output = context.generate(generate_rollout, 0, ListSource(["Go on"], 2))
    for sample in (s for g in output.samples for s in g):
        assert 0 in sample.loss_mask
        assert check_log_probs(reference, sample) == sum(sample.loss_mask)
        assert "<obs>" in sample.response


def test_a_list_function_by_file_path(model_path, router_url, reference, tmp_path):
    path = tmp_path / "custom_generate.py"
    path.write_text(LIST_FORM)
    flags = {"custom_generate_function_path": str(path), "max_turns": 3, "rollout_max_response_len": 8}
    with open_context(model_path, router_url, **flags) as context:
        prompt = [{"role": "user", "content": "use the tool"}]
        output = context.generate(generate_rollout, 0, ListSource([prompt], 2))
        tokenizer = context.tokenizer
    for sample in (s for g in output.samples for s in g):
        # Byte soup of an untrained model: any re-tokenisation of it would change the ids.
        assert check_log_probs(reference, sample) == sum(sample.loss_mask)
        assert tokenizer.decode(sample.tokens).count("<|im_start|>tool\nresult") == 2
        assert len(sample.weight_versions) == 3
        assert len(sample.metadata["messages"]) == 7
        assert sample.reward == float(len(sample.response))


def test_surplus_is_aborted_and_resumed_with_exact_log_probs(model_path, router_url, reference):
    flags = {
        "rollout_batch_size": 1,
        "over_sampling_batch_size": 8,
        "n_samples_per_prompt": 2,
        "partial_rollout": True,
        "rollout_max_response_len": 1200,
    }
    with open_context(model_path, router_url, **flags) as context:
        source = ListSource([f"Tell me a long story about {i}." for i in range(8)], 2)
        first = context.generate(generate_rollout, 3, source)
        assert len(first.samples) == 1
        assert len(source.returned) == first.metrics["rollout/unfinished_groups"] > 0
        cut = {
            s.index: (len(s.tokens), s.response_length)
            for g in source.returned
            for s in g
            if s.status is Status.ABORTED and s.response_length
        }
        assert cut, "no sample was cut in the middle; the engine was faster than the abort"
        resumed: list[Sample] = []
        while source.returned:
            output = context.generate(generate_rollout, 4, source)
            resumed += [s for g in output.samples for s in g if s.index in cut]
            if len(resumed) >= 2:
                break
    assert resumed
    for sample in resumed:
        length, response_length = cut[sample.index]
        assert sample.response_length > response_length
        assert len(sample.tokens) > length
        assert sample.metadata["start_rollout_id"] == 3
        assert check_log_probs(reference, sample) == sample.response_length
        assert len(sample.weight_versions) >= 2


def test_evaluation_on_two_sets(model_path, router_url, tmp_path):
    for name, count in (("aime", 3), ("gsm8k", 5)):
        rows = [json.dumps({"input": f"{name} {i}", "label": "1"}) for i in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    sets = (
        eval_set("aime", tmp_path / "aime.jsonl", n_samples_per_eval_prompt=2, rm_type="math", temperature=0.0),
        eval_set("gsm8k", tmp_path / "gsm8k.jsonl", custom_rm_path=f"{PLUGINS}.length_reward", max_response_len=4),
    )
    with open_context(model_path, router_url, eval_datasets=sets) as context:
        output = context.evaluate(generate_rollout, 0, None)
    aime, gsm8k = output.data["aime"], output.data["gsm8k"]
    assert [s.prompt for s in aime["samples"]] == ["aime 0", "aime 0", "aime 1", "aime 1", "aime 2", "aime 2"]
    assert aime["rewards"] == [0.0] * 6
    greedy = [s.tokens for s in aime["samples"]]
    assert greedy[0] == greedy[1]
    assert len(gsm8k["rewards"]) == 5
    assert all(s.response_length <= 4 for s in gsm8k["samples"])
    assert gsm8k["rewards"] == [float(sum(s.tokens) % 97) for s in gsm8k["samples"]]
