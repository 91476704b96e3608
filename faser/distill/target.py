"""FrozenTarget: the model that a head is made for, loaded to be run over whole conversations.

Loads it as a server does, with the same backend and the same products, low-bit ones included: so a head learns
from the numbers that a server gives it. TargetStates runs it: hidden states, and probabilities of the next tokens.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.checkpoints.files import ModelConfig, read_model_config
from faser.engine.checkpoints.gguf_config import gguf_config
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.startup.device import resolve_device
from faser.engine.execution.startup.memory import compute_dtype, context_len
from faser.errors import ConfigError
from faser.kernels.factory import make_backend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import KvCache, RowLayout
from faser.types.engine import ProgressCallback

_MOST_ROWS = 2048  # tokens of the longest conversation that is learned from
_BLOCK_SIZE = 16
_LOGIT_ROWS = 256  # of one call: logits take far more memory than states


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """Tokens to run, [N] int64. The distributions after rows first_row … N - 2 are wanted."""

    token_ids: Tensor
    first_row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassageStates:
    """States and distributions of the target for a passage of N tokens. M = N - 1 - first_row, at least 0.

    states: [N, K * H] bfloat16, the inputs of K layers side by side. top_ids: [M, k] int32, the likeliest next
    tokens, in order. top_probs: [M, k] float16, their probabilities at temperature 1 among all tokens.
    """

    states: Tensor
    top_ids: Tensor
    top_probs: Tensor


class TargetStates:
    """One target. max_rows: of the decoder's buffers; most tokens of a passage, and of the passages of one call.

    state_layers: ascending; i is the input of layer i, the number of layers is what the last one returns.
    """

    def __init__(
        self, decoder: Decoder, backend: Backend, state_layers: Sequence[int], *, max_rows: int, top: int
    ) -> None:
        self.state_layers = tuple(state_layers)
        self.max_rows = max_rows
        self._top = min(top, decoder.spec.vocab_size)
        self._decoder = decoder
        self._backend = backend
        spec = decoder.spec
        self._cache: KvCache = backend.allocate_kv(
            KvShape(
                heads=spec.kv_heads,
                num_blocks=-(-max_rows // _BLOCK_SIZE),
                block_size=_BLOCK_SIZE,
                dtype=decoder.dtype,
            )
        )

    @torch.inference_mode()
    def compute(self, passages: Sequence[Passage]) -> list[PassageStates]:
        """Run passages that fit together; see batches."""
        lengths = [len(each.token_ids) for each in passages]
        assert sum(lengths) <= self.max_rows, f"{sum(lengths)} rows; at most {self.max_rows} fit"
        backend, decoder = self._backend, self._decoder
        plan = backend.plan(_layout(lengths), _BLOCK_SIZE)
        token_ids = torch.cat([each.token_ids for each in passages]).to(backend.device)
        hidden, layer = decoder.embed(token_ids), 0
        found = []
        for wanted in self.state_layers:
            hidden = decoder.run_layers(hidden, layer, wanted, self._cache, plan)
            layer = wanted
            found.append(hidden.to(device="cpu", dtype=torch.bfloat16, copy=True))
        hidden = decoder.run_layers(hidden, layer, decoder.spec.num_layers, self._cache, plan)
        states = torch.split(torch.cat(found, dim=1), lengths)
        starts = [sum(lengths[:at]) for at in range(len(lengths))]
        counts = [max(0, length - 1 - each.first_row) for length, each in zip(lengths, passages, strict=True)]
        rows = [
            torch.arange(start + each.first_row, start + each.first_row + count)
            for start, each, count in zip(starts, passages, counts, strict=True)
        ]
        ids, probs = self._likeliest(hidden, torch.cat(rows).to(backend.device))
        return [
            PassageStates(states=each, top_ids=its_ids, top_probs=its_probs)
            for each, its_ids, its_probs in zip(
                states, torch.split(ids, counts), torch.split(probs, counts), strict=True
            )
        ]

    def _likeliest(self, hidden: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(ids, probabilities) of the likeliest tokens after some rows of hidden: see PassageStates."""
        ids, probs = [], []
        for part in torch.split(rows, min(_LOGIT_ROWS, len(self._decoder.logit_rows))):
            logits = self._decoder.logits(hidden.index_select(0, part))
            top = logits.topk(self._top, dim=-1)
            ids.append(top.indices.to("cpu", torch.int32))
            normaliser = logits.logsumexp(dim=-1, keepdim=True)
            probs.append((top.values - normaliser).exp().to("cpu", torch.float16))
        if not ids:
            return torch.empty((0, self._top), dtype=torch.int32), torch.empty((0, self._top), dtype=torch.float16)
        return torch.cat(ids), torch.cat(probs)


