"""Weights that are made up where they are used: seeded, of the size that trained ones have, and never on a disk.

Entries of standard deviation 0.02, norms of one. The head is the exception: after the last norm a row's logits
then have a deviation of LOGIT_STD, and about exp(ln V - LOGIT_STD² / 2) tokens share most of the mass, 43 of
128256.
Of flat logits every choice with top_p would have to look at the whole vocabulary, which no real text asks for.
"""

import math
from pathlib import Path

import torch
from torch import Tensor

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models import tensors

LOGIT_STD = 4.0
_STD = 0.02


class MadeUp:
    """A WeightSource. Tensors lie on `device`, in bfloat16, each a function of the seed and of its place alone."""

    def __init__(self, spec: DecoderSpec, device: torch.device | str, seed: int = 0) -> None:
        self._shapes = tensors.tensor_shapes(spec)
        self._places = {name: place for place, name in enumerate(self._shapes)}
        self._head = tensors.EMBEDDING if spec.tie_word_embeddings else tensors.HEAD
        self._head_std = LOGIT_STD / math.sqrt(spec.hidden_size)
        self._device = torch.device(device)
        self._seed = seed

    @classmethod
    def of(cls, directory: Path, device: torch.device | str, seed: int = 0) -> "MadeUp":
        return cls(read_model_config(directory).spec, device, seed)

    def names(self) -> list[str]:
        return list(self._shapes)

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        generator = torch.Generator(self._device).manual_seed((self._seed << 20) + self._places[name])
        made = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return made.normal_(0.0, self._head_std if name == self._head else _STD, generator=generator)
