"""Estimates how a model fits on a GPU that is not there, from its config.json alone.

    | CUDA | weights | buffers | a step | graphs, workspaces | states | left for keys and values | not granted |

A start measures most of these (memory.py, warm_up.py); here they are counted. Weights, buffers, states, keys and
values are exact but for padding. Of the temporary memory of a step the sampler's is counted, or that of a mixture,
whichever is larger. Graphs and workspaces are as a start expects them; CUDA's own memory is a constant.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from faser.config.engine import DEVICE_DEFAULTS, EngineConfig, gpu_defaults
from faser.engine.checkpoints.files import ModelConfig
from faser.engine.checkpoints.quantized import StoredFp8, StoredLowBit
from faser.engine.execution.models.decoder import Buffers
from faser.engine.execution.models.tensors import iter_shapes
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.engine.execution.sampling.logprobs import ELEMENTS_AT_ONCE
from faser.engine.execution.startup.memory import (
    CachedModel,
    cache_shapes,
    compute_dtype,
    context_len,
    kv_cache_dtype,
    state_bytes,
    with_snapshot_memory,
)

RUNTIME_BYTES = 1 << 30  # the context of CUDA and the kernels of torch, FlashInfer and Triton; assumed
# Of a logit, where every request asks for log probabilities: a copy of all of them, and what a part of them takes.
_COPY_BYTES, _PART_BYTES = 4, 20.5
_ATTENTION_BYTES = 128 << 20  # FlashInfer's workspace
_PRODUCT_BYTES = 32 << 20  # cuBLAS's
_TILE_ROWS = (16, 64)
_LAYERS, _EXPERTS = "model.layers.", ".experts."
_SCALE_BITS = 0.4  # of a weight: a scale and a zero point for 128


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuEstimate:
    """Memory of a model on a GPU of total_bytes, in bytes. kv_token: of a token in all layers.

    states: recurrent states of all sequences, with snapshots. max_model_len: the model's longest context, or the
    one that was asked for. max_num_seqs, step_rows: limits that follow from the GPU unless they were given.
    """

    total_bytes: int
    granted_bytes: int
    weights: int
    buffers: int
    step: int
    graphs: int
    states: int
    kv_token: int
    max_model_len: int
    max_num_seqs: int
    step_rows: int

    @property
    def step_bytes(self) -> int:
        """Return what all but weights, states, keys and values takes."""
        return RUNTIME_BYTES + self.buffers + self.step + self.graphs

    @property
    def left_bytes(self) -> int:
        """For keys and values; below 0 where the model does not fit."""
        return self.granted_bytes - self.step_bytes - self.weights - self.states

    @property
    def longest_context(self) -> int:
        """Return the tokens of the longest context that one sequence can have; 0: the model does not fit."""
        if not self.kv_token:
            return self.max_model_len if self.left_bytes > 0 else 0
        return max(0, min(self.max_model_len, self.left_bytes // self.kv_token))

    def sequences(self, context: int) -> int:
        """Count the sequences of this many tokens that run at once."""
        if context > self.longest_context:
            return 0
        return min(self.max_num_seqs, self.left_bytes // max(1, context * self.kv_token))


def estimate(config: EngineConfig, model: ModelConfig, total_bytes: int) -> GpuEstimate:
    """Estimate a model on an empty GPU with this much memory, which takes the defaults of such a GPU.

    Raises ConfigError for a context that the model does not have.
    """
    values = {name: getattr(config, name) for name in DEVICE_DEFAULTS}
    chosen: dict[str, Any] = gpu_defaults(values, config.by_device, total_bytes)
    config = replace(config, **chosen, by_device=())
    dtype = compute_dtype(replace(config, backend="flashinfer", device="cuda"), model)
    cached = CachedModel(spec=model.spec, dtype=dtype, kv_dtype=kv_cache_dtype(config, dtype))
    longest, rows, logit_rows = context_len(config, model), config.max_num_batched_tokens, config.max_logit_rows
    config = with_snapshot_memory(config, [cached], longest)
    (kv,) = cache_shapes(config, [cached], 1)
    buffers = Buffers.allocate(model.spec, dtype, torch.device("meta"), max_rows=rows, max_logit_rows=logit_rows)
    angles = {(each.rope, each.head_dim) for each in model.spec.attentions if each.rope is not None}
    drafts = 0 if config.speculation.policy == "off" else config.speculation.cap
    sizes = GraphSizes.default(
        max_rows=rows,
        max_sequences=config.max_num_seqs,
        max_drafts=drafts,
        max_blocks_each=-(-longest // config.block_size),
        block_size=config.block_size,
        tile_rows=_TILE_ROWS,
    )
    return GpuEstimate(
        total_bytes=total_bytes,
        granted_bytes=int(total_bytes * config.gpu_memory_utilization),
        weights=weight_bytes(config, model, dtype),
        buffers=_bytes_of(buffers) + 4 * longest * sum(width for _, width in angles),
        step=max(sampler_bytes(logit_rows, model.spec.vocab_size), rows * _mixture_row_bytes(model, dtype)),
        graphs=sizes.expected_bytes(len({each.window for each in model.spec.attentions}))
        + _ATTENTION_BYTES
        + _PRODUCT_BYTES,
        states=state_bytes(config, cached),
        kv_token=kv.block_bytes // config.block_size,
        max_model_len=longest,
        max_num_seqs=config.max_num_seqs,
        step_rows=rows,
    )


def weight_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Count the bytes of the weights on a GPU.

    Matrices of layers in 8-bit floats stay as they are stored, or are rounded to them where that is asked for; so
    do codes of integers, but those of experts. Whatever else is held in the type of the activations.
    """
    stored = None if config.quantization == "none" else model.quantization
    bits: float = 8 * dtype.itemsize
    if config.quantization == "fp8" or isinstance(stored, StoredFp8):
        bits = 8
    elif isinstance(stored, StoredLowBit):
        bits = max(stored.bits) + _SCALE_BITS
    total = 0.0
    for name, shape in iter_shapes(model.spec):
        narrow = len(shape) == 2 and name.startswith(_LAYERS) and not (_EXPERTS in name and bits != int(bits))
        total += math.prod(shape) * (bits / 8 if narrow else dtype.itemsize)
        total += 4 * shape[0] * (narrow and bits == 8)  # a scale for each row
    return int(total)


def sampler_bytes(num_rows: int, vocab_size: int) -> int:
    """Estimate the temporary memory of a step that samples this many rows."""
    logits = num_rows * vocab_size
    return _COPY_BYTES * logits + int(_PART_BYTES * min(logits, ELEMENTS_AT_ONCE))


def _mixture_row_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of a row's pairs with experts: gate and up, their product, and what the expert gives."""
    hidden = model.spec.hidden_size
    return max((each.top_k * (3 * each.size + hidden) * dtype.itemsize for each in model.spec.mixtures), default=0)


def _bytes_of(buffers: Buffers) -> int:
    fields: Iterable[object] = (getattr(buffers, name) for name in Buffers.__slots__)
    return sum(each.nbytes for each in fields if isinstance(each, torch.Tensor))
