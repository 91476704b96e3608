"""The drafting loop: a first pass over tokens that a model has not computed, then one for every further token.

Owns the drafts of one proposal, for a draft model and for layers of the target alike; remembers nothing from one
proposal to the next.

    position      start ............... n - 1 | n       n + 1     ...
    rows          |  DraftInput: known and    | x_1     x_2       ...      each row yields the token after it
                  |  unverified tokens        |
    pass          |            1              | 2       3         ...      over all active sequences
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.plan import StopRule
from faser.engine.execution.drafters.draft_samplers import DraftRows, DraftSampler, DraftTokens
from faser.engine.execution.runner.batch import BlockTable, RowBatch
from faser.engine.execution.runner.runner import Runner


@dataclass(slots=True, kw_only=True)
class DraftInput:
    """Where one sequence's draft begins. token_ids: at positions start …, up to the last token before the draft.

    max_tokens: most tokens to draft, at least 1; the slot's blocks have room for them.
    Read only, and not frozen: see engine/contract/plan.py.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """Drafts in the order of the inputs. confidences: margins in nats, one per token.

    num_fed: how many leading tokens of each draft were rows themselves, so that the model's KV cache holds them.
    passes: forwards of the model. probs: as in Proposals.
    """

    token_ids: tuple[tuple[int, ...], ...] = ()
    confidences: tuple[tuple[float, ...], ...] = ()
    num_fed: tuple[int, ...] = ()
    passes: int = 0
    probs: Tensor | None = None


