"""The drafting loop: a first pass over tokens that a model has not computed, then one for every further token.

Owns the drafts of one proposal, of a draft model and of a head alike; remembers nothing from one to the next.
fed_loop.py is the loop of a device that feeds itself. A token has a position in its sequence, on which its random
numbers depend, and its row a place in the cache of the model that drafts; they differ for heads.

    place         start ............... n - 1 | n       n + 1     ...
    rows          |  DraftInput: known and    | x_1     x_2       ...      each row yields the token after it
                  |  unverified tokens        |
    pass          |            1              | 2       3         ...      over all active sequences
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.contract.drafts import DraftTable, empty_table
from faser.engine.contract.plan import DraftPlan, StopRule
from faser.engine.execution.drafting.head_memory import StatePiece
from faser.engine.execution.drafting.samplers import DraftRows, DraftSampler, DraftTokens
from faser.engine.execution.runner.batch import BlockTable, RowBatch, TokenFeedback
from faser.engine.execution.runner.runner import Runner
from faser.kernels.interface.blocks import DraftedTokens
from faser.kernels.interface.shapes import RowLayout
from faser.types.arrays import NO_TOKEN, Ints


@dataclass(slots=True, kw_only=True)
class DraftInput:
    """Beginning of one sequence's draft. Read only, and not frozen: see engine/contract/plan.py.

    start: the place of the first row. token_ids: of the rows, up to the last token before the draft.
    max_tokens: most tokens to draft, at least 1; the slot's blocks have room for them.
    shift: by how much the positions of the tokens exceed the places of their rows.
    states: for a head, those of the positions before the rows' tokens.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    max_tokens: int
    shift: int = 0
    states: Sequence[StatePiece] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """S drafts of up to K tokens, in the order of the inputs.

    lengths: [S]. token_ids: [S, K], NO_TOKEN beyond lengths. margins: [S, K] the confidences, in nats; 0 beyond.
    num_fed: [S] how many leading tokens of each draft were rows themselves, so that the model's KV cache holds
        them.
    passes: forwards of the model. probs: as in Proposals.
    """

    lengths: Ints
    token_ids: Ints
    margins: NDArray[np.float64]
    num_fed: Ints
    passes: int
    probs: Tensor | None = None

    def table(self, plan: DraftPlan, method: str, drafting: Sequence[int]) -> DraftTable:
        """A draft for every request of the plan. drafting: of them, the S that have a draft here."""
        table = empty_table([each.slot for each in plan.requests], method, plan.width)
        if drafting:
            width, all_draft = self.token_ids.shape[1], len(drafting) == len(plan.requests)
            at = slice(None) if all_draft else drafting
            table.lengths[at] = self.lengths
            table.token_ids[at, :width] = self.token_ids
            table.confidences[at, :width] = self.margins
        return table


def on_host(values: Tensor) -> NDArray[Any]:
    """Return the values where the host reads them; waits for a device."""
    return values.numpy(force=True)


def no_drafts() -> DraftBatch:
    """Return the drafts of no inputs."""
    none, nothing = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int64)
    return DraftBatch(lengths=none, token_ids=nothing, margins=np.zeros((0, 0)), num_fed=none, passes=0)


def drafted(found: DraftedTokens) -> DraftBatch:
    """The drafts of one native call."""
    beyond = np.arange(found.token_ids.shape[1]) >= found.counts[:, None]
    return DraftBatch(
        lengths=found.counts,
        token_ids=np.where(beyond, NO_TOKEN, found.token_ids),
        margins=np.where(beyond, 0.0, found.margins),
        num_fed=found.num_fed,
        passes=found.passes,
    )


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


class Passes(Protocol):
    """The passes of a model that drafts. Both give logits, [S, V] float32, valid until the next call."""

    @property
    def table(self) -> BlockTable:
        """The blocks of every slot in the model's cache."""
        ...

    def first(self, inputs: Sequence[DraftInput]) -> tuple[Tensor, int]:
        """Run the rows of the inputs: logits of the last row of each, and how many passes that took."""
        ...

    def further(self, batch: RowBatch, sources: Ints) -> Tensor:
        """Run one row for each of S drafted tokens. sources: [S], the last logits' rows that they came from."""
        ...


