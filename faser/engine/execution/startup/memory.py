"""Sizes that follow from config and models: contexts, rows, KV caches, and how a GPU's memory is divided.

Refuses what does not fit. warm_up.py measures what a GPU has left.
"""

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from faser.config.declaration import show_bytes
from faser.config.engine import EngineConfig, cpu_kv_memory
from faser.engine.checkpoints.families.architecture import DecoderSpec, ExpertsSpec
from faser.engine.checkpoints.files import ModelConfig
from faser.engine.execution.drafting.text import CORPUS_TOKENS
from faser.engine.execution.models.layers import mixer_shapes
from faser.errors import ConfigError
from faser.kernels.interface.fp8 import FP8
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.mixers import StateShape
from faser.machine import available_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """The memory of one device.

    share: the part of the total that this process may take. free: before anything was loaded. loaded: taken since
    then and kept: weights, compiled kernels, existing workspaces. step: taken on top while a step of step_rows
    rows runs. graphs, workspaces: taken later, by CUDA graphs and by further workspaces.

        |          total                                                                  |
        | other processes, CUDA | loaded | step | graphs | workspaces | left | beyond share |
                                |          free                                           |
    """

    device: str
    total_bytes: int
    share: float
    free_bytes: int
    loaded_bytes: int
    step_bytes: int
    step_rows: int
    graph_bytes: int
    workspaces_bytes: int

    @property
    def granted_bytes(self) -> int:
        """Return the bytes that this process may take: its share, or what was free if that is less."""
        return min(int(self.total_bytes * self.share), self.free_bytes)

    @property
    def taken_bytes(self) -> int:
        return self.loaded_bytes + self.step_bytes + self.graph_bytes + self.workspaces_bytes

    @property
    def left_bytes(self) -> int:
        """For keys and values within the share."""
        return max(0, self.granted_bytes - self.taken_bytes)

    @property
    def most_bytes(self) -> int:
        """For keys and values if the share did not count."""
        return max(0, self.free_bytes - self.taken_bytes)

    def describe(self) -> str:
        """One sentence with every part."""
        parts = {
            "loaded": self.loaded_bytes,
            f"a step of {self.step_rows} rows": self.step_bytes,
            "CUDA graphs": self.graph_bytes,
            "workspaces": self.workspaces_bytes,
        }
        listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items())
        return (
            f"{self.device} has {show_bytes(self.total_bytes)}, of which {show_bytes(self.free_bytes)} were free; "
            f"--gpu-memory-utilization {self.share:g} grants {show_bytes(self.granted_bytes)}; {listed}; "
            f"left for the KV cache: {show_bytes(self.left_bytes)}"
        )


# What the index of texts holds of each token, at most; and the limits of all of it: a share of free memory, and
# bytes.
_TEXT_BYTES_PER_TOKEN = 200
_TEXT_SHARE = 1 / 64
_TEXT_MOST_BYTES = 256 << 20

# Of the kernels for mixtures (kernels/cpu/native). A span is 256 activations in 8 bits, with up to 256 bytes of
# scales and sums. The place, the weight and the row of a pair of row and expert take the routing bytes.
_LOW_BIT_SPAN = 256
_ROUTING_BYTES = 24

# Snapshots of recurrent states, unless their memory is given: one for a number of sequences, and for a few
# conversations at least. Of a KV cache of given size states and one context come first, and snapshots get a part
# of the rest.
_SEQUENCES_A_SNAPSHOT = 4
_LEAST_SNAPSHOTS = 8
_SHARE_OF_SNAPSHOTS = 4

# Tables of a context: an angle; a block, as the control plane keeps it; and a block of a sequence.
_ANGLE_BYTES = 4
_BLOCK_BYTES = 128
_TABLE_BYTES = 8
_REFUSED = "can't allocate memory"  # by torch, on a CPU

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A model with a KV cache.

    dtype: of activations. kv_dtype: of stored keys and values; see kv_cache_dtype.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    kv_dtype: torch.dtype


def context_len(config: EngineConfig, model: ModelConfig) -> int:
    """Positions of the longest context. Raises ConfigError for more than the model has."""
    longest = model.spec.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(f"--max-model-len is {config.max_model_len}; this model has at most {longest} positions")
    return config.max_model_len


def compute_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """The type of activations. auto: float32 for a float32 checkpoint, else bfloat16.

    bfloat16 replaces float16, for which a CPU has no products and a GPU no kernels compiled ahead of time; and
    float32 under flashinfer, which computes in 16 bits.
    """
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    wide = model.dtype == "float32" and config.backend != "flashinfer"
    return torch.float32 if wide else torch.bfloat16


