"""What is made of agreements, token by token. Oracle: drafts and means worked out by hand.

Planted bugs that these tests have caught: drafts that begin at the first token the one before it got wrong;
drafts that the end cuts counted in; first tokens added to the memory instead of taken from it; shares of the mean
over all memories.
"""

from benchmarks.draft_memory import Quality, mean_accepted, remembered, table

PROMPT = tuple(range(10))


def test_the_memory_is_the_end_of_the_prompt_and_first_tokens_come_out_of_it() -> None:
    assert remembered(PROMPT, 4, 0) == (6, 7, 8, 9)
    assert remembered(PROMPT, 4, 1) == (0, 7, 8, 9)
    assert remembered(PROMPT, 10, 1) == remembered(PROMPT, 16, 4) == remembered(PROMPT, None, 0) == PROMPT


def test_a_draft_begins_behind_the_token_that_corrected_the_one_before_it() -> None:
    yes, no = True, False
    assert mean_accepted([yes, no, yes, yes, yes, no, yes], 3) == (1 + 3) / 2
    assert mean_accepted([yes] * 8, 3) == 3
    assert mean_accepted([no, no, yes, yes, yes, yes], 3) == (0 + 0 + 3) / 3


def test_accepted_tokens_stand_beside_those_of_the_whole_prompt() -> None:
    """One kind alone, then all kinds together: (1 + 3) / 2 of (2 + 4) / 2."""
    rows = table(
        [quality("a", 16, 1.0), quality("a", "all", 2.0), quality("b", 16, 3.0), quality("b", "all", 4.0)]
    )
    shares = [(line.split(" | ")[1], line.split(" | ")[7]) for line in rows.splitlines()[2:]]
    assert shares == [
        ("a", "0.500"),
        ("a", "1.000"),
        ("b", "0.750"),
        ("b", "1.000"),
        ("each", "0.667"),
        ("each", "1.000"),
    ]


def quality(kind: str, memory: int | str, accepted: float) -> Quality:
    return Quality(
        drafter="small",
        kind=kind,
        memory=memory,
        first=0,
        prompt_tokens=400,
        agreement=0.5,
        accepted=accepted,
        sampled=0.5,
    )
