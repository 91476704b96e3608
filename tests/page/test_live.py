"""The live view in a browser: it shows what the feed sends, says when it does not, and keeps out of the way."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from faser.types.engine import EngineState
from tests.api.server import serving, settings
from tests.api.test_with_engine import CONFIG
from tests.fake_engine import FakeEngine

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

BODY = {"prompt": "hello hello hello hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
TARGETS = {"speculative": {"slo": {"ttft_ms": 60_000}}}


@pytest.fixture(scope="module")
def url(browser: Browser, tiny_checkpoint: Path) -> Iterator[str]:
    from tests.page.browser import serving_model

    del browser  # its thread would wait for the server's
    with serving_model(tiny_checkpoint, CONFIG) as url:
        yield url


@pytest.fixture(scope="module")
def idle_url() -> Iterator[str]:
    with serving(FakeEngine()) as url:
        yield url


def ask(url: str, times: int = 4) -> int:
    """Returns the number of tokens."""
    with httpx.Client(base_url=url, timeout=30) as http:
        answers = [http.post("/v1/completions", json={**BODY, **TARGETS}).json() for _ in range(times)]
    return sum(each["usage"]["completion_tokens"] for each in answers)


def panel(page: Page, title: str) -> Any:
    return page.locator(".panel", has=page.get_by_role("heading", name=title, exact=True))


def table_of(shown: Any) -> dict[str, list[int]]:
    return {
        row.locator("th").inner_text(): [
            int(each.replace(",", "")) for each in row.locator("td").all_inner_texts()
        ]
        for row in shown.locator("tbody tr").all()
    }


def wait_for(page: Page, holds: Callable[[], bool]) -> None:
    """The feed brings a sample a second."""
    deadline_s = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline_s, page.locator("main").inner_text()
        page.wait_for_timeout(100)


def is_live(page: Page) -> None:
    page.locator(".link[data-kind=live]").wait_for()


def test_the_view_shows_what_the_server_did(browser: Browser, url: str) -> None:
    from tests.page.browser import visiting

    with visiting(browser, f"{url}/#live") as visit:
        page = visit.page
        is_live(page)
        num_tokens = ask(url)
        assert num_tokens == 240
        panel(page, "Tokens per sequence and step").locator('svg:not([aria-label*=": – "])').wait_for()
        page.get_by_text("Speculation", exact=True).click()
        flow = panel(page, "Draft token flow")
        flow.locator("summary").click()
        counted = scraped(url)
        in_all = sum(counted[name] for name in counted if name.startswith("faser_spec_drafted_tokens_total{"))
        assert in_all > 0
        wait_for(page, lambda: sum(row[0] for row in table_of(flow).values()) == in_all)
        for method, (drafted, pruned, verified, accepted, _, wasted) in table_of(flow).items():
            assert drafted == counted[f'faser_spec_drafted_tokens_total{{method="{method}"}}']
            assert (
                verified == counted[f'faser_spec_verified_tokens_total{{method="{method}"}}'] == accepted + wasted
            )
            assert accepted == counted[f'faser_spec_accepted_tokens_total{{method="{method}"}}']
            assert pruned == drafted - verified
        targets = panel(page, "Latency targets met")
        assert "4 requests" not in targets.inner_text()
        wait_for(page, lambda: "100 % of 4" in (targets.locator("svg").text_content() or ""))
        assert re.search(r"length\s+4", panel(page, "Finished requests").inner_text())
        assert panel(page, "Steps").locator("path.verify").count() == 3
        shapes = panel(page, "Steps").locator("path.step.rows").get_attribute("d")
        assert re.match(r"M[\d.]+ [\d.]+H", shapes)  # the last second may have had one step


def test_latencies_of_before_the_view_was_opened_are_shown(browser: Browser, tiny_checkpoint: Path) -> None:
    from tests.page.browser import serving_model, visiting

    with serving_model(tiny_checkpoint, CONFIG) as url:
        ask(url)
        with visiting(browser, f"{url}/#live") as visit:
            is_live(visit.page)
            shown = panel(visit.page, "Time to first token").locator(".side")
            wait_for(visit.page, lambda: shown.inner_text().startswith("p95 "))
            row = panel(visit.page, "Latency").locator("tr", has_text="time to first token")
            assert row.locator("td").last.inner_text() == "4"


def test_speculation_is_folded_until_it_is_opened_and_that_is_remembered(browser: Browser, idle_url: str) -> None:
    from tests.page.browser import visiting

    with visiting(browser, f"{idle_url}/#live") as visit:
        page = visit.page
        is_live(page)
        chart = panel(page, "Draft token flow")
        for is_open in (True, False):
            assert chart.is_visible() != is_open
            page.get_by_text("Speculation", exact=True).click()
            assert chart.is_visible() == is_open
            page.wait_for_timeout(100)  # the browser tells of a toggle a moment later
            page.reload()
            is_live(page)
            assert chart.is_visible() == is_open


def scraped(url: str) -> dict[str, float]:
    """By name, with the labels other than model and engine."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = (re.fullmatch(r"(\w+)\{(.*?)\} (\S+)", line) for line in lines if not line.startswith("#"))
    return {
        each[1] + "{" + re.sub(r'(model_name|engine)="[^"]*",?', "", each[2]).rstrip(",") + "}": float(each[3])
        for each in found
        if each
    }


