"""FrozenTarget: the model that a head is made for, loaded to be run over whole conversations.

Loads it as a server does, with the same backend and the same products.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.distill.states.target_states import TargetStates
from faser.engine.checkpoints.files import ModelConfig, read_model_config
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.startup.device import resolve_device
from faser.engine.execution.startup.sizing import compute_dtype, context_len
from faser.kernels.factory import make_backend
from faser.kernels.interface.backend import Backend
from faser.types import ProgressCallback

_MOST_ROWS = 2048  # tokens of the longest conversation that is learned from
_LOGIT_ROWS = 256


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
        """[V, H] on the backend's device, as the target's rows look it up."""
        return self._rows(self.decoder.ends.embedding, torch.arange(self.config.spec.vocab_size))

    @torch.inference_mode()
    def head_rows(self, token_ids: Tensor) -> Tensor:
        """[N, H] on the backend's device: the rows of these tokens in the head."""
        return self._rows(self.decoder.ends.head, token_ids)

    def final_norm(self) -> Tensor:
        """[H]."""
        return self.decoder.ends.final_norm

    def _rows(self, packed: object, token_ids: Tensor) -> Tensor:
        device = self.backend.device
        out = torch.empty((len(token_ids), self.config.spec.hidden_size), dtype=self.decoder.dtype, device=device)
        return self.backend.embed(token_ids.to(device), packed, out)


def load_target(config: EngineConfig, directory: Path, report: ProgressCallback) -> FrozenTarget:
    """Raises ConfigError or ModelError for a model that cannot be served."""
    resolved = resolve_device(config)
    model = read_model_config(directory)
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
        from faser.engine.checkpoints.gguf.checkpoint import gguf_config  # not every machine has the library

        return tuple(gguf_config(directory).get("architectures") or ())
    return tuple(json.loads((directory / "config.json").read_text(encoding="utf-8")).get("architectures") or ())
