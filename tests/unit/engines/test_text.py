"""Text in and out: tokenizer, incremental decoding, stop strings."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.engines.api import RequestError, parse_sampling_params
from slime.engines.embedded.text import StopScanner, Text, final_text
from tests.support.tiny_models import EOS_ID, make_tiny_model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(str(make_tiny_model(tmp_path_factory.mktemp("model"))))


def scan(text: Text, content: str, **options: Any) -> tuple[str | None, str]:
    """Push the tokens of ``content`` until something stops it; returns what matched and the text until then."""
    params = parse_sampling_params(options)
    scanner = StopScanner(text, params)
    done: list[int] = []
    for token in text.encode(content):
        done.append(token)
        matched = scanner.push(token)
        if matched is not None:
            return matched, text.decode(done, params)
    return None, text.decode(done, params)


def test_eos_is_read_without_loading_the_tokenizer(text: Text) -> None:
    fresh = Text(text.path)
    assert fresh.eos_ids() == (EOS_ID,)
    assert not fresh.is_loaded


def test_stop_strings_over_token_boundaries(text: Text) -> None:
    assert scan(text, "one two three", stop=["two", "three"]) == ("two", "one two")
    assert scan(text, "aab", stop="ab") == ("ab", "aab")
    assert scan(text, "naïve 🙂 end", stop="🙂") == ("🙂", "naïve 🙂")
    assert scan(text, "nothing here", stop="xyz") == (None, "nothing here")


def test_stop_regex(text: Text) -> None:
    assert scan(text, "x=12; y", stop_regex=r"\d+;") == ("12;", "x=12;")
    with pytest.raises(RequestError, match="does not compile"):
        StopScanner(text, parse_sampling_params({"stop_regex": "("}))


@settings(max_examples=60)
@given(content=st.text(alphabet="ab é漢🙂", max_size=20), stop=st.text(alphabet="ab é漢🙂", min_size=1, max_size=3))
def test_scanner_finds_exactly_what_is_there(text: Text, content: str, stop: str) -> None:
    matched, seen = scan(text, content, stop=stop)
    assert (matched == stop) == (stop in content)
    if matched:
        assert content.startswith(seen)
        assert seen.endswith(stop)
        assert stop not in seen[:-1]


def test_what_stopped_is_cut_off_unless_asked_for(text: Text) -> None:
    ids = [*text.encode("hello END"), EOS_ID]
    plain = parse_sampling_params({})
    assert final_text(text, ids, plain, None) == "hello END"
    assert final_text(text, ids, plain, EOS_ID) == "hello END"
    assert final_text(text, ids[:-1], plain, "END") == "hello "
    keep = parse_sampling_params({"no_stop_trim": True, "skip_special_tokens": False})
    assert final_text(text, ids, keep, EOS_ID) == "hello END<|im_end|>"
    assert final_text(text, ids[:-1], keep, "END") == "hello END"


def test_without_a_tokenizer_text_is_refused() -> None:
    none = Text(None)
    assert none.decode([1, 2], parse_sampling_params({})) == ""
    with pytest.raises(RequestError, match="skip-tokenizer-init"):
        none.encode("hello")
