"""Embeddings by LlamaIndex, rerank by its Jina client and by Cohere's, and the calls of Open WebUI for documents.

Usage: retrieval.py URL MODEL. Open WebUI is an application, so its requests are made here as its code makes them
(0.12.4, retrieval/utils.py and retrieval/models/external.py): batches of texts at the same time, and as many best
documents as there are, put back in their order.
"""

import asyncio
import math
import sys
from typing import Any

import aiohttp
import cohere
import requests
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.jinaai_rerank import JinaRerank

URL, MODEL = sys.argv[1:]
TEXTS = ["A cat sat on the mat.", "A cat sat on a mat.", "Interest rates rose by a quarter."]
HEADERS = {"Content-Type": "application/json", "Authorization": "Bearer none"}


def close(one: list[float], other: list[float]) -> bool:
    return math.dist(one, other) < 1e-4


def llama_index() -> list[list[float]]:
    model = OpenAILikeEmbedding(model_name=MODEL, api_base=f"{URL}/v1", api_key="none", max_retries=0)
    vectors = model.get_text_embedding_batch(TEXTS)
    assert all(math.isclose(math.hypot(*each), 1.0, rel_tol=1e-4) for each in vectors)
    assert close(model.get_query_embedding(TEXTS[1]), vectors[1])
    assert close(asyncio.run(model.aget_text_embedding(TEXTS[2])), vectors[2])
    index = VectorStoreIndex.from_documents([Document(text=each) for each in TEXTS], embed_model=model)
    found = index.as_retriever(similarity_top_k=2).retrieve(TEXTS[2])
    assert found[0].text == TEXTS[2], found

    jina = JinaRerank(model=MODEL, base_url=f"{URL}/v1", api_key="none", top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=each)) for each in TEXTS]
    ranked = jina.postprocess_nodes(nodes, query_bundle=QueryBundle(TEXTS[0]))
    assert ranked[0].text == TEXTS[0], ranked
    assert len(ranked) == 2
    return vectors


def cohere_rerank(cosines: list[float]) -> None:
    client = cohere.ClientV2(api_key="none", base_url=URL)
    answer = client.rerank(model=MODEL, query=TEXTS[0], documents=TEXTS, top_n=3)
    assert [each.index for each in answer.results] == sorted(range(3), key=lambda at: -cosines[at])
    for each in answer.results:
        assert math.isclose(each.relevance_score, cosines[each.index], abs_tol=1e-4)


async def open_webui_embeddings() -> list[list[float]]:
    async def ask(session: aiohttp.ClientSession, texts: list[str]) -> list[list[float]]:
        body = {"input": texts, "model": MODEL, "prefix": "query: "}  # RAG_EMBEDDING_PREFIX_FIELD_NAME names it
        async with session.post(f"{URL}/v1/embeddings", headers=HEADERS, json=body) as answer:
            answer.raise_for_status()
            return [each["embedding"] for each in (await answer.json())["data"]]

    async with aiohttp.ClientSession() as session:
        batches = await asyncio.gather(*(ask(session, [each]) for each in TEXTS))
    return [each for batch in batches for each in batch]


def open_webui_rerank() -> list[float]:
    body = {"model": MODEL, "query": TEXTS[0], "documents": TEXTS, "top_n": len(TEXTS)}
    answer = requests.post(f"{URL}/v1/rerank", headers=HEADERS, json=body, timeout=60)
    answer.raise_for_status()
    found: list[dict[str, Any]] = sorted(answer.json()["results"], key=lambda each: each["index"])
    return [each["relevance_score"] for each in found]


vectors = llama_index()
cosines = [sum(one * other for one, other in zip(vectors[0], each, strict=True)) for each in vectors]
cohere_rerank(cosines)
assert all(map(close, asyncio.run(open_webui_embeddings()), vectors))
assert close(open_webui_rerank(), cosines)
print("ok")
