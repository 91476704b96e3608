"""The drafting loop: a first pass over what a model has not seen, then a pass for every further token.

Owns the course of one proposal. Knows neither whose weights run nor whose KV cache they read, and remembers
nothing from one proposal to the next.

    position      start ............... n - 1 | n       n + 1     ...
    rows          |  opening, what is drafted | x_1     x_2       ...      each row chooses the token after it
                  |  from: known, and behind  |
    pass          |            1              | 2       3         ...      over all sequences that still go on
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

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
    """Where one sequence's draft begins. token_ids: of positions start …, up to the last token before the draft.

    max_tokens: most tokens to draft, at least 1; the slot's blocks hold their positions.
    Read only, and not frozen: see engine/contract/plan.py.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    max_tokens: int


@dataclass(slots=True, kw_only=True)
class DraftOutput:
    """What became of one opening. num_fed: so many leading drafted tokens were rows themselves: the model's KV
    holds them. confidences: margins in nats. Read only, as Opening is."""

    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    num_fed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """courses: in the order of the openings. passes: forwards of the model. probs, top_ids: as in Proposals."""

    courses: tuple[DraftOutput, ...]
    passes: int
    probs: Tensor | None
    top_ids: Tensor | None = None


class DraftLoop(Protocol):
    """Drafts for sequences, pass by pass."""

    def draft(
        self,
        openings: Sequence[DraftInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
        *,
        wants_top_ids: bool = False,
    ) -> DraftBatch:
        """Draft for every opening, each as far as it and the stop rule allow.

        until: asked before every pass but those that open; True ends all drafts where they are. What it says must
        not depend on the tokens drafted. wants_top_ids: as in DraftPlan.
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
        choice: DraftSampler,
        *,
        max_rows: int,
        num_layers: int | None = None,
    ) -> None:
        self._runner = runner
        self._table = table
        self._choice = choice
        self._max_rows = max_rows
        self._num_layers = num_layers

    def draft(
        self,
        openings: Sequence[DraftInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
        *,
        wants_top_ids: bool = False,
    ) -> DraftBatch:
        if not openings:
            return DraftBatch(courses=(), passes=0, probs=None)
        progress = DraftProgress(openings, wants_top_ids)
        chosen, passes = self._open(openings, wants_top_ids)
        going = np.arange(len(openings))
        while len(going := progress.take(going, chosen, stop)) and not (until is not None and until()):
            chosen = self._go_on(progress.feed(going))
            passes += 1
        return DraftBatch(
            courses=progress.courses(), passes=passes, probs=progress.probs(), top_ids=progress.top_ids()
        )

    def _open(self, openings: Sequence[DraftInput], wants_top_ids: bool) -> tuple[DraftTokens, int]:
        """The first token of every opening, and how many passes that took."""
        parts, passes = [], 0
        for pieces in chunks(openings, self._max_rows):
            batch = rows_of(pieces, self._table)
            self._runner.forward(batch, self._num_layers)
            passes += 1
            ends = [i for i, piece in enumerate(pieces) if piece.ends]
            if ends:
                starts = np.array([pieces[i].start + len(pieces[i].token_ids) for i in ends])
                slots = np.array([pieces[i].slot for i in ends])
                rows = DraftRows(slots=slots, positions=starts, draft_starts=starts, wants_top_ids=wants_top_ids)
                parts.append(self._choose(batch.last_rows[ends], rows))
        return _joined(parts), passes

    def _go_on(self, fed: "_Fed") -> DraftTokens:
        """One pass: a row for each drafted token that is fed, which chooses the one after it."""
        ones = np.ones(len(fed.token_ids), dtype=np.int32)
        starts = (fed.choice.positions - 1).astype(np.int32)
        batch = self._table.lay_out(fed.choice.slots.tolist(), starts, ones, fed.token_ids)
        self._runner.forward(batch, self._num_layers)
        return self._choose(batch.last_rows, fed.choice)

    @torch.inference_mode()
    def _choose(self, last_rows: NDArray[np.int64], rows: DraftRows) -> DraftTokens:
        return self._choice.choose(self._runner.logits(last_rows), rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fed:
    """Inputs of a pass, one a sequence, and what is to be chosen after them."""

    token_ids: NDArray[np.int64]
    choice: DraftRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows of one opening that share a pass. ends: the last of them is the opening's last."""

    slot: int
    start: int
    token_ids: Sequence[int]
    ends: bool


def chunks(openings: Sequence[DraftInput], max_rows: int) -> Iterator[list[Piece]]:
    """All rows of the openings in order, max_rows at a time."""
    pieces: list[Piece] = []
    room = max_rows
    for opening in openings:
        done = 0
        while done < len(opening.token_ids):
            part = opening.token_ids[done : done + room]
            start = opening.start + done
            done += len(part)
            pieces.append(
                Piece(slot=opening.slot, start=start, token_ids=part, ends=done == len(opening.token_ids))
            )
            room -= len(part)
            if not room:
                yield pieces
                pieces, room = [], max_rows
    if pieces:
        yield pieces


def rows_of(pieces: Sequence[DraftInput | Piece], table: BlockTable) -> RowBatch:
    """The rows of a pass, a sequence of the batch for each piece."""
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
    top_ids = [part.top_ids for part in parts if part.top_ids is not None]
    return DraftTokens(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        margins=np.concatenate([part.margins for part in parts]),
        probs=torch.cat(probs) if probs else None,
        top_ids=torch.cat(top_ids) if top_ids else None,
    )


_ALL = slice(None)


@dataclass(slots=True)
class _Kept:
    """A line of a tensor for each kept token, pass after pass, and whose they are."""

    lines: list[Tensor] = field(default_factory=list)
    owners: list[NDArray[np.int64]] = field(default_factory=list)

    def add(self, lines: Tensor | None, kept: NDArray[np.bool_] | slice, owners: NDArray[np.int64]) -> None:
        if lines is not None:
            self.lines.append(lines[kept if isinstance(kept, slice) else torch.from_numpy(kept)])
            self.owners.append(owners)

    def joined(self) -> Tensor | None:
        """[T, …], draft after draft: passes come one after the other, so a stable sort by owner orders them."""
        if not self.lines:
            return None
        order = np.argsort(np.concatenate(self.owners), kind="stable")
        return torch.cat(self.lines)[torch.from_numpy(order)]


class DraftProgress:
    """The drafts of one round, by opening. slots, draft_starts, max_tokens: of the openings, [S] int64."""

    def __init__(self, openings: Sequence[DraftInput], wants_top_ids: bool = False) -> None:
        self._names_likely = wants_top_ids
        self.slots = np.array([each.slot for each in openings])
        self.draft_starts = np.array([each.start + len(each.token_ids) for each in openings])
        self.max_tokens = np.array([each.max_tokens for each in openings])
        shape = (len(openings), int(self.max_tokens.max()))
        self._token_ids = np.zeros(shape, dtype=np.int64)
        self._margins = np.zeros(shape)
        self._survival = np.ones(len(openings))
        self._counts = np.zeros(len(openings), dtype=np.int64)  # tokens kept
        self._num_fed = np.zeros(len(openings), dtype=np.int64)
        self._probs, self._top_ids = _Kept(), _Kept()

    def take(self, going: NDArray[np.int64], chosen: DraftTokens, stop: StopRule | None) -> NDArray[np.int64]:
        """Keep what the rule lets in of a pass's tokens, one for each of going; returns who goes on.

        A token is kept while survival, its own acceptance included, exceeds the price of its row. For a token
        that was drawn this looks at the margin only, which was there before it.
        """
        kept: NDArray[np.bool_] | slice = _ALL
        staying = going
        if stop is not None:
            survival = self._survival[going] * _sigmoid(stop.intercept + stop.slope * chosen.margins)
            self._survival[going] = survival
            kept = survival > stop.row_price
            staying = going[kept]
        depth = self._counts[staying]
        self._token_ids[staying, depth] = chosen.token_ids[kept]
        self._margins[staying, depth] = chosen.margins[kept]
        depth += 1
        self._counts[staying] = depth
        self._probs.add(chosen.probs, kept, staying)
        self._top_ids.add(chosen.top_ids, kept, staying)
        staying = staying[depth < self.max_tokens[staying]]
        if stop is None or not len(staying):
            return staying
        excess = (self._survival[staying] - stop.row_price).sum()
        return staying if excess > stop.pass_prices[len(staying) - 1] else staying[:0]

    def count_fed(self, going: NDArray[np.int64]) -> None:
        """A pass has one more token of each of going as a row, whether it will be kept or not."""
        self._num_fed[going] += 1

    def feed(self, going: NDArray[np.int64]) -> _Fed:
        """The last drafted token of each of going, for the next pass."""
        self.count_fed(going)
        count, first = self._counts[going], self.draft_starts[going]
        return _Fed(
            token_ids=self._token_ids[going, count - 1],
            choice=DraftRows(
                slots=self.slots[going],
                positions=first + count,
                draft_starts=first,
                wants_top_ids=self._names_likely,
            ),
        )

    def courses(self) -> tuple[DraftOutput, ...]:
        lines = zip(
            self._token_ids.tolist(),
            self._margins.tolist(),
            self._counts.tolist(),
            np.minimum(self._num_fed, self._counts).tolist(),
            strict=True,
        )
        return tuple(
            [
                DraftOutput(
                    token_ids=tuple(token_ids[:count]), confidences=tuple(margins[:count]), num_fed=num_fed
                )
                for token_ids, margins, count, num_fed in lines
            ]
        )

    def probs(self) -> Tensor | None:
        return self._probs.joined()

    def top_ids(self) -> Tensor | None:
        return self._top_ids.joined()


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(np.minimum(np.maximum(-values, -500.0), 500.0)))
