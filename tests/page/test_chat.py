"""The chat in a browser: what one types, sees and stops."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from faser.errors import OverloadError
from faser.types import EngineState
from tests.api.server import serving, settings, until
from tests.fake_engine import FakeEngine, saying

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ANSWER = "# Planets\n\nHere is **one**: `mars`.\n\n```python\nprint('<b>mars</b>')\n```\n\n- a\n- b\n"


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture(scope="module")
def url(engine: FakeEngine) -> Iterator[str]:
    with serving(engine, settings(api_keys=())) as url:
        yield url


@pytest.fixture(autouse=True)
def fresh(engine: FakeEngine) -> None:
    engine.reset(saying(ANSWER, tokens_per_step=3))


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def answered(page: Page, number: int = 1) -> Any:
    """The turn of the answer with this number, once it is complete."""
    turn = page.locator(".turn.assistant").nth(number - 1)
    turn.and_(page.locator("[aria-busy=false]")).wait_for()
    return turn


def test_an_answer_streams_and_is_shown_as_markdown(browser: Browser, url: str, engine: FakeEngine) -> None:
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        ask(visit.page, "hi")
        turn = answered(visit.page)
        assert turn.locator("h3").inner_text() == "Planets"
        assert turn.locator("strong").inner_text() == "one"
        assert turn.locator("pre code").inner_text() == "print('<b>mars</b>')"
        assert turn.locator("li").all_inner_texts() == ["a", "b"]
        assert re.search(rf"{len(ANSWER)} tokens", turn.locator(".numbers").inner_text())
        ask(visit.page, "again")
        answered(visit.page, 2)
    # Both turns are in the second request, and a salt of the tab that does not change.
    first, second = engine.requests
    assert first.cache_salt == second.cache_salt is not None
    assert len(second.prompt_token_ids) > len(first.prompt_token_ids) + len(ANSWER)


def test_stop_ends_the_answer_and_frees_the_engine(browser: Browser, url: str, engine: FakeEngine) -> None:
    from tests.page.browser import visiting

    engine.script = saying("word " * 2000, tokens_per_step=1)
    engine.step_s = 0.01
    with visiting(browser, url) as visit:
        for how in ("button", "Escape"):
            engine.aborted.clear()
            ask(visit.page, "talk")
            number = 1 if how == "button" else 2
            visit.page.locator(".turn.assistant").nth(number - 1).get_by_text("word").wait_for()
            if how == "button":
                visit.page.get_by_role("button", name="Stop").click()
            else:
                visit.page.keyboard.press("Escape")
            answered(visit.page, number)
            until(lambda: len(engine.aborted) == 1)
            visit.page.get_by_role("button", name="Send").wait_for()


def test_the_fields_make_the_request(browser: Browser, url: str, engine: FakeEngine) -> None:
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        page = visit.page
        for label, value in (("Temperature", "0.5"), ("Top k", "7"), ("Seed", "3"), ("Max tokens", "9")):
            page.get_by_label(label).fill(value)
        page.get_by_label("Stop at").fill("END\nSTOP")
        page.get_by_label("Most drafted").fill("2")
        ask(page, "hi")
        answered(page)
        page.get_by_label("Drafts").select_option("off")
        page.get_by_role("button", name="Regenerate").click()
        answered(page)
        page.get_by_role("button", name="Export").click()
        shown = page.locator("dialog.export pre")
        assert "-d '{" in shown.inner_text()
        page.get_by_label("Python").check()
        assert "extra_body=" in shown.inner_text()
        compile(shown.inner_text(), "<exported>", "exec")
    first, second = engine.requests
    sampling = first.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.max_tokens) == (0.5, 7, 3, 9)
    assert sampling.stop == ("END", "STOP")
    assert (first.speculation.max_tokens, first.speculation.trace) == (2, True)
    assert (second.speculation.enabled, second.prompt_token_ids) == (False, first.prompt_token_ids)


def test_edit_takes_a_question_back_and_clear_forgets_all(browser: Browser, url: str, engine: FakeEngine) -> None:
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        page = visit.page
        ask(page, "first")
        answered(page)
        page.get_by_role("button", name="Edit").click()
        assert page.locator(".turn").count() == 0
        assert page.get_by_label("Message", exact=True).input_value() == "first"
        ask(page, "second")
        answered(page)
        page.get_by_role("button", name="Clear").click()
        assert page.locator(".turn").count() == 0
        ask(page, "third")
        answered(page)
    assert len(engine.requests[2].prompt_token_ids) == len(engine.requests[0].prompt_token_ids)


def test_errors_are_shown_in_words_and_can_be_tried_again(browser: Browser, url: str, engine: FakeEngine) -> None:
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        page = visit.page
        engine.refusals = [OverloadError("the queue is full", retry_after_s=7)]
        ask(page, "hi")
        problem = page.get_by_role("alert").filter(has_text="queue")
        assert "Try again in 7 s." in problem.inner_text()
        page.get_by_role("button", name="Try again").click()
        answered(page)
        assert page.locator(".turn").count() == 2
        page.get_by_label("Temperature").fill("9")
        ask(page, "hi")
        page.get_by_text("temperature is 9").wait_for()
        page.get_by_label("Temperature").fill("")
        engine.state = EngineState.LOADING
        page.get_by_role("button", name="Try again").click()
        page.get_by_text("the engine is loading").wait_for()
        visit.problems = [each for each in visit.problems if "Failed to load resource" not in each]


def test_a_server_with_keys_is_asked_once_and_the_key_is_kept_for_the_tab(browser: Browser) -> None:
    from tests.page.browser import visiting

    engine = FakeEngine(saying("Hello!"))
    with serving(engine, settings(api_keys=("right",))) as url, visiting(browser, url) as visit:
        page = visit.page
        page.get_by_label("API key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("does not know that key").wait_for()
        page.get_by_label("API key", exact=True).fill("right")
        page.keyboard.press("Enter")
        page.locator("#model").get_by_text("tiny").wait_for()
        ask(page, "hi")
        answered(page)
        page.reload()
        page.locator("#model").get_by_text("tiny").wait_for()
        assert page.evaluate("Object.values(localStorage).includes('right')") is False
        assert "right" not in page.content()
        visit.problems = [each for each in visit.problems if "401" not in each]
    assert len(engine.requests) == 1


def test_who_declines_to_give_a_key_is_left_alone(browser: Browser) -> None:
    from tests.page.browser import visiting

    with serving(FakeEngine(), settings(api_keys=("right",))) as url, visiting(browser, url) as visit:
        page = visit.page
        page.get_by_role("button", name="Cancel").click()
        page.wait_for_timeout(5500)  # the page asks from time to time whether the server is ready
        assert not page.locator("#ask-key").is_visible()
        page.get_by_role("button", name="API key").click()
        page.get_by_label("API key", exact=True).fill("right")
        page.keyboard.press("Enter")
        page.locator("#model").get_by_text("tiny").wait_for()
        visit.problems = [each for each in visit.problems if "401" not in each]


def test_reasoning_is_folded_away(browser: Browser, url: str) -> None:
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        shown = visit.page.evaluate(
            """async () => {
              const { AnswerTurn } = await import("/page/chat/turns.js");
              const turn = new AnswerTurn({ xray: false, actions: [] });
              document.querySelector(".turns").append(turn.element);
              for (const reasoning_content of ["Let me ", "think."])
                turn.take({ choices: [{ delta: { reasoning_content } }] });
              turn.take({ choices: [{ delta: { content: "Yes." }, finish_reason: "stop" }] });
              turn.end();
              const fold = turn.element.querySelector("details");
              const thought = fold.lastChild.textContent;
              return [fold.open, fold.hidden, thought, turn.prose.textContent, turn.message.content];
            }"""
        )
    assert shown == [False, False, "Let me think.", "Yes.", "Yes."]


def test_tool_calls_are_shown_and_take_results(browser: Browser, engine: FakeEngine) -> None:
    from tests.page.browser import visiting

    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    engine = FakeEngine(saying(call, tokens_per_step=4))
    template = "{{ messages }}{% if tools %}{{ tools }}<tool_call>{% endif %}"
    chosen = settings(chat_template=template)
    with serving(engine, chosen) as url, visiting(browser, url) as visit:
        page = visit.page
        page.get_by_text("Tools", exact=True).click()
        page.get_by_label("Offer these tools").check()
        ask(page, "weather in Oslo?")
        turn = answered(page)
        assert turn.locator(".call-name").inner_text() == "get_weather"
        assert '"Oslo"' in turn.locator(".call pre").inner_text()
        engine.script = saying("It is cold.")
        page.get_by_label("Result of get_weather").fill('{"degrees": -4}')
        page.get_by_role("button", name="Send results").click()
        assert "It is cold." in answered(page, 2).inner_text()
    assert len(engine.requests) == 2


def test_it_works_without_a_mouse(browser: Browser, url: str) -> None:
    """Every control is reached by Tab and has a visible focus."""
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        page = visit.page
        page.get_by_label("Message", exact=True).wait_for()
        page.keyboard.type("hi")
        page.keyboard.press("Enter")
        answered(page)
        page.evaluate("document.activeElement.blur()")
        reached, outlined = [], True
        for _ in range(40):
            page.keyboard.press("Tab")
            name, style = page.evaluate(
                "[document.activeElement === document.body ? 'BODY' : document.activeElement.innerText ||"
                " document.activeElement.id || document.activeElement.tagName,"
                " getComputedStyle(document.activeElement).outlineStyle]"
            )
            reached.append(name)
            outlined &= style != "none" or name == "BODY"  # after the last control
        for control in ("Skip to the view", "Chat", "Live", "Copy", "Edit", "ask", "X-ray", "Regenerate", "Send"):
            assert control in reached, (control, reached)
        assert outlined, reached
        page.get_by_role("button", name="X-ray").focus()
        page.keyboard.press("Space")
        assert page.get_by_role("button", name="X-ray").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["DESK", "PHONE"])
def test_axe_finds_nothing_serious(browser: Browser, url: str, size: str, scheme: str) -> None:
    from tests.page import browser as pages

    with pages.visiting(browser, url, size=getattr(pages, size), scheme=scheme, for_axe=True) as visit:
        assert visit.axe() == []
        ask(visit.page, "hi")
        answered(visit.page)
        assert visit.axe() == []
        visit.page.get_by_role("button", name="X-ray").click()
        assert visit.axe() == []


def test_a_phone_scrolls_in_one_direction_only(browser: Browser, url: str, engine: FakeEngine) -> None:
    from tests.page.browser import PHONE, visiting

    engine.script = saying(
        "| a | b |\n|---|---|\n" + f"| {'wide ' * 40}| {'x' * 90} |\n" + "y" * 300, tokens_per_step=9
    )
    with visiting(browser, url, size=PHONE) as visit:
        for opened in (False, True):
            if opened:
                visit.page.get_by_text("Settings", exact=True).click()
            ask(visit.page, "z" * 200)
            answered(visit.page, 1 + opened)
            wide = visit.page.evaluate("document.documentElement.scrollWidth")
            assert wide <= PHONE[0], wide


def test_the_theme_is_chosen_and_remembered(browser: Browser, url: str) -> None:
    from tests.page.browser import visiting

    with visiting(browser, url, scheme="dark") as visit:
        page = visit.page

        def paper() -> Any:
            return page.evaluate("getComputedStyle(document.body).backgroundColor")

        dark = paper()
        page.get_by_role("button", name="Theme").click()
        light = paper()
        assert light != dark
        page.reload()
        assert paper() == light


def test_ten_thousand_tokens_do_not_stall_the_page(browser: Browser, url: str, engine: FakeEngine) -> None:
    """The longest time for which the page answers nothing stays short, in each kind of block."""
    from tests.page.browser import visiting

    kinds = ("word " * 2000, "- item\n" * 1400, "```\n" + "x = 1\n" * 1600, "**b** `c` _d_ " * 700)
    with visiting(browser, url) as visit:
        page = visit.page
        page.evaluate(
            """() => { window.longest = 0; let last = performance.now();
            const tick = () => { const now = performance.now(); longest = Math.max(longest, now - last);
            last = now; setTimeout(tick, 0); }; tick(); }"""
        )
        for text in kinds:
            engine.script = saying(text, tokens_per_step=8)
            ask(page, "go")
            answered(page)
            assert len(page.locator(".prose").inner_text()) > 0.4 * len(text)
            page.get_by_role("button", name="Clear").click()
        assert page.evaluate("longest") < 1500  # milliseconds, on a machine that does other things as well


def test_the_page_is_shown_below_a_proxys_path(browser: Browser) -> None:
    from faser.config.server import ServerConfig
    from tests.page.browser import visiting

    config = ServerConfig(root_path="/llm", disable_uvicorn_access_log=True)
    with serving(FakeEngine(saying("Hello!")), config=config) as url, visiting(browser, f"{url}/llm") as visit:
        ask(visit.page, "hi")
        assert "Hello!" in answered(visit.page).inner_text()
