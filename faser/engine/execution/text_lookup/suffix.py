"""SuffixDrafter: what most often followed the longest context, in this sequence and in past outputs.

Owns each sequence's text and the corpus of what sequences said before their slots were released. Knows no model.
Engines use it where the native lookup (native_lookup.py), which proposes the same drafts, cannot be had.
Source: SuffixDecoding, arXiv 2411.04975, sections 3 and 4. Their global tree is our corpus, their tree of a
request the text of a sequence; the score of a draft, the tokens it should have accepted, is the same. They count
every occurrence of a context in a tree; we count the latest OCCURRENCES of the longest one found. Their estimate
of a probability is the share of occurrences; ours is lower where a short context or few occurrences speak for it,
because a share of one out of one says little: see DOUBT.

The corpus is shared. It never changes a token that anybody gets, but a client who times its own requests could
learn that others were told the same text. Sequences with different salts share nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafters.drafter import Continuation, Proposals
from faser.engine.execution.text_lookup.corpus import END, Corpus, Match, Text
from faser.engine.execution.text_lookup.lookup import CORPUS_TOKENS
from faser.engine.execution.text_lookup.prediction import foreword

OCCURRENCES = 8  # so many are counted: enough to tell .9 from .6, few enough for a step
# A context of L tokens seen n times goes on with what followed it c times with probability c / (n + DOUBT / L):
# one occurrence of three tokens is an even bet. benchmarks/text_drafts.py holds it against what came true.
DOUBT = 3.0


class SuffixDrafter:
    """A Drafter. cap: the longest draft. Confidences are estimated probabilities.

    max_tree_depth: longest context compared, in tokens. max_spec_factor: a draft is no longer than so many times
    the context. min_token_prob: it ends before a token that follows in a smaller share of the occurrences.
    max_cached_requests, corpus_tokens: bounds of the corpus, 0 for none.
    """

    drafts_overlapped = True

    def __init__(
        self,
        *,
        cap: int,
        max_tree_depth: int = 24,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = 1.0,
        min_token_prob: float = 0.1,
        corpus_tokens: int = CORPUS_TOKENS,
    ) -> None:
        self.corpus = Corpus(max_tokens=corpus_tokens, max_outputs=max_cached_requests)
        self._cap = cap
        self._depth = max_tree_depth
        self._factor = max_spec_factor
        self._min_share = min_token_prob
        self._spoken: dict[int, _Spoken] = {}

    def start(self, start: SequenceStart) -> None:
        # What a preemption interrupted is in the corpus up to here; only a context's worth is repeated.
        unsaid = max(start.prompt_len, len(start.token_ids) - self._depth)
        before = foreword(start)
        text = Text((*before, *start.token_ids))
        self._spoken[start.slot] = _Spoken(text=text, unsaid=len(before) + unsaid, salt=hash(start.salt))

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        return Proposals(drafts=tuple(self._draft(request) for request in plan.requests))

    def commit(self, continuations: Sequence[Continuation]) -> None:
        for each in continuations:
            self._spoken[each.slot].text.tokens.extend(each.token_ids)

    def release(self, slot: int) -> None:
        spoken = self._spoken.pop(slot)
        self.corpus.add(spoken.text.tokens[spoken.unsaid :], salt=spoken.salt)

    def _draft(self, request: DraftRequest) -> Draft:
        """The better of the sequence's own continuation and the corpus'; its own when they are equal.

        The tokens behind, and those drafted, are at the end of the text for the time of this call; never indexed.
        """
        spoken = self._spoken[request.slot]
        text = spoken.text
        text.index()
        num_known = len(text.tokens)
        text.tokens.extend(request.unverified)
        tail = text.tokens[-self._depth :]
        limit = min(self._cap, request.max_tokens)
        best = self._follow(text, text.find(tail, most=OCCURRENCES), limit, text.tokens)
        del text.tokens[num_known:]
        past = self.corpus.text
        other = self._follow(past, past.find(tail, most=OCCURRENCES, salt=spoken.salt), limit, [])
        best = other if other.score > best.score else best
        return Draft(slot=request.slot, method="suffix", token_ids=best.token_ids, confidences=best.probs)

    def _follow(self, text: Text, match: Match | None, limit: int, drafted: list[int]) -> "_Path":
        """From the occurrences of a context on, always to the token that follows most often.

        Of equally frequent ones to the one seen latest. An occurrence where the text ends says nothing. drafted:
        grows by the draft; where it is the text itself, the draft can go on with itself.
        """
        if match is None:
            return NOTHING
        tokens, starts = text.tokens, match.starts
        probs: list[float] = []
        survival, score, first = 1.0, 0.0, len(drafted)
        for context in range(match.length, match.length + min(limit, int(self._factor * match.length))):
            following = [tokens[start] for start in starts]
            if END in following:
                starts = [start for start in starts if tokens[start] != END]
                following = [tokens[start] for start in starts]
                if not starts:
                    break
            token = following[0]
            count = following.count(token)
            if count == len(following):
                starts = [start + 1 for start in starts]
            else:
                token = max(following, key=following.count)
                count = following.count(token)
                starts = [start + 1 for start in starts if tokens[start] == token]
            if count < self._min_share * len(following):
                break
            prob = count / (len(following) + DOUBT / context)
            drafted.append(token)
            probs.append(prob)
            survival *= prob
            score += survival
        return _Path(token_ids=tuple(drafted[first:]), probs=tuple(probs), score=score)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Path:
    """score: tokens expected to be accepted, the sum of the running products of probs."""

    token_ids: tuple[int, ...] = ()
    probs: tuple[float, ...] = ()
    score: float = 0.0


NOTHING = _Path()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spoken:
    """unsaid: index into text of what the corpus does not have yet."""

    text: Text
    unsaid: int
    salt: int