def batches(lengths: Sequence[int], max_rows: int) -> list[range]:
    """Ranges of neighbouring passages that fit into max_rows rows together, in blocks of their own.

    Each length is at most max_rows.
    """
    found, first, used = [], 0, 0
    for at, length in enumerate(lengths):
        blocks = -(-length // _BLOCK_SIZE)
        if used + blocks > -(-max_rows // _BLOCK_SIZE) and used:
            found.append(range(first, at))
            first, used = at, 0
        used += blocks
    return [*found, range(first, len(lengths))] if lengths else []


def _layout(lengths: Sequence[int]) -> RowLayout:
    """Every passage from its first position on, in blocks of its own."""
    blocks = [-(-length // _BLOCK_SIZE) for length in lengths]
    table = torch.zeros((len(lengths), max(blocks)), dtype=torch.int32)
    first = 0
    for at, count in enumerate(blocks):
        table[at, :count] = torch.arange(first, first + count, dtype=torch.int32)
        first += count
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return RowLayout(
        query_start=ends.to(torch.int32),
        seq_len=torch.tensor(lengths, dtype=torch.int32),
        positions=torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]),
        block_table=table,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenTarget:
    """max_rows: most tokens that it runs at once. architectures: as its config.json names them."""

    config: ModelConfig
    decoder: Decoder
    backend: Backend
    max_rows: int
    architectures: tuple[str, ...]

    def states(self, state_layers: tuple[int, ...], *, top: int) -> TargetStates:
        return TargetStates(self.decoder, self.backend, state_layers, max_rows=self.max_rows, top=top)

    @torch.inference_mode()
    def embedding(self) -> Tensor:
        """Return the embedding [V, H] on the backend's device, as the target's rows look it up."""
        return self._rows(self.decoder.ends.embedding, torch.arange(self.config.spec.vocab_size))

    @torch.inference_mode()
    def head_rows(self, token_ids: Tensor) -> Tensor:
        """Return the rows [N, H] of these tokens in the head, on the backend's device."""
        return self._rows(self.decoder.ends.head, token_ids)

    def final_norm(self) -> Tensor:
        """Return the weight [H] of the final norm."""
        return self.decoder.ends.final_norm

    def _rows(self, packed: object, token_ids: Tensor) -> Tensor:
        device = self.backend.device
        out = torch.empty((len(token_ids), self.config.spec.hidden_size), dtype=self.decoder.dtype, device=device)
        return self.backend.embed(token_ids.to(device), packed, out)


def load_target(config: EngineConfig, directory: Path, report: ProgressCallback) -> FrozenTarget:
    """Raises ConfigError or ModelError for a model that cannot be served, or has recurrent states."""
    resolved = resolve_device(config)
    model = read_model_config(directory)
    if model.spec.has_states:
        raise ConfigError(f"{directory} has gated delta nets; heads are distilled from models without them only")
    max_rows = min(_MOST_ROWS, context_len(resolved, model))
    backend = make_backend(
        resolved.backend, resolved.device, num_threads=resolved.threads, cache_dir=cache_dir() / "kernels"
    )
    decoder = load_decoder(
        directory,
        backend,
        compute_dtype(resolved, model),
        max_model_len=max_rows,
        max_rows=max_rows,
        max_logit_rows=_LOGIT_ROWS,
        quantization=resolved.quantization,
        progress=lambda done, total: report("loading weights", done, total),
    )
    return FrozenTarget(
        config=model, decoder=decoder, backend=backend, max_rows=max_rows, architectures=_architectures(directory)
    )


def _architectures(directory: Path) -> tuple[str, ...]:
    if directory.suffix == ".gguf":
        return tuple(gguf_config(directory).get("architectures") or ())
    return tuple(json.loads((directory / "config.json").read_text(encoding="utf-8")).get("architectures") or ())
