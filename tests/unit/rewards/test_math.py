"""Mathematical answers against the table of examples, and what is decided without algebra."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.errors import DataError
from slime.rewards.grade import Deferred, Grade
from slime.rewards.latex import last_boxed, normalize, outer_brackets, split_top_level
from slime.rewards.math import compare, grade_deepscaler, grade_math
from slime.rewards.symbolic import all_equal, equal

TABLE: list[tuple[str, Any, int]] = [
    (r"\boxed{12}", "12", 1),
    (r"\boxed{3} and then \boxed{7}", "7", 1),
    ("the answer is 7", "7", 0),
    (r"\boxed{\frac{3}{6}}", r"\frac{1}{2}", 0),
    (r"\boxed{0.5}", r"\frac{1}{2}", 1),
    (r"\boxed{0.25}", "1/4", 1),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{(1,2)}", "(1, 2)", 1),
    (r"\boxed{(1,2)}", "(2,1)", 0),
    (r"\boxed{[1,2)}", "(1,2)", 0),
    (r"\boxed{1,234}", "1234", 1),
    (r"\boxed{50\%}", "50", 1),
    (r"\boxed{\$50}", "50", 1),
    (r"\boxed{12 cm}", "12", 1),
    (r"\boxed{x=5}", "5", 1),
    (r"\boxed{5 million}", "5000000", 0),
    (r"\boxed{7 3/4}", "31/4", 1),
    (r"\boxed{2\sqrt3}", r"\sqrt{12}", 1),
    (r"\boxed{90^\circ}", "90", 1),
    (r"\boxed{Yes}", "yes", 1),
    (r"\boxed{2^{10}}", "1024", 0),
    (r"\boxed{1024.0}", "1024", 1),
    (r"\boxed{3 or 4}", "3,4", 1),
    (r"\boxed{5}", 5, 1),
    (r"\boxed{0}", 0, 0),
    # beyond the table
    (r"\boxed{0}", "0", 1),
    (r"\boxed{5}", 5.0, 1),
    (r"\boxed{5}", r"so \boxed{5}", 1),
    (r"\boxed{5}", r"\boxed{", 0),
    (r"\boxed{5}", None, 0),
    (r"\boxed{5}", "", 0),
    (r"\boxed 5", "5", 0),
    (r"\boxed{5", "5", 0),
    (r"\fbox{5}", "5", 0),
    (r"\boxed{}", "5", 0),
    (r"\boxed{\dfrac{1}{3}}", "1/3", 1),
    (r"\boxed{-\frac12}", "-0.5", 1),
    (r"\boxed{\frac{-7}{4}}", "-7/4", 1),
    (r"\boxed{7\frac{3}{4}}", "7.75", 1),
    (r"\boxed{-1\frac{1}{2}}", "-1.5", 1),
    (r"\boxed{2/4}", "2/4", 1),
    (r"\boxed{1/2}", "2/4", 1),
    (r"\boxed{12\text{ cm}^2}", "12", 1),
    (r"\boxed{\text{Yes}}", "yes", 1),
    (r"\boxed{\text{no solution}}", "No solution", 1),
    (r"\boxed{.5}", "0.5", 1),
    (r"\boxed{10{,}000}", "10000", 1),
    (r"\boxed{\left(\frac12, 3\right)}", "(0.5,3)", 1),
    (r"\boxed{(-\infty, 3]}", r"\left(-\infty,3\right]", 1),
    (r"\boxed{\{2,1\}}", r"\{1,2\}", 1),
    (r"\boxed{x=3 \text{ or } x=4}", "3,4", 1),
    (r"\boxed{\frac{\pi}{2}}", "pi/2", 1),
    (r"\boxed{sqrt(12)}", "2*sqrt(3)", 1),
    (r"\boxed{y=2x+1}", "y = 1+2x", 1),
    (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", 1),
    (r"\boxed{x+1}", "y+1", 0),
    (r"\boxed{\sqrt{x^2}}", "x", 0),
    (r"\boxed{5}", "-5", 0),
    (r"\boxed{1/0}", "1/2", 0),
    (r"\boxed{9^{9^{9}}}", "x", 0),
    (r"\boxed{2^{99999999}}", r"\sqrt{2}", 0),
    (r"\boxed{\int_0^1 x dx}", r"\frac{x}{2}", 0),
    (r"\boxed{" + "1+" * 5000 + "1}", "x", 0),
]


def settle(grade: Grade | Deferred) -> Grade:
    """What the service does, in this process."""
    if isinstance(grade, Grade):
        return grade
    assert grade.function == "slime.rewards.symbolic:all_equal"
    return grade.if_true if all_equal(*grade.arguments) else grade.if_false


@pytest.mark.parametrize(("response", "label", "score"), TABLE, ids=[f"{r[:40]}|{lab}" for r, lab, _ in TABLE])
def test_table(response: str, label: Any, score: int) -> None:
    assert settle(grade_math(response, label, {})).reward == score


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        (r"…</think> so \boxed{7}", "7", 1),
        (r"\boxed{7}", "7", 0),
        (r"\boxed{7}</think> done", "7", 0),
        (r"a</think>\boxed{1}</think>\boxed{2}", "2", 1),
        (r"x ###Response \boxed{9}", "9", 1),
        (r"###Response \boxed{1} ###Response \boxed{2}", "1", 1),
        (r"…</think>\boxed{7}", 7.0, 1),
        (r"…</think>\boxed{7}", "", 0),
        (r"…</think>\boxed{7}", r"\boxed{", 0),
        (r"…</think>\boxed{2\sqrt3}", r"\sqrt{12}", 1),
    ],
)
def test_deepscaler_table(response: str, label: Any, score: int) -> None:
    assert settle(grade_deepscaler(response, label, {})).reward == score


def test_what_could_not_be_read_is_marked() -> None:
    no_marker = grade_deepscaler(r"\boxed{7}", "7", {})
    assert isinstance(no_marker, Grade)
    assert no_marker.unparsed
    assert "--rm-type math" in no_marker.note
    no_box = grade_math("7", "7", {})
    assert isinstance(no_box, Grade)
    assert no_box.unparsed
    wrong = grade_math(r"\boxed{8}", "7", {})
    assert isinstance(wrong, Grade)
    assert not wrong.unparsed
    with pytest.raises(DataError, match=r"--label-key"):
        grade_deepscaler("</think>", None, {})


@pytest.mark.parametrize(("answer", "label"), [("12", "13"), ("yes", "no"), ("(1,2)", "(1,3)"), ("x+1", "7")])
def test_plain_answers_never_reach_the_algebra(answer: str, label: str) -> None:
    assert compare(answer, label) is False


def test_only_undecided_parts_are_deferred() -> None:
    assert compare(r"(1, 2\sqrt3)", r"(1, \sqrt{12})") == [(r"2\sqrt{3}", r"\sqrt{12}")]


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
        (r"\boxed {5}", "5"),
        (r"\boxed{1}\boxed", None),
        ("", None),
    ],
)
def test_boxes(text: str, box: str | None) -> None:
    assert last_boxed(text) == box


@given(st.text(alphabet="0123456789.,/ -+x=()[]{}^\\$%frac sqrt text cm", max_size=40))
def test_normal_form_is_stable_and_never_fails(text: str) -> None:
    once = normalize(text)
    assert " " not in once
    assert compare(text, text) in (True, False)
    assert bool(once) == (compare(text, text) is True)


def test_commas_and_brackets() -> None:
    assert split_top_level("1,f(2,3),{4,5}") == ["1", "f(2,3)", "{4,5}"]
    assert outer_brackets("(a)(b)") is None
    assert outer_brackets("(a,b]") == ("(", "a,b", "]")


def test_equality_is_false_for_what_cannot_be_read() -> None:
    assert not equal(r"\frac{", "1")
    assert not equal("((((", "x")


@pytest.mark.timeout(2)
@pytest.mark.parametrize("piece", ["\\frac", "\\text{", "{", "1,", "^\\circ", " or ", "\\sqrt", "((", "12 "])
def test_hostile_text_is_read_in_linear_time(piece: str) -> None:
    for text in (piece * 50_000, piece * (1990 // len(piece))):
        assert settle(grade_math(f"\\boxed{{{text}}}", "x", {})).reward == 0
