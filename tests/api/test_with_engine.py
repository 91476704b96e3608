"""The front-end on a real engine with a tiny model: what the fake engine promises holds."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from faser.api.app import create_app
from faser.config import EngineConfig
from faser.engine.async_engine import AsyncEngine
from faser.engine.tokenizer import load_tokenizer
from faser.metrics import Metrics
from tests.api.server import MODEL, settings

CONFIG = EngineConfig(dtype="float32", backend="torch", max_model_len=512, max_num_seqs=4, kv_cache_memory=1 << 20)


@asynccontextmanager
async def running(checkpoint: Path) -> AsyncIterator[tuple[AsyncEngine, httpx.AsyncClient]]:
    metrics = Metrics(model_name=MODEL, max_model_len=512)
    engine = AsyncEngine(CONFIG, checkpoint, load_tokenizer(checkpoint), transport="thread", metrics=metrics)
    app = create_app(engine, settings=settings(), metrics=metrics)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server, listener = uvicorn.Server(config), config.bind_socket()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await engine.start()
    try:
        await engine.wait_ready()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            yield engine, client
    finally:
        server.should_exit = True
        await serving
        listener.close()
        await engine.stop()


def scenario(checkpoint: Path, story: Callable[[AsyncEngine, httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with running(checkpoint) as (engine, client):
            await story(engine, client)

    asyncio.run(run())


def test_stream_and_whole_answer_are_the_same_text(tiny_checkpoint: Path) -> None:
    async def story(_: AsyncEngine, client: httpx.AsyncClient) -> None:
        body = {"prompt": "the quick brown", "max_tokens": 12, "temperature": 0, "logprobs": 1, "echo": True}
        whole = (await client.post("/v1/completions", json=body)).json()["choices"][0]
        streamed = (await client.post("/v1/completions", json={**body, "stream": True})).text
        chunks = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
        choices = [json_choice(chunk) for chunk in chunks]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        assert tokens == whole["logprobs"]["tokens"]
        assert whole["logprobs"]["token_logprobs"][0] is None
        assert choices[-1]["finish_reason"] == whole["finish_reason"]

    scenario(tiny_checkpoint, story)


def json_choice(chunk: str) -> dict[str, Any]:
    choice: dict[str, Any] = json.loads(chunk)["choices"][0]
    return choice


def test_client_that_leaves_frees_its_place_in_the_engine(tiny_checkpoint: Path) -> None:
    async def story(engine: AsyncEngine, client: httpx.AsyncClient) -> None:
        body = {"prompt": "the", "max_tokens": 500, "ignore_eos": True, "n": 2, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
            assert engine.stats.num_running > 0
        async with asyncio.timeout(5):
            while b'finished_reason="abort",model_name="tiny"} 1.0' not in (await client.get("/metrics")).content:
                await asyncio.sleep(0.01)
        short = {"prompt": "the", "max_tokens": 1}
        assert (await client.post("/v1/completions", json=short)).status_code == 200
        assert engine.stats.num_running == 0
        assert engine.stats.generation_tokens < 500

    scenario(tiny_checkpoint, story)


def test_prompt_over_the_context_is_refused_with_both_numbers(tiny_checkpoint: Path) -> None:
    async def story(_: AsyncEngine, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/completions", json={"prompt": "the", "max_tokens": 512})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "maximum context length is 512" in message
        assert "513" in message

    scenario(tiny_checkpoint, story)
