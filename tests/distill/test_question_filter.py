"""Which questions are dropped, and for which reason."""

import pytest

from faser.distill.questions import QuestionFilter


@pytest.mark.parametrize(
    "text, ended, reason",
    [
        ("Why is the sky blue?", True, None),
        ("为什么天空是蓝色的?", True, None),
        ("Why is the sky", False, "too long"),
        ("  \n", True, "empty"),
        ("Hi", True, "empty"),
        ("1, 2, 3, 4, 5, 6, 7, 8", True, "degenerate"),
        ("a \ufffd sign that is no sign", True, "degenerate"),
        ("again and " * 20, True, "degenerate"),
        ("what is the SKY, then", True, "duplicate"),
    ],
)
def test_a_question_is_dropped_for_one_reason(text: str, ended: bool, reason: str | None) -> None:
    known = QuestionFilter(["What is the sky then?"])
    assert known.takes(text, ended=ended) == (reason is None)
    assert dict(known.dropped) == ({} if reason is None else {reason: 1})


def test_a_question_passes_once() -> None:
    known = QuestionFilter()
    assert [known.takes("Why is the sky blue?", ended=True) for _ in range(2)] == [True, False]
