"""Tables of drafts for tests to write down and to read, a line for each draft."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from faser.config.speculation import DRAFT_METHODS
from faser.engine.contract.drafts import NO_DRAFTS, DraftTable, joined, table_of
from faser.engine.execution.drafting.loop import DraftBatch


class DraftLine(NamedTuple):
    """One draft of a table."""

    slot: int
    method: str
    token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()


def lines_of(table: DraftTable) -> list[DraftLine]:
    lengths = table.lengths.tolist()
    return [
        DraftLine(slot, DRAFT_METHODS[method], tuple(token_ids[:length]), tuple(confidences[:length]))
        for slot, method, length, token_ids, confidences in zip(
            table.slots.tolist(),
            table.methods.tolist(),
            lengths,
            table.token_ids.tolist(),
            table.confidences.tolist(),
            strict=True,
        )
    ]


def table_with(lines: Iterable[DraftLine], width: int) -> DraftTable:
    """Lines without confidences get 1.0 for each token."""
    tables = [
        table_of(
            [line.slot],
            line.method,
            [line.token_ids],
            [line.confidences or (1.0,) * len(line.token_ids)],
            width=width,
        )
        for line in lines
    ]
    return joined(tables) if tables else NO_DRAFTS


def tokens_of(batch: DraftBatch) -> list[tuple[int, ...]]:
    """The tokens of each draft of a loop."""
    return [
        tuple(line[:count]) for line, count in zip(batch.token_ids.tolist(), batch.lengths.tolist(), strict=True)
    ]


def same(one: DraftBatch, other: DraftBatch) -> bool:
    """Whether two loops drafted the same and computed the same."""
    return (tokens_of(one), margins_of(one), one.num_fed.tolist(), one.passes) == (
        tokens_of(other),
        margins_of(other),
        other.num_fed.tolist(),
        other.passes,
    )


def margins_of(batch: DraftBatch) -> list[tuple[float, ...]]:
    return [
        tuple(line[:count]) for line, count in zip(batch.margins.tolist(), batch.lengths.tolist(), strict=True)
    ]


def committed(tokens: Mapping[int, Sequence[int]]) -> tuple[list[int], list[int], list[int]]:
    """Arguments of Drafter.commit. tokens: by slot."""
    return [*tokens], [*map(len, tokens.values())], [token_id for each in tokens.values() for token_id in each]
