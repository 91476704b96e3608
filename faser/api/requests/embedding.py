"""Vectors and scores by the rules of a checkpoint: how long vectors are, which texts a score reads, what it is.

Pure functions of values, for the routes and for the offline API. Knows neither bodies nor engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from faser.api.requests.chat_renderer import ChatRenderer
from faser.errors import RequestError
from faser.types.pooling import Embedder, Pooling
from faser.types.request import SpeculationParams
from faser.types.sampling import SamplingParams

Floats = NDArray[np.float32]

NO_DRAFTS = SpeculationParams(enabled=False)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# The prompt that Qwen3-Reranker is trained with, for checkpoints whose chat template knows no documents.
_JUDGE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Texts whose vectors give scores: a prompt or a pair for each document if the model reads query and document
    together, else queries, then documents.

    num_queries: one, or as many as there are documents. reads_pairs: it is a cross-encoder. raw: its scores are
    logits.
    """

    texts: Sequence[str | tuple[str, str]]
    pooling: Pooling
    num_queries: int
    reads_pairs: bool = False
    raw: bool = False

    @property
    def judges(self) -> bool:
        """Return whether the model reads query and document together."""
        return self.reads_pairs or bool(self.pooling.token_ids)

    @property
    def adds_special_tokens(self) -> bool:
        """Return whether the tokenizer adds its special tokens; a prompt for a judge has them."""
        return not self.pooling.token_ids

    def scores(self, vectors: Floats, *, activated: bool = True) -> Floats:
        """Return the score of each document, [N]. vectors: of the texts. activated: not raw logits."""
        if not self.judges:
            scaled = unit(vectors)
            cosines: Floats = (scaled[: self.num_queries] * scaled[self.num_queries :]).sum(axis=1)
            return cosines
        odds = vectors[:, 0] if len(self.pooling.token_ids) < 2 else vectors[:, 0] - vectors[:, 1]
        return np.asarray(1 / (1 + np.exp(-odds)), np.float32) if activated and not self.raw else odds


def compare(
    embedder: Embedder,
    renderer: ChatRenderer,
    queries: Sequence[str],
    documents: Sequence[str],
    *,
    instruction: str | None = None,
    truncate: int | None = None,
) -> Comparison:
    """Return the texts that are read for the scores of documents. queries: one, or one for each document.

    instruction: what a document has to do; None: the default. truncate: as truncate_prompt_tokens.
    Raises RequestError for what this model does not take.
    """
    asked = [*queries] * (len(documents) if len(queries) == 1 else 1)
    if not embedder.score_token_ids:
        if instruction is not None:
            what = "is a cross-encoder" if embedder.judges_pairs else "compares embeddings"
            raise RequestError(
                f"instruction is for models that judge with words; this one {what}", param="instruction"
            )
        if embedder.judges_pairs:
            return Comparison(
                texts=list(zip(asked, documents, strict=True)),
                pooling=Pooling(kind=embedder.kind),
                num_queries=len(queries),
                reads_pairs=True,
                raw=embedder.raw_scores,
            )
        texts = [embedder.prompts.get("query", "") + each for each in queries]
        texts += [embedder.prompts.get("document", "") + each for each in documents]
        return Comparison(texts=texts, pooling=Pooling(kind=embedder.kind), num_queries=len(queries))
    if truncate is not None:
        raise RequestError(
            "truncate_prompt_tokens would cut the question off the end of the prompt, which this model needs; "
            "shorten the documents instead",
            param="truncate_prompt_tokens",
        )
    texts = [
        _judged(renderer, query, document, instruction) for query, document in zip(asked, documents, strict=True)
    ]
    pooling = Pooling(kind=embedder.kind, token_ids=embedder.score_token_ids)
    return Comparison(texts=texts, pooling=pooling, num_queries=len(queries))


def params_of(pooling: Pooling, second_from: int | None = None) -> SamplingParams:
    """Return the engine's parameters of a request for a vector. second_from: of a pair, as in Pooling."""
    if second_from is not None:
        pooling = replace(pooling, second_from=second_from)
    return SamplingParams(max_tokens=0, temperature=0.0, pooling=pooling)


def unit(vectors: Floats) -> Floats:
    """Scale vectors [N, D] to length 1; one of zeros stays."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Floats = vectors / np.maximum(lengths, np.finfo(np.float32).tiny)
    return scaled


def vector_size(embedder: Embedder, most: int, asked: int | None) -> int:
    """Return how many numbers a vector gets. most: the model's hidden size. asked: `dimensions`; None: all.

    Raises RequestError for a size that the model is not trained for, and for a model that makes no embeddings.
    """
    if embedder.judges_pairs:
        raise RequestError(
            "this model is a cross-encoder, which judges pairs of texts and makes no embeddings; it serves "
            "/v1/rerank and /v1/score",
            param="model",
        )
    if asked is None or asked == most:
        return most
    if not embedder.is_matryoshka:
        raise RequestError(
            f"dimensions is {asked}; the vectors of this model have {most} numbers, and its config.json does not "
            "say that it is trained for fewer (is_matryoshka, matryoshka_dimensions)",
            param="dimensions",
        )
    if embedder.dimensions and asked not in embedder.dimensions:
        sizes = ", ".join(map(str, embedder.dimensions))
        raise RequestError(f"dimensions is {asked}; this model is trained for {sizes}", param="dimensions")
    if not 1 <= asked <= most:
        raise RequestError(f"dimensions is {asked}; it must be from 1 to {most}", param="dimensions")
    return asked


def _judged(renderer: ChatRenderer, query: str, document: str, instruction: str | None) -> str:
    """Return the prompt in which a model judges, by its template if that knows documents."""
    if "document" not in renderer.template_of(tools=False):
        return _JUDGE.format(instruction=instruction or _INSTRUCTION, query=query, document=document)
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    if instruction is not None:
        messages.insert(0, {"role": "system", "content": instruction})
    return renderer.render_roles(messages)
