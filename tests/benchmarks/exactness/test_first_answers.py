"""What counts as a sane answer, and as a right one."""

import pytest

from benchmarks.exactness.first_answers import QUESTIONS, Question, faults, is_right


@pytest.mark.parametrize(
    "text, ended, found",
    [
        ("The capital of France is Paris.", True, []),
        ("Buenos días — ¿qué tal?", True, []),
        ("Paris, and so", False, ["does not end"]),
        (" ", True, ["is empty"]),
        ("no " * 9, True, ["repeats itself"]),  # six runs of four words
        ("a lone soul, and " * 4 + "the sea", True, []),
        ("a lone soul, and " * 5, True, ["repeats itself"]),
        ("Париж", True, ["has other letters"]),
    ],
)
def test_an_answer_has_the_faults_that_the_rule_names(text: str, ended: bool, found: list[str]) -> None:
    assert faults(text, ended=ended) == found


def test_expected_words_count_whole_and_among_the_first_ones_only() -> None:
    question = Question("?", ("rhine", "po"), least=2, within=5)
    assert is_right(question, "The Po, the Rhine.")
    assert not is_right(question, "The Poet of the Rhine.")
    assert not is_right(question, "One two three Rhine four Po.")


def test_the_questions_differ_and_the_first_one_is_the_readmes() -> None:
    assert len({each.text for each in QUESTIONS}) == 30
    assert QUESTIONS[0].text == "What is the capital of France?"
