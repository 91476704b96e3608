"""The front-end on a real engine with a tiny model: what the fake engine promises holds."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import uvicorn

from faser.api.app import create_app
from faser.config.engine import EngineConfig
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.text.tokenizer import load_tokenizer
from faser.metrics.server import Metrics
from tests.api.server import MODEL, settings
from tests.waiting import PATIENCE_S

CONFIG = EngineConfig(dtype="float32", backend="torch", max_model_len=512, max_num_seqs=4, kv_cache_memory=1 << 20)


@asynccontextmanager
async def running(
    checkpoint: Path,
    config: EngineConfig,
    *,
    api_keys: tuple[str, ...] = (),
    share_cache_across_keys: bool = False,
    chat_template: str | None = None,
) -> AsyncIterator[tuple[AsyncEngine, httpx.AsyncClient]]:
    metrics = Metrics(model_name=MODEL, max_model_len=512, speculation=config.speculation)
    engine = AsyncEngine(config, checkpoint, load_tokenizer(checkpoint), transport="thread", observer=metrics)
    chosen = settings(
        api_keys=api_keys,
        share_cache_across_keys=share_cache_across_keys,
        speculation=config.speculation,
        spec_decode_metrics=config.per_request_spec_decode_metrics,
        chat_template=chat_template,
    )
    app = create_app(engine, settings=chosen, metrics=metrics)
    http = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
    server, listener = uvicorn.Server(http), http.bind_socket()
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


def scenario(
    checkpoint: Path,
    story: Callable[[AsyncEngine, httpx.AsyncClient], Awaitable[None]],
    config: EngineConfig = CONFIG,
    *,
    chat_template: str | None = None,
) -> None:
    async def run() -> None:
        async with running(checkpoint, config, chat_template=chat_template) as (engine, client):
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


def test_what_answers_tell_of_speculation_is_what_is_scraped(tiny_checkpoint: Path) -> None:
    """Oracle: two ways of counting, by sample and in all; and vLLM's identities between its fields."""

    async def story(_: AsyncEngine, client: httpx.AsyncClient) -> None:
        body = {"prompt": "hello hello hello hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        body |= {"cache_salt": "mine"}
        answers = [(await client.post("/v1/completions", json={**body, "n": n})).json() for n in (1, 2)]
        reports = [answer["metrics"]["faser"] for answer in answers]
        scraped = scrape((await client.get("/metrics")).text)
        for name in ("drafted", "verified", "accepted", "wasted"):
            assert sum(each[name] for each in reports) == scraped[f"faser_spec_{name}_tokens_total"]
        assert sum(each["pruned"] for each in reports) == scraped["faser_spec_pruned_tokens_total"]
        assert scraped["faser_spec_accepted_tokens_total"] > 0
        alone = answers[0]["metrics"]["speculative_decoding"]
        assert sum(alone["acceptance_histogram"]) == alone["num_spec_steps"] == len(alone["per_step_drafted"])
        assert sum(alone["per_step_accepted"]) == alone["num_accepted_draft_tokens"] == reports[0]["accepted"]
        assert sum(alone["per_step_drafted"]) == alone["num_draft_tokens"] == reports[0]["verified"]
        plain = (await client.post("/v1/completions", json={**body, "speculative": {"enabled": False}})).json()
        assert plain["choices"] == answers[0]["choices"]
        assert (plain["metrics"]["faser"]["max_tokens"], plain["metrics"]["faser"]["drafted"]) == (0, 0)

    config = replace(
        CONFIG,
        num_threads=1,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4, "policy": "fixed"},
        per_request_spec_decode_metrics="detailed",
    )
    scenario(tiny_checkpoint, story, config)


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
@pytest.mark.full(but=("suffix",))
def test_a_trace_is_the_servers_own_count_step_by_step(tiny_checkpoint: Path, method: str) -> None:
    """Oracle: the lists that vLLM's part of the answer has of each draft, and the tokens without a trace."""

    async def story(_: AsyncEngine, client: httpx.AsyncClient) -> None:
        body = {"prompt": "hello hello hello hello", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        body |= {"cache_salt": "mine", "stream": True, "stream_options": {"include_usage": True}}
        plain, untraced = await streamed(client, body)
        before = scrape((await client.get("/metrics")).text)
        choices, metrics = await streamed(client, {**body, "speculative": {"trace": True}})
        after = scrape((await client.get("/metrics")).text)
        assert "".join(each["text"] for each in choices) == "".join(each["text"] for each in plain)
        assert not any("trace" in each for each in plain)
        assert untraced["faser"]["accepted"] > 0
        traces = [each["trace"] for each in choices]
        drafts = [each for each in traces if each["gamma"]]
        report = metrics["speculative_decoding"]
        assert [each["gamma"] for each in drafts] == report["per_step_drafted"]
        assert [each["accepted"] for each in drafts] == report["per_step_accepted"]
        assert len(drafts) >= 3
        assert len(traces) == metrics["faser"]["steps"]
        assert {each["drafter"] for each in drafts} == {method}
        assert all(each["drafter"] is None for each in traces if not each["gamma"])
        tokens = [token for each in traces for token in each["tokens"]]
        assert len(tokens) == 60
        assert "".join(token["text"] for token in tokens) == "".join(each["text"] for each in choices)
        origins = Counter(token["origin"] for token in tokens)
        assert origins["plain"] == len(traces) - len(drafts)
        shown = sum(min(each["accepted"], len(each["tokens"])) for each in traces)  # max_tokens may cut the last
        assert origins["accepted"] == shown
        for name in ("verified", "accepted"):
            counted = after[f"faser_spec_{name}_tokens_total"] - before[f"faser_spec_{name}_tokens_total"]
            assert counted == metrics["faser"][name]
        assert sum(each["accepted"] for each in traces) == metrics["faser"]["accepted"]
        assert sum(each["gamma"] for each in traces) == metrics["faser"]["verified"]

    model = {"model": str(tiny_checkpoint)} if method == "draft_model" else {}
    config = replace(
        CONFIG,
        num_threads=1,
        speculative_config={"method": method, "num_speculative_tokens": 4, "policy": "fixed", **model},
        per_request_spec_decode_metrics="detailed",
    )
    scenario(tiny_checkpoint, story, config)


def test_without_a_drafter_every_token_of_a_trace_is_plain(tiny_checkpoint: Path) -> None:
    async def story(_: AsyncEngine, client: httpx.AsyncClient) -> None:
        body = {"prompt": "hello", "max_tokens": 9, "ignore_eos": True, "cache_salt": "mine", "stream": True}
        choices, metrics = await streamed(client, {**body, "speculative": {"trace": True}})
        tokens = [token for each in choices for token in each["trace"]["tokens"]]
        assert [token["origin"] for token in tokens] == ["plain"] * 9
        assert metrics == {}

    scenario(tiny_checkpoint, story, replace(CONFIG, speculative_policy="off"))


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices of a stream's chunks, and the metrics of its last one."""
    answer = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return [choice for chunk in chunks for choice in chunk["choices"]], chunks[-1].get("metrics", {})


def scrape(text: str) -> dict[str, float]:
    """Each series' sum over its labels."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
            sums[name] = sums.get(name, 0.0) + value
    return sums


def json_choice(chunk: str) -> dict[str, Any]:
    choice: dict[str, Any] = json.loads(chunk)["choices"][0]
    return choice


def test_a_structure_is_compiled_before_the_request_is_queued(tiny_checkpoint: Path) -> None:
    """A 400 that says where it fails, for streams too; each sample of the answer to a good one validates."""

    async def story(engine: AsyncEngine, client: httpx.AsyncClient) -> None:
        body = {"prompt": "a fox: ", "max_tokens": 120, "temperature": 1, "seed": 3, "n": 2}
        bad = {"type": "object", "properties": {"a": {"not": {}}}}
        for stream in (False, True):
            answer = await client.post("/v1/completions", json={**body, "guided_json": bad, "stream": stream})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["param"] == "guided_json"
            assert "at /properties/a: Unimplemented keys" in error["message"]
        schema = {
            "type": "object",
            "properties": {"the_colour": {"enum": ["red", "green"]}, "legs": {"type": "integer", "maximum": 9}},
            "required": ["the_colour", "legs"],
            "additionalProperties": False,
        }
        wrapped = {"type": "json_schema", "json_schema": {"name": "fox", "schema": schema}}
        answer = await client.post("/v1/completions", json={**body, "response_format": wrapped})
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        for choice in choices:
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["text"]), schema)
        assert any(choice["finish_reason"] == "stop" for choice in choices)
        assert engine.stats.num_running == engine.stats.num_waiting == 0

    scenario(tiny_checkpoint, story)


def test_client_that_leaves_frees_its_place_in_the_engine(tiny_checkpoint: Path) -> None:
    async def story(engine: AsyncEngine, client: httpx.AsyncClient) -> None:
        body = {"prompt": "the", "max_tokens": 500, "ignore_eos": True, "n": 2, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
            assert engine.stats.num_running > 0
        async with asyncio.timeout(PATIENCE_S):
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
