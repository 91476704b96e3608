"""Fakes at the seams. They check what the real things would silently get wrong."""

from dataclasses import dataclass

from faser.engine.plan import SequenceResult, SequenceRows, SequenceStart, StepPlan, StepResult
from faser.types import PositionLogprobs

VOCAB_SIZE = 50

# What a place in the cache holds: the token, its position, and a hash of all tokens up to it. A real key or
# value depends on exactly these.
Cell = tuple[int, int, int]


def next_token(history: int, seed: int) -> int:
    """The scripted model: the token that follows a history, given the sequence's seed."""
    return hash((history, seed)) % VOCAB_SIZE


def extend(history: int, token_id: int) -> int:
    return hash((history, token_id))


def scripted_logprobs(history: int, token_id: int) -> PositionLogprobs:
    """Scores that only this token behind this history has."""
    return PositionLogprobs(token_id=token_id, logprob=-float(hash((history, -1)) % 997), rank=1, top=())


@dataclass(slots=True)
class _Line:
    """A slot in use. histories[i]: hash of the first i tokens, as far as they are known."""

    start: SequenceStart
    histories: list[int]
    blocks: list[int]


class ScriptedExecutor:
    """An Executor without a model, but with the memory of one: it knows what was written where.

    AssertionError if a plan starts a slot in use, leaves one that is not, shares a block that is written to,
    or feeds rows whose block table does not hold exactly their own prefix. Rows of one step are written
    before any is read, as attention does. burst: a result carries up to so many tokens, all of them those
    that single steps would have brought. fail_slots: slots whose next result is an error.
    """

    def __init__(self, *, block_size: int, burst: int = 1) -> None:
        self.block_size = block_size
        self.burst = burst
        self.fail_slots: set[int] = set()
        self.steps: list[StepPlan] = []
        self._lines: dict[int, _Line] = {}
        self._cells: dict[tuple[int, int], Cell] = {}

    def run(self, plan: StepPlan) -> StepResult:
        self.steps.append(plan)
        for slot in plan.released:
            del self._lines[slot]
        for start in plan.started:
            assert start.slot not in self._lines, f"slot {start.slot} is in use"
            self._lines[start.slot] = _Line(start, _histories(start.token_ids), [])
        self._write(plan)
        for rows in plan.rows:
            self._check_prefix(rows)
        return StepResult(
            step=plan.step, sequences=tuple(self._result(rows) for rows in plan.rows), run_s=0.001 * plan.num_rows
        )

    def num_known(self, slot: int) -> int:
        """Known tokens of the sequence in slot: what it was started with and what was chosen since."""
        return len(self._lines[slot].histories) - 1

    def _write(self, plan: StepPlan) -> None:
        written: set[tuple[int, int]] = set()
        for rows in plan.rows:
            line = self._lines[rows.slot]
            line.blocks += rows.new_blocks
            assert rows.token_ids, "a sequence in the plan has rows"
            for position, token_id in enumerate(rows.token_ids, rows.start):
                place = self._place(line, position)
                cell = (token_id, position, extend(line.histories[position], token_id))
                assert cell[2] == line.histories[position + 1], (
                    f"slot {rows.slot} is fed a wrong token at {position}"
                )
                assert place not in written, f"{place} is written twice in a step"
                written.add(place)
                self._cells[place] = cell
        dirty = {block for block, _ in written}
        for block in dirty:
            users = [slot for slot, line in self._lines.items() if block in line.blocks]
            assert len(users) == 1, f"block {block} is written to and in the tables of slots {users}"

    def _check_prefix(self, rows: SequenceRows) -> None:
        line = self._lines[rows.slot]
        for position in range(rows.start + len(rows.token_ids)):
            cell = self._cells.get(self._place(line, position))
            assert cell is not None, f"slot {rows.slot} reads position {position}, which was never written"
            found = (position, line.histories[position + 1])
            assert cell[1:] == found, f"slot {rows.slot} finds a foreign {cell} at position {position}"

    def _result(self, rows: SequenceRows) -> SequenceResult:
        line = self._lines[rows.slot]
        if rows.slot in self.fail_slots:
            self.fail_slots.remove(rows.slot)
            return SequenceResult(slot=rows.slot, error="logits are not numbers")
        chosen: list[int] = []
        logprobs: list[PositionLogprobs] = []
        if rows.samples:
            assert rows.start + len(rows.token_ids) == len(line.histories) - 1, (
                "sampling needs the last known token"
            )
            for _ in range(1 + line.histories[-1] % self.burst):
                token_id = next_token(line.histories[-1], line.start.seed)
                logprobs.append(scripted_logprobs(line.histories[-1], token_id))
                line.histories.append(extend(line.histories[-1], token_id))
                chosen.append(token_id)
        wants = line.start.sampling.logprobs is not None and rows.samples
        return SequenceResult(
            slot=rows.slot,
            token_ids=tuple(chosen),
            logprobs=tuple(logprobs) if wants else None,
            prompt_logprobs=self._score_prompt(rows, line),
        )

    def _score_prompt(self, rows: SequenceRows, line: _Line) -> tuple[PositionLogprobs, ...] | None:
        if line.start.sampling.prompt_logprobs is None:
            return None
        end = min(rows.start + len(rows.token_ids) + 1, line.start.prompt_len)
        return tuple(
            scripted_logprobs(line.histories[position], line.start.token_ids[position])
            for position in range(rows.start + 1, end)
        )

    def _place(self, line: _Line, position: int) -> tuple[int, int]:
        return line.blocks[position // self.block_size], position % self.block_size


def _histories(token_ids: tuple[int, ...]) -> list[int]:
    histories = [0]
    for token_id in token_ids:
        histories.append(extend(histories[-1], token_id))
    return histories
