"""What the tests of this folder build: tables of drafts, the candidates of a step, its drafts, and sequences."""

from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np

from faser.config.speculation import DRAFT_METHODS
from faser.engine.contract.drafts import METHOD_IDS, Drafts, DraftTable, joined, table_of
from faser.engine.control.kv_cache import SequenceBlocks
from faser.engine.control.sequence import Sequence, Tenant
from faser.engine.control.speculation.acceptance import Acceptance, DraftOutcomes
from faser.engine.control.speculation.policy import Candidates, DraftingSequences, StepFacts, without_targets
from faser.engine.control.speculation.step_drafts import StepDrafts
from faser.types.arrays import NO_TOKEN, Floats, Ints
from faser.types.request import Slo, SpeculationParams
from tests.engine.driving import request

PLENTY = 1 << 30  # tokens yet to be generated: more than enough to pay for any missing KV
MODEL, SUFFIX = METHOD_IDS["draft_model"], METHOD_IDS["suffix"]


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int64)


def full(count: int, value: int) -> Ints:
    return np.full(count, value, dtype=np.int64)


def constant(alpha: float, count: int, cap: int) -> Floats:
    """[count, cap + 1] the survival of drafts all of whose tokens are accepted with alpha."""
    return np.tile(alpha ** np.arange(cap + 1), (count, 1))


def table(
    slots: Ints, methods: Ints, lengths: Ints, confidences: Floats, token_ids: Ints | None = None
) -> DraftTable:
    """What is given beyond lengths does not count. token_ids: None: each token is 0."""
    within = np.arange(confidences.shape[1]) < lengths[:, None]
    return DraftTable(
        slots=slots,
        methods=methods,
        lengths=lengths,
        token_ids=np.where(within, 0 if token_ids is None else token_ids, NO_TOKEN),
        confidences=np.where(within, confidences, 0.0),
    )


def one_draft(slot: int, method: str, confidences: Many[float] = (), *, width: int) -> DraftTable:
    """Of the tokens 0, 1, …"""
    return table_of([slot], method, [range(len(confidences))], [confidences], width=width)


def answer(*drafts: DraftTable, run_s: float = 0.0, passes: int = 0, catchup_tokens: int = 0) -> Drafts:
    """The answer to a plan."""
    return Drafts(step=0, table=joined(drafts), run_s=run_s, passes=passes, catchup_tokens=catchup_tokens)


def named_drafts(drafts: DraftTable) -> list[tuple[int, str]]:
    """(slot, method) of each."""
    return [
        (slot, DRAFT_METHODS[method])
        for slot, method in zip(drafts.slots.tolist(), drafts.methods.tolist(), strict=True)
    ]


def outcomes(drafts: DraftTable, accepted: Many[int] | Ints, decided: Ints | None = None) -> DraftOutcomes:
    """The first `accepted` tokens of each draft were right. decided: None: all up to the first that was not."""
    right = np.array(accepted, dtype=np.int64)
    return DraftOutcomes(drafts, np.minimum(right + 1, drafts.lengths) if decided is None else decided, right)


def note_nothing(acceptance: Acceptance, slots: Ints) -> None:
    """Look-ups for one token each have found none."""
    survival = np.zeros((len(slots), acceptance.cap + 1))
    survival[:, 0] = 1.0
    acceptance.note_drafts(slots, full(len(slots), 1), full(len(slots), 0), survival, by_model=False)


def candidates(
    survival: Floats,
    *,
    limit: Ints | None = None,
    lacking: Floats | None = None,
    wanted_per_s: Floats | None = None,
    missing_kv: Ints | None = None,
    remaining: Ints | None = None,
    slots: Ints | None = None,
    other_rows: int = 0,
    other_sequences: int = 0,
    kv_tokens: int = 0,
    since: int = 1,
) -> Candidates:
    """Sequences of which nothing more than their survival is said may draft, and are as usual as can be."""
    count, columns = survival.shape
    never, none = without_targets(count)
    return Candidates(
        DraftingSequences(
            slots=np.arange(count) if slots is None else slots,
            lacking=never if lacking is None else lacking,
            wanted_per_s=none if wanted_per_s is None else wanted_per_s,
            missing_kv=full(count, 0) if missing_kv is None else missing_kv,
            remaining=full(count, PLENTY) if remaining is None else remaining,
        ),
        full(count, columns - 1) if limit is None else limit,
        survival,
        StepFacts(
            other_rows=other_rows,
            other_sequences=other_sequences,
            kv_tokens=kv_tokens,
            kv_sequences=count,
            since=since,
        ),
    )


def step_drafts(
    drafts: DraftTable, kept: Many[int] | Ints, *, num_decided: int = 0, is_drawn: bool = False
) -> StepDrafts:
    """Drafts of which a step verifies the first `kept` tokens that are not decided yet."""
    count, width = len(drafts.slots), drafts.width
    return StepDrafts(
        sequences=[],
        lengths=drafts.lengths,
        candidates=candidates(np.ones((count, width + 1)), slots=drafts.slots),
        num_decided=num_decided,
        is_drawn=is_drawn,
        drafts=Drafts(step=1, table=drafts, run_s=0.0),
        survival=np.ones((count, width + 1)),
        kept=np.array(kept, dtype=np.int64),
    )


def sequence_in(
    slot: int, *, prompt: int = 5, max_tokens: int = 20, most: int | None = None, tpot_ms: float | None = None
) -> Sequence:
    """A greedy sequence that has this slot."""
    params = SpeculationParams(max_tokens=most, slo=Slo(tpot_ms=tpot_ms))
    asked = request(f"r{slot}", [1] * prompt, max_tokens=max_tokens, temperature=0.0)
    found = Sequence(
        replace(asked, speculation=params),
        0,
        priority_key=(0, 0.0, slot),
        tenant=Tenant(""),
        seed=0,
        table=SequenceBlocks(b""),
        max_total=prompt + max_tokens,
        eos_token_ids=frozenset(),
    )
    found.slot = slot
    return found
