"""Fakes at the seams. They check what the real things would silently get wrong."""

import random
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from faser.engine.contract.drafts import Drafts, table_of
from faser.engine.contract.plan import (
    NO_ADAPTER,
    PLACEHOLDER,
    DrafterCheck,
    DraftPlan,
    DraftRequest,
    LaunchedStep,
    SequenceRows,
    SequenceStart,
    StateSave,
    StepPlan,
    StepResult,
    StepRows,
)
from faser.engine.control.speculation.policy import Candidates, Policy
from faser.types.adapter import Adapter
from faser.types.answer import PositionLogprobs, SequenceError
from faser.types.arrays import Ints

VOCAB_SIZE = 50

# What a place in the cache holds: the token, its position, and a hash of all tokens up to it. A real key or
# value depends on exactly these.
Cell = tuple[int, int, int]
UNFINISHED: Cell = (-1, -1, -1)  # of a row that left before the last layer


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
    """A slot in use. histories[i]: hash of the first i tokens, as far as they are known. last: chosen last.

    adapter: the digest of its adapter; None: it has none.
    """

    start: SequenceStart
    histories: list[int]
    blocks: list[int]
    last: int = PLACEHOLDER
    adapter: str | None = None


class ScriptedExecutor:
    """An Executor without a model, but with the memory of one: it knows what was written where.

    AssertionError if a plan starts a slot in use, leaves one that is not, shares a block that is written to,
    or feeds rows whose block table does not hold exactly their own prefix. Rows of one step are written
    before any is read, as attention does. Drafts are right as far as a hash of the history says, then wrong, and
    now and then shorter than wished. A drafted token counts as written, in the place of a known one as well.
    fail_slots: slots whose next result is an error behind accepted tokens. prunes: how many drafted rows leave
    early; None: never any. chunk: the model has recurrent states as well, which each slot keeps after whole chunks
    of this number of tokens, and snapshots of them; None: it has none. follows: drafts go on behind launched
    steps, but for some that this random generator refuses; None: they never do. masks: of answers with a
    structure. adapters: digests by adapter slot; a sequence's must stay where it is as long as the sequence does.
    loaded: digests of adapters in memory, of which plans may place any.
    """

    def __init__(
        self,
        *,
        block_size: int,
        prunes: random.Random | None = None,
        chunk: int | None = None,
        follows: random.Random | None = None,
    ) -> None:
        self.masks = ScriptedMasks()
        self._without: dict[int, set[int]] = {}  # by step: slots that get no token
        self.block_size = block_size
        self._follows = follows
        self.num_followed = 0
        self._ahead: DraftPlan | None = None  # drafts for the next step, which
        self._is_ahead = False  # were not refused
        self._ended: Drafts | None = None
        self._drafted: dict[int, list[int]] = {}  # tokens of these drafts, by slot
        self._brings: dict[int, int] = {}  # most tokens of the launched step, by slot
        self._known_before: dict[int, int] = {}  # tokens known before it
        self._prunes = prunes
        self._states = None if chunk is None else ScriptedStates(chunk)
        self.fail_slots: set[int] = set()
        self.adapters: dict[int, str] = {}
        self.loaded: set[str] = set()
        self.steps: list[StepPlan] = []
        self.launched: list[StepPlan] = []
        self._lines: dict[int, _Line] = {}
        self._cells: dict[tuple[int, int], Cell] = {}

    def draft(self, plan: DraftPlan, *, during: StepPlan | None = None) -> Drafts:  # noqa: ARG002
        assert plan.requests, "a plan without requests is not sent"
        self._ended = None
        for slot in plan.released:
            del self._lines[slot]
        drafts = [self._draft(wish, computes=not plan.from_text) for wish in plan.requests]
        return _drafts(plan, drafts, run_s=0.001, by_model=self.drafts_ahead)

    def run(self, plan: StepPlan) -> StepResult:
        self.steps.append(plan)
        known = StepRows.of(*[replace(each, token_ids=self._fed(each)) for each in plan.rows])
        plan, drafts, self._ended = replace(plan, rows=known), self._ended, None
        without = self._without.pop(plan.step, None)
        if without is None:
            without = self.masks.missing(plan)
        for save in plan.saves:
            assert self._states is not None, "the model has no states to save"
            self._states.save(save)
        for slot in plan.released:
            del self._lines[slot]
        for placed in plan.adapters:
            assert placed.digest in self.loaded, f"adapter {placed.digest} is not in memory"
            used = [slot for slot, line in self._lines.items() if line.start.adapter == placed.slot]
            assert not used, f"adapter slot {placed.slot} is in use by the sequences of slots {used}"
            self.adapters[placed.slot] = placed.digest
        for start in plan.started:
            assert start.slot not in self._lines, f"slot {start.slot} is in use"
            adapter = None if start.adapter == NO_ADAPTER else self.adapters[start.adapter]
            histories = _histories(start.token_ids, first=first_history(adapter))
            self._lines[start.slot] = _Line(start, histories, [], adapter=adapter)
            if start.snapshot is not None:
                assert self._states is not None, "the model has no states to restore"
                self._states.restore(start.slot, start.snapshot)
        for rows in plan.rows:
            line = self._lines[rows.slot]
            found = self.adapters.get(line.start.adapter)
            assert found == line.adapter, (
                f"slot {rows.slot} computes with adapter {found} in place of {line.adapter}"
            )
        self._write(plan)
        if self._states is not None:
            for rows in plan.rows:
                self._states.run(rows, self._path(rows))
        for rows in plan.rows:
            self._check_prefix(rows)
        outcomes = [
            SequenceOutcome() if rows.slot in without else self._outcome(self._prune(rows), rows.num_drafts)
            for rows in plan.rows
        ]
        return replace(step_result(plan.step, *outcomes, run_s=0.001 * plan.num_rows), drafts=drafts)

    def load_adapter(self, adapter: Adapter) -> None:
        self.loaded.add(adapter.digest)

    def drop_adapter(self, digest: str) -> None:
        self.loaded.remove(digest)
        self.adapters = {slot: each for slot, each in self.adapters.items() if each != digest}

    def rebuild(self, check: DrafterCheck) -> bool:  # noqa: ARG002
        return False

    def run_overlapped(self, plan: StepPlan, draft_plan: DraftPlan) -> tuple[StepResult, Drafts]:
        """The draft lane is the slower one: what it writes to must still be its own when the step has run."""
        assert draft_plan.requests, "a plan without requests is not sent"
        assert draft_plan.share is not None
        verified = {rows.slot: rows.token_ids[len(rows.token_ids) - rows.num_drafts :] for rows in plan.rows}
        for wish in draft_plan.requests:
            assert wish.unverified == verified[wish.slot], "a draft continues what is being verified"
        known = {slot: line.histories[-1] for slot, line in self._lines.items()}
        result = self.run(plan)
        drafts = [self._draft_behind(wish, known[wish.slot]) for wish in draft_plan.requests]
        return result, _drafts(draft_plan, drafts, run_s=0.002)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """A device that is slow: it does nothing before it is asked for its result."""
        assert len(self.launched) < 2, "three steps in flight"
        assert self.drafts_ahead or not plan.num_drafts, "only plain steps are launched"
        self._brings = {rows.slot: rows.num_drafts + 1 for rows in plan.rows if rows.samples}
        self._known_before = {
            rows.slot: rows.start + len(rows.token_ids) - rows.num_drafts for rows in plan.rows if rows.samples
        }
        busy = {rows.slot for each in self.launched for rows in each.rows}
        assert busy.isdisjoint(plan.released), "a slot is released before what comes of it was heard"
        assert busy.isdisjoint([start.slot for start in plan.started]), "a newcomer gets a slot in flight"
        if self.launched:
            adapters = {slot: line.start.adapter for slot, line in self._lines.items()}
            adapters |= {start.slot: start.adapter for start in self.launched[0].started}
            used = {adapters[slot] for slot in busy}
            assert used.isdisjoint([placed.slot for placed in plan.adapters]), "an adapter in flight is replaced"
        assert plan.is_async == bool(self.launched), "a plan knows whether a step is in flight"
        scored = [start for start in plan.started if start.sampling.prompt_logprobs is not None]
        assert not scored, "the prompt of a newcomer is scored"
        if not self.launched:
            self._without[plan.step] = self.masks.missing(plan)
        else:
            again = {rows.slot for rows in plan.rows if rows.samples and rows.token_ids != (PLACEHOLDER,)}
            again -= {start.slot for start in plan.started}
            assert again.isdisjoint(self.masks.late), "a row whose mask is not there is computed again"
        self.launched.append(plan)
        return _Launched(plan=plan, began_s=0.0, masks=self.masks, without=self._without)

    def collect(self, launched: LaunchedStep) -> StepResult:
        assert self.launched.pop(0) is launched.plan, "collected out of order"
        result = self.run(launched.plan)
        if self._ahead is not None and not self._is_ahead:
            self._take_blocks_ahead()
        for plan in self.launched:
            self._without[plan.step] = self.masks.missing(plan)
        return result

    @property
    def drafts_ahead(self) -> bool:
        return self._follows is not None

    def draft_ahead(self, plan: DraftPlan) -> bool:
        assert self._follows is not None, "drafts are made before steps"
        assert len(self.launched) == 1, "drafts follow one step"
        assert not plan.released, "the step in flight may know these slots"
        for wish in plan.requests:
            assert wish.slot in self._brings, "no token comes that the draft could follow"
        self._ahead, self._is_ahead = plan, self._follows.random() > 0.2
        self.num_followed += self._is_ahead
        return self._is_ahead

    def end_drafts(self) -> Ints:
        """The step has been collected, so these sequences have all its tokens; some of them have ended with it."""
        assert not self.launched, "the step that the drafts follow was not collected"
        plan = self._take_blocks_ahead()
        assert plan is not None, "nothing was launched ahead"
        self._drafted = {wish.slot: self._draft_within(wish._replace(new_blocks=())) for wish in plan.requests}
        self._ended = _drafts(plan, [*self._drafted.values()], run_s=0.001, by_model=True)
        return self._ended.table.lengths

    def _take_blocks_ahead(self) -> DraftPlan | None:
        """Append the blocks of drafts ahead: after those of the step that they follow, which is over now.

        Nobody else may have them, but for sequences whose release is still to come.
        """
        plan, self._ahead = self._ahead, None
        for wish in () if plan is None else plan.requests:
            line = self._lines[wish.slot]
            line.blocks += wish.new_blocks
            most, sampling = self._brings[wish.slot], line.start.sampling
            known = self._known_before[wish.slot]
            if sampling.max_tokens is not None:  # no row is behind the last token but one
                end = min(known + most + wish.max_tokens, line.start.prompt_len + sampling.max_tokens)
                assert len(line.blocks) * self.block_size >= end, f"no room for {end} tokens in {line.blocks}"
            self._check_own(set(line.blocks[known // self.block_size :]), self._brings)
        return plan

    def _draft_within(self, wish: DraftRequest) -> list[int]:
        """A draft of a sequence near its end has rows that no block has room for; no draft is empty."""
        line = self._lines[wish.slot]
        room = len(line.blocks) * self.block_size - (len(line.histories) - 1)
        drafted = self._draft(wish._replace(max_tokens=min(wish.max_tokens, max(room, 1))), computes=room > 0)
        return drafted or [0]

    def _fed(self, rows: SequenceRows) -> tuple[int, ...]:
        """Its inputs, with the token that the step before sampled, if that is what it waits for."""
        if rows.num_drafts and rows.token_ids[-1] == PLACEHOLDER:
            known = rows.token_ids[: len(rows.token_ids) - rows.num_drafts]
            assert PLACEHOLDER not in known, "what drafts follow is known"
            return (*known, *self._drafted[rows.slot][: rows.num_drafts])
        if rows.token_ids != (PLACEHOLDER,):
            assert PLACEHOLDER not in rows.token_ids
            return rows.token_ids
        return (self._lines[rows.slot].last,)

    def cell(self, block: int, offset: int) -> Cell:
        """What a place in the cache holds."""
        return self._cells.get((block, offset), UNFINISHED)

    def set_cell(self, block: int, offset: int, cell: Cell) -> None:
        """Write to the cache past the plans, as a copy from elsewhere does."""
        self._cells[block, offset] = cell

    @property
    def states(self) -> "ScriptedStates":
        """The recurrent states, of a model that has them."""
        assert self._states is not None
        return self._states

    def num_known(self, slot: int) -> int:
        """Known tokens of the sequence in slot: what it was started with and what was chosen since."""
        return len(self._lines[slot].histories) - 1

    def blocks(self, slot: int) -> list[int]:
        """Blocks of the sequence in slot, in order of position."""
        return list(self._lines[slot].blocks)

    def _draft(self, wish: DraftRequest, *, computes: bool = True) -> list[int]:
        return self._draft_behind(wish, self._lines[wish.slot].histories[-1], computes=computes)

    def _draft_behind(self, wish: DraftRequest, known: int, *, computes: bool = True) -> list[int]:
        """known: hash of the tokens known when the draft was wished for. computes: it writes to the cache."""
        line = self._lines[wish.slot]
        line.blocks += wish.new_blocks
        begin = known
        for token_id in wish.unverified:
            begin = extend(begin, token_id)
        num_known = line.histories.index(known) + len(wish.unverified)
        assert wish.max_tokens >= 1
        if computes:
            assert len(line.blocks) * self.block_size >= num_known + wish.max_tokens, "no room for the draft"
            self._check_own({self._place(line, num_known - 1 + i)[0] for i in range(wish.max_tokens + 1)})
        token_ids: list[int] = []
        history = begin
        for i in range(min(wish.max_tokens, begin % 7)):
            token_id = next_token(history, line.start.seed)
            if i == begin // 7 % 5:
                token_id = (token_id + 1) % VOCAB_SIZE
            token_ids.append(token_id)
            history = extend(history, token_id)
        return token_ids

    def _write(self, plan: StepPlan) -> None:
        written: set[tuple[int, int]] = set()
        for slot, new_blocks in plan.rows.new_blocks.items():
            self._lines[slot].blocks += new_blocks
        for rows in plan.rows:
            line = self._lines[rows.slot]
            assert rows.token_ids, "a sequence in the plan has rows"
            if (max_tokens := line.start.sampling.max_tokens) is not None:
                last = max(line.start.prompt_len + max_tokens - 1, line.start.prompt_len)
                assert rows.start + len(rows.token_ids) <= last, "a row is behind the last token that is asked for"
            path = self._path(rows)
            for position, token_id in enumerate(rows.token_ids, rows.start):
                place = self._place(line, position)
                cell = (token_id, position, extend(path[position], token_id))
                assert cell[2] == path[position + 1], f"slot {rows.slot} is fed a wrong token at {position}"
                assert place not in written, f"{place} is written twice in a step"
                written.add(place)
                self._cells[place] = cell
        self._check_own({block for block, _ in written})

    def _check_own(self, blocks: set[int], among: Collection[int] | None = None) -> None:
        """among: slots that have rows; None: all that were not released."""
        for block in blocks:
            known = self._lines if among is None else among
            users = [slot for slot in known if block in self._lines[slot].blocks]
            assert len(users) == 1, f"block {block} is written to and in the tables of slots {users}"

    def _path(self, rows: SequenceRows) -> list[int]:
        """Histories of the known tokens, and of the drafted ones behind them."""
        path = list(self._lines[rows.slot].histories)
        for token_id in rows.token_ids[len(rows.token_ids) - rows.num_drafts :]:
            path.append(extend(path[-1], token_id))
        return path

    def _check_prefix(self, rows: SequenceRows) -> None:
        line, path = self._lines[rows.slot], self._path(rows)
        for position in range(rows.start + len(rows.token_ids)):
            cell = self._cells.get(self._place(line, position))
            assert cell is not None, f"slot {rows.slot} reads position {position}, which was never written"
            found = (position, path[position + 1])
            assert cell[1:] == found, f"slot {rows.slot} finds a foreign {cell} at position {position}"

    def _prune(self, rows: SequenceRows) -> SequenceRows:
        """Those of the rows that go through all layers; what the others wrote nobody may read."""
        left = rows.num_drafts if self._prunes is None else self._prunes.randint(0, rows.num_drafts)
        count = len(rows.token_ids) - rows.num_drafts + left
        for position in range(rows.start + count, rows.start + len(rows.token_ids)):
            self._cells[self._place(self._lines[rows.slot], position)] = UNFINISHED
        return replace(rows, token_ids=rows.token_ids[:count], num_drafts=left)

    def _outcome(self, rows: SequenceRows, num_planned: int) -> "SequenceOutcome":
        """num_planned: drafted rows, before some of them left."""
        line = self._lines[rows.slot]
        fails = rows.slot in self.fail_slots
        chosen: list[int] = []
        logprobs: list[PositionLogprobs] = []
        if rows.samples:
            num_inputs = len(rows.token_ids) - rows.num_drafts
            assert rows.start + num_inputs == len(line.histories) - 1, "sampling needs the last known token"
            for drafted in (*rows.token_ids[num_inputs:], None):
                token_id = next_token(line.histories[-1], line.start.seed)
                logprobs.append(scripted_logprobs(line.histories[-1], token_id))
                line.histories.append(extend(line.histories[-1], token_id))
                chosen.append(token_id)
                line.last = token_id
                if token_id != drafted:
                    break
        if fails:  # in place of the bonus or recovered token
            self.fail_slots.remove(rows.slot)
            del chosen[-1:], logprobs[-1:]
            line.last = 0  # what a step that is in flight already is fed
            line.histories[len(line.histories) - rows.samples :] = [
                extend(line.histories[-1 - rows.samples], line.last)
            ]
        wants = line.start.sampling.logprobs is not None and rows.samples
        return SequenceOutcome(
            token_ids=tuple(chosen),
            error=SequenceError.NOT_FINITE if fails else None,
            num_cut=num_planned - rows.num_drafts,
            logprobs=tuple(logprobs) if wants and chosen else None,
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


class ScriptedMasks:
    """Masks of answers with a structure, which take longer than a step now and then.

    slowness: by whose random numbers; None: they are always in time. late: slots whose mask is not there, and for
    how many steps more.
    """

    def __init__(self, slowness: random.Random | None = None) -> None:
        self.slowness = slowness
        self.late: dict[int, int] = {}
        self._structured: set[int] = set()
        self._known: dict[int, int] = {}  # by slot: tokens before the mask that was asked for last

    def missing(self, plan: StepPlan) -> set[int]:
        """Return the slots that get no token in the step; all tokens before it are known."""
        for slot in [*plan.released, *(start.slot for start in plan.started)]:
            self._structured.discard(slot)
            self.late.pop(slot, None)
            self._known.pop(slot, None)
        self._structured |= {start.slot for start in plan.started if start.sampling.structured_output is not None}
        sampling = {
            each.slot: each.start + len(each.token_ids) - each.num_drafts for each in plan.rows if each.samples
        }
        for slot, known in sampling.items():
            if slot in self._structured and self._known.get(slot) != known and self.slowness is not None:
                self._known[slot] = known
                if steps := self.slowness.choice([0, 0, 1, 2, 5]):
                    self.late[slot] = steps
        found = self.late.keys() & sampling
        self.late = {slot: steps - 1 for slot, steps in self.late.items() if steps > 1}
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched(LaunchedStep):
    """without: see ScriptedExecutor."""

    masks: ScriptedMasks
    without: dict[int, set[int]]

    @property
    def late(self) -> set[int]:
        return self.without[self.plan.step] | (self.masks.late.keys() - set(self.plan.rows.slots))


class ScriptedStates:
    """Recurrent states by slot, as hashes of all tokens that went in; they outlive the sequences.

    AssertionError where rows find a state of other tokens than their own, or none that they can go on from: one is
    taken back to any place from the last whole chunk of known tokens on, and to none before it.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._seen: dict[int, list[int]] = {}  # by slot: histories that its state has gone through
        self._known: dict[int, int] = {}
        self.snapshots: dict[int, list[int]] = {}

    def run(self, rows: SequenceRows, path: list[int]) -> None:
        """path: histories of the sequence's tokens, drafted ones included."""
        slot, start, end = rows.slot, rows.start, rows.start + len(rows.token_ids)
        seen, known = (path[:1], 0) if start == 0 else (self._seen[slot], self._known[slot])
        kept = known // self._chunk * self._chunk
        assert kept <= start < len(seen), f"slot {slot} goes on at {start}, not at {kept} to {len(seen) - 1}"
        assert seen[: start + 1] == path[: start + 1], f"slot {slot} goes on from a state of foreign tokens"
        self._seen[slot], self._known[slot] = path[: end + 1], end - rows.num_drafts

    def save(self, save: StateSave) -> None:
        end = self._known[save.slot] // self._chunk * self._chunk
        assert end == save.num_tokens > 0, f"slot {save.slot} keeps the state after {end} tokens, not {save}"
        self.snapshots[save.snapshot] = self._seen[save.slot][: end + 1]

    def restore(self, slot: int, snapshot: int) -> None:
        self._seen[slot] = list(self.snapshots[snapshot])
        self._known[slot] = len(self._seen[slot]) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceOutcome:
    """What a step says about one sequence; see StepResult."""

    token_ids: tuple[int, ...] = ()
    num_cut: int = 0
    logprobs: tuple[PositionLogprobs, ...] | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None
    error: SequenceError | None = None


def step_result(step: int, *outcomes: SequenceOutcome, run_s: float, began_s: float = 0.0) -> StepResult:
    """The columns of these outcomes."""
    named = [*enumerate(outcomes)]
    return StepResult(
        step=step,
        counts=[len(each.token_ids) for each in outcomes],
        token_ids=[token_id for each in outcomes for token_id in each.token_ids],
        run_s=run_s,
        began_s=began_s,
        errors={at: each.error for at, each in named if each.error is not None},
        num_cut={at: each.num_cut for at, each in named if each.num_cut},
        logprobs={at: each.logprobs for at, each in named if each.logprobs is not None},
        prompt_logprobs={at: each.prompt_logprobs for at, each in named if each.prompt_logprobs is not None},
    )


def _drafts(plan: DraftPlan, token_ids: list[list[int]], *, run_s: float, by_model: bool = False) -> Drafts:
    slots, confidences = [each.slot for each in plan.requests], [[0.5] * len(each) for each in token_ids]
    method = "draft_model" if by_model else "suffix"
    table = table_of(slots, method, token_ids, confidences, width=plan.width)
    passes = max(map(len, token_ids)) if by_model else 0
    return Drafts(step=plan.step, table=table, run_s=run_s, passes=passes)


def first_history(adapter: str | None) -> int:
    """The history of no tokens. adapter: a digest; every key and value depends on it."""
    return 0 if adapter is None else extend(0, int(adapter, 16))


def _histories(token_ids: tuple[int, ...], *, first: int) -> list[int]:
    histories = [first]
    for token_id in token_ids:
        histories.append(extend(histories[-1], token_id))
    return histories


class RandomPolicy(Policy):
    """A Policy that decides at random: any γ within the limits, and any cut of what was drafted.

    looks_first: it decides once the drafts are there.
    """

    name = "random"
    never_drafts = False

    def __init__(self, seed: int, *, looks_first: bool = False) -> None:
        self._random = np.random.default_rng(seed)
        self.looks_first = looks_first

    def row_price(self, candidates: Candidates) -> float:  # noqa: ARG002
        return self._random.random()

    def lengths(self, candidates: Candidates) -> Ints:
        lengths = self._random.integers(0, candidates.limit + 1)
        return np.where(self._random.random(len(lengths)) < 0.3, 0, lengths)

    def keep(self, candidates: Candidates, lengths: Ints) -> Ints:  # noqa: ARG002
        return self._random.integers(0, lengths + 1)
