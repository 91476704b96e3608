"""Columns of decoding sequences against the same sequences taken one by one, in random scenarios.

Planted bugs that these tests have caught: tokens of a wrong slot; a length that is one too long; a token that ends
a sequence is missed; the columns of a sequence that has left stay; a draft's rows come after another sequence's;
a block that is full is not published, or one that is not; the tokens of a step in another order than that of the
columns; tokens count for no tenant.
"""

import random
from dataclasses import replace

import pytest

from faser.engine.contract.plan import StepDeltas, StepResult, StepRows
from faser.engine.control.decoding import Decoding
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.sequence import Sequence, Status, Tenant
from faser.types.answer import SequenceError
from tests.engine.driving import request

BLOCK, EOS, STOP = 4, 7, 8
VOCAB = 40
MOST_TOKENS = 3  # that a step samples for a sequence


class Twin:
    """A sequence, and another one that is committed by itself."""

    def __init__(self, rng: random.Random, kv: KvManager, slot: int, number: int, tenant: Tenant) -> None:
        prompt = [rng.randrange(10, VOCAB) for _ in range(rng.randint(1, 9))]
        asked = request(
            f"r{number}", prompt, ignore_eos=rng.random() < 0.3, stop_token_ids=rng.choice([(), (STOP,)])
        )
        max_total = len(prompt) + rng.randint(2, 40)
        key = (rng.randrange(2), 0.0, number)
        self.kv = kv
        self.member, self.alone = (
            Sequence(
                asked,
                number % 3,
                priority_key=key,
                tenant=tenant,
                seed=0,
                table=kv.new_table(str(number)),
                max_total=max_total,
                eos_token_ids=frozenset((EOS,)),
            )
            for _ in range(2)
        )
        self.member.slot, self.member.status = slot, Status.RUNNING
        self.member.num_cached, self.member.num_preemptions = rng.randrange(9), rng.randrange(3)
        first = rng.randrange(10, VOCAB)
        for each in (self.member, self.alone):
            each.advance(len(prompt), (first,))
        kv.allocate(self.member.table, kv.blocks_for(max_total))
        kv.publish(self.member.table, self.member.token_ids, self.member.num_computed)


def sampled(rng: random.Random) -> tuple[int, ...]:
    count = rng.choice([0, *[1] * 12, *range(2, MOST_TOKENS + 1)])
    return tuple(rng.choice([EOS, STOP]) if rng.random() < 0.03 else rng.randrange(9, VOCAB) for _ in range(count))


def reported(deltas: StepDeltas) -> set[tuple[object, ...]]:
    return {
        (each.request_id, each.index, each.token_ids, each.num_cached_tokens, each.num_preemptions)
        for each in deltas
    }


