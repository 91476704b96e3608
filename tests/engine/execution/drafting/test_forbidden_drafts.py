"""Drafts end where the grammar of their answer forbids them; drawn ones after the token that is forbidden.

Bugs these tests have been seen to catch: a drawn draft cut before the forbidden token, unverified tokens left
out.
"""

import torch

from faser.engine.contract.plan import DraftPlan, DraftRequest
from faser.engine.execution.drafting.drafter import Proposals, without_forbidden
from faser.engine.execution.drafting.grammar import GrammarDrafter
from faser.engine.structure.sequence_matchers import SequenceMatchers
from tests.engine.execution.draft_lines import DraftLine, lines_of, table_with
from tests.engine.structure.languages import EOS, LANGUAGES, the_compiler, the_tokenizer

FREE, STRUCTURED = 0, 1


def the_matchers() -> SequenceMatchers:
    matchers = SequenceMatchers(the_compiler(), num_threads=1, patience_s=5.0)
    matchers.start(STRUCTURED, LANGUAGES["choice"].asked, ())
    return matchers


def ids(text: str) -> tuple[int, ...]:
    return tuple(the_tokenizer().encode(text))


def cut(text: str, *, unverified: str = "", drawn: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is left of a draft with this text, of a free answer and of a structured one."""
    token_ids = ids(text)
    drafts = tuple(
        DraftLine(slot=slot, method="suffix", token_ids=token_ids, confidences=(0.5,) * len(token_ids))
        for slot in (FREE, STRUCTURED)
    )
    requests = tuple(
        DraftRequest(slot=slot, max_tokens=9, new_blocks=(), unverified=ids(unverified))
        for slot in (FREE, STRUCTURED)
    )
    probs = torch.zeros(2 * len(token_ids), 512, dtype=torch.float64) if drawn else None
    found = without_forbidden(
        DraftPlan(step=1, width=16, requests=requests),
        Proposals(table=table_with(drafts, 16), probs=probs),
        the_matchers(),
    )
    assert found.probs is probs
    free, structured = lines_of(found.table)
    return free.token_ids, structured.token_ids


def test_a_draft_ends_before_the_token_that_is_forbidden() -> None:
    whole = ids("the quick dog")
    free, structured = cut("the quick dog")
    assert free == whole
    assert len(structured) < len(whole)
    assert whole[: len(structured)] == structured
    assert the_tokenizer().decode(structured).startswith("the quick")


def test_a_draft_that_is_allowed_stays_whole() -> None:
    assert cut("the fox") == (ids("the fox"), ids("the fox"))


def test_nothing_is_left_of_a_draft_that_begins_wrongly() -> None:
    assert cut("a dog")[1] == ids("a")[:1] or cut("a dog")[1] == ()
    assert cut("dog")[1] == ()


def test_a_drawn_draft_keeps_the_token_that_is_forbidden() -> None:
    """It has to be verified: what it was drawn from is part of the residual."""
    drawn, point_mass = (cut("the quick dog", drawn=drawn)[1] for drawn in (True, False))
    assert drawn == ids("the quick dog")[: len(point_mass) + 1]
    assert cut("dog", drawn=True)[1] == ids("dog")[:1]
    assert cut("the fox", drawn=True)[1] == ids("the fox")


def test_a_draft_continues_unverified_tokens() -> None:
    assert cut(" fox", unverified="the")[1] == ids(" fox")
    assert cut(" fox")[1] == ()
    assert cut(" fox", unverified="nothing")[1] == ()


def test_the_grammar_drafts_for_answers_with_a_structure_alone() -> None:
    matchers = SequenceMatchers(the_compiler(), num_threads=1, patience_s=5.0)
    matchers.start(STRUCTURED, LANGUAGES["schema"].asked, ())
    matchers.start(2, LANGUAGES["choice"].asked, ids("the quick fox"))
    requests = tuple(DraftRequest(slot=slot, max_tokens=3, new_blocks=()) for slot in (FREE, STRUCTURED, 2))
    drafter = GrammarDrafter(matchers, cap=2, alone=True)
    free, structured, ended = lines_of(drafter.propose(DraftPlan(step=1, width=16, requests=requests)).table)
    assert free == DraftLine(slot=FREE, method="grammar")
    assert structured.token_ids == tuple(matchers.forced(STRUCTURED, (), 2))
    assert len(structured.token_ids) == len(structured.confidences) == 2
    assert ended.token_ids == (EOS,)