class PassLoop:
    """Loop of plain passes: the tokens of a pass are read before the next one is launched."""

    def __init__(self, passes: Passes, sampler: DraftSampler) -> None:
        self._passes = passes
        self._sampler = sampler

    @torch.inference_mode()
    def draft(
        self,
        inputs: Sequence[DraftInput],
        stop: StopRule | None,
        until: Callable[[], bool] | None = None,
    ) -> DraftBatch:
        if not inputs:
            return no_drafts()
        progress = DraftProgress(inputs)
        sequences = OneRowEach.of(self._passes.table, progress.slots, progress.places)
        active, rows = np.arange(len(inputs)), progress.first_rows()
        logits, passes = self._passes.first(inputs)
        while True:
            staying = progress.take(active, self._sampler.choose(logits, rows), stop)
            if not len(staying) or (until is not None and until()):
                return progress.batch(passes)
            sources = np.searchsorted(active, staying)
            if len(staying) < len(active):
                sequences = sequences.take(sources)
            active = staying
            token_ids, rows = progress.feed(active)
            logits = self._passes.further(sequences.next_batch(torch.from_numpy(token_ids)), sources)
            passes += 1


class ModelPasses:
    """Passes of a draft model, or of a head. table: of its cache. max_rows: most rows of a pass."""

    def __init__(self, runner: Runner, table: BlockTable, *, max_rows: int) -> None:
        self.runner = runner
        self.table = table
        self._max_rows = max_rows

    def read(self, inputs: Sequence[DraftInput]) -> tuple[RowBatch, int]:
        """Run the rows of the inputs: the last pass, in which all of them end, and how many passes that took."""
        *before, last = spread(inputs, self._max_rows)
        for pieces in before:
            self.run(pieces)
        return self.run(last), len(before) + 1

    def run(self, pieces: Sequence["DraftInput | Piece"]) -> RowBatch:
        """Run one pass over the tokens of the pieces."""
        batch = rows_of(pieces, self.table)
        self.runner.forward(batch)
        return batch

    def keep(self, sources: Ints) -> None:
        """Prepare the next pass to continue these rows of the last samples. A head's reads their states."""

    def first(self, inputs: Sequence[DraftInput]) -> tuple[Tensor, int]:
        batch, passes = self.read(inputs)
        return self.runner.logits(batch.last_rows), passes

    def further(self, batch: RowBatch, sources: Ints) -> Tensor:
        self.keep(sources)
        self.runner.forward(batch)
        return self.runner.logits(batch.last_rows)


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


