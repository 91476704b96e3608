"""Exact laws of what speculation emits when drafts are made beside verification; see enumeration.

    step     verified: chunk | drafted meanwhile, behind all of the chunk: y_1 … y_m | next chunk: y_2 … y_m,
    if all of the chunk was accepted and the last row's token is y_1, else none.

What stands is said by the production frontiers. A rule may look at the chunk and at what was drafted meanwhile; a
border says, given y_1, what the row behind an accepted chunk yields.
"""

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from faser.engine.contract.drafts import table_of
from faser.engine.control.speculation.overlap import Frontiers
from tests.engine.losslessness.enumeration import GAMMA, Cut, Judge, Law, Pair, Rule, Tokens

REACH = 2 * GAMMA - 2  # a chunk, and a draft behind it, behind the output

AheadRule = Callable[[Pair, Tokens, Tokens, Tokens], Cut]  # prefix, chunk, drafted meanwhile
BorderLaw = Callable[[Pair, Tokens, int], list[float]]  # prefix and chunk, y_1 -> probability of every token


def own_token(pair: Pair, known: Tokens, _first: int) -> list[float]:
    """The target's own, whatever was drafted: the engine's way."""
    return pair.p(known)


def by_ratio(pair: Pair, known: Tokens, first: int) -> list[float]:
    """Rejection sampling across the border, as PEARL judges it (arXiv 2408.11850)."""
    line = pair.line[known]
    return _accepted_or(pair, known, first, float(pair.accept[line, first]))


def alike_or_residual(pair: Pair, known: Tokens, first: int) -> list[float]:
    """A mistake: the target's own token where it is y_1, and where not, one of the residual instead."""
    return _accepted_or(pair, known, first, pair.p(known)[first])


def _accepted_or(pair: Pair, known: Tokens, first: int, passes: float) -> list[float]:
    """y_1 with the chance `passes`, else a token of the residual."""
    found = [(1 - passes) * share for share in pair.replacement[pair.line[known]].tolist()]
    found[first] += passes
    return found


def whole_chunk(_pair: Pair, _prefix: Tokens, chunk: Tokens, _ahead: Tokens) -> Cut:
    return Cut(len(chunk))


def on_chunks(rule: Rule) -> AheadRule:
    """A rule of serial drafts, which sees nothing of what is drafted meanwhile."""

    def cut(pair: Pair, prefix: Tokens, chunk: Tokens, _ahead: Tokens) -> Cut:
        return rule(pair, prefix, chunk, ())

    return cut


def emitted_law_ahead(
    pair: Pair,
    judge: Judge,
    rule: AheadRule = whole_chunk,
    *,
    border: BorderLaw = own_token,
    frontiers: type[Frontiers] = Frontiers,
) -> Law:
    """The law of the first tokens out, over as many steps as they take. pair: with a reach of REACH."""
    known: dict[tuple[Tokens, Tokens], Law] = {}
    judged: dict[tuple[Tokens, Tokens], Law] = {}

    def verdicts(prefix: Tokens, chunk: Tokens) -> Law:
        if (prefix, chunk) not in judged:
            judged[prefix, chunk] = judge(pair, prefix, chunk, True)
        return judged[prefix, chunk]

    def emitted(prefix: Tokens, chunk: Tokens, ahead: Tokens) -> Law:
        cut = rule(pair, prefix, chunk, ahead)
        kept = chunk[: cut.num_judged]
        law: Law = defaultdict(float)
        reached = 0.0
        for tokens, prob in verdicts(prefix, kept).items():
            if len(tokens) > len(kept):
                reached += prob
            else:
                law[tokens] += prob
        if not cut.bonus:
            law[kept] += reached
            return law
        says = border if kept == chunk else own_token
        for token_id, share in enumerate(says(pair, prefix + kept, ahead[0])):
            law[(*kept, token_id)] += reached * share
        return law

    def onwards(prefix: Tokens, chunk: Tokens) -> Law:
        if len(prefix) >= pair.length:
            return {prefix[: pair.length]: 1.0}
        if (prefix, chunk) not in known:
            found: Law = defaultdict(float)
            for weight, ahead in pair.drafts(prefix + chunk):
                for tokens, prob in emitted(prefix, chunk, ahead).items():
                    following = standing(frontiers(1), chunk, ahead, tokens)
                    for end, share in onwards(prefix + tokens, following).items():
                        found[end] += weight * prob * share
            known[prefix, chunk] = found
        return known[prefix, chunk]

    return onwards((), ())


def standing(frontiers: Frontiers, chunk: Tokens, ahead: Tokens, tokens: Tokens) -> Tokens:
    """The chunk of the next step, after one that verified `chunk` and sampled these tokens."""
    draft = table_of([0], "draft_model", [ahead], [(0.0,) * len(ahead)], width=len(ahead))
    frontiers.learn(draft, {0: chunk}, {0: tokens})
    _, drafts = frontiers.standing(np.zeros(1, dtype=np.int64))
    return drafts.tokens(0)[1:] if len(drafts.slots) else ()