@pytest.mark.parametrize("seed", range(25))
def test_a_step_does_to_all_what_it_does_to_each_alone(seed: int) -> None:
    rng = random.Random(seed)
    kv = KvManager(4000, BLOCK)
    decoding, twins = Decoding(kv), dict[Sequence, Twin]()
    tenants = [Tenant(name) for name in ("a", "b")[: 1 + seed % 2]]
    num_taken = num_exceptions = number = num_tokens = 0
    for _ in range(60):
        while len(twins) < 12 and rng.random() < 0.7:
            slot = min({*range(13)} - {each.held_slot for each in twins})
            twin, number = Twin(rng, kv, slot, number, rng.choice(tenants)), number + 1
            twins[twin.member] = twin
            decoding.update(twin.member)
        if twins and rng.random() < 0.1:
            gone = rng.choice([*twins])
            decoding.leave(gone)
            del twins[gone]
        in_step = [each for each in twins if rng.random() < 0.95]
        rng.shuffle(in_step)
        tokens = [sampled(rng) for _ in in_step]
        failed = {at: SequenceError.NOT_FINITE for at in range(len(in_step)) if rng.random() < 0.03}
        if rng.random() < 0.5:  # as steps are laid out: the members first, in their order
            tokens = [(1,) if rng.random() < 0.8 else each for each in tokens]
            in_step.sort(key=lambda each: each.priority_key)
        flat = [token_id for each in tokens for token_id in each]
        result = StepResult(step=0, counts=[*map(len, tokens)], token_ids=flat, run_s=0.0, errors=failed)
        deltas, expected = StepDeltas(), set()
        done = decoding.take(in_step, tokens, result, deltas)
        for at, (member, new) in enumerate(zip(in_step, tokens, strict=True)):
            alone = twins[member].alone
            before = alone.num_tokens
            alone.advance(before - 1 + MOST_TOKENS, new)
            if at in done:
                num_taken += 1
                num_tokens += len(new)
                assert alone.finish_reason is None
                assert new
                assert at not in failed
                expected.add(
                    (
                        member.request.request_id,
                        member.index,
                        new,
                        member.num_cached,
                        member.num_preemptions,
                    )
                )
            else:
                num_exceptions += 1
                may_end = not member.may_end_with.isdisjoint(new)
                assert not new or at in failed or may_end or before + len(new) >= member.max_total
                member.advance(before - 1 + MOST_TOKENS, new)
                kv.publish(member.table, member.token_ids, member.num_computed)
                decoding.update(member)
            assert (member.token_ids, member.num_computed) == (alone.token_ids, alone.num_computed)
            if member.finish_reason is not None or at in failed:
                decoding.leave(member)
                del twins[member]
        assert reported(deltas) == expected
        assert sum(each.service for each in tenants) == 2 * num_tokens
        decoding.check([*twins])
        assert [*decoding.sequences] == sorted(twins, key=lambda each: each.priority_key)
        for each, twin in twins.items():
            assert each.table.num_published == each.num_computed // BLOCK
            found = kv.cached_prefix(twin.alone.table, twin.alone.token_ids)
            assert found == each.table.blocks[: each.num_computed // BLOCK]
    assert num_taken > 10 * num_exceptions / 4
    assert num_exceptions > 10


@pytest.mark.parametrize("seed", range(10))
def test_rows_are_those_of_each_sequence_one_after_the_other(seed: int) -> None:
    rng = random.Random(seed)
    kv = KvManager(500, BLOCK)
    decoding, kept, expected = Decoding(kv), {}, StepRows()
    members = [Twin(rng, kv, slot, slot, Tenant("")).member for slot in range(9)]
    for each in members:
        decoding.update(each)
    for each in sorted(members, key=lambda each: each.priority_key):
        draft = tuple(rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 4])))
        blocks = tuple(range(len(draft) // 2))
        if draft:
            kept[each] = draft, blocks
        expected.add(
            each.held_slot,
            each.num_computed,
            (each.token_ids[-1], *draft),
            samples=True,
            num_drafts=len(draft),
            new_blocks=blocks,
        )
    rows = StepRows()
    decoding.lay(rows, kept)
    assert rows == expected


def test_a_sequence_is_a_member_once_its_prompt_is_computed_and_while_it_reports_nothing_but_tokens() -> None:
    kv = KvManager(500, BLOCK)
    decoding = Decoding(kv)
    found = Twin(random.Random(0), kv, 0, 0, Tenant("")).member
    found.num_computed -= 1  # its last but one token is not computed
    decoding.update(found)
    assert found not in decoding
    found.num_computed += 1
    found.request = replace(found.request)
    found.reports_only_tokens = False
    decoding.update(found)
    assert found not in decoding
    found.reports_only_tokens = True
    decoding.update(found)
    assert found in decoding
    assert decoding.without_room() == []
    assert decoding.may_draft() == [found]
    del found.table.blocks[found.num_computed // BLOCK :]
    assert decoding.without_room() == ([found] if found.num_computed % BLOCK == 0 else [])
