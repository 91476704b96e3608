"""Engines over a model with recurrent states: prompts go on from snapshots, and no bit of an answer changes.

Oracle: an engine that serves one sequence at a time, without prefix caching and drafts. Tokens are compared, and
log probabilities bit by bit: rows of the native backend have the same bits in every batch. A bug seen to be
caught: states that are saved after their slots have gone to others.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from faser.engine.checkpoints.files import read_model_config
from faser.engine.engine import Engine
from faser.engine.execution.models.layers import mixer_shapes
from faser.errors import ConfigError
from faser.kernels.interface.mixers import StateShape
from faser.types.request import Request, SpeculationParams
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.execution.models.paged import prompt
from tests.engine.losslessness.equality import CAP, Answer, answers, build, build_with_parts
from tests.engine.test_states_engine import FIELDS, predicted

MAX_MODEL_LEN = 400
SLOTS = 6
SYSTEM = tuple(prompt(100, VOCAB_SIZE, seed=1))
NUM_TURNS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_family_model(directory, "qwen3_5_text", FIELDS | {"max_position_embeddings": 1024})
    write_tokenizer(directory)
    return directory


def shape(model: Path, num_snapshots: int, *, most_drafts: int) -> StateShape:
    layers = mixer_shapes(read_model_config(model).spec)
    return StateShape(
        layers=layers,
        num_slots=SLOTS,
        most_drafts=most_drafts,
        dtype=torch.float32,
        num_snapshots=num_snapshots,
    )


def engine_of(
    model: Path,
    *,
    num_snapshots: int,
    drafts: bool = False,
    most_drafts: int = CAP,
    pool_tokens: int = 4000,
    **settings: Any,
) -> Engine:
    """pool_tokens: that the KV cache has room for."""
    states = shape(model, num_snapshots, most_drafts=most_drafts if drafts else 0)
    block_bytes = 16 * 2 * 2 * 32 * 4
    usual: dict[str, Any] = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": SLOTS,
        "max_num_batched_tokens": 40,
        "kv_cache_memory": states.total_bytes + pool_tokens // 16 * block_bytes,
        "state_snapshot_memory": num_snapshots * states.snapshot_bytes,
    }
    speculation = {"method": "suffix", "num_speculative_tokens": most_drafts}
    if most_drafts != CAP:
        speculation["num_speculative_tokens_per_batch_size"] = [[1, 16, most_drafts]]
    found = build((model, model), speculation if drafts else None, **usual | settings)
    if drafts:
        found.use_policy("fixed", most_drafts - 1)
    return found


@dataclass
class Conversation:
    """What a client sends: all that was said so far, and something new. keeps: also what it was answered."""

    name: str
    said: tuple[int, ...]
    sampling: SamplingParams
    keeps: bool = True

    def turn(self, number: int) -> Request:
        return Request(request_id=f"{self.name}{number}", prompt_token_ids=self.said, sampling=self.sampling)

    def hear(self, number: int, found: dict[tuple[str, int], Answer]) -> None:
        answer = found[f"{self.name}{number}", 0][0] if self.keeps else ()
        self.said = (*self.said, *answer, *prompt(12 + number, VOCAB_SIZE, seed=hash(self.said) % 1000))


def conversations() -> list[Conversation]:
    """Two share a system prompt, one has a prompt of its own that repeats itself, one leaves its answers out."""
    greedy = SamplingParams(max_tokens=45, ignore_eos=True, temperature=0.0, logprobs=2)
    sampled = replace(greedy, n=3, temperature=0.7, seed=8)
    repeated = tuple(prompt(23, VOCAB_SIZE, seed=5)) * 3
    return [
        Conversation("a", (*SYSTEM, *prompt(20, VOCAB_SIZE, seed=11)), replace(sampled, n=1, max_tokens=30)),
        Conversation("b", (*SYSTEM, *prompt(31, VOCAB_SIZE, seed=12)), sampled),
        Conversation("c", repeated, greedy),
        Conversation("d", (*SYSTEM[:70], *prompt(9, VOCAB_SIZE, seed=13)), greedy, keeps=False),
    ]


Turn = tuple[Request, dict[tuple[str, int], Answer]]


@pytest.fixture(scope="module")
def script(model: Path) -> list[list[Turn]]:
    """By number of the turn: what each conversation asks, and its answer by an engine that shares nothing."""
    alone = engine_of(model, num_snapshots=0, max_num_seqs=1, enable_prefix_caching=False)
    turns, talks = [], conversations()
    for number in range(NUM_TURNS):
        asked = [each.turn(number) for each in talks]
        heard = [answers(alone, [each]) for each in asked]
        for talk, found in zip(talks, heard, strict=True):
            talk.hear(number, found)
        turns.append(list(zip(asked, heard, strict=True)))
    assert alone.stats().prefix_cache_hits == 0
    return turns


def hold(engine: Engine, script: Iterable[Iterable[Turn]]) -> None:
    """Each turn of all conversations at once."""
    for turn in script:
        wanted: dict[tuple[str, int], Answer] = {}
        for _, each in turn:
            wanted |= each
        assert answers(engine, [predicted(asked, wanted) for asked, _ in turn]) == wanted


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("num_snapshots", [1, 2, 40])
@pytest.mark.full(but=("1-True", "2-False", "40-True"))
def test_conversations_are_answered_as_without_a_prefix_cache(
    num_snapshots: int, drafts: bool, model: Path, script: list[list[Turn]]
) -> None:
    engine = engine_of(model, num_snapshots=num_snapshots, drafts=drafts)
    hold(engine, script)
    stats = engine.stats()
    asked = sum(len(each.prompt_token_ids) for turn in script for each, _ in turn)
    assert stats.prefix_cache_hits > (asked // 2 if num_snapshots == 40 else 0)
    if drafts:
        assert stats.speculation is not None
        methods = stats.speculation.methods
        assert 0 < sum(each.accepted for each in methods) < sum(each.verified for each in methods)


@pytest.mark.parametrize("pool_tokens", [4000, 640])
@pytest.mark.parametrize("most_drafts", [18, 32])
def test_snapshots_follow_drafts_that_go_through_whole_chunks(
    most_drafts: int, pool_tokens: int, model: Path, script: list[list[Turn]]
) -> None:
    """Chunks of 16 tokens, of which whole ones end within the drafts that are accepted."""
    engine = engine_of(
        model,
        num_snapshots=40,
        drafts=True,
        most_drafts=most_drafts,
        pool_tokens=pool_tokens,
        max_num_batched_tokens=400,
    )
    longest = 0
    for turn in script:
        wanted: dict[tuple[str, int], Answer] = {}
        for _, each in turn:
            wanted |= each
        asked = [replace(each, predicted_token_ids=wanted[each.request_id, 0][0]) for each, _ in turn]
        for request in asked:
            engine.add(replace(request, speculation=SpeculationParams(trace=True)))
        found: dict[tuple[str, int], Answer] = {}
        while engine.has_work():
            for delta in engine.step():
                longest = max(longest, 0 if delta.trace is None else delta.trace.accepted)
                token_ids, scores = found.get((delta.request_id, delta.index), ((), ()))
                found[delta.request_id, delta.index] = (
                    token_ids + delta.token_ids,
                    scores + (delta.logprobs or ()),
                )
        assert found == wanted
    assert longest > 16
    assert engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_sequences_that_are_preempted_go_on_from_snapshots(
    drafts: bool, model: Path, script: list[list[Turn]]
) -> None:
    engine = engine_of(model, num_snapshots=8, drafts=drafts, pool_tokens=480)
    hold(engine, script)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_requests_that_are_dropped_in_the_middle_leave_what_others_can_use(
    drafts: bool, model: Path, script: list[list[Turn]]
) -> None:
    """Each turn is asked twice: the first time it is dropped after a few steps, in its prompt or in its answer."""
    engine = engine_of(model, num_snapshots=12, drafts=drafts)
    for number, turn in enumerate(script):
        for at, (asked, _) in enumerate(turn):
            engine.add(replace(asked, request_id="dropped"))
            for _ in range(1 + 3 * at + number):
                engine.step()
            engine.abort("dropped")
        hold(engine, [turn])
    assert engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("settings", [{"block_size": 48}, {"async_scheduling": True}, {"early_prune": "on"}])
def test_other_engines_share_states_as_well(
    settings: dict[str, Any], model: Path, script: list[list[Turn]]
) -> None:
    engine = engine_of(model, num_snapshots=20, drafts="early_prune" in settings, pool_tokens=6000, **settings)
    hold(engine, script)
    assert engine.stats().prefix_cache_hits > 0


def test_cached_tokens_are_those_that_were_not_computed(model: Path) -> None:
    engine = engine_of(model, num_snapshots=20)
    sampling = SamplingParams(max_tokens=21, ignore_eos=True, n=2)
    first = Request(request_id="a", prompt_token_ids=SYSTEM, sampling=sampling)
    assert dict(cached(engine, first)) == {0: 0, 1: 96}
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (200, 96)
    assert (stats.prompt_tokens, stats.prompt_tokens_cached) == (100, 0)
    again = replace(first, request_id="b", prompt_token_ids=(*SYSTEM[:97], *prompt(40, VOCAB_SIZE, seed=2)))
    assert dict(cached(engine, again)) == {0: 96, 1: 128}
    assert engine.stats().prompt_tokens_cached == 96


def cached(engine: Engine, asked: Request) -> Iterator[tuple[int, int]]:
    """Of each sample, its cached tokens."""
    engine.add(asked)
    while engine.has_work():
        for delta in engine.step():
            if delta.finish_reason is not None:
                yield delta.index, delta.num_cached_tokens


def test_snapshots_are_part_of_the_memory_of_the_kv_cache(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    def built(**settings: Any) -> tuple[int, int]:
        """Blocks, and bytes of all."""
        info = build_with_parts((model, model), None, max_model_len=1024, max_num_seqs=SLOTS, **settings).info
        return info.num_blocks, info.kv_cache_bytes

    block_bytes, memory = 16 * 2 * 2 * 32 * 4, 4 << 20
    for num_snapshots in (0, 1, 10):
        states = shape(model, num_snapshots, most_drafts=0)
        given = num_snapshots * states.snapshot_bytes
        num_blocks = (memory - states.total_bytes) // block_bytes
        assert built(kv_cache_memory=memory, state_snapshot_memory=given) == (
            num_blocks,
            num_blocks * block_bytes + states.total_bytes,
        )
    eight = (memory - shape(model, 8, most_drafts=0).total_bytes) // block_bytes
    assert built(kv_cache_memory=memory)[0] == eight  # enough for a few conversations
    least = shape(model, 1, most_drafts=0)
    tight = SLOTS * least.slot_bytes + 64 * block_bytes + 4 * 3 * least.snapshot_bytes
    assert built(kv_cache_memory=tight)[0] == (tight - shape(model, 3, most_drafts=0).total_bytes) // block_bytes
    with caplog.at_level("INFO", "faser"):
        assert built(kv_cache_memory=tight - 12 * least.snapshot_bytes + (1 << 14))[0] >= 64
    assert "prefix caching is off" in caplog.text  # no memory is left, and one context goes first


def test_what_snapshots_cannot_be_is_refused_with_the_limit(model: Path) -> None:
    least = shape(model, 1, most_drafts=0).snapshot_bytes
    with pytest.raises(ConfigError, match=r"--state-snapshot-memory is 1000B; one snapshot of this model's"):
        engine_of(model, num_snapshots=0, state_snapshot_memory=1000)
    given = (7 << 19) // least * least
    with pytest.raises(ConfigError, match=r"the states of 6 sequences .*, 3\.\dMiB of snapshots included"):
        engine_of(model, num_snapshots=0, kv_cache_memory=2 << 20, state_snapshot_memory=given)
    with pytest.raises(ConfigError, match="snapshots are for prefix caching, and enable_prefix_caching is off"):
        engine_of(model, num_snapshots=1, enable_prefix_caching=False)
