"""Drafters that are replayed over recorded answers: each proposes at every position, and learns each token.

A confidence here is any value that can be a key: how often tokens with this confidence were right is learned from
other answers (scoring.py).
"""

import ctypes
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Protocol

from benchmarks.text_replay.recording import Answer
from faser.engine.checkpoints.ngram_model import NgramModel
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.drafter import Continuation
from faser.engine.execution.drafting.text import (
    CORPUS_TOKENS,
    DRAFT_PER_CONTEXT_TOKEN,
    MAX_CONTEXT,
    MIN_FOLLOWING_SHARE,
    LookupDrafter,
    ngram_table,
)
from faser.kernels.cpu.text_index import TextIndex, TextRules
from faser.types import SamplingParams

CAP = 16  # tokens of a draft from a look-up
CHAIN = 8  # tokens of a chain of successors

_PLAN = DraftPlan(step=0, requests=(DraftRequest(slot=0, max_tokens=CAP, new_blocks=()),))

Draft = list[tuple[int, Hashable]]  # tokens with their confidences


class Replayed(Protocol):
    """A drafter of one sequence at a time."""

    def begin(self, answer: Answer) -> None: ...

    def drafts(self) -> list[Draft]:
        """One or several, from which the best is chosen; at least one may be empty."""
        ...

    def learn(self, token: int, top: Sequence[int], top_logprobs: Sequence[float], /) -> None:
        """The token that came at this position, and what the model thought likeliest there."""
        ...

    def end(self) -> None: ...


class LookUp:
    """The engine's suffix and n-gram look-up.

    shares: answers of all conversations are in one namespace; else each conversation has its own.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        *,
        corpus: bool,
        shares: bool = False,
        min_n: int = 2,
    ) -> None:
        rules = TextRules(
            cap=CAP,
            depth=MAX_CONTEXT,
            max_outputs=10_000 if corpus else 0,
            max_tokens=CORPUS_TOKENS,
            max_spec_factor=DRAFT_PER_CONTEXT_TOKEN,
            min_token_prob=MIN_FOLLOWING_SHARE,
            min_n=min_n,
            max_n=5,
        )
        self._index = TextIndex(library, rules)
        self._shares = shares

    def begin(self, answer: Answer) -> None:
        salt = 0 if self._shares else hash((answer.conversation, answer.temperature))
        self._index.open(0, answer.prompt, unsaid=len(answer.prompt), salt=salt)

    def drafts(self) -> list[Draft]:
        found = self._index.look_up([0], [CAP], [()])
        if found is None:
            return []
        suffix, ngram = found.counts
        return [
            [
                (token, ("suffix", round(confidence, 1)))
                for token, confidence in zip(found.token_ids[:suffix], found.confidences[:suffix], strict=True)
            ],
            [(token, ("ngram", found.confidences[CAP])) for token in found.token_ids[CAP : CAP + ngram]],
        ]

    def learn(self, token: int, _top: Sequence[int], _top_logprobs: Sequence[float], /) -> None:
        self._index.extend([0], [(token,)])

    def end(self) -> None:
        self._index.close(0)


class Successors:
    """For contexts of the given lengths, longest first, the token that came last after each: a chain of them.

    by_argmax: what the model thought likeliest, not what came; the two differ where tokens are drawn at random.
    With length 1 and by_argmax this is token recycling (arXiv 2408.08696) with one candidate and no tree.
    """

    def __init__(self, lengths: Sequence[int], *, by_argmax: bool = False, shares: bool = False) -> None:
        self._lengths = tuple(lengths)
        self._by_argmax = by_argmax
        self._shares = shares
        self._tables: dict[tuple[int, ...], tuple[int, int, int]] = {}
        self._namespaces: dict[object, dict[tuple[int, ...], tuple[int, int, int]]] = defaultdict(dict)
        self._tail: list[int] = []

    def begin(self, answer: Answer) -> None:
        self._tables = self._namespaces[0 if self._shares else (answer.conversation, answer.temperature)]
        self._tail = list(answer.prompt[-8:])

    def drafts(self) -> list[Draft]:
        tail = self._tail[-8:]
        draft: Draft = []
        for _ in range(CHAIN):
            for length in self._lengths:
                entry = self._tables.get(tuple(tail[-length:]))
                if entry is not None:
                    token, agreed, seen = entry
                    draft.append((token, (length, min(agreed, 3), min(seen - agreed, 2))))
                    tail.append(token)
                    break
            else:
                break
        return [draft]

    def learn(self, token: int, top: Sequence[int], _top_logprobs: Sequence[float], /) -> None:
        value = top[0] if self._by_argmax else token
        for length in self._lengths:
            key = tuple(self._tail[-length:])
            known, agreed, seen = self._tables.get(key, (value, -1, -1))
            self._tables[key] = (value, agreed + 1 if known == value else 0, seen + 1)
        self._tail.append(token)

    def end(self) -> None:
        pass


class Recycled:
    """For each token a mean of the model's likeliest next tokens, the newest weighing most: all TOP are used."""

    _KEPT = 0.6

    def __init__(self, *, shares: bool = False) -> None:
        self._shares = shares
        self._namespaces: dict[object, dict[int, dict[int, float]]] = defaultdict(dict)
        self._rows: dict[int, dict[int, float]] = {}
        self._last = 0

    def begin(self, answer: Answer) -> None:
        self._rows = self._namespaces[0 if self._shares else (answer.conversation, answer.temperature)]
        self._last = answer.prompt[-1]

    def drafts(self) -> list[Draft]:
        last = self._last
        draft: Draft = []
        for _ in range(CHAIN):
            row = self._rows.get(last)
            if row is None:
                break
            last, share = max(row.items(), key=lambda item: item[1])
            draft.append((last, round(share, 1)))
        return [draft]

    def learn(self, token: int, top: Sequence[int], top_logprobs: Sequence[float], /) -> None:
        row = self._rows.setdefault(self._last, {})
        kept = self._KEPT if row else 0.0
        for each in row:
            row[each] *= kept
        for each, logprob in zip(top, top_logprobs, strict=True):
            row[each] = row.get(each, 0.0) + (1 - kept) * math.exp(logprob)
        self._last = token

    def end(self) -> None:
        pass


class Counted:
    """The engine's n-gram model. Learns nothing while answers come."""

    def __init__(self, library: ctypes.CDLL, model: NgramModel) -> None:
        self._drafter = LookupDrafter(library, TextRules(cap=CAP, ngrams=ngram_table(library, model)))

    def begin(self, answer: Answer) -> None:
        length = len(answer.prompt)
        self._drafter.start(
            SequenceStart(
                slot=0, sampling=SamplingParams(), seed=0, prompt_len=length, token_ids=answer.prompt, salt=None
            )
        )

    def drafts(self) -> list[Draft]:
        (draft,) = self._drafter.propose(_PLAN).drafts
        return [
            [(token, round(chance, 1)) for token, chance in zip(draft.token_ids, draft.confidences, strict=True)]
        ]

    def learn(self, token: int, _top: Sequence[int], _top_logprobs: Sequence[float], /) -> None:
        self._drafter.commit([Continuation(slot=0, token_ids=(token,))])

    def end(self) -> None:
        self._drafter.release(0)
