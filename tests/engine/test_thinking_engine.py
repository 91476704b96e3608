"""Thinking budgets under speculation. Oracle: the same engine without a drafter, and the answers' own tokens."""

from pathlib import Path
from typing import Any

import pytest

from faser.engine.engine import Engine
from faser.types.sampling import StructuredOutput, StructureKind, ThinkingBudget
from tests.checkpoints import tiny_tokenizer
from tests.engine.losslessness.equality import Answer, answers, build, requests, write_pair

MOST = 16
(END,) = tiny_tokenizer().encode("!").ids
ANSWER = StructuredOutput(kind=StructureKind.REGEX, text="[^!]*![ab]{6}")
# No other token is as unlikely as the end, so the model never closes its thinking by itself.
NEVER = ((END, -100.0),)
BUDGETS = {"at once": 0, "soon": 9}
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logit_bias": NEVER},
    "sampled": {"temperature": 0.9, "logit_bias": NEVER, "logprobs": 1},
    "structure": {"temperature": 0.9, "structured_output": ANSWER, "logit_bias": NEVER},
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter"))


@pytest.fixture(scope="module")
def plain(checkpoints: tuple[Path, Path]) -> Engine:
    return build(checkpoints, None)


@pytest.fixture(scope="module")
def drafting(checkpoints: tuple[Path, Path]) -> Engine:
    given = {"method": "auto", "model": str(checkpoints[1])}
    table = {"num_speculative_tokens": MOST, "num_speculative_tokens_per_batch_size": [[1, 16, MOST]]}
    return build(checkpoints, given | table, max_num_batched_tokens=512)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_the_budget_binds_and_drafts_change_no_token(
    plain: Engine, drafting: Engine, budget: str, fields: str
) -> None:
    thinking = ThinkingBudget(max_tokens=BUDGETS[budget], begin=(1,), end=END, is_open=True)
    asked = requests(**{"max_tokens": 30, "thinking_budget": thinking} | FIELDS[fields])[:6]
    expected = answers(plain, asked)
    for token_ids, _ in expected.values():
        ends_at = token_ids.index(END)
        assert ends_at >= BUDGETS[budget]
        # A structure may have to wait for the end of a character.
        assert ends_at == BUDGETS[budget] or (fields == "structure" and ends_at < BUDGETS[budget] + 4)
        assert len(token_ids) > BUDGETS[budget] + 1, "it answers"
    for num_tokens in (4, MOST):
        drafting.use_policy("fixed", num_tokens)
        before = _accepted(drafting)
        assert _differing(answers(drafting, asked), expected) == []
        assert _accepted(drafting) > before


def _differing(found: dict[tuple[str, int], Answer], expected: dict[tuple[str, int], Answer]) -> list[str]:
    return [f"{key}: {found[key][0]} instead of {each[0]}" for key, each in expected.items() if found[key] != each]


def _accepted(engine: Engine) -> int:
    speculated = engine.stats().speculation
    assert speculated is not None
    return sum(each.accepted for each in speculated.methods)
