"""From the prompts of a body to token ids: which are refused, which are cut, in which portions they are read.

Where texts are worked on, by their length, and that memory goes back after a large one.
"""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from faser.api.requests.chat_template import ChatTemplate
from faser.api.requests.prompts import (
    LARGE_CHARS,
    TextWorker,
    TokenizationRules,
    TokenizedPrompt,
    count_chars,
    tokenize_prompts,
)
from faser.errors import RequestError
from tests.fake_engine import byte_tokenizer

_T = TypeVar("_T")
LIMIT = 4096


class CountingWorker(TextWorker):
    """Works at once, and notes how many characters each piece of work has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_chars: list[int] = []

    async def run(self, num_chars: int, work: Callable[[], _T]) -> _T:
        self.num_chars.append(num_chars)
        return work()


def tokenized(
    sources: list[str | list[int]], *, truncate: int | None = None, worker: TextWorker | None = None
) -> list[TokenizedPrompt]:
    rules = TokenizationRules(limit=LIMIT, add_special_tokens=False, truncate=truncate)
    return asyncio.run(tokenize_prompts(sources, byte_tokenizer(), rules, worker or CountingWorker()))


@pytest.mark.parametrize("prompt", ["x" * (LIMIT + 1), [7] * (LIMIT + 1)])
def test_a_prompt_over_the_context_is_refused_with_its_exact_length_where_that_is_cheap(
    prompt: str | list[int],
) -> None:
    with pytest.raises(RequestError, match=r"length is 4096 tokens. The prompt has 4097 tokens\.$"):
        tokenized([prompt])


def test_a_prompt_far_over_the_context_is_refused_untokenised() -> None:
    with pytest.raises(RequestError, match="The prompt has at least 142858 tokens"):
        tokenized(["x" * 1_000_000])


def test_a_long_text_is_cut_before_it_is_tokenised() -> None:
    text = "".join(f"{number} bottles " for number in range(1_000_000))
    (prompt,) = tokenized([text], truncate=40)
    assert bytes(prompt.token_ids).decode() == text[-40:]
    assert prompt.text == text  # which an echo repeats


@pytest.mark.parametrize("length", [39, 40, 41])
def test_cutting_keeps_the_last_tokens_or_all(length: int) -> None:
    text = "".join(chr(ord("a") + at % 26) for at in range(length))
    (prompt,) = tokenized([text], truncate=40)
    assert bytes(prompt.token_ids).decode() == text[-40:]


def test_prompts_are_read_in_portions_and_a_large_one_alone() -> None:
    worker = CountingWorker()
    part = "x" * (LARGE_CHARS // 4)
    sources: list[str | list[int]] = [*[part] * 9, "y" * 100_000, [1, 2, 3], "z"]
    prompts = tokenized(sources, truncate=5, worker=worker)
    assert [prompt.text for prompt in prompts] == [part] * 9 + ["y" * 100_000, None, "z"]
    assert worker.num_chars == [LARGE_CHARS, LARGE_CHARS, LARGE_CHARS // 4, 100_000, 1]


ROOT = Path(__file__).parents[3]


def thread_of(num_chars: int) -> str:
    async def run() -> str:
        return await TextWorker().run(num_chars, lambda: threading.current_thread().name)

    return asyncio.run(run())


def test_short_texts_stay_long_ones_leave_and_large_ones_share_a_thread() -> None:
    here = threading.current_thread().name
    assert thread_of(100) == here
    assert thread_of(LARGE_CHARS) != here
    assert thread_of(LARGE_CHARS + 1).startswith("faser-large-texts")


def test_large_texts_wait_for_each_other_and_nobody_else_waits() -> None:
    running, most = 0, 0

    def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        time.sleep(0.02)
        running -= 1

    async def scenario() -> None:
        worker = TextWorker()
        large = [asyncio.create_task(worker.run(LARGE_CHARS + 1, work)) for _ in range(5)]
        await asyncio.sleep(0)
        assert await worker.run(10, lambda: "short") == "short"
        assert await worker.run(LARGE_CHARS, lambda: "long") == "long"
        assert not large[-1].done()
        await asyncio.gather(*large)

    asyncio.run(scenario())
    assert most == 1


@pytest.mark.parametrize("num_chars", [1, LARGE_CHARS, LARGE_CHARS + 1])
def test_a_failure_reaches_the_caller(num_chars: int) -> None:
    def work() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        asyncio.run(TextWorker().run(num_chars, work))


def test_all_strings_are_counted_and_counting_ends_where_it_is_enough() -> None:
    assert count_chars(["abc", None, 7]) == 6
    assert count_chars([[{"content": "abc", "tool_calls": [{"x": "12345"}]}]]) > 8 + len("contenttool_callsx")
    began_s = time.thread_time()
    assert count_chars([[0] * 5_000_000]) > LARGE_CHARS
    assert time.thread_time() - began_s < 1


# A front-end over a fake engine, asked once; prints by how many MB its peak and its memory afterwards have grown.
_GROWTH = """
import asyncio, json, sys
from pathlib import Path
import httpx, psutil
from tests.api.server import MODEL, settings
from tests.fake_engine import FakeEngine
from faser.api.app import create_app
from faser.metrics.server import Metrics

