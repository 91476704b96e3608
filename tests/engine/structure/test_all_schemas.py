"""200 JSON schemas, sixteen at once: what is completed validates, and speculation changes no token.

Oracles: jsonschema, and the same engine without drafts. A model with random weights answers, which chooses oddly
among what is allowed.
"""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from benchmarks.exactness.schemas import NUM_SCHEMAS, NamedSchema, all_schemas
from faser.types.request import Request
from faser.types.sampling import SamplingParams, StructuredOutput, StructureKind
from tests.checkpoints import EOS_TOKEN_ID
from tests.engine.losslessness.equality import answers, build, write_pair
from tests.engine.structure.languages import the_tokenizer

SCHEMAS = all_schemas()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


def requests(schemas: tuple[NamedSchema, ...], *, temperature: float) -> list[Request]:
    tokenizer = the_tokenizer()
    return [
        Request(
            request_id=each.name,
            prompt_token_ids=tuple(tokenizer.encode(f"A {each.name.replace('-', ' ')}: ")),
            sampling=SamplingParams(
                temperature=temperature,
                seed=i,
                max_tokens=250,
                structured_output=StructuredOutput(kind=StructureKind.JSON, text=json.dumps(each.schema)),
            ),
            arrival_s=float(i),
        )
        for i, each in enumerate(schemas)
    ]


def test_there_are_two_hundred_of_different_names() -> None:
    assert len({each.name for each in SCHEMAS}) == len(SCHEMAS) == NUM_SCHEMAS == 200


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_completed_answers_validate_and_are_those_without_speculation(
    temperature: float, checkpoints: tuple[Path, Path], full: bool
) -> None:
    """At the second temperature by a draft model too, whose drafts know nothing of grammars.

    Every fourth schema, and every tenth; with --full all, and every third.
    """
    every = {(0.0, True): 1, (0.0, False): 4, (0.8, True): 3, (0.8, False): 10}[temperature, full]
    asked = requests(SCHEMAS[::every], temperature=temperature)
    expected = answers(build(checkpoints, None), asked)
    engine = build(checkpoints, {"model": str(checkpoints[1])} if temperature else {})
    engine.use_policy("fixed", 4)
    found = answers(engine, asked)
    assert found == expected
    stats = engine.stats().speculation
    assert stats is not None
    accepted = {each.method: each.accepted for each in stats.methods}
    assert accepted["grammar"] > 7 * len(asked)
    tokenizer, completed = the_tokenizer(), 0
    by_name = {each.name: each.schema for each in SCHEMAS}
    for (name, _), (token_ids, _) in found.items():
        if token_ids[-1] == EOS_TOKEN_ID:
            completed += 1
            value = json.loads(tokenizer.decode(token_ids))
            jsonschema.validate(
                value, by_name[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
            )
    assert completed > 0.8 * len(asked)


def test_a_step_that_could_be_launched_ahead_waits_for_structured_answers(checkpoints: tuple[Path, Path]) -> None:
    """Their masks need the tokens of the step before. Free answers run with them, and change nothing."""
    asked = requests(SCHEMAS[::25], temperature=0.0)
    free = [
        replace(
            each, request_id=f"{each.request_id} free", sampling=SamplingParams(max_tokens=60, temperature=0.0)
        )
        for each in asked[:3]
    ]
    expected = answers(build(checkpoints, None), [*asked, *free])
    assert answers(build(checkpoints, None, async_scheduling=True), [*asked, *free]) == expected
