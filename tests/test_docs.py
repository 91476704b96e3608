"""README, CONTRIBUTING and docs/: links lead somewhere, numbers have their zero, and pages stay short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
GENERATED = {"api.md", "cli.md", "models.md"}
MOST_WORDS = 41_000


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def broken_links(page: Path) -> list[str]:
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"\w+:", link):
            continue
        if not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page) == []


def test_a_missing_file_and_a_missing_heading_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`-c d\n[1](#a-b-c-d) [2](gone.md) [3](page.md#gone) [4](https://gone.example)\n```\n# gone\n```\n"
    )
    assert broken_links(page) == ["gone.md: no such file", "page.md#gone: no such heading"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_decimals_have_their_zero(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert re.findall(r".*(?<![\w.])\.\d.*", prose) == []


def test_written_pages_stay_short() -> None:
    """Move figures and histories to benchmarks/results instead of raising the limit."""
    written = [page for page in PAGES if page.name not in GENERATED]
    words = [word for page in written for word in page.read_text(encoding="utf-8").split()]
    assert sum(any(map(str.isalnum, word)) for word in words) <= MOST_WORDS
