"""/v1/embeddings, /rerank and /score with an engine whose vectors follow from the prompts.

Bugs these tests have been seen to catch: vectors in the order in which they come; a vector cut without being
scaled again; base64 of float64; scores of the next document; logits of no before those of yes.
"""

import base64
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from faser.engine.text.tokenizer import load_tokenizer
from faser.types.answer import FinishReason, RequestOutput
from faser.types.pooling import Embedder, PoolingKind
from faser.types.request import Request
from tests.engine.checkpoints.encoder_models import write_wordpiece
from tests.fake_engine import MAX_MODEL_LEN, FakeEngine, delta

SIZE = 8


def vector_of(request: Request) -> Any:
    """A vector that the prompt decides; of as many numbers as tokens are asked for."""
    pooling = request.sampling.pooling
    assert pooling is not None
    drawn = np.random.default_rng(list(request.prompt_token_ids)).normal(size=SIZE).astype(np.float32)
    return drawn[: len(pooling.token_ids)] if pooling.token_ids else drawn


CROSS_ENCODER = Embedder(kind=PoolingKind.CLS, is_encoder=True, judges_pairs=True)


def script(request: Request) -> Iterator[RequestOutput]:
    assert request.sampling.max_tokens == 0
    if request.request_id.endswith("-0"):
        yield RequestOutput(request_id=request.request_id, deltas=())  # its vector comes after those of the others
    ended = delta(request, 0, b"", finish_reason=FinishReason.LENGTH)
    yield RequestOutput(request_id=request.request_id, deltas=(ended,), pooled=vector_of(request).tobytes())


@pytest.fixture
def pooling(engine: FakeEngine) -> FakeEngine:
    engine.reset(script)
    engine.hidden_size = SIZE
    return engine


def unit(vector: Any) -> Any:
    return vector / np.linalg.norm(vector)


