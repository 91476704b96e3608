"""Makes a Decoder of a checkpoint: configuration, weights, rotary table, buffers."""

from pathlib import Path

import torch

from faser.engine.models.config_json import read_model_config
from faser.engine.models.decoder import Buffers, Decoder
from faser.engine.models.rope import rotary_angles
from faser.engine.models.weights import Progress, WeightSource, pack_weights
from faser.kernels.backend import Backend


def load_decoder(
    directory: Path,
    backend: Backend,
    dtype: torch.dtype,
    *,
    max_model_len: int,
    max_rows: int,
    max_logit_rows: int | None = None,
    progress: Progress,
) -> Decoder:
    """Load a checkpoint directory, or a GGUF file.

    dtype: what weights, activations and products have. max_model_len: positions that will be asked for.
    max_rows: most rows of a step. max_logit_rows: most rows of one logits call; None: as many as max_rows.
    progress: called with (bytes done, bytes in all) after every tensor.

    Raises ModelError that names the file, the field or the tensor that cannot be used.
    """
    spec = read_model_config(directory).spec
    weights = pack_weights(_open_source(directory), spec, backend, dtype, progress)
    angles = rotary_angles(spec.rope, head_dim=spec.head_dim, num_positions=max_model_len)
    buffers = Buffers.allocate(
        spec,
        dtype,
        backend.device,
        max_rows=max_rows,
        max_logit_rows=max_rows if max_logit_rows is None else max_logit_rows,
    )
    return Decoder(spec, backend, weights, angles.to(backend.device), buffers)


def _open_source(path: Path) -> WeightSource:
    if path.suffix == ".gguf":
        from faser.engine.models.gguf import open_gguf

        return open_gguf(path)
    from faser.engine.models.safetensors_source import SafetensorsSource

    return SafetensorsSource(path)
