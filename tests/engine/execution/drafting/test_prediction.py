"""A prediction is drafted from, by the sequence it was sent for alone, and changes no token.

Oracle: the same engine without a drafter. Planted bugs that these tests have caught are in the names.
"""

from pathlib import Path

import pytest

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.build import build_engine
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.contract.step_times import StepTimes
from faser.engine.engine import Engine
from faser.engine.execution.drafting.drafter import Drafter
from faser.engine.execution.drafting.text import LookupDrafter, prediction_prefix
from faser.kernels.cpu.text_index import TextRules, text_library
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.engine.execution.draft_lines import committed, lines_of
from tests.engine.execution.drafting.oracle.ngram import NgramDrafter
from tests.engine.execution.drafting.oracle.suffix import SuffixDrafter

NUM_TOKENS = 48
PROMPTS = tuple(tuple((7 * i + 3 * k) % 500 + 5 for k in range(20)) for i in range(6))


def start(predicted: tuple[int, ...], *, slot: int = 0, prompt: tuple[int, ...] = (1, 2, 3, 4)) -> SequenceStart:
    return SequenceStart(
        slot=slot,
        sampling=SamplingParams(),
        seed=0,
        prompt_len=len(prompt),
        token_ids=prompt,
        predicted_token_ids=predicted,
    )


def native(rules: TextRules) -> Drafter:
    return LookupDrafter(text_library(cache_dir() / "kernels"), rules)


def drafted(drafter: Drafter, slot: int = 0) -> tuple[int, ...]:
    request = DraftRequest(slot=slot, max_tokens=4, new_blocks=())
    return lines_of(drafter.propose(DraftPlan(step=1, width=16, requests=(request,))).table)[0].token_ids


DRAFTERS = [
    lambda: NgramDrafter(min_n=2, max_n=4, cap=4),
    lambda: SuffixDrafter(cap=4, max_spec_factor=4.0),
    lambda: native(TextRules(cap=4, min_n=2, max_n=4)),
    lambda: native(TextRules(cap=4, depth=24, max_spec_factor=4.0, max_outputs=9, max_tokens=1000)),
]


@pytest.mark.parametrize("make", DRAFTERS)
def test_the_answer_finds_its_context_in_the_prediction_from_its_first_token_on(make: type[Drafter]) -> None:
    drafter: Drafter = make()
    drafter.start(start((10, 11, 12, 13, 14, 15)))
    drafter.commit(*committed({0: (10,)}))
    assert drafted(drafter) == (11, 12, 13, 14)
    drafter.commit(*committed({0: (99, 12, 13)}))
    assert drafted(drafter)[:2] == (14, 15), "it is found again after a deviation"


@pytest.mark.parametrize("make", DRAFTERS)
def test_a_prediction_is_used_by_its_own_sequence_alone(make: type[Drafter]) -> None:
    """Not by a concurrent sequence, nor by a later one: the corpus has answers alone, and whole ones."""
    drafter: Drafter = make()
    drafter.start(start(tuple(range(10, 40))))
    drafter.start(start((), slot=1))
    drafter.commit(*committed({1: (10, 11, 12)}))
    assert drafted(drafter, 1) == ()
    drafter.commit(*committed({0: tuple(range(50, 60))}))
    drafter.release(0)
    assert drafted(drafter, 1) == ()
    if isinstance(drafter, SuffixDrafter):
        assert drafter.corpus.num_tokens == 10
        drafter.commit(*committed({1: (50, 51)}))
        assert drafted(drafter, 1) == (52, 53, 54, 55)


def test_without_a_prediction_nothing_is_put_before_the_text() -> None:
    assert prediction_prefix(start(())) == ()
    assert prediction_prefix(start((8, 9))) == (1, 2, 3, 4, 8, 9)
    assert prediction_prefix(start((8,), prompt=tuple(range(100)))) == (*range(76, 100), 8)


def build(checkpoint: Path, method: str | None) -> Engine:
    """The pool is too small for all, so that sequences are preempted."""
    config = EngineConfig(
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        kv_cache_memory=1 << 20,
        speculative_config={"policy": "off"} if method is None else {"method": method, "policy": "fixed"},
    )
    times = StepTimes.proportional(step_s=0.01, text_s=1e-7)
    engine, _ = build_engine(config, checkpoint, lambda _stage, _done, _total: None, step_times=times)
    return engine


def answers(
    engine: Engine, temperature: float, predictions: tuple[tuple[int, ...], ...]
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Tokens by prompt, and how many of them had been drafted."""
    for at, (prompt, predicted) in enumerate(zip(PROMPTS, predictions, strict=True)):
        sampling = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, seed=at, ignore_eos=True)
        engine.add(
            Request(
                request_id=str(at),
                prompt_token_ids=prompt,
                sampling=sampling,
                arrival_s=float(at),
                predicted_token_ids=predicted,
            )
        )
    output: dict[str, list[int]] = {str(at): [] for at in range(len(PROMPTS))}
    num_accepted = 0
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None
            output[delta.request_id] += delta.token_ids
            num_accepted += 0 if delta.speculation is None else delta.speculation.accepted
    return tuple(tuple(token_ids) for token_ids in output.values()), num_accepted


@pytest.mark.parametrize("method", ["ngram", "suffix", "auto"])
def test_tokens_are_the_same_whatever_is_predicted_and_a_good_prediction_is_accepted(
    tiny_checkpoint: Path, method: str
) -> None:
    """At temperature 1, where a tiny model never repeats itself: what is accepted has come from the prediction."""
    nothing = ((),) * len(PROMPTS)
    expected, _ = answers(build(tiny_checkpoint, None), 1.0, nothing)
    wrong = tuple(tuple(reversed(token_ids)) for token_ids in expected)
    accepted = {}
    for name, predictions in (("none", nothing), ("wrong", wrong), ("right", expected)):
        found, accepted[name] = answers(build(tiny_checkpoint, method), 1.0, predictions)
        assert found == expected, name
    assert accepted["right"] > 0.5 * NUM_TOKENS * len(PROMPTS)
    assert max(accepted["none"], accepted["wrong"]) < 0.1 * accepted["right"]
