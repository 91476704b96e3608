"""The page in a real browser. Tests are skipped without Chromium, Playwright and axe; make page-tests has them."""

import importlib.util
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_MISSING = [
    *(["chromium"] if shutil.which("chromium") is None else []),
    *(name for name in ("playwright", "axe_playwright_python") if importlib.util.find_spec(name) is None),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/page/" in item.path.as_posix():
            item.add_marker(pytest.mark.page)
            if _MISSING:
                item.add_marker(pytest.mark.skip(reason=f"needs {' and '.join(_MISSING)}; make page-tests"))


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """One for each module: while it is there an event loop runs, next to which others could not."""
    from tests.page.browser import chromium

    with chromium() as browser:
        yield browser
