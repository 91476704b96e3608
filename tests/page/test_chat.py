"""The chat in a browser: what one types, sees and stops."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from faser.errors import OverloadError
from faser.types.engine import EngineState
from tests.api.server import serving, settings
from tests.fake_engine import FakeEngine, saying
from tests.waiting import until

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
        page.get_by_label("Stop sequences").fill("END\nSTOP")
        page.get_by_text("Speculation", exact=True).click()
        page.get_by_label("Max draft tokens").fill("2")
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


def test_edit_takes_a_question_back_and_a_new_chat_begins_without_turns(
    browser: Browser, url: str, engine: FakeEngine
) -> None:
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
        page.get_by_role("button", name="New chat").click()
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
        page.get_by_text("rejected that key").wait_for()
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
                visit.page.get_by_text("Chats and settings", exact=True).click()
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
            page.get_by_role("button", name="New chat").click()
        assert page.evaluate("longest") < 1500  # milliseconds, on a machine that does other things as well


def test_the_page_is_shown_below_a_proxys_path(browser: Browser) -> None:
    from faser.config.server import ServerConfig
    from tests.page.browser import visiting

    config = ServerConfig(root_path="/llm", disable_uvicorn_access_log=True)
    with serving(FakeEngine(saying("Hello!")), config=config) as url, visiting(browser, f"{url}/llm") as visit:
        ask(visit.page, "hi")
        assert "Hello!" in answered(visit.page).inner_text()


def test_a_conversation_goes_on_after_a_reload(browser: Browser, url: str, engine: FakeEngine) -> None:
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        page = visit.page
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_label("Max tokens").fill("400")
        for number in (1, 2):
            ask(page, f"question {number}")
            answered(page, number)
        before = page.locator(".turns").inner_html()
        page.reload()
        answered(page, 2)
        assert page.locator(".turns").inner_html() == before
        assert page.get_by_label("System prompt").input_value() == "Be brief."
        ask(page, "question 3")
        answered(page, 3)
        page.get_by_role("button", name="X-ray").click()
        assert "page was reloaded" in page.locator(".turn.assistant").first.inner_text()
    # The server sees one conversation: the same salt, and each request begins with the one before.
    first, second, third = engine.requests
    assert first.cache_salt == second.cache_salt == third.cache_salt is not None
    text = third.prompt_token_ids
    assert len(text) - len(second.prompt_token_ids) == len(second.prompt_token_ids) - len(first.prompt_token_ids)
    assert third.sampling.max_tokens == 400


def test_a_reload_amid_an_answer_keeps_what_has_come(browser: Browser, url: str, engine: FakeEngine) -> None:
    from tests.page.browser import visiting

    engine.script = saying("word " * 2000, tokens_per_step=1)
    engine.step_s = 0.01
    with visiting(browser, url) as visit:
        ask(visit.page, "talk")
        visit.page.locator(".turn.assistant").get_by_text("word word").wait_for()
        visit.page.reload()
        turn = answered(visit.page)
        assert "word word" in turn.inner_text()
        assert turn.locator(".ending").inner_text() == "Interrupted"
        until(lambda: len(engine.aborted) == 1)


def test_conversations_are_listed_opened_and_deleted(browser: Browser, url: str, engine: FakeEngine) -> None:
    from tests.page.browser import visiting

    def stored() -> str:
        return str(page.evaluate("JSON.stringify(localStorage)"))

    with visiting(browser, url) as visit:
        page = visit.page
        kept = page.locator(".kept li")
        for number, name in enumerate(("apples", "pears"), 1):
            ask(page, name)
            answered(page)
            page.get_by_role("button", name="New chat").click()
            assert kept.count() == number
        page.get_by_role("button", name="apples", exact=True).click()
        assert page.locator(".turn.user .said").all_inner_texts() == ["apples"]
        ask(page, "more")
        answered(page, 2)
        first, second, third = engine.requests
        assert first.cache_salt == third.cache_salt != second.cache_salt
        salts = page.evaluate(
            "Object.values(localStorage).filter((each) => each[0] === '{').map((each) => JSON.parse(each).salt)"
        )
        assert len(set(salts)) == 2
        page.get_by_role("button", name="Delete pears").click()
        assert page.locator(".turn").count() == 4  # the one that is shown stays
        assert "pears" not in stored()
        assert sum(each in stored() for each in salts) == 1  # its salt is gone with it
        page.get_by_role("button", name="Delete apples").click()
        assert page.locator(".turn").count() == 0
        assert "apples" not in stored()
        page.reload()
        page.get_by_text("How can I help?").wait_for()
        assert kept.count() == 0


def test_a_deleted_conversation_is_gone_from_other_tabs_too(browser: Browser, url: str) -> None:
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        page = visit.page
        ask(page, "apples")
        answered(page)
        other = page.context.new_page()
        other.goto(url)
        other.get_by_text("How can I help?").wait_for()  # a new tab begins a conversation
        other.get_by_role("button", name="Delete apples").click()
        page.get_by_text("How can I help?").wait_for()
        page.reload()
        page.get_by_text("How can I help?").wait_for()
        assert page.evaluate("Object.keys(localStorage).filter((each) => each.startsWith('faser-chat'))") == []


def test_who_wants_nothing_kept_leaves_nothing(browser: Browser, url: str) -> None:
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        page = visit.page
        asked: list[str] = []

        def accept(dialog: Any) -> None:
            asked.append(dialog.message)
            dialog.accept()

        page.on("dialog", accept)
        ask(page, "apples")
        answered(page)
        page.get_by_label("Keep in this browser").uncheck()
        assert asked == ["Delete 1 conversation from this browser?"]
        ask(page, "pears")
        answered(page, 2)
        found = page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})")
        assert "apples" not in found
        assert "pears" not in found
        page.reload()
        page.get_by_text("How can I help?").wait_for()
        assert not page.get_by_label("Keep in this browser").is_checked()
        assert page.get_by_text("is lost when you close or reload it").is_visible()
        page.get_by_label("Keep in this browser").check()
        assert page.get_by_text("until you delete them").is_visible()
        ask(page, "plums")
        answered(page)
        page.get_by_role("button", name="Delete all").click()
        assert page.locator(".turn").count() == 0
        assert "plums" not in page.evaluate("JSON.stringify(localStorage)")


def test_a_conversation_that_the_browser_cannot_keep_is_reported(browser: Browser, url: str) -> None:
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        page = visit.page
        page.evaluate(
            "() => { try { for (let at = 0; ; at += 1) localStorage.setItem(`x${at}`, 'x'.repeat(100000)); }"
            " catch { try { for (let at = 0; ; at += 1) localStorage.setItem(`y${at}`, 'x'.repeat(100)); }"
            " catch { /* full */ } } }"
        )
        ask(page, "apples " * 40)
        answered(page)
        page.get_by_text("does not keep this conversation (QuotaExceededError)").wait_for()
        page.evaluate(
            "for (const key of Object.keys(localStorage)) if (/^[xy]/.test(key)) localStorage.removeItem(key)"
        )
        ask(page, "pears")
        answered(page, 2)
        assert page.get_by_text("does not keep this conversation").count() == 0
        page.reload()
        answered(page, 2)


def test_an_answer_that_is_not_complete_says_so(browser: Browser, url: str, engine: FakeEngine) -> None:
    from tests.page.browser import visiting

    def ending(number: int) -> Any:
        return answered(page, number).locator(".ending")

    with visiting(browser, url) as visit:
        page = visit.page
        ask(page, "hi")
        assert not ending(1).is_visible()
        page.get_by_label("Max tokens").fill("3")
        ask(page, "hi")
        assert ending(2).inner_text() == "Cut off at max tokens"
        page.get_by_label("Max tokens").fill("")
        engine.script = saying("word " * 2000, tokens_per_step=1)
        engine.step_s = 0.01
        ask(page, "talk")
        page.locator(".turn.assistant").nth(2).get_by_text("word").wait_for()
        page.keyboard.press("Escape")
        assert ending(3).inner_text() == "Stopped"
        engine.step_s = 1.0  # before the first token
        ask(page, "talk")
        page.get_by_text("waiting for the first token").wait_for()
        page.keyboard.press("Escape")
        assert ending(4).inner_text() == "Stopped"
        assert page.get_by_text("waiting for the first token").count() == 0
        page.reload()
        assert ending(3).inner_text() == "Stopped"
        assert not ending(1).is_visible()
        assert ending(2).inner_text() == "Cut off at max tokens"


@pytest.mark.parametrize("is_secure", [True, False])
def test_a_block_of_code_is_copied(browser: Browser, url: str, is_secure: bool) -> None:
    """Also where the page has no clipboard of its own: over HTTP from another machine."""
    from tests.page.browser import visiting

    with visiting(browser, url) as visit:
        page = visit.page
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.evaluate("navigator.clipboard.writeText('before')")
        if not is_secure:
            page.evaluate("Object.defineProperty(navigator.clipboard, 'writeText', { value: undefined })")
        ask(page, "hi")
        block = answered(page).locator(".code-block")
        assert block.locator(".code-head span").inner_text() == "python"
        assert block.locator(".code-call").inner_text() == "print"
        assert block.locator(".code-string").inner_text() == "'<b>mars</b>'"
        block.get_by_role("button", name="Copy code").click()
        block.get_by_text("Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == "print('<b>mars</b>')"


def test_the_page_says_that_the_default_model_is_a_small_one(browser: Browser) -> None:
    from faser.engine.checkpoints.source import SMOLLM2_ID
    from tests.page.browser import visiting

    for model, is_shown in ((SMOLLM2_ID, True), ("some/other", False)):
        with serving(FakeEngine(), replace(settings(), model=model)) as url, visiting(browser, url) as visit:
            visit.page.locator("#model").get_by_text("tiny").wait_for()
            assert visit.page.get_by_text("tiny is a small model to try the server with").is_visible() == is_shown
