"""Policies as the command line spells them."""

import pytest

from benchmarks.spec_bench.policy_spec import parse_policy
from faser.errors import ConfigError


@pytest.mark.parametrize(
    "text", ["fixed", "fixed:0", "fixed:6", "fixed:x", "quick", "off:1", "table:", "table:4=9"]
)
def test_a_policy_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--policies names '{text}'"):
        parse_policy(text, cap=5)


def test_a_table_is_spelled_by_its_bounds() -> None:
    assert parse_policy("table:4=5/16=2/64=0", cap=5).table == ((1, 4, 5), (5, 16, 2), (17, 64, 0))
    with pytest.raises(ConfigError, match="ascending"):
        parse_policy("table:4=5/4=2", cap=5)