def test_every_chart_has_words_and_a_table(browser: Browser, url: str) -> None:
    from tests.page.browser import visiting

    with visiting(browser, f"{url}/#live") as visit:
        page = visit.page
        is_live(page)
        ask(url, 1)
        page.wait_for_timeout(1200)
        page.get_by_text("Speculation", exact=True).click()
        for svg in page.locator("svg.chart").all():
            label = svg.get_attribute("aria-label") or ""
            assert re.fullmatch(r"\S.*: \S.*", label), label
        summaries = page.locator(".as-table summary")
        for at in range(summaries.count()):
            summaries.nth(at).press("Enter")
        page.wait_for_timeout(300)
        for table in page.locator("table").all():
            assert table.locator("thead th").count() >= 1
        assert page.locator(".unseen[aria-live=polite]").inner_text().startswith("0 running")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 900), (390, 844)])
def test_axe_finds_nothing_serious_and_nothing_is_wider_than_the_screen(
    browser: Browser, idle_url: str, size: tuple[int, int], scheme: str
) -> None:
    from tests.page.browser import visiting

    with visiting(browser, f"{idle_url}/#live", size=size, scheme=scheme, for_axe=True) as visit:
        is_live(visit.page)
        visit.page.wait_for_timeout(1200)
        visit.page.locator(".as-table summary").first.click()
        assert visit.axe() == []
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_the_keyboard_looks_back_and_holds(browser: Browser, idle_url: str) -> None:
    from tests.page.browser import visiting

    with visiting(browser, f"{idle_url}/#live") as visit:
        page = visit.page
        is_live(page)
        slider = page.get_by_role("slider", name="Time shown")
        slider.focus()
        for _ in range(3):
            page.keyboard.press("ArrowLeft")
        assert slider.get_attribute("aria-valuetext") == page.locator(".clock").inner_text() == "3 s ago"
        page.keyboard.press("Escape")
        assert page.locator(".clock").inner_text() == "now"
        hold = page.get_by_role("button", name="Hold")
        hold.press("Enter")
        assert hold.get_attribute("aria-pressed") == "true"
        up = page.locator(".facts").inner_text()
        page.wait_for_timeout(1500)
        assert page.locator(".facts").inner_text() == up
        hold.press("Enter")
        page.locator(".facts").filter(has_not_text=up).wait_for()


def test_the_feed_is_read_only_while_the_view_is_seen(browser: Browser, idle_url: str) -> None:
    from tests.page.browser import visiting

    def viewers() -> int:
        return int(visit.page.evaluate("performance.getEntriesByName(new URL('live', location.href).href).length"))

    with visiting(browser, f"{idle_url}/#live") as visit:
        is_live(visit.page)
        visit.page.get_by_role("link", name="Chat").click()
        visit.page.locator(".link[data-kind=paused]").wait_for(state="attached")
        assert viewers() == 1
        visit.page.get_by_role("link", name="Live").click()
        is_live(visit.page)


def test_a_lost_connection_is_reported_and_made_again(browser: Browser) -> None:
    from tests.page.browser import visiting

    with serving(FakeEngine()) as url, visiting(browser, url) as visit:
        page = visit.page
        asked: list[float] = []

        def fail_twice(route: Route) -> None:
            asked.append(page.evaluate("performance.now()"))
            if len(asked) < 3:
                route.fulfill(status=200, content_type="text/event-stream", body='data: {"end":"closing"}\n\n')
            else:
                route.continue_()

        page.route("**/live", fail_twice)
        page.get_by_role("link", name="Live").click()
        page.get_by_text("The server has ended; trying again in 1 s").wait_for()
        page.get_by_text("The server has ended; trying again in 2 s").wait_for()
        is_live(page)
        first, second, third = asked
        assert 800 < second - first < 2500
        assert 1650 < third - second < 4000


def test_the_view_asks_for_the_key_and_says_when_it_is_off(browser: Browser) -> None:
    from tests.page.browser import visiting

    with serving(FakeEngine(), settings(api_keys=("secret",))) as url, visiting(browser, url) as visit:
        page = visit.page
        visit.problems.clear()
        page.goto(f"{url}/#live")
        page.get_by_label("API key", exact=True).fill("secret")
        page.get_by_role("button", name="Use this key").click()
        is_live(page)
        visit.problems[:] = [each for each in visit.problems if "401" not in each]


def test_the_view_lives_through_the_loading_of_the_model(browser: Browser) -> None:
    from tests.page.browser import visiting

    engine = FakeEngine()
    engine.loaded, engine.state = False, EngineState.LOADING
    with serving(engine) as url, visiting(browser, f"{url}/#live") as visit:
        is_live(visit.page)
        visit.page.get_by_text("engine loading").wait_for()
        engine.loaded, engine.state = True, EngineState.READY
        visit.page.get_by_text("4,096 KV tokens").wait_for()
        visit.problems[:] = [each for each in visit.problems if "503" not in each]  # of /ready and /v1/models
