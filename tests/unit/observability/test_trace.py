import asyncio

import pytest

from slime.observability.trace import (
    bind_trace,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)
from slime.types import Sample


def events(sample):
    return [(e["kind"], e["name"]) for e in bind_trace(sample).carrier["events"]]


def test_spans_nest_and_survive_a_dump():
    sample = Sample(index=3, group_index=1)
    with trace_span(sample, "outer") as outer:
        outer.set("prompt_tokens", 5)
        with trace_span(sample, "inner"):
            trace_event(sample, "tick", {"n": 1})
    assert events(sample) == [
        ("span_start", "outer"),
        ("span_start", "inner"),
        ("event", "tick"),
        ("span_end", "inner"),
        ("span_end", "outer"),
    ]
    first, second, tick, _, last = bind_trace(sample).carrier["events"]
    assert second["parent_id"] == first["span_id"]
    assert tick["parent_id"] == second["span_id"]
    assert last["attrs"] == {"prompt_tokens": 5}
    assert (first["sample_id"], first["group_id"]) == (3, 1)
    copied = Sample.from_dict(sample.to_dict())
    assert events(copied) == events(sample)


def test_a_fault_of_the_traced_code_is_recorded_and_raised():
    sample = Sample()
    with pytest.raises(ValueError), trace_span(sample, "work"):
        raise ValueError("bad")
    assert bind_trace(sample).carrier["events"][-1]["attrs"]["error"] == "ValueError: bad"


def test_concurrent_tasks_keep_their_own_parents():
    samples = [Sample(index=i) for i in range(3)]

    @trace_function("leaf")
    async def leaf(sample):
        await asyncio.sleep(0)

    async def branch(sample):
        with trace_span(sample, "branch"):
            await leaf(sample)

    async def main():
        await asyncio.gather(*(branch(s) for s in samples))

    asyncio.run(main())
    for sample in samples:
        own = bind_trace(sample).carrier["events"]
        assert own[1]["name"] == "leaf"
        assert own[1]["parent_id"] == own[0]["span_id"]


def test_function_form_takes_lists_and_attributes():
    group = [Sample(), Sample()]

    @trace_function("score", target="samples", attrs_getter=lambda samples: {"n": len(samples)})
    def score(samples):
        return len(samples)

    assert score(group) == 2
    assert all(events(s) == [("span_start", "score"), ("span_end", "score")] for s in group)
    assert bind_trace(group[0]).carrier["events"][0]["attrs"] == {"n": 2}


def test_attempts_and_moving_across_processes():
    sample = Sample(index=1)
    trace_event(sample, "first")
    trace_next_attempt(sample)
    payload = export_trace(bind_trace(sample))
    remote = import_trace(payload)
    trace_event(remote, "remote")
    merged = import_trace(export_trace(remote), bind_trace(sample).carrier)
    assert [(e["name"], e["attempt"]) for e in merged.carrier["events"]] == [("first", 0), ("remote", 1)]
    assert events(sample)[-1] == ("event", "remote")


def test_an_impossible_target_is_logged_not_raised(caplog):
    with trace_span(42, "work"):  # type: ignore[arg-type]
        pass
    assert "cannot trace int" in caplog.text
