"""Takes the pictures of the page that the docs show, in Chromium, from a server with the default model.

    faser serve --port 8001 &
    python -m benchmarks serving.page_pictures http://127.0.0.1:8001 docs/images

A chat with X-ray first; then the live view after two minutes of load. For each size and scheme it prints the share
of a core that the live view takes, as Chromium counts it: all tasks of its main thread, and scripts alone. What a
console says is printed, too. Needs `pip install playwright`, and Chromium (Debian: `apt install chromium`).
"""

import asyncio
import itertools
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from playwright.sync_api import sync_playwright

from benchmarks.runner import command_line

_CHAT = (
    "Write a Python function that adds two numbers, then one that multiplies two numbers.",
    "Now the same for subtraction and division.",
)
_LOAD = (
    "Write a short story about a lighthouse keeper.",
    "Explain how photosynthesis works, step by step.",
    "List the numbers from one to forty in words, one per line.",
    "Write a Python function that sorts a list, then show it again with comments.",
    "Repeat this sentence ten times: The quick brown fox jumps over the lazy dog.",
    "Give me a JSON array with twenty objects that have name and age.",
)
_SCHEMES = ("light", "dark")
_CHAT_SIZES = {"desk": (1280, 860, 1), "phone": (390, 844, 2)}  # pixels, and of the screen for each
_LIVE_SIZES = {"desk": (1360, 1180, 1), "phone": (390, 1500, 1)}
_CLIENTS, _SECONDS = 6, 130  # the live view shows two minutes
_WAIT_MS = 120_000


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for (kind, size), scheme in itertools.product(_CHAT_SIZES.items(), _SCHEMES):
            with _page(browser, f"{kind}-{scheme}", size, scheme) as page:
                _chat(page, arguments.url, arguments.folder, f"{kind}-{scheme}")
        with ExitStack() as pages:
            live = {
                f"{kind}-{scheme}": pages.enter_context(_page(browser, f"{kind}-{scheme}", size, scheme))
                for (kind, size), scheme in itertools.product(_LIVE_SIZES.items(), _SCHEMES)
            }
            _live(live, arguments.url, arguments.folder)
        browser.close()


@contextmanager
def _page(browser: Any, name: str, size: tuple[int, int, int], scheme: str) -> Iterator[Any]:
    width, height, scale = size
    viewport = {"width": width, "height": height}
    context = browser.new_context(viewport=viewport, color_scheme=scheme, device_scale_factor=scale)
    page = context.new_page()
    page.on("console", lambda message: print(f"{name}: console: {message.text}"))
    page.on("pageerror", lambda error: print(f"{name}: error: {error}"))
    yield page
    context.close()


def _chat(page: Any, url: str, folder: Path, name: str) -> None:
    page.goto(url)
    page.get_by_text("ready", exact=True).first.wait_for(timeout=_WAIT_MS)
    narrow = name.startswith("phone")
    if narrow:
        page.get_by_text("Chats and settings", exact=True).click()
    page.get_by_label("Max tokens").fill("220")
    page.get_by_label("Temperature").fill("0")
    if narrow:
        page.get_by_text("Chats and settings", exact=True).click()
    for turn, question in enumerate(_CHAT):
        page.get_by_label("Message", exact=True).fill(question)
        page.get_by_role("button", name="Send").click()
        answers = page.locator(".turn.assistant").nth(turn)
        answers.and_(page.locator("[aria-busy=false]")).wait_for(timeout=_WAIT_MS)
        if turn == 0:
            if name == "desk-light":
                page.wait_for_timeout(400)
                page.screenshot(path=folder / "chat-desk-light.png")
            page.get_by_role("button", name="X-ray").click()
    page.wait_for_timeout(400)
    page.screenshot(path=folder / f"xray-{name}.png")


def _live(pages: dict[str, Any], url: str, folder: Path) -> None:
    load = threading.Thread(target=lambda: asyncio.run(_clients(url)))
    load.start()
    sessions = {}
    for name, page in pages.items():
        page.goto(f"{url}/#live")
        page.get_by_text("Speculation", exact=True).click()
        sessions[name] = page.context.new_cdp_session(page)
        sessions[name].send("Performance.enable")
    any_page = next(iter(pages.values()))
    any_page.wait_for_timeout(500 * _SECONDS)
    before = {name: _counters(session) for name, session in sessions.items()}
    any_page.wait_for_timeout(500 * _SECONDS - 5000)
    for name, page in pages.items():
        after = _counters(sessions[name])
        spent = {key: after[key] - before[name][key] for key in ("TaskDuration", "ScriptDuration", "Timestamp")}
        tasks, scripts = (100 * spent[key] / spent["Timestamp"] for key in ("TaskDuration", "ScriptDuration"))
        print(f"live view, {name}: {tasks:.1f} % of a core, scripts {scripts:.1f} %")
        page.screenshot(path=folder / f"live-{name}.png")
    load.join()


def _counters(session: Any) -> dict[str, float]:
    return {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}


async def _clients(url: str) -> None:
    end_s = time.monotonic() + _SECONDS

    async def client(http: httpx.AsyncClient, first: int) -> None:
        for turn in itertools.count(first):
            if time.monotonic() > end_s:
                return
            body = {
                "messages": [{"role": "user", "content": _LOAD[turn % len(_LOAD)]}],
                "max_tokens": (48, 96, 160)[turn % 3],
                "temperature": 0.7 if turn % 3 == 2 else 0,
                "speculative": {"slo": {"ttft_ms": 900, "tpot_ms": (40, 80)[turn % 2]}},
            }
            (await http.post(f"{url}/v1/chat/completions", json=body)).raise_for_status()
            await asyncio.sleep(turn % 5 / 3)

    async with httpx.AsyncClient(timeout=_WAIT_MS / 1000) as http:
        await asyncio.gather(*(client(http, first) for first in range(_CLIENTS)))
