"""Help and the documentation's tables say what the code says."""

from pathlib import Path

import pytest

from faser.config.declaration import GROUPS, Setting
from faser.config.help import help_text, markdown
from faser.config.sources import SETTINGS, UsageError

ROOT = Path(__file__).parents[2]


def test_the_documented_flags_are_up_to_date() -> None:
    """If this fails: make docs."""
    assert (ROOT / "docs" / "cli.md").read_text() == markdown(SETTINGS) + "\n"


def test_the_page_for_starters_lists_the_flags_most_used_with_their_defaults() -> None:
    page = (ROOT / "docs" / "start.md").read_text()
    rows = [line for line in markdown(SETTINGS).splitlines() if line.startswith("| `--")]
    for each in SETTINGS:
        if each.common and each.name != "model":
            (row,) = [row for row in rows if row.startswith(f"| `{each.flag}`")]
            default = row.split(" | ")[1]
            assert f"| `{each.flag}` | {default} |" in page, each.flag


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_shows_all_of_its_flags_and_no_other(group: str) -> None:
    text = help_text("faser serve", group, SETTINGS)
    for each in SETTINGS:
        assert (f"  {each.flag} " in text or f"  {each.flag}\n" in text) == (each.group == group)


def test_all_shows_every_flag() -> None:
    text = help_text("faser serve", "all", SETTINGS)
    assert all(each.flag in text for each in SETTINGS)


@pytest.mark.parametrize("topic", ["max-num-seqs", "--max-num-seqs", "max_num_seqs", "Max-Num-Seqs"])
def test_a_flag_shows_its_variable_and_its_limits(topic: str) -> None:
    text = help_text("faser serve", topic, SETTINGS)
    assert "FASER_MAX_NUM_SEQS" in text
    assert "must be: at least 1 and at most 4096" in text


def test_an_unknown_topic_gets_a_suggestion() -> None:
    with pytest.raises(UsageError, match=r"--help=sever: no such topic. Did you mean 'server'\?"):
        help_text("faser serve", "sever", SETTINGS)


@pytest.mark.parametrize("topic", ["", "all", *GROUPS])
def test_help_fits_a_terminal(topic: str) -> None:
    assert max(len(line) for line in help_text("faser serve", topic, SETTINGS).splitlines()) <= 100


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.flag)
def test_a_flag_says_its_default(setting: Setting) -> None:
    """As a value in brackets, or in words where it has none; `none` in a shell would be a text."""
    text = help_text("faser serve", setting.flag, SETTINGS).partition("\n  variable:")[0]
    assert "None" not in text
    assert ("Default" in text) == (setting.default in (None, ())), text
    assert text.endswith("]") == (setting.default not in (None, ())), text
