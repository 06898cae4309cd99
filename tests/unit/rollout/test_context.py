"""The handle: how args carry it, what happens to it elsewhere, and the functions without a handle."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest

from slime.errors import ConfigError
from slime.rollout.context import RolloutContext
from slime.rollout.established import get, get_async_loop, get_model_url, post, run
from slime.rollout.failures import TooManyFailuresError
from slime.rollout.generate import generate
from slime.rollout.pipeline import generate_rollout
from slime.rollout.state import GenerateState
from slime.types import Sample, Status
from tests.support.fake_engine import Answer, FakeEngine
from tests.support.rollout_args import ListSource, make_args, open_context


def test_args_carry_the_handle_into_threads_and_copies(model_path, engine):
    with open_context(model_path, engine.url) as context:
        found = []
        thread = threading.Thread(target=lambda: found.append(GenerateState(context.args).tokenizer))
        thread.start()
        thread.join()
        assert found == [context.tokenizer]
        assert RolloutContext.of(copy.deepcopy(context.args)) is context
        with pytest.raises(RuntimeError, match="belong to no rollout"):
            GenerateState(make_args(model_path, engine.url))


def test_two_contexts_stay_apart(model_path, engine):
    with open_context(model_path, engine.url, sglang_server_concurrency=3) as one:
        with open_context(model_path, engine.url, sglang_server_concurrency=5) as two:
            assert GenerateState(one.args).semaphore.limit == 3
            assert GenerateState(two.args).semaphore.limit == 5
            assert RolloutContext.active() is two
        assert RolloutContext.active() is one
    assert RolloutContext.active() is None


def test_in_another_process_it_says_where_the_handle_is(model_path, engine):
    with open_context(model_path, engine.url) as context:
        args = pickle.loads(pickle.dumps(context.args))
    assert args.rollout_batch_size == 4
    with pytest.raises(RuntimeError, match="only available in the rollout process"):
        _ = args.rollout_context.tokenizer
    assert pickle.loads(pickle.dumps(args)).rollout_batch_size == 4


def test_state_is_a_view(model_path, engine):
    with open_context(model_path, engine.url, n_samples_per_prompt=3, rollout_seed=10) as context:
        state, other = GenerateState(context.args), GenerateState(context.args)
        state.remaining_batch_size += 2
        state.aborted = True
        assert (other.remaining_batch_size, other.aborted, context.turn.aborted) == (2, True, True)
        state.reset()
        assert (other.remaining_batch_size, other.aborted) == (0, False)
        assert other.group_sampling_seeds is None
        with state.dp_rank_context() as rank:
            assert other.dp_counts[rank] == 1
        assert other.dp_counts == [0]
        assert state.sampling_params["no_stop_trim"] is True


def test_closing_is_complete(model_path, engine):
    before = threading.active_count()
    with open_context(model_path, engine.url):
        assert threading.active_count() > before
    assert threading.active_count() == before


def test_no_router_address_is_a_configuration_error(model_path):
    args = make_args(model_path, "http://127.0.0.1")
    before = threading.active_count()
    with pytest.raises(ConfigError, match="--sglang-router-ip"):
        RolloutContext.open(args)
    assert threading.active_count() == before


async def test_post_and_get_work_without_a_rollout(engine):
    assert await post(f"{engine.url}/echo") == {}
    assert await get(f"{engine.url}/v1/loads") == {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}


def test_run_inside_and_outside_of_a_rollout(model_path, engine):
    async def thread_name() -> str:
        return threading.current_thread().name

    assert run(thread_name()) == "slime-run"
    with pytest.raises(RuntimeError, match="no rollout is running"):
        get_async_loop()
    with open_context(model_path, engine.url) as context:
        assert run(thread_name()) == "slime-rollout-loop"
        assert get_async_loop() is context.loop_thread


def test_model_urls(model_path):
    args = make_args(model_path, "http://10.0.0.1:30000")
    assert get_model_url(args, "judge") == "http://10.0.0.1:30000/generate"
    named = args.with_facts(model_router_urls={"judge": "http://10.0.0.2:1"})
    assert get_model_url(named, "judge", "/v1/models") == "http://10.0.0.2:1/v1/models"
    assert get_model_url(named, "other") == "http://10.0.0.1:30000/generate"


def test_what_the_router_drops_goes_straight_to_a_worker(model_path):
    masks = {"sampling_masks": True}
    with FakeEngine(**masks) as one, FakeEngine(**masks) as two, FakeEngine(workers=[one.url, two.url]) as router:
        with open_context(model_path, router.url, rollout_top_p=0.9, rollout_batch_size=8) as context:
            output = context.generate(generate_rollout, 0, ListSource(["a"], 2))
        assert not router.requests
        assert len(one.requests) + len(two.requests) == 16
        assert one.requests, "sessions must spread over the workers"
        assert two.requests, "sessions must spread over the workers"
    sample = output.samples[0][0]
    generated = sample.tokens[-3:]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 4, 6]
    assert sample.rollout_top_p_token_ids.tolist() == [i for t in generated for i in (t, 7)]
    assert sample.rollout_log_probs == [-0.25, -0.26, -0.27], "those of the cut distribution"


@pytest.mark.parametrize("flags", [{"rollout_top_k": 5}, {"rollout_top_p": 0.5}, {}])
def test_kept_tokens_are_asked_for_where_sampling_cuts(model_path, engine, flags):
    engine.sampling_masks = True
    with open_context(model_path, engine.url, **flags) as context:
        output = context.generate(generate_rollout, 0, ListSource(["a"], 2))
    assert {bool(r.get("return_sampling_mask")) for r in engine.requests} == {bool(flags)}
    assert (output.samples[0][0].rollout_top_p_token_ids is not None) == bool(flags)


def test_routes_are_asked_for_from_the_first_unknown_token(model_path):
    custom = {"num_layers": 3, "moe_router_topk": 2}
    flags = {
        "use_rollout_routing_replay": True,
        "partial_rollout": True,
        "rollout_batch_size": 1,
        "n_samples_per_prompt": 1,
    }
    with FakeEngine(routes=(3, 2)) as engine, open_context(model_path, engine.url, custom=custom, **flags) as context:
        source = ListSource(["abcd"], 1)
        group = source.get_samples(1)[0]
        sample = group[0]
        sample.tokens = [*context.tokenizer.encode("abcd"), 65, 66]
        sample.response_length, sample.rollout_log_probs, sample.loss_mask = 2, [-1.0, -2.0], [1, 1]
        sample.rollout_routed_experts = np.full((5, 3, 2), 9, dtype=np.int32)
        sample.status = Status.ABORTED
        source.add_samples([group])
        output = context.generate(generate_rollout, 0, source)
    assert engine.requests[0]["routed_experts_start_len"] == 5
    continued = output.samples[0][0].rollout_routed_experts
    assert continued[:, 0, 0].tolist() == [9, 9, 9, 9, 9, 5, 6, 7]


def test_an_answer_without_tokens_keeps_the_record(model_path):
    """Ended before its first token: some engines send the routes of the prompt even then."""
    custom = {"num_layers": 3, "moe_router_topk": 2}
    ended = Answer([], "", {"type": "abort", "message": "aborted"})
    with (
        FakeEngine(lambda *_: ended, routes=(3, 2)) as engine,
        open_context(model_path, engine.url, custom=custom, use_rollout_routing_replay=True) as context,
    ):
        sample = Sample(index=0, tokens=[60, 61, 62, 65, 66], response_length=2, status=Status.ABORTED)
        sample.rollout_log_probs, sample.loss_mask = [-1.0, -2.0], [1, 1]
        sample.rollout_routed_experts = np.full((4, 3, 2), 9, dtype=np.int32)
        run(generate(context.args, sample, dict(context.sampling_params)))
    assert sample.status is Status.ABORTED
    assert sample.rollout_routed_experts.shape == (4, 3, 2)


@pytest.mark.parametrize(
    ("routes", "text"), [(None, "returned no routed experts"), ((2, 2), r"no multiple of --num-layers 3")]
)
def test_routes_of_another_model_cannot_be_replayed(model_path, routes, text):
    custom = {"num_layers": 3, "moe_router_topk": 5}
    refused = pytest.raises(TooManyFailuresError, match=text)
    flags = {"use_rollout_routing_replay": True, "custom": custom}
    with FakeEngine(routes=routes) as engine, open_context(model_path, engine.url, **flags) as context, refused:
        context.generate(generate_rollout, 0, ListSource(["a"], 2))


def test_an_engine_without_sampling_masks_cannot_train_on_top_p(model_path, engine):
    refused = pytest.raises(TooManyFailuresError, match=r"--rollout-top-p 0\.9")
    with open_context(model_path, engine.url, rollout_top_p=0.9) as context, refused:
        context.generate(generate_rollout, 0, ListSource(["a"], 2))


def test_sample_is_the_established_one():
    from slime.utils.types import Sample as Established

    assert Established is Sample