def spread(inputs: Sequence[DraftInput], max_rows: int) -> list[Sequence[DraftInput | Piece]]:
    """All tokens of the inputs in as few passes as possible, and the last one of every input in the last pass.

    So tokens are sampled once for all of them. Three inputs with last tokens A, B and C, in passes of 6 rows:

        in order     a a a a a A | b B c c c c | C
        here         a a a a a b | c c c c     | A B C
    """
    assert len(inputs) <= max_rows, f"{len(inputs)} sequences draft; a pass has {max_rows} rows"
    num_rows = sum(len(each.token_ids) for each in inputs)
    room = (-(-num_rows // max_rows) - 1) * max_rows  # of all passes before the last
    if not room:
        return [inputs]
    early, last = [], []
    for each in inputs:
        count = min(room, len(each.token_ids) - 1)
        room -= count
        if count:
            early.append(replace(each, token_ids=each.token_ids[:count]))
        last.append(replace(each, start=each.start + count, token_ids=each.token_ids[count:]))
    return [*chunks(early, max_rows), last]


def rows_of(pieces: Sequence[DraftInput | Piece], table: BlockTable) -> RowBatch:
    """The rows of a pass: each piece is one sequence of the batch."""
    inputs = [piece.token_ids for piece in pieces]
    return table.lay_out(
        [piece.slot for piece in pieces],
        np.array([piece.start for piece in pieces], dtype=np.int32),
        np.array([*map(len, inputs)], dtype=np.int32),
        np.fromiter(chain.from_iterable(inputs), np.int64),
    )


@dataclass(slots=True, kw_only=True)
class OneRowEach:
    """S sequences with one row each in every pass: what is the same in all passes is looked up once.

    block_table: [S, B], query_start: [S + 1], as in RowLayout. rows: [S] row numbers.
    places: [S] int32, of the rows of the next pass.
    """

    block_table: Tensor
    query_start: Tensor
    rows: Ints
    places: NDArray[np.int32]

    @classmethod
    def of(cls, table: BlockTable, slots: Ints, places: Ints) -> "OneRowEach":
        """places: [S] of the first draft tokens. The slots hold the blocks of the whole drafts."""
        return cls(
            block_table=table.of(slots.tolist()),
            query_start=torch.from_numpy(np.arange(len(slots) + 1, dtype=np.int32)),
            rows=np.arange(len(slots)),
            places=places.astype(np.int32),
        )

    def take(self, kept: Ints) -> "OneRowEach":
        """Those with these numbers, [N]."""
        at = torch.from_numpy(kept)
        return OneRowEach(
            block_table=self.block_table[at],
            query_start=self.query_start[: len(kept) + 1],
            rows=self.rows[: len(kept)],
            places=self.places[kept],
        )

    def skip(self) -> None:
        """Leave a pass to the device."""
        self.places = self.places + 1

    def next_batch(self, token_ids: Tensor, feedback: TokenFeedback | None = None) -> RowBatch:
        """The rows of the next pass. token_ids: [S] int64."""
        places = self.places
        self.places = places + 1
        return RowBatch(
            token_ids=token_ids,
            layout=RowLayout(
                query_start=self.query_start,
                seq_len=torch.from_numpy(self.places),
                positions=torch.from_numpy(places),
                block_table=self.block_table,
            ),
            last_rows=self.rows,
            feedback=feedback,
        )


class DraftProgress:
    """The drafts of one proposal while they grow. Of the S inputs, [S] int64 each: slots, places and draft_starts.

    places, draft_starts: of the first draft tokens, in the cache and in the sequence. max_tokens: of each draft.
    Sequences are numbered as the inputs; an active one gets a further token.
    """

    def __init__(self, inputs: Sequence[DraftInput]) -> None:
        self.slots = np.array([each.slot for each in inputs])
        self.places = np.array([each.start + len(each.token_ids) for each in inputs])
        self.draft_starts = self.places + [each.shift for each in inputs]
        self.max_tokens = np.array([each.max_tokens for each in inputs])
        shape = (len(inputs), int(self.max_tokens.max()))
        self._token_ids = np.full(shape, NO_TOKEN)
        self._margins = np.zeros(shape)
        self._survival = np.ones(len(inputs))
        self._counts = np.zeros(len(inputs), dtype=np.int64)  # tokens kept
        self._num_fed = np.zeros(len(inputs), dtype=np.int64)
        self._probs = _KeptRows()

    def take(self, active: Ints, tokens: DraftTokens, stop: StopRule | None) -> Ints:
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

    def count_fed(self, active: Ints | slice) -> None:
        """One more token of each active sequence is a row of a pass, whether or not it is kept later."""
        self._num_fed[active] += 1

    @property
    def counts(self) -> Ints:
        """Return how many tokens of each draft are kept: [S]."""
        return self._counts

    def first_rows(self) -> DraftRows:
        """The rows of the first draft tokens."""
        return self._rows(self.slots, self.draft_starts, self.draft_starts)

    def feed(self, active: Ints) -> tuple[Ints, DraftRows]:
        """The last draft token of each active sequence, and the rows of the tokens that follow them."""
        self.count_fed(active)
        count, first = self._counts[active], self.draft_starts[active]
        return self._token_ids[active, count - 1], self._rows(self.slots[active], first + count, first)

    def batch(self, passes: int) -> DraftBatch:
        """The drafts as they are now. passes: how many there were."""
        return DraftBatch(
            lengths=self._counts,
            token_ids=self._token_ids,
            margins=self._margins,
            num_fed=np.minimum(self._num_fed, self._counts),
            passes=passes,
            probs=self._probs.joined(),
        )

    def _rows(self, slots: Ints, positions: Ints, draft_starts: Ints) -> DraftRows:
        return DraftRows(slots=slots, positions=positions, draft_starts=draft_starts)


_ALL = slice(None)


@dataclass(slots=True)
class _KeptRows:
    """One row of a tensor for each kept token, pass after pass. drafts: which input each row belongs to."""

    rows: list[Tensor] = field(default_factory=list)
    drafts: list[Ints] = field(default_factory=list)

    def add(self, rows: Tensor | None, kept: NDArray[np.bool_] | slice, drafts: Ints) -> None:
        if rows is not None:
            self.rows.append(rows[kept if isinstance(kept, slice) else torch.from_numpy(kept)])
            self.drafts.append(drafts)

    def joined(self) -> Tensor | None:
        """Join the rows draft after draft: [T, …]. Passes are in order, and a stable sort by draft keeps it."""
        if not self.rows:
            return None
        order = np.argsort(np.concatenate(self.drafts), kind="stable")
        return torch.cat(self.rows)[torch.from_numpy(order)]


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(np.minimum(np.maximum(-values, -500.0), 500.0)))
