"""SuffixDrafter: what most often followed the longest context, in this sequence and in past outputs.

Owns each sequence's text and the corpus of what sequences generated before their slots were released.
Source: SuffixDecoding, arXiv 2411.04975, sections 3 and 4. Their global tree is our corpus, their tree of a
request the text of a sequence; the score of a draft, the tokens expected to be accepted, is the same. They count
every occurrence of a context in a tree; we count the latest OCCURRENCES of the longest one found. Their estimate
of a probability is the share of occurrences; ours is lower where the context is short or the occurrences are few,
because a share of one out of one says little: see DOUBT.

The corpus is shared. It never changes a token of any request, but a client that times its own requests could
learn that other requests were answered with the same text. Sequences with different salts share nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.drafter import Proposals, by_slot
from faser.engine.execution.drafting.text import (
    CORPUS_TOKENS,
    DRAFT_PER_CONTEXT_TOKEN,
    MAX_CONTEXT,
    MIN_FOLLOWING_SHARE,
    prediction_prefix,
)
from tests.engine.execution.draft_lines import DraftLine, table_with
from tests.engine.execution.drafting.oracle.corpus import END, Corpus, Match, Text

OCCURRENCES = 8  # the latest ones are counted: enough to tell .9 from .6, few enough for a step
# A context of L tokens seen n times goes on with what followed it c times with probability c / (n + DOUBT / L):
# one occurrence of three tokens is an even bet.
DOUBT = 3.0


class SuffixDrafter:
    """A Drafter. cap: the longest draft. Confidences are estimated probabilities.

    max_tree_depth: longest context compared, in tokens. max_spec_factor: longest draft, as a multiple of the
    context. min_token_prob: a draft ends before a token that follows in a smaller share of the occurrences.
    max_cached_requests, corpus_tokens: limits of the corpus, 0 for no corpus.
    """

    drafts_overlapped = True

    def __init__(
        self,
        *,
        cap: int,
        max_tree_depth: int = MAX_CONTEXT,
        max_cached_requests: int = 10_000,
        max_spec_factor: float = DRAFT_PER_CONTEXT_TOKEN,
        min_token_prob: float = MIN_FOLLOWING_SHARE,
        corpus_tokens: int = CORPUS_TOKENS,
    ) -> None:
        self.corpus = Corpus(max_tokens=corpus_tokens, max_outputs=max_cached_requests)
        self._cap = cap
        self._depth = max_tree_depth
        self._factor = max_spec_factor
        self._min_share = min_token_prob
        self._sequences: dict[int, _Sequence] = {}

    def start(self, start: SequenceStart) -> None:
        # After a preemption the corpus has this output already; only enough for one context is added again.
        unsaid = max(start.prompt_len, len(start.token_ids) - self._depth)
        prefix = prediction_prefix(start)
        text = Text((*prefix, *start.token_ids))
        self._sequences[start.slot] = _Sequence(text=text, unsaid=len(prefix) + unsaid, salt=hash(start.salt))

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        return Proposals(table=table_with([self._draft(request) for request in plan.requests], plan.width))

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        for slot, tokens in by_slot(slots, counts, token_ids):
            self._sequences[slot].text.tokens.extend(tokens)

    def release(self, slot: int) -> None:
        sequence = self._sequences.pop(slot)
        self.corpus.add(sequence.text.tokens[sequence.unsaid :], salt=sequence.salt)

    def _draft(self, request: DraftRequest) -> DraftLine:
        """The better of a draft from the sequence itself and one from the corpus; in a tie the former.

        Unverified and drafted tokens stand at the end of the text during this call and are never indexed.
        """
        sequence = self._sequences[request.slot]
        text = sequence.text
        text.index()
        num_known = len(text.tokens)
        text.tokens.extend(request.unverified)
        tail = text.tokens[-self._depth :]
        limit = min(self._cap, request.max_tokens)
        best = self._follow(text, text.find(tail, most=OCCURRENCES), limit, text.tokens)
        del text.tokens[num_known:]
        past = self.corpus.text
        other = self._follow(past, past.find(tail, most=OCCURRENCES, salt=sequence.salt), limit, [])
        best = other if other.score > best.score else best
        return DraftLine(slot=request.slot, method="suffix", token_ids=best.token_ids, confidences=best.probs)

    def _follow(self, text: Text, match: Match | None, limit: int, drafted: list[int]) -> "_Path":
        """From the occurrences of a context on, always the token that follows most often, in a tie the latest.

        An occurrence at the end of a text has no following token and is not counted. drafted: the draft is
        appended to it; where it is the text itself, the draft can continue with its own tokens.
        """
        if match is None:
            return _NO_DRAFT
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


_NO_DRAFT = _Path()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sequence:
    """unsaid: index into text of the first token that the corpus lacks."""

    text: Text
    unsaid: int
    salt: int
