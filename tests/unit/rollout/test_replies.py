import pytest

from slime.rollout.faults import BadReplyError
from slime.rollout.replies import read_output


def reply(triples, *, reason="stop", output_ids=None, **meta):
    return {"output_ids": output_ids, "meta_info": {"output_token_logprobs": triples, "finish_reason": reason, **meta}}


STOP = {"type": "stop", "matched": 2}


def test_columns_are_read():
    good = reply([[-0.5, 7, None], [0, 2, "x"]], reason=STOP, output_ids=[7, 2])
    assert read_output(good, max_new_tokens=2) == ([7, 2], [-0.5, 0.0])
    assert read_output(good, max_new_tokens=None) == ([7, 2], [-0.5, 0.0])


def test_an_aborted_request_may_have_nothing():
    assert read_output(reply([], reason={"type": "abort"}), max_new_tokens=4) == ([], [])


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (reply(None, reason=STOP), "without output_token_logprobs"),
        (reply([[-0.5, 7, None]], reason=None), "finish_reason None"),
        (reply([[-0.5, 7, None]], reason="stop"), "finish_reason 'stop'"),
        (reply([[-0.5, 7, None]], reason=STOP, output_ids=[7, 8]), "2 output_ids with 1 log-probs"),
        (reply([[-0.5, 7, None]], reason=STOP, output_ids="no"), "'no' output_ids"),
        (reply([[-0.5, 7, None]] * 5, reason=STOP), "5 tokens, at most 4"),
        (reply([], reason=STOP), "no token"),
        (reply([[-0.5]], reason=STOP), "another form"),
        (reply(7, reason=STOP), "another form"),
        (reply([[None, 7, None]], reason=STOP), "another form"),
        (reply([["x", 7, None]], reason=STOP), "another form"),
        (reply([[-0.5, "7", None]], reason=STOP), "'7' as a token id"),
        (reply([[-0.5, -1, None]], reason=STOP), "-1 as a token id"),
        (reply([[-0.5, True, None]], reason=STOP), "True as a token id"),
    ],
)
def test_what_does_not_fit_is_told(bad, found):
    with pytest.raises(BadReplyError, match=found):
        read_output(bad, max_new_tokens=4)
