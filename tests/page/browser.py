"""A real Chromium that shows the page, and a server with a real engine for it."""

import asyncio
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from faser.config.engine import EngineConfig
from tests.api.test_with_engine import running

DESK, PHONE = (1280, 800), (390, 844)


@dataclass(slots=True)
class Visit:
    """One page that is open. problems: errors on its console, and requests to another host."""

    page: Page
    problems: list[str] = field(default_factory=list)

    def axe(self) -> list[str]:
        """What axe finds that is serious or critical."""
        from axe_playwright_python.sync_playwright import Axe

        found = Axe().run(self.page).response["violations"]
        return [
            f"{each['id']}: {[node['target'] for node in each['nodes']]}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def visiting(
    browser: Browser,
    url: str,
    *,
    size: tuple[int, int] = DESK,
    scheme: Any = "light",
    for_axe: bool = False,
) -> Iterator[Visit]:
    """The page at url, loaded. for_axe: scripts that axe puts into the page are let through.

    AssertionError at the end if the page had a problem.
    """
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, bypass_csp=for_axe
    )
    visit = Visit(context.new_page())
    host = url.split("/")[2]
    visit.page.on("pageerror", lambda error: visit.problems.append(f"error: {error}"))
    visit.page.on(
        "console",
        lambda said: visit.problems.append(f"{said.type}: {said.text}") if said.type == "error" else None,
    )
    visit.page.on(
        "request",
        lambda asked: (
            visit.problems.append(f"asks {asked.url}")
            if asked.url.split(":")[0] not in ("blob", "data") and asked.url.split("/")[2] != host
            else None
        ),
    )
    visit.page.goto(url)
    try:
        yield visit
    finally:
        context.close()
    assert visit.problems == []


@contextmanager
def serving_model(checkpoint: Path, config: EngineConfig, **settings: Any) -> Iterator[str]:
    """The URL of a server whose engine runs this checkpoint; both in a thread, as Playwright blocks this one."""
    ready, stop = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def serve() -> None:
        async with running(checkpoint, config, **settings) as (_, http):
            found.extend((str(http.base_url), asyncio.get_running_loop()))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(120), "the server did not start"
    url, loop = found
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)
