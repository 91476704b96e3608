"""Sampling by tensor operations: for devices and machines that have no kernels for it, and as their reference."""

import numpy as np
import torch
from torch import Tensor

from faser.engine.execution.sampling.distribution import (
    Truncation,
    best,
    choose,
    draw,
    final_probs,
    first_and_margin,
    parts,
    rows_at_once,
    scale,
)
from faser.kernels.interface.sampling import (
    NO_TOKEN,
    Ints,
    Reals,
    SamplingMetadata,
    Words,
    best_then_drawn,
    philox,
)

_ALL = slice(None)


class TorchSamplingKernels:
    """See SamplingKernels. Works where the logits are."""

    @torch.inference_mode()
    def best(self, logits: Tensor) -> Ints:
        token_ids, values = best(logits)
        return torch.where(values.isfinite(), token_ids, NO_TOKEN).numpy(force=True)

    @torch.inference_mode()
    def best_and_margin(self, logits: Tensor) -> tuple[Ints, Reals]:
        token_ids, margins = first_and_margin(logits)
        values = logits.gather(-1, token_ids[:, None])[:, 0]
        found, differences, largest = _on_host(token_ids, margins, values)
        sound = np.isfinite(largest)
        return np.where(sound, found, NO_TOKEN).astype(np.int64), np.where(sound, differences, 0.0)

    def take(self, logits: Tensor, metadata: SamplingMetadata, uniforms: Reals) -> Ints:
        return best_then_drawn(self, logits, metadata, uniforms)

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Ints, _best: Ints, metadata: SamplingMetadata, uniforms: Reals) -> Ints:
        temperature, cut = _tensors(metadata, logits.device)
        noise = torch.from_numpy(uniforms).to(logits.device)
        drawn = [
            choose(scale(_pick(logits, rows, part), temperature[part]), cut.rows(part), noise[part])
            for part in parts(len(rows), rows_at_once(logits))
        ]
        return torch.cat(drawn).numpy(force=True)

    @torch.inference_mode()
    def nearest(
        self, logits: Tensor, rows: Ints, _best: Ints, metadata: SamplingMetadata, uniforms: Reals, window: float
    ) -> tuple[Ints, Reals]:
        temperature, cut = _tensors(metadata, logits.device)
        at, noise = (torch.from_numpy(each).to(logits.device) for each in (rows, uniforms))
        found = []
        for part in parts(len(rows), rows_at_once(logits)):
            scaled = scale(logits[at[part]], temperature[part])
            token_ids = nearest(final_probs(scaled, cut.rows(part)), noise[part], window)[:, None]
            final_ids = scaled.gather(-1, token_ids)[:, 0]
            margins = final_ids - scaled.scatter_(-1, token_ids, -torch.inf).amax(-1)
            found.append((token_ids[:, 0], margins))
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


def nearest(fixed_probs: Tensor, noise: Tensor, window: float) -> Tensor:
    """[R] the token with the most probability within window of the number; a window of 0 gives the one it is in.

    fixed_probs: [R, V] whole numbers, not normalised. noise: [R] float64 in [0, 1).
    """
    if window == 0:
        return draw(fixed_probs, noise)
    ends = fixed_probs.cumsum(-1, dtype=torch.float64)
    total = ends[:, -1]
    centre = (noise * total)[:, None]
    reach = (window * total)[:, None]
    starts = ends - fixed_probs
    inside = torch.minimum(ends, centre + reach).sub_(torch.maximum(starts, centre - reach))
    return inside.argmax(-1)


def _on_host(*columns: Tensor) -> Reals:
    """[C, R] from C columns [R], in one copy from the device. float64 holds every float32 and every token id."""
    wide: Reals = torch.stack([column.double() for column in columns]).numpy(force=True)
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