class DraftLoop(Protocol):
    """Drafts for sequences, pass by pass."""

    def draft(
        self,
        inputs: Sequence[DraftInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
    ) -> DraftBatch:
        """Draft for every input, as many tokens as its limit and the stop rule allow.

        until: asked before every pass after the inputs are computed; True ends all drafts where they are. Its
        answer must not depend on the draft tokens.
        """
        ...


class PassLoop:
    """See DraftLoop. Drafts with the first num_layers layers of a runner's model (None: all).

    max_rows: most rows of a pass.
    """

    def __init__(
        self,
        runner: Runner,
        table: BlockTable,
        sampler: DraftSampler,
        *,
        max_rows: int,
        num_layers: int | None = None,
    ) -> None:
        self._runner = runner
        self._table = table
        self._sampler = sampler
        self._max_rows = max_rows
        self._num_layers = num_layers

    def draft(
        self,
        inputs: Sequence[DraftInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
    ) -> DraftBatch:
        if not inputs:
            return DraftBatch()
        progress = DraftProgress(inputs)
        tokens, passes = self._first_tokens(inputs)
        active = np.arange(len(inputs))
        while len(active := progress.take(active, tokens, stop)) and not (until is not None and until()):
            tokens = self._next_tokens(*progress.feed(active))
            passes += 1
        return progress.batch(passes)

    def _first_tokens(self, inputs: Sequence[DraftInput]) -> tuple[DraftTokens, int]:
        """The first draft token of every input, and how many passes that took."""
        parts, passes = [], 0
        for pieces in chunks(inputs, self._max_rows):
            batch = rows_of(pieces, self._table)
            self._runner.forward(batch, self._num_layers)
            passes += 1
            ends = [i for i, piece in enumerate(pieces) if piece.ends]
            if ends:
                starts = np.array([pieces[i].start + len(pieces[i].token_ids) for i in ends])
                slots = np.array([pieces[i].slot for i in ends])
                rows = DraftRows(slots=slots, positions=starts, draft_starts=starts)
                parts.append(self._sample(batch.last_rows[ends], rows))
        return _joined(parts), passes

    def _next_tokens(self, token_ids: NDArray[np.int64], rows: DraftRows) -> DraftTokens:
        """One pass over a draft token of each sequence. rows: of the tokens that follow them."""
        ones = np.ones(len(token_ids), dtype=np.int32)
        starts = (rows.positions - 1).astype(np.int32)
        batch = self._table.lay_out(rows.slots.tolist(), starts, ones, token_ids)
        self._runner.forward(batch, self._num_layers)
        return self._sample(batch.last_rows, rows)

    @torch.inference_mode()
    def _sample(self, last_rows: NDArray[np.int64], rows: DraftRows) -> DraftTokens:
        return self._sampler.choose(self._runner.logits(last_rows), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens of one input that share a pass. ends: the last of them is the input's last."""

    slot: int
    start: int
    token_ids: Sequence[int]
    ends: bool


def chunks(inputs: Sequence[DraftInput], max_rows: int) -> Iterator[list[Piece]]:
    """All tokens of the inputs in order, max_rows at a time."""
    pieces: list[Piece] = []
    room = max_rows
    for each in inputs:
        done = 0
        while done < len(each.token_ids):
            part = each.token_ids[done : done + room]
            start = each.start + done
            done += len(part)
            pieces.append(Piece(slot=each.slot, start=start, token_ids=part, ends=done == len(each.token_ids)))
            room -= len(part)
            if not room:
                yield pieces
                pieces, room = [], max_rows
    if pieces:
        yield pieces


def rows_of(pieces: Sequence[DraftInput | Piece], table: BlockTable) -> RowBatch:
    """The rows of a pass: each piece is one sequence of the batch."""
    inputs = [piece.token_ids for piece in pieces]
    return table.lay_out(
        [piece.slot for piece in pieces],
        np.array([piece.start for piece in pieces], dtype=np.int32),
        np.array([*map(len, inputs)], dtype=np.int32),
        np.fromiter(chain.from_iterable(inputs), np.int64),
    )


def _joined(parts: list[DraftTokens]) -> DraftTokens:
    if len(parts) == 1:
        return parts[0]
    probs = [part.probs for part in parts if part.probs is not None]
    return DraftTokens(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        margins=np.concatenate([part.margins for part in parts]),
        probs=torch.cat(probs) if probs else None,
    )


_ALL = slice(None)


@dataclass(slots=True)
class _KeptRows:
    """One row of a tensor for each kept token, pass after pass. drafts: which input each row belongs to."""

    rows: list[Tensor] = field(default_factory=list)
    drafts: list[NDArray[np.int64]] = field(default_factory=list)

    def add(self, rows: Tensor | None, kept: NDArray[np.bool_] | slice, drafts: NDArray[np.int64]) -> None:
        if rows is not None:
            self.rows.append(rows[kept if isinstance(kept, slice) else torch.from_numpy(kept)])
            self.drafts.append(drafts)

    def joined(self) -> Tensor | None:
        """[T, …], draft after draft. Passes are in order, so a stable sort by draft keeps the order of tokens."""
        if not self.rows:
            return None
        order = np.argsort(np.concatenate(self.drafts), kind="stable")
        return torch.cat(self.rows)[torch.from_numpy(order)]


class DraftProgress:
    """The drafts of one proposal while they grow. slots, draft_starts, max_tokens: [S] int64, of the S inputs.

    Sequences are numbered as the inputs; an active one gets a further token.
    """

    def __init__(self, inputs: Sequence[DraftInput]) -> None:
        self.slots = np.array([each.slot for each in inputs])
        self.draft_starts = np.array([each.start + len(each.token_ids) for each in inputs])
        self.max_tokens = np.array([each.max_tokens for each in inputs])
        shape = (len(inputs), int(self.max_tokens.max()))
        self._token_ids = np.zeros(shape, dtype=np.int64)
        self._margins = np.zeros(shape)
        self._survival = np.ones(len(inputs))
        self._counts = np.zeros(len(inputs), dtype=np.int64)  # tokens kept
        self._num_fed = np.zeros(len(inputs), dtype=np.int64)
        self._probs = _KeptRows()

    def take(self, active: NDArray[np.int64], tokens: DraftTokens, stop: StopRule | None) -> NDArray[np.int64]:
        """Keep those tokens of a pass, one an active sequence, that the rule allows; returns what stays active.

        A token is kept while the survival of the draft, its own acceptance included, exceeds the price of its row.
        For a token that was drawn, the rule uses the margin only, which does not depend on the draw.
        """
        kept: NDArray[np.bool_] | slice = _ALL
        staying = active
        if stop is not None:
            survival = self._survival[active] * _sigmoid(stop.intercept + stop.slope * tokens.margins)
            self._survival[active] = survival
            kept = survival > stop.row_price
            staying = active[kept]
        depth = self._counts[staying]
        self._token_ids[staying, depth] = tokens.token_ids[kept]
        self._margins[staying, depth] = tokens.margins[kept]
        depth += 1
        self._counts[staying] = depth
        self._probs.add(tokens.probs, kept, staying)
        staying = staying[depth < self.max_tokens[staying]]
        if stop is None or not len(staying):
            return staying
        excess = (self._survival[staying] - stop.row_price).sum()
        return staying if excess > stop.pass_prices[len(staying) - 1] else staying[:0]

    def count_fed(self, active: NDArray[np.int64]) -> None:
        """One more token of each active sequence is a row of a pass, whether or not it is kept later."""
        self._num_fed[active] += 1

    def feed(self, active: NDArray[np.int64]) -> tuple[NDArray[np.int64], DraftRows]:
        """The last draft token of each active sequence, and the rows of the tokens that follow them."""
        self.count_fed(active)
        count, first = self._counts[active], self.draft_starts[active]
        return self._token_ids[active, count - 1], DraftRows(
            slots=self.slots[active],
            positions=first + count,
            draft_starts=first,
        )

    def batch(self, passes: int) -> DraftBatch:
        """The drafts as they are now. passes: how many there were."""
        counts = self._counts.tolist()
        return DraftBatch(
            token_ids=cut(self._token_ids, counts),
            confidences=cut(self._margins, counts),
            num_fed=tuple(np.minimum(self._num_fed, self._counts).tolist()),
            passes=passes,
            probs=self._probs.joined(),
        )


def cut(rows: NDArray[Any], counts: list[int]) -> tuple[tuple[Any, ...], ...]:
    """The first counts[i] values of row i."""
    return tuple([tuple(row[:count]) for row, count in zip(rows.tolist(), counts, strict=True)])


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(np.minimum(np.maximum(-values, -500.0), 500.0)))
