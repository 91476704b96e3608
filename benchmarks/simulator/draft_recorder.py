"""DraftRecorder: stands before a drafter and writes down what it proposes, while nothing of it is verified.

Owns the recordings. To the engine it is a drafter that has nothing to propose, so every step brings one token and
every position of an output gets its draft. The drafter behind it is told truthfully whether the first token of its
draft was the one that came; the others count as not judged.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from faser.engine.contract.plan import Draft, DraftPlan, SequenceStart
from faser.engine.execution.drafters.drafter import Continuation, Drafter, Proposals


@dataclass(slots=True, kw_only=True)
class Recording:
    """One sequence. drafts: by the number of output tokens they follow. max_tokens: what was asked for there."""

    seed: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: list[int] = field(default_factory=list)
    drafts: dict[int, Draft] = field(default_factory=dict)
    max_tokens: dict[int, int] = field(default_factory=dict)


class DraftRecorder:
    """A Drafter. recordings: of all sequences, in the order in which they started.

    A sequence that is preempted goes on with its recording: prompt and seed say which. Drafts nothing ahead,
    because nothing is ever being verified.
    """

    drafts_overlapped = False

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._recordings: dict[tuple[int, tuple[int, ...]], Recording] = {}
        self._slots: dict[int, Recording] = {}

    @property
    def recordings(self) -> tuple[Recording, ...]:
        return tuple(self._recordings.values())

    def start(self, start: SequenceStart) -> None:
        prompt = start.token_ids[: start.prompt_len]
        new = Recording(seed=start.seed, prompt_token_ids=prompt)
        self._slots[start.slot] = self._recordings.setdefault((start.seed, prompt), new)
        self._drafter.start(start)

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        proposals = self._drafter.propose(plan, until)
        assert proposals.probs is None, "drafts that were drawn cannot be replayed: drafting must be greedy"
        for request, draft in zip(plan.requests, proposals.drafts, strict=True):
            assert not request.unverified, f"slot {request.slot}: a recorder drafts nothing ahead"
            recording = self._slots[request.slot]
            position = len(recording.output_token_ids)
            recording.drafts[position] = draft
            recording.max_tokens[position] = request.max_tokens
        nothing = tuple(Draft(slot=draft.slot, method=draft.method) for draft in proposals.drafts)
        return Proposals(drafts=nothing, passes=proposals.passes, catchup_tokens=proposals.catchup_tokens)

    def commit(self, continuations: Sequence[Continuation]) -> None:
        judged = []
        for each in continuations:
            recording = self._slots[each.slot]
            draft = recording.drafts.get(len(recording.output_token_ids))
            right = draft is not None and draft.token_ids[:1] == each.token_ids[:1]
            judged.append(Continuation(slot=each.slot, token_ids=each.token_ids, num_accepted=int(right)))
            recording.output_token_ids += each.token_ids
        self._drafter.commit(judged)

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self._drafter.release(slot)
