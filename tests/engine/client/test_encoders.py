"""An encoder behind the whole front-end, asked by HTTP: routes, tokenizer, messages, engine.

Oracle: transformers' model over the ids of the tokenizers library, alone with each text or pair.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tokenizers
import torch

from faser.api.app import create_app
from faser.config.engine import EngineConfig
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.text.tokenizer import load_tokenizer
from faser.metrics.server import Metrics
from tests.api.server import MODEL, settings
from tests.engine.checkpoints.encoder_models import write_encoder, write_modules

TEXTS = ["a bag", "cab", "bed gig " * 8, "jab"]
CONFIG = EngineConfig(backend="native", num_threads=1, max_num_batched_tokens=64, max_num_seqs=4)


@asynccontextmanager
async def served(directory: Path) -> AsyncIterator[tuple[httpx.AsyncClient, AsyncEngine]]:
    metrics = Metrics(model_name=MODEL, max_model_len=0)
    engine = AsyncEngine(CONFIG, directory, load_tokenizer(directory), transport="thread", observer=metrics)
    await engine.start()
    try:
        await engine.wait_ready()
        app = create_app(engine, settings=settings(), metrics=metrics)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            yield http, engine
    finally:
        await engine.stop()


def library(directory: Path) -> tokenizers.Tokenizer:
    core = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    core.no_padding()
    core.no_truncation()
    return core


@torch.inference_mode()
def test_embeddings_are_served_by_http(tmp_path: Path) -> None:
    model, core = write_encoder(tmp_path, "bert"), library(tmp_path)
    write_modules(tmp_path, "mean", most=60)

    async def ask() -> tuple[Any, Any, Any, str]:
        async with served(tmp_path) as (http, engine):
            answer = await http.post("/v1/embeddings", json={"input": TEXTS})
            chat = await http.post("/v1/completions", json={"prompt": "a"})
            long = await http.post("/v1/embeddings", json={"input": "bed " * 30})
            assert engine.stats.prompt_tokens == answer.json()["usage"]["prompt_tokens"]
            return answer.json(), chat, long, (await http.get("/metrics")).text

    answer, chat, long, metrics = asyncio.run(ask())
    for text, found in zip(TEXTS, answer["data"], strict=True):
        mean = model(torch.tensor([core.encode(text).ids])).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(found["embedding"], mean / np.linalg.norm(mean), atol=1e-5)
    assert (chat.status_code, long.status_code) == (400, 400)
    assert "maximum context length is 60 tokens" in long.json()["error"]["message"]
    assert f'finished_reason="length",model_name="{MODEL}"}} {len(TEXTS)}' in metrics


@torch.inference_mode()
def test_pairs_are_ranked_by_http(tmp_path: Path) -> None:
    model, core = write_encoder(tmp_path, "bert", labels=1), library(tmp_path)

    async def ask() -> Any:
        async with served(tmp_path) as (http, _):
            return (await http.post("/rerank", json={"query": "a bed", "documents": TEXTS})).json()

    wanted = []
    for text in TEXTS:
        pair = core.encode("a bed", text)
        logit = model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits[0, 0]
        wanted.append(float(torch.sigmoid(logit)))
    found = {each["index"]: each["relevance_score"] for each in asyncio.run(ask())["results"]}
    np.testing.assert_allclose([found[at] for at in range(len(TEXTS))], wanted, atol=1e-5)
