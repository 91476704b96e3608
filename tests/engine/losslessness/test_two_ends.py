"""A model with two end-of-sequence tokens: the drafted end and the model's own, with min_tokens between them.

Where a grammar is complete its drafter proposes the first of the end tokens, and the model may choose the other.
Oracle: the same engine without a drafter.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from faser.types.answer import FinishReason
from faser.types.sampling import StructuredOutput, StructureKind
from tests.checkpoints import EOS_TOKEN_ID, write_json
from tests.engine.losslessness.equality import CAP, build, requests, write_pair
from tests.engine.losslessness.test_failures import accepted, endings, predicted

OTHER_END = 1
CHOICE = StructuredOutput(kind=StructureKind.CHOICE, text=json.dumps(["the quick", "the quick brown fox"]))
REGEX = StructuredOutput(kind=StructureKind.REGEX, text="[a-c]{2,9}")
FIELDS: dict[str, dict[str, Any]] = {
    "choice": {"structured_output": CHOICE},
    "choice, late": {"structured_output": CHOICE, "min_tokens": 3},
    "regex, late": {"structured_output": REGEX, "min_tokens": 5, "ignore_eos": False},
    "late": {"min_tokens": 7, "ignore_eos": False, "logit_bias": ((OTHER_END, 4.0), (EOS_TOKEN_ID, 4.0))},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    pair = write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))
    for directory in pair:
        for name in ("config.json", "generation_config.json"):
            known = json.loads((directory / name).read_text())
            write_json(directory / name, known | {"eos_token_id": [EOS_TOKEN_ID, OTHER_END]})
    return pair


@pytest.mark.parametrize("method", ["auto", "suffix"])
@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.full(but=("choice-auto", "choice, late-suffix", "regex, late-auto", "late-suffix"))
def test_answers_end_with_the_token_that_ends_them_without_speculation(
    checkpoints: tuple[Path, Path], fields: str, method: str
) -> None:
    asked = requests(**{"temperature": 0.9, "max_tokens": 40} | FIELDS[fields])[:20]
    expected = endings(build(checkpoints, None), asked)
    last = Counter(each.token_ids[-1] for each in expected.values() if each.finish_reason is FinishReason.STOP)
    assert last[EOS_TOKEN_ID] > 1
    assert last[OTHER_END] > 1
    engine = build(checkpoints, {"method": method})
    engine.use_policy("fixed", CAP)
    found = endings(engine, predicted(asked, expected) if method == "suffix" or fields == "late" else asked)
    assert found == {key: expected[key] for key in found}
    assert accepted(engine) > 10
