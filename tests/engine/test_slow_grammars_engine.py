"""An answer whose grammar takes long beside others: it waits for its masks, they do not, and no token changes.

Oracle: each request alone, without drafts. Bugs these tests have been seen to catch: an answer that waits ended
with an error, a row of a whole chunk of states computed again.
"""

from pathlib import Path
from typing import Any

import pytest

from faser.engine.engine import Engine
from faser.types.answer import FinishReason
from faser.types.request import Request
from faser.types.sampling import SamplingParams, StructuredOutput, StructureKind
from tests.checkpoints import tiny_tokenizer, write_tiny_checkpoint, write_tokenizer
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.losslessness.equality import build
from tests.engine.test_states_engine import FIELDS

X = tiny_tokenizer().encode("x").ids[0]
SLOW, FREE = "slow", "free"
NUM_TOKENS, NUM_FREE = 80, 200


@pytest.fixture(scope="module", params=["attention", "states"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    if request.param == "attention":
        write_tiny_checkpoint(directory)
    else:
        write_family_model(directory, "qwen3_5_text", FIELDS)
        write_tokenizer(directory)
    return directory


def ambiguous(num_tokens: int = NUM_TOKENS) -> Request:
    """Its answer is "x" again and again, which its grammar can read in ever more ways."""
    return Request(
        request_id=SLOW,
        prompt_token_ids=(X,) * 24,
        sampling=SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            logit_bias=((X, 100.0),),
            structured_output=StructuredOutput(
                kind=StructureKind.GRAMMAR, text='start: e\ne: "x" | e e | e e e | e e e e | e e e e e'
            ),
        ),
        arrival_s=0.0,
    )


def free(num_tokens: int) -> Request:
    sampling = SamplingParams(temperature=0.9, seed=3, max_tokens=num_tokens, ignore_eos=True)
    return Request(request_id=FREE, prompt_token_ids=(40, 41, 42), sampling=sampling, arrival_s=0.0)


def run(engine: Engine, *asked: Request) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The answers, and whose tokens came step by step."""
    for request in asked:
        engine.add(request)
    found: dict[str, tuple[int, ...]] = {}
    order: list[str] = []
    while engine.has_work():
        for delta in engine.step():
            assert delta.finish_reason in (None, FinishReason.LENGTH), delta.error
            found[delta.request_id] = found.get(delta.request_id, ()) + delta.token_ids
            order.append(delta.request_id)
    return found, order


def engine_of(model: Path, speculation: dict[str, Any] | None, *, ahead: bool = False) -> Engine:
    """ahead: steps are launched before the one in flight has ended."""
    settings: dict[str, Any] = {
        "max_model_len": 224,
        "kv_cache_memory": 8 << 20,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "async_scheduling": ahead,
    }
    return build((model, model), speculation, **settings)


@pytest.mark.parametrize("drafts, ahead", [(False, False), (True, False), (False, True)])
@pytest.mark.full(but=("attention-False-True", "states-True-False"))
def test_others_go_on_while_a_grammar_takes_long(model: Path, drafts: bool, ahead: bool) -> None:
    alone, _ = run(engine_of(model, None), ambiguous())
    assert alone[SLOW] == (X,) * NUM_TOKENS
    undisturbed, _ = run(engine_of(model, None), free(NUM_FREE))
    engine = engine_of(model, {"method": "suffix"} if drafts else None, ahead=ahead)
    if drafts:
        engine.use_policy("fixed", 4)
    found, order = run(engine, ambiguous(), free(NUM_FREE))
    assert found == alone | undisturbed
    until_both_end = order[: min(len(order) - order[::-1].index(each) for each in (SLOW, FREE))]
    assert until_both_end.count(FREE) > until_both_end.count(SLOW) + 3, "steps waited for masks of the other one"
