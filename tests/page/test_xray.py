"""X-ray in a browser, against a server with a real engine: its colours are the server's counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.api.test_with_engine import CONFIG, scrape
from tests.page.test_chat import answered, ask

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DRAFTING = replace(
    CONFIG,
    num_threads=1,
    speculative_config={"method": "suffix", "num_speculative_tokens": 4, "policy": "fixed"},
)


@pytest.fixture(scope="module")
def url(tiny_checkpoint: Path) -> Iterator[str]:
    from tests.page.browser import serving_model

    with serving_model(tiny_checkpoint, DRAFTING) as url:
        yield url


def test_colours_are_the_servers_counts(browser: Browser, url: str) -> None:
    from tests.page.browser import visiting

    before = scrape(httpx.get(f"{url}/metrics").text)
    with visiting(browser, url) as visit:
        page = visit.page
        page.get_by_role("button", name="X-ray").click()
        page.get_by_label("Max tokens").fill("60")
        page.get_by_label("Temperature").fill("0")
        for number in (1, 2):  # the second time there is a past answer to draft from
            if number == 2:
                page.get_by_role("button", name="Regenerate").click()
            else:
                ask(page, "hello hello hello hello")
            turn = answered(page)
            legend = turn.locator(".legend li").evaluate_all(
                "(all) => all.map((each) => [each.dataset.origin, Number(each.dataset.count)])"
            )
            classes = turn.locator(".tokens .token").evaluate_all("(all) => all.map((each) => each.className)")
            shown = Counter(each.removeprefix("token ").removesuffix(" break") for each in classes)
            # A token without visible text has no element, so elements are at most as many as tokens.
            counts = dict(legend)
            for origin, count in counts.items():
                name = origin.replace("accepted ", "accepted by-")
                assert shown[name] <= count
            after = scrape(httpx.get(f"{url}/metrics").text)
            gained = {name: after[name] - before[name] for name in after if name.startswith("faser_spec_")}
            before = after
            accepted = sum(count for origin, count in counts.items() if origin.startswith("accepted"))
            assert sum(counts.values()) == 60
            assert accepted == gained["faser_spec_accepted_tokens_total"] or number == 2
            words = turn.locator("figcaption").inner_text()
            numbers = (gained["faser_spec_accepted_tokens_total"], gained["faser_spec_verified_tokens_total"])
            assert f"{numbers[0]:.0f} of {numbers[1]:.0f} draft tokens accepted" in words
            assert "60 tokens" in turn.locator(".numbers").inner_text()
        assert accepted > 20
        # Off and on again shows the same; an untraced answer says so.
        page.get_by_role("button", name="X-ray").click()
        assert not turn.locator(".tokens").is_visible()
        page.get_by_role("button", name="X-ray").click()
        assert turn.locator(".tokens").is_visible()
        page.get_by_text("Speculation", exact=True).click()
        page.get_by_label("Trace tokens, for X-ray").uncheck()
        page.get_by_role("button", name="Regenerate").click()
        assert "has no trace" in answered(page).inner_text()


def test_each_origin_has_a_sign_besides_its_colour(browser: Browser, url: str) -> None:
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        page = visit.page
        page.get_by_role("button", name="X-ray").click()
        page.get_by_label("Max tokens").fill("50")
        ask(page, "hello hello hello hello")
        answered(page)
        styles = page.evaluate(
            """() => Object.fromEntries(["accepted", "corrected", "bonus", "plain"].map((origin) => {
              const probe = document.createElement("span");
              probe.className = `token ${origin}`;
              document.querySelector(".tokens").append(probe);
              const style = getComputedStyle(probe);
              return [origin, style.textDecorationLine + " " + style.textDecorationStyle];
            }))"""
        )
        assert len(set(styles.values())) == 4
        assert page.locator(".tokens .token[title]").count() > 0
        assert page.locator(".gamma svg[role=img]").get_attribute("aria-label")