route, body = sys.argv[1:]
content = body.replace("TEXT", "word " * 800_000).encode()
app = create_app(FakeEngine(), settings=settings(), metrics=Metrics(model_name=MODEL, max_model_len=4096))

async def main():
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        headers = {"content-type": "application/json"}
        await http.post(route, content=b'{"prompt": "warm"}', headers=headers)
        process = psutil.Process()
        before = process.memory_info().rss
        answer = await http.post(route, content=content, headers=headers)
        status = Path("/proc/self/status").read_text().split()
        peak = int(status[status.index("VmHWM:") + 1]) * 1024
        print(json.dumps([answer.status_code, (peak - before) / 1e6, (process.memory_info().rss - before) / 1e6]))

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "route, fields, status",
    [
        ("/tokenize", {"prompt": "TEXT"}, 400),
        ("/tokenize", {"prompt": "TEXT", "return_token_strs": True}, 400),
        ("/v1/completions", {"prompt": "TEXT"}, 400),
        ("/v1/completions", {"prompt": "TEXT", "truncate_prompt_tokens": 100}, 200),
        ("/v1/completions", {"prompt": "x", "prediction": {"type": "content", "content": "TEXT"}}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}, 400),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "TEXT"}], "truncate_prompt_tokens": 100},
            200,
        ),
    ],
)
@pytest.mark.full(but=("/v1/chat/completions-fields6-200",))
def test_a_long_text_costs_no_more_memory_than_a_few_copies_of_it(
    route: str, fields: dict[str, object], status: int
) -> None:
    """4 MB of words took 0.8 GB when all of it was tokenised."""
    done = subprocess.run(
        [sys.executable, "-c", _GROWTH, route, json.dumps(fields)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answered, peak_mb, kept_mb = json.loads(done.stdout)
    assert answered == status
    assert peak_mb < 100
    assert kept_mb < 50


def test_a_slow_chat_template_works_in_a_thread_and_goes_on_doing_so() -> None:
    """The event loop waits for it once, for a moment; quick templates of the server follow into threads."""
    loops = "{% for i in range(300) %}{% for j in range(300) %}{% endfor %}{% endfor %}done"
    slow, quick = (ChatTemplate(source, bos_token=None, eos_token=None) for source in (loops, "done"))
    names: list[str] = []

    def render(template: ChatTemplate) -> str:
        names.append(threading.current_thread().name)
        message = {"role": "user", "content": "Hello"}
        return template.render([message], add_generation_prompt=True, continue_final_message=False, extra={})

    async def serve() -> list[str]:
        worker = TextWorker()
        order = (quick, slow, quick, slow)
        return [await worker.run(5, partial(render, template)) for template in order]

    assert asyncio.run(serve()) == ["done"] * 4
    inline = threading.current_thread().name
    assert [name == inline for name in names] == [True, True, False, False, False]