def kv_cache_dtype(config: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The type of stored keys and values of a model that computes in dtype; the same rule for both models."""
    return {"fp8": FP8, "int8": torch.int8}.get(config.kv_cache_dtype, dtype)


def text_index_bytes(config: EngineConfig, max_model_len: int) -> int:
    """Return the bytes that the index of texts may hold: what all sequences can fill, within the limits."""
    if not config.speculation.drafts_from_text:
        return 0
    tokens = config.max_num_seqs * max_model_len + CORPUS_TOKENS
    limit = min(int(available_memory() * _TEXT_SHARE), _TEXT_MOST_BYTES)
    return min(tokens * _TEXT_BYTES_PER_TOKEN, limit)


def experts_bytes(config: EngineConfig, model: CachedModel) -> int:
    """Return the bytes that the CPU's kernels for mixtures take for the largest step, and keep; 0: no mixtures.

    For each pair of a row and an expert: its input, as it is and in 8 bits; gate and up, and their product; its
    result in float32; and where it is among the others. A shared expert comes before them, in the same memory but
    for its results. Layers take turns too.
    """
    hidden, value = model.spec.hidden_size, model.dtype.itemsize

    def of_networks(count: int, size: int) -> int:
        quantised = 2 * -(-max(hidden, size) // _LOW_BIT_SPAN) * _LOW_BIT_SPAN
        return count * (3 * value * size + quantised)

    def of_row(mixture: ExpertsSpec) -> int:
        networks = max(of_networks(mixture.top_k, mixture.size), of_networks(1, mixture.shared_size))
        pairs = mixture.top_k * ((value + 4) * hidden + _ROUTING_BYTES)
        shared = 4 * (hidden + 1) if mixture.shared_size else 0
        return networks + pairs + 4 * mixture.num_experts + shared

    return config.max_num_batched_tokens * max(map(of_row, model.spec.mixtures), default=0)


def check_context(config: EngineConfig, model: CachedModel, num_positions: int) -> None:
    """Raise ConfigError if the tables of a context, which are filled at the start, exceed the free memory.

    These are angles for each rotary embedding, with what their computation takes, and the blocks of sequences.
    """
    widths = {(each.rope, each.head_dim): each.head_dim for each in model.spec.attentions if each.rope is not None}
    angles = _ANGLE_BYTES * num_positions * (sum(widths.values()) + 2 * max(widths.values(), default=0))
    blocks = -(-num_positions // config.block_size)
    needed = angles + blocks * (_BLOCK_BYTES + _TABLE_BYTES * config.max_num_seqs)
    if needed > (free := available_memory()):
        given = "max_position_embeddings" if config.max_model_len is None else "--max-model-len"
        raise ConfigError(
            f"{given} is {num_positions}; tables for as many positions take {show_bytes(needed)}, and "
            f"{show_bytes(free)} of memory are free; lower --max-model-len"
        )


@contextmanager
def refused_allocations(config: EngineConfig) -> Iterator[None]:
    """Context manager that raises ConfigError where the system refuses memory."""
    try:
        yield
    except (MemoryError, OSError, RuntimeError) as error:
        refused = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        if not refused and _REFUSED not in str(error):
            raise
        context = "the model's" if config.max_model_len is None else config.max_model_len
        reason, free = str(error) or type(error).__name__, show_bytes(available_memory())
        raise ConfigError(
            f"the system refuses memory ({reason}); {free} are free; "
            f"--max-model-len is {context}, --max-num-seqs {config.max_num_seqs}; lower one of them"
        ) from error


def state_shape(config: EngineConfig, model: CachedModel) -> StateShape | None:
    """The states of as many sequences as run at once, and snapshots; None: the model has none."""
    if not model.spec.has_states:
        return None
    bare = StateShape(
        layers=mixer_shapes(model.spec),
        num_slots=config.max_num_seqs,
        most_drafts=0 if config.speculation.policy == "off" else config.speculation.cap,
        dtype=model.dtype,
    )
    return replace(bare, num_snapshots=(config.state_snapshot_memory or 0) // bare.snapshot_bytes)


def state_bytes(config: EngineConfig, model: CachedModel) -> int:
    """Return the bytes of the states of all sequences, and of snapshots; 0: there are none."""
    shape = state_shape(config, model)
    return 0 if shape is None else shape.total_bytes


def with_snapshot_memory(config: EngineConfig, models: Sequence[CachedModel], max_model_len: int) -> EngineConfig:
    """The config, which says how much memory snapshots of recurrent states take. models: the target comes first.

    Where it is not given: enough for some, but of a KV cache of given size no more than a quarter of what the
    states and one context leave. Raises ConfigError for less than one snapshot takes.
    """
    shape, given = state_shape(config, models[0]), config.state_snapshot_memory
    if shape is None or not config.enable_prefix_caching:
        return replace(config, state_snapshot_memory=0)
    if given is None:
        given = max(_LEAST_SNAPSHOTS, config.max_num_seqs // _SEQUENCES_A_SNAPSHOT) * shape.snapshot_bytes
        if config.kv_cache_memory is not None:
            some = replace(shape, num_snapshots=1)  # with snapshots a sequence keeps more
            block_bytes = sum(each.block_bytes for each in cache_shapes(config, models, 1))
            one_context = -(-max_model_len // config.block_size) * block_bytes
            taken = some.num_slots * some.slot_bytes + one_context
            room = max(0, config.kv_cache_memory - taken) // _SHARE_OF_SNAPSHOTS
            given = min(given, room // shape.snapshot_bytes * shape.snapshot_bytes)
    elif 0 < given < shape.snapshot_bytes:
        raise ConfigError(
            f"--state-snapshot-memory is {show_bytes(given)}; one snapshot of this model's recurrent states takes "
            f"{show_bytes(shape.snapshot_bytes)}; raise it, or set it to 0, which switches prefix caching off"
        )
    return replace(config, state_snapshot_memory=given)


def kv_shapes(
    config: EngineConfig,
    models: Sequence[CachedModel],
    max_model_len: int,
    budget: MemoryBudget | None = None,
    text_bytes: int = 0,
) -> list[KvShape]:
    """The KV cache of each model. All have the same blocks, so a block costs its bytes in all of them together.

    They hold at least one whole context, and no more than all sequences can fill. Recurrent states and their
    snapshots are of the same memory. budget: of a GPU; None: on a CPU, where text_bytes of the same memory go to
    the index of texts, and experts_bytes to mixtures. Raises ConfigError where the configured memory, or the
    GPU's, is too small.
    """
    states = sum(state_bytes(config, each) for each in models)
    block_bytes = sum(each.block_bytes for each in cache_shapes(config, models, 1))
    one_context = -(-max_model_len // config.block_size)
    most = one_context * config.max_num_seqs
    if config.kv_cache_memory is not None:
        _check_given(config, one_context * block_bytes, states, max_model_len, budget)
        num_blocks = (config.kv_cache_memory - states) // block_bytes
    elif budget is not None:
        num_blocks = min(budget.left_bytes // block_bytes, most)
        if num_blocks < one_context:
            fitting = num_blocks * config.block_size
            raise ConfigError(_too_little(budget, one_context * block_bytes, max_model_len, fitting))
    else:
        share = cpu_kv_memory(available_memory()) - text_bytes
        share -= states + sum(experts_bytes(config, each) for each in models)
        num_blocks = max(one_context, min(share // block_bytes, most))
    return cache_shapes(config, models, num_blocks)


def _check_given(
    config: EngineConfig, needed: int, states: int, max_model_len: int, budget: MemoryBudget | None
) -> None:
    """needed: bytes of one context. states: of the states of all sequences, snapshots included."""
    given, snapshots = config.kv_cache_memory or 0, config.state_snapshot_memory
    if given < needed + states:
        with_states = f", and the states of {config.max_num_seqs} sequences {show_bytes(states)}" if states else ""
        with_states += f", {show_bytes(snapshots)} of snapshots included" if states and snapshots else ""
        lower = "--max-num-seqs or --max-model-len" if states else "--max-model-len"
        raise ConfigError(
            f"--kv-cache-memory is {show_bytes(given)}; one context of {max_model_len} tokens needs "
            f"{show_bytes(needed)}{with_states}; raise it, or lower {lower}"
        )
    if budget is not None and given > budget.most_bytes:
        raise ConfigError(
            f"--kv-cache-memory is {show_bytes(given)}; at most {show_bytes(budget.most_bytes)} can be had: "
            f"{budget.describe()}"
        )


def _too_little(budget: MemoryBudget, needed: int, max_model_len: int, fitting: int) -> str:
    """fitting: tokens that fit."""
    shorter = f"lower --max-model-len to {fitting}, " if fitting else ""
    return (
        f"one context of {max_model_len} tokens needs {show_bytes(needed)} of KV cache, and "
        f"{show_bytes(budget.left_bytes)} are left: {budget.describe()}; {shorter}lower "
        "--max-num-batched-tokens or --max-num-seqs, or raise --gpu-memory-utilization"
    )


def cache_shapes(config: EngineConfig, models: Sequence[CachedModel], num_blocks: int) -> list[KvShape]:
    return [
        KvShape(heads=each.spec.kv_heads, num_blocks=num_blocks, block_size=config.block_size, dtype=each.kv_dtype)
        for each in models
    ]
