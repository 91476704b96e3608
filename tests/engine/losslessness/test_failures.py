"""A request that fails has said the same before as without speculation, and the requests beside it say the same.

Requests fail in two ways: the model's logits are no numbers behind a token whose embedding is NaN, or their own
limits leave no token to choose. Drafts run into both: they come from predictions that go on behind the failure.
Oracle: the same engine without a drafter.
"""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from faser.engine.engine import Engine
from faser.types.answer import FinishReason, PositionLogprobs, SequenceError
from faser.types.request import Request
from faser.types.sampling import StructuredOutput, StructureKind
from tests.checkpoints import tiny_tokenizer
from tests.engine.losslessness.equality import CAP, build, requests, write_pair

POISON = 300  # no prompt has it; behind it logits are no numbers
NUM_TOKENS = 40


class Ending(NamedTuple):
    """What a sample said, and how it ended."""

    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    error: SequenceError | None


Endings = dict[tuple[str, int], Ending]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same target, but for one embedding; the drafter is healthy."""
    target, drafter = write_pair(tmp_path_factory.mktemp("poisoned"), tmp_path_factory.mktemp("drafter"))
    weights = load_file(target / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return target, drafter


def endings(engine: Engine, asked: list[Request]) -> Endings:
    """AssertionError if a sample goes on behind its end."""
    for request in asked:
        engine.add(request)
    found: Endings = {}
    while engine.has_work():
        for delta in engine.step():
            key = delta.request_id, delta.index
            before = found.get(key, Ending((), (), None, None))
            assert before.finish_reason is None
            assert (delta.error is not None) == (delta.finish_reason is FinishReason.ERROR)
            found[key] = Ending(
                before.token_ids + delta.token_ids,
                before.logprobs + (delta.logprobs or ()),
                delta.finish_reason,
                delta.error,
            )
    return found


def predicted(asked: list[Request], answers: Endings) -> list[Request]:
    """The requests, each with an answer to draft from."""
    return [
        replace(each, predicted_token_ids=answers[each.request_id, 0].token_ids)
        for each in asked
        if each.speculation.enabled
    ]


def accepted(engine: Engine) -> int:
    stats = engine.stats().speculation
    assert stats is not None
    return sum(each.accepted for each in stats.methods)


POISONED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logit_bias": ((POISON, 1.5),)},
    "sampled": {"temperature": 0.8, "logit_bias": ((POISON, 2.0),)},
    "scored": {"temperature": 0.8, "logit_bias": ((POISON, 2.0),), "logprobs": 2, "n": 2},
    "penalties": {"temperature": 0.7, "frequency_penalty": 0.4, "logit_bias": ((POISON, 2.0),)},
}
DRAFTERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"method": "suffix"}, {}),
    "coupled": ({"method": "auto", "draft_sample_method": "coupled"}, {}),
    "pruned": ({"method": "suffix"}, {"early_prune": "on", "spec_overlap": "off"}),
    "overlapped": ({"method": "auto"}, {"spec_overlap": "on"}),
}


@pytest.fixture(scope="module", params=POISONED)
def failing(
    request: pytest.FixtureRequest, healthy: tuple[Path, Path], poisoned: tuple[Path, Path]
) -> tuple[list[Request], Endings]:
    """Requests, and what they come to without speculation. Their predictions go on where the model fails."""
    asked = requests(max_tokens=NUM_TOKENS, **POISONED[request.param])[:24]
    asked = predicted(asked, endings(build(healthy, None), asked))
    expected = endings(build(poisoned, None), asked)
    how = Counter(each.error for each in expected.values())
    assert how[SequenceError.NOT_FINITE] > 5
    assert how[None] > 0
    return asked, expected


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.full(
    but=(
        "greedy-text",
        "sampled-coupled",
        "scored-pruned",
        "penalties-overlapped",
        "scored-text",
        "greedy-overlapped",
        "penalties-coupled",
    )
)
def test_tokens_before_logits_that_are_no_numbers_are_those_without_speculation(
    poisoned: tuple[Path, Path], failing: tuple[list[Request], Endings], drafter: str
) -> None:
    asked, expected = failing
    given, settings = DRAFTERS[drafter]
    if given["method"] == "auto":
        given = given | {"model": str(poisoned[1])}
    engine = build(poisoned, given, **settings)
    engine.use_policy("fixed", CAP)
    assert endings(engine, asked) == expected
    assert accepted(engine) > 50
    assert engine.stats().kv_usage == 0.0


@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_refused_draft_tokens_whose_keys_and_values_are_no_numbers_change_nothing(
    poisoned: tuple[Path, Path], cache: str
) -> None:
    """Every sixth token of the predictions is the poison, and none of the answers. It stays stored."""
    sampling: dict[str, Any] = {"temperature": 0.0, "bad_words": ((POISON,),)}
    asked = requests(max_tokens=NUM_TOKENS, **sampling)[:24]
    expected = endings(build(poisoned, None, kv_cache_dtype=cache), asked)
    assert {each.error for each in expected.values()} == {None}
    predictions = predicted(asked, expected)
    asked = [
        replace(
            each,
            predicted_token_ids=tuple(
                POISON if at % 6 == 5 else token_id for at, token_id in enumerate(each.predicted_token_ids)
            ),
        )
        for each in predictions
    ]
    engine = build(poisoned, {"method": "suffix"}, kv_cache_dtype=cache)
    engine.use_policy("fixed", CAP)
    found = endings(engine, asked)
    assert found == {key: expected[key] for key in found}
    assert accepted(engine) > 50


@pytest.mark.parametrize("method", ["suffix", "auto"])
def test_a_stop_token_ends_an_answer_before_the_row_behind_it_can_fail(
    healthy: tuple[Path, Path], poisoned: tuple[Path, Path], method: str
) -> None:
    sampling: dict[str, Any] = POISONED["greedy"] | {"stop_token_ids": (POISON,)}
    asked = predicted(
        requests(max_tokens=NUM_TOKENS),
        endings(build(healthy, None), requests(max_tokens=NUM_TOKENS, **POISONED["greedy"])),
    )
    asked = [replace(each, sampling=replace(each.sampling, **sampling)) for each in asked]
    expected = endings(build(poisoned, None), asked)
    how = Counter(each.finish_reason for each in expected.values())
    assert how[FinishReason.STOP] > 5
    assert how[FinishReason.ERROR] == 0
    engine = build(poisoned, {"method": method})
    engine.use_policy("fixed", CAP)
    assert endings(engine, asked) == expected
    assert accepted(engine) > 50


X, Y = (tiny_tokenizer().encode(text).ids[0] for text in "xy")
LIMITS: dict[str, dict[str, Any]] = {
    "bad_words": {"allowed_token_ids": (X,), "bad_words": ((X,) * 7,)},
    "bad_words and a bias": {"allowed_token_ids": (X, Y), "bad_words": ((X, X, Y), (X,) * 9), "logprobs": 2},
    "grammar": {
        "structured_output": StructuredOutput(kind=StructureKind.REGEX, text="x{30}y"),
        "allowed_token_ids": (X,),
    },
    "grammar that a bad word ends": {
        "structured_output": StructuredOutput(kind=StructureKind.REGEX, text="(x|y){9}(xy){5}"),
        "allowed_token_ids": (X, Y),
        "bad_words": ((Y, X, Y, X, Y),),
    },
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.full(
    but=("bad_words-0.0", "bad_words and a bias-0.9", "grammar-0.9", "grammar that a bad word ends-0.0")
)
def test_tokens_before_limits_that_leave_none_are_those_without_speculation(
    healthy: tuple[Path, Path], limit: str, temperature: float
) -> None:
    """Every other request has no limits, and goes on."""
    limited = requests(max_tokens=NUM_TOKENS, temperature=temperature, **LIMITS[limit])
    free = requests(max_tokens=NUM_TOKENS, temperature=temperature)
    asked = [(free, limited)[i % 2][i] for i in range(24)]
    asked = [
        replace(each, prompt_token_ids=(*each.prompt_token_ids[:100], *(X,) * 20, *(X, Y) * 5)) for each in asked
    ]
    expected = endings(build(healthy, None), asked)
    how = Counter(each.error for each in expected.values())
    assert how[SequenceError.NONE_ALLOWED] > 5
    assert how[None] >= len(asked) // 2
    engine = build(healthy, {"method": "auto"})
    engine.use_policy("fixed", CAP)
    assert endings(engine, asked) == expected
    assert accepted(engine) > 20
