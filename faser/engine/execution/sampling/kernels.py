"""Sampling by tensor operations: for devices and machines that have no kernels for it, and as their reference."""

import numpy as np
import torch
from torch import Tensor

from faser.engine.execution.sampling.distribution import (
    Truncation,
    best,
    choose,
    final_probs,
    first_and_margin,
    parts,
    rows_at_once,
    scale,
)
from faser.kernels.interface.sampling import SamplingMetadata, arrivals, best_then_drawn, philox
from faser.types.arrays import NO_TOKEN, Floats, Ints, Words

_ALL = slice(None)


class TorchSamplingKernels:
    """Sampling kernels by tensor operations, wherever the logits are."""

    @torch.inference_mode()
    def best(self, logits: Tensor) -> Ints:
        token_ids, values = best(logits)
        return torch.where(values.isfinite(), token_ids, NO_TOKEN).numpy(force=True)

    @torch.inference_mode()
    def best_and_margin(self, logits: Tensor) -> tuple[Ints, Floats]:
        token_ids, margins = first_and_margin(logits)
        values = logits.gather(-1, token_ids[:, None])[:, 0]
        found, differences, largest = _on_host(token_ids, margins, values)
        sound = np.isfinite(largest)
        return np.where(sound, found, NO_TOKEN).astype(np.int64), np.where(sound, differences, 0.0)

    def take(self, logits: Tensor, metadata: SamplingMetadata, noise: Words) -> Ints:
        return best_then_drawn(self, logits, metadata, noise)

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Ints, _best: Ints, metadata: SamplingMetadata, noise: Words) -> Ints:
        temperature, cut = _tensors(metadata, logits.device)
        drawn = [
            choose(
                scale(_pick(logits, rows, part), temperature[part]),
                cut.rows(part),
                race(noise[part], logits.shape[-1], logits.device),
            )
            for part in parts(len(rows), rows_at_once(logits))
        ]
        return torch.cat(drawn).numpy(force=True)

    @torch.inference_mode()
    def predict(
        self,
        logits: Tensor,
        rows: Ints,
        _best: Ints,
        metadata: SamplingMetadata,
        noise: Words,
        token_ids: Ints | None = None,
    ) -> tuple[Ints, Floats]:
        temperature, cut = _tensors(metadata, logits.device)
        at = torch.from_numpy(rows).to(logits.device)
        width = logits.shape[-1] if token_ids is None else int(token_ids[-1]) + 1
        ids = None if token_ids is None else torch.from_numpy(token_ids).to(logits.device)
        found = []
        for part in parts(len(rows), rows_at_once(logits)):
            scaled = scale(logits[at[part]], temperature[part])
            columns = choose(scaled, cut.rows(part), race(noise[part], width, logits.device), ids)[:, None]
            own = scaled.gather(-1, columns)[:, 0]
            margins = own - scaled.scatter_(-1, columns, -torch.inf).amax(-1)
            found.append((columns[:, 0], margins))
        predicted, margins = _on_host(*(torch.cat(each) for each in zip(*found, strict=True)))
        return predicted.astype(np.int64), margins

    @torch.inference_mode()
    def fixed_point_probs(self, logits: Tensor, rows: Ints, _best: Ints, metadata: SamplingMetadata) -> None:
        temperature, cut = _tensors(metadata, logits.device)
        for part in parts(len(rows), rows_at_once(logits)):
            at = torch.from_numpy(rows[part]).to(logits.device)
            logits[at] = final_probs(scale(logits[at], temperature[part]), cut.rows(part))

    def philox(self, counters: Words, keys: Words) -> Words:
        return philox(counters, keys)


TORCH_SAMPLING = TorchSamplingKernels()  # where a backend has no kernels of its own


def race(noise: Words, width: int, device: torch.device) -> Tensor:
    """`arrivals` of these random words, [N, ...] float64 on the device."""
    return torch.from_numpy(arrivals(noise, width)).to(device)


def _on_host(*columns: Tensor) -> Floats:
    """Copy C columns [R] to the host as [C, R], at once. float64 holds every float32 and every token id."""
    wide: Floats = torch.stack([column.double() for column in columns]).numpy(force=True)
    return wide


def _pick(logits: Tensor, rows: Ints, part: slice = _ALL) -> Tensor:
    """logits[rows[part]], without a copy where rows are all."""
    return logits[part] if len(rows) == len(logits) else logits[torch.from_numpy(rows[part]).to(logits.device)]


def _tensors(metadata: SamplingMetadata, device: torch.device) -> tuple[Tensor, Truncation]:
    temperature, min_p, top_k, top_p = (
        torch.from_numpy(values).to(device)
        for values in (metadata.temperature, metadata.min_p, metadata.top_k, metadata.top_p)
    )
    return temperature, Truncation(min_p=min_p, top_k=top_k, top_p=top_p)