def test_the_openai_client_gets_unit_vectors_in_order(client: openai.OpenAI, pooling: FakeEngine) -> None:
    """It asks for base64 by itself, and decodes it."""
    answer = client.embeddings.create(model="tiny", input=["one", "two", "three"])
    for request, found in zip(pooling.requests, answer.data, strict=True):
        np.testing.assert_allclose(found.embedding, unit(vector_of(request)), rtol=1e-5)
        assert not request.speculation.enabled
        assert not request.may_record
    assert [each.index for each in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == sum(len(each.prompt_token_ids) for each in pooling.requests)


@pytest.mark.parametrize("given", ["né", ["one", "two"], [5, 6, 7], [[1, 2], [3]]])
def test_inputs_have_the_forms_of_prompts(http: httpx.Client, pooling: FakeEngine, given: Any) -> None:
    answer = http.post("/v1/embeddings", json={"input": given, "encoding_format": "float"}).json()
    rendered = http.post("/v1/completions/render", json={"prompt": given}).json()
    assert [list(each.prompt_token_ids) for each in pooling.requests] == [each["token_ids"] for each in rendered]
    assert len(answer["data"]) == len(rendered)
    assert len(answer["data"][0]["embedding"]) == SIZE


def test_messages_are_rendered(http: httpx.Client, pooling: FakeEngine) -> None:
    answer = http.post("/v1/embeddings", json={"messages": [{"role": "user", "content": "hi"}]})
    assert answer.status_code == 200, answer.text
    assert b"hi" in bytes(each for each in pooling.requests[0].prompt_token_ids if each < 256)


def test_a_smaller_vector_is_scaled_again(http: httpx.Client, pooling: FakeEngine) -> None:
    pooling.embedder = Embedder(is_matryoshka=True, dimensions=(2, 4))
    body = {"input": "a", "dimensions": 4, "encoding_format": "base64"}
    found = http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"]
    vector = np.frombuffer(base64.b64decode(found), "<f4")
    np.testing.assert_allclose(vector, unit(vector_of(pooling.requests[0])[:4]), rtol=1e-5)


def test_a_model_that_does_not_scale_gives_its_numbers(http: httpx.Client, pooling: FakeEngine) -> None:
    pooling.embedder = Embedder(kind=PoolingKind.MEAN, normalises=False)
    found = http.post("/v1/embeddings", json={"input": "a"}).json()["data"][0]["embedding"]
    np.testing.assert_allclose(found, vector_of(pooling.requests[0]), rtol=1e-6)
    asked = pooling.requests[0].sampling.pooling
    assert asked is not None
    assert asked.kind is PoolingKind.MEAN


@pytest.mark.parametrize(
    "body, param, said",
    [
        ({}, "input", "exactly one of input and messages"),
        ({"input": []}, "input", "empty list"),
        ({"input": ["a", 5]}, "input.1", "input.1 is 5"),
        (
            {"input": "a", "dimensions": 4},
            "dimensions",
            "dimensions is 4; the vectors of this model have 8 numbers",
        ),
        ({"input": "a", "prompt_name": "query"}, "prompt_name", "this model's prompts are: none"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "int8"),
        ({"input": ""}, "input", "the prompt is empty"),
        ({"input": "a", "model": "other"}, "model", "not found"),
    ],
)
def test_wrong_fields_are_named(
    http: httpx.Client, pooling: FakeEngine, body: dict[str, Any], param: str, said: str
) -> None:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code in (400, 404), answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert not pooling.requests


def test_the_text_before_an_input_has_a_name(http: httpx.Client, pooling: FakeEngine) -> None:
    pooling.embedder = Embedder(prompts={"query": "Query: "})
    http.post("/v1/embeddings", json={"input": ["cats"], "prompt_name": "query"})
    http.post("/v1/embeddings", json={"input": ["Query: cats"]})
    assert pooling.requests[0].prompt_token_ids == pooling.requests[1].prompt_token_ids


DOCUMENTS: list[Any] = ["Paris", {"text": "a dog"}, "rain"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_the_cosine(http: httpx.Client, pooling: FakeEngine, path: str) -> None:
    pooling.embedder = Embedder(prompts={"query": "Q: ", "document": ""})
    answer = http.post(path, json={"query": "where?", "documents": DOCUMENTS, "top_n": 2}).json()
    query, *texts = (unit(vector_of(each)) for each in pooling.requests)
    wanted = [float(query @ each) for each in texts]
    order = sorted(range(3), key=lambda at: -wanted[at])[:2]
    assert [each["index"] for each in answer["results"]] == order
    np.testing.assert_allclose(
        [each["relevance_score"] for each in answer["results"]], [wanted[at] for at in order]
    )
    assert answer["results"][0]["document"] == {"text": ["Paris", "a dog", "rain"][order[0]]}
    assert bytes(pooling.requests[0].prompt_token_ids[:3]) == b"Q: "


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_a_model_that_judges_says_how_likely_yes_is(http: httpx.Client, pooling: FakeEngine, path: str) -> None:
    pooling.embedder = Embedder(score_token_ids=(7, 3))
    body: dict[str, Any] = {"text_1": "where?", "text_2": ["Paris", "a dog"]}
    answer = http.post(path, json=body).json()
    odds = [float(found[0] - found[1]) for found in map(vector_of, pooling.requests)]
    np.testing.assert_allclose(
        [each["score"] for each in answer["data"]], [1 / (1 + np.exp(-each)) for each in odds]
    )
    raw = http.post(path, json=body | {"use_activation": False}).json()
    np.testing.assert_allclose([each["score"] for each in raw["data"]], odds, rtol=1e-5)
    prompt = bytes(each for each in pooling.requests[0].prompt_token_ids if each < 256).decode()
    assert "<Query>: where?\n<Document>: Paris" in prompt


def test_pairs_of_texts_are_scored_side_by_side(http: httpx.Client, pooling: FakeEngine) -> None:
    answer = http.post("/score", json={"queries": ["a", "b"], "documents": ["c", "d"]}).json()
    first, second, third, fourth = (unit(vector_of(each)) for each in pooling.requests)
    scores = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(scores, [first @ third, second @ fourth], atol=1e-6)


@pytest.fixture
def cross_encoder(pooling: FakeEngine, tmp_path: Path) -> Iterator[FakeEngine]:
    """An engine of a cross-encoder, whose tokenizer gives letters, types and special tokens."""
    write_wordpiece(tmp_path)
    kept, pooling.tokenizer = pooling.tokenizer, load_tokenizer(tmp_path)
    pooling.embedder = CROSS_ENCODER
    yield pooling
    pooling.tokenizer = kept


@pytest.mark.parametrize("raw_scores", [False, True])
def test_a_cross_encoder_reads_pairs(http: httpx.Client, cross_encoder: FakeEngine, raw_scores: bool) -> None:
    cross_encoder.embedder = replace(CROSS_ENCODER, raw_scores=raw_scores)
    answer = http.post("/rerank", json={"query": "bed", "documents": ["cab", "a bag"]}).json()
    logits = [float(vector_of(each)[0]) for each in cross_encoder.requests]
    wanted = {at: each if raw_scores else 1 / (1 + np.exp(-each)) for at, each in enumerate(logits)}
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    assert found == pytest.approx(wanted)
    assert [each["index"] for each in answer["results"]] == sorted(wanted, key=lambda at: -wanted[at])
    body = {"text_1": "bed", "text_2": ["cab", "a bag"], "use_activation": False}
    raw = http.post("/score", json=body).json()
    assert [each["score"] for each in raw["data"]] == pytest.approx(logits)
    for request, document in zip(cross_encoder.requests, ("cab", "a bag"), strict=False):
        assert (
            cross_encoder.tokenizer.decode(request.prompt_token_ids, False) == f"[CLS] bed [SEP] {document} [SEP]"
        )
        assert request.sampling.pooling is not None
        assert request.sampling.pooling.second_from == 5


def test_pairs_that_are_too_long_lose_tokens_of_the_longer_text(
    http: httpx.Client, cross_encoder: FakeEngine
) -> None:
    body = {"query": "abc", "documents": ["defghijk"], "truncate_prompt_tokens": 10}
    assert http.post("/rerank", json=body).status_code == 200
    found = cross_encoder.tokenizer.decode(cross_encoder.requests[0].prompt_token_ids, False)
    assert found == "[CLS] abc [SEP] defg [SEP]"
    answer = http.post("/rerank", json={"query": "a " * MAX_MODEL_LEN, "documents": ["b"]})
    assert answer.status_code == 400
    assert "maximum context length is" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_an_encoder_generates_no_text(
    http: httpx.Client, pooling: FakeEngine, path: str, body: dict[str, Any]
) -> None:
    pooling.embedder = Embedder(kind=PoolingKind.MEAN, is_encoder=True)
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    assert "an encoder, which generates no text; it serves /v1/embeddings" in answer.json()["error"]["message"]
    assert not pooling.requests


def test_a_cross_encoder_makes_no_embeddings(http: httpx.Client, pooling: FakeEngine) -> None:
    pooling.embedder = CROSS_ENCODER
    answer = http.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 400
    assert "judges pairs of texts and makes no embeddings" in answer.json()["error"]["message"]
    answer = http.post("/rerank", json={"query": "a", "documents": ["b"], "add_special_tokens": False})
    assert answer.json()["error"]["param"] == "add_special_tokens"
    assert not pooling.requests


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [5]}, "documents.0"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
    ],
)
def test_wrong_texts_are_named(
    http: httpx.Client, pooling: FakeEngine, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert not pooling.requests
