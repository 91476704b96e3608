"""State and model of an engine, as front-ends see them."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from faser.types.pooling import EMBEDDER, Embedder

# Reports progress: the name of a stage, how much of it is done, and how much there is; 0 of 0 where unknown.
ProgressCallback = Callable[[str, int, int], None]


class EngineState(StrEnum):
    """The states of an engine, in order. RESTARTING: after READY, an engine died or hung and is started again."""

    LOADING = "loading"
    WARMING = "warming"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Properties of the loaded model for the front-end. kv_cache_bytes, weight_bytes: sizes in memory.

    separate_layers: how many layers run in single operations, since the backend's own calls do not take them.
    hidden_size: numbers of an embedding. embedder: how embeddings are made.
    """

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    backend: str
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    kv_cache_dtype: str
    weight_bytes: int
    num_parameters: int
    separate_layers: int = 0
    hidden_size: int = 0
    embedder: Embedder = EMBEDDER
