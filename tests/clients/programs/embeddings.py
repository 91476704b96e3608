"""Embeddings by LangChain and LiteLLM, and LiteLLM's rerank. Usage: embeddings.py URL MODEL."""

import math
import sys

import litellm
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

URL, MODEL = sys.argv[1:]
TEXTS = ["A cat sat on the mat.", "A cat sat on a mat.", "Interest rates rose by a quarter."]

embeddings = OpenAIEmbeddings(
    model=MODEL,
    base_url=f"{URL}/v1",
    api_key=SecretStr("none"),
    max_retries=0,
    check_embedding_ctx_length=False,  # otherwise it sends token ids of OpenAI's own vocabulary
)
vectors = embeddings.embed_documents(TEXTS)
assert len(vectors) == len(TEXTS)
assert all(math.isclose(math.hypot(*each), 1.0, rel_tol=1e-4) for each in vectors)
assert math.dist(embeddings.embed_query(TEXTS[1]), vectors[1]) < 1e-4

answer = litellm.embedding(f"hosted_vllm/{MODEL}", input=TEXTS, api_base=f"{URL}/v1", api_key="none")
for each, vector in zip(answer.data, vectors, strict=True):
    assert math.dist(each["embedding"], vector) < 1e-4

ranked = litellm.rerank(
    f"hosted_vllm/{MODEL}", query=TEXTS[0], documents=TEXTS, top_n=2, api_base=URL, api_key="none"
)
assert ranked.results is not None
assert ranked.results[0]["index"] == 0, ranked
assert len(ranked.results) == 2
print("ok")
