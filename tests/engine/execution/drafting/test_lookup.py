"""Text look-ups are combined: a drafter can be added to the native index without touching either."""

from collections.abc import Callable, Sequence

from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.drafter import Continuation, Proposals
from faser.engine.execution.drafting.text import CombinedLookup
from faser.types import SamplingParams

PLAN = DraftPlan(step=0, requests=tuple(DraftRequest(slot=s, max_tokens=2, new_blocks=()) for s in (0, 1)))


class FakeDrafter:
    """Drafts its own token, and records its calls."""

    def __init__(self, method: str, token_id: int, *, drafts_overlapped: bool = True) -> None:
        self.calls: list[str] = []
        self.drafts_overlapped = drafts_overlapped
        self._method, self._token_id = method, token_id

    def start(self, start: SequenceStart) -> None:
        self.calls.append(f"start {start.slot}")

    def propose(self, plan: DraftPlan, _until: Callable[[], bool] | None = None, /) -> Proposals:
        return Proposals(
            drafts=tuple(
                Draft(slot=each.slot, method=self._method, token_ids=(self._token_id,), confidences=(1.0,))
                for each in plan.requests
            )
        )

    def commit(self, continuations: Sequence[Continuation]) -> None:
        self.calls += [f"commit {each.slot}" for each in continuations]

    def release(self, slot: int) -> None:
        self.calls.append(f"release {slot}")


def test_methods_of_the_native_look_up_come_first_and_each_part_gets_every_call() -> None:
    drafters = [FakeDrafter(name, i) for i, name in enumerate("abc")]
    lookup = CombinedLookup(drafters[2:], native=CombinedLookup(drafters[:2]))
    assert lookup.num_methods == 3
    lookup.start(SequenceStart(slot=0, sampling=SamplingParams(), seed=0, prompt_len=1, token_ids=(1,)))
    columns = lookup.look_up(PLAN)
    lookup.commit([Continuation(slot=0, token_ids=(5,))])
    lookup.release(0)
    assert [[(draft.method, draft.slot) for draft in column] for column in columns] == [
        [(name, slot) for slot in (0, 1)] for name in "abc"
    ]
    assert [each.calls for each in drafters] == [["start 0", "commit 0", "release 0"]] * 3


def test_a_look_up_drafts_overlapped_if_all_its_parts_do() -> None:
    slow = FakeDrafter("slow", 0, drafts_overlapped=False)
    assert CombinedLookup([FakeDrafter("fast", 0)]).drafts_overlapped
    assert not CombinedLookup([FakeDrafter("fast", 0)], native=CombinedLookup([slow])).drafts_overlapped
    assert not CombinedLookup([slow]).drafts_overlapped
