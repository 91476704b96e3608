"""A made-up pair of models that agree as often as is wanted: real drafts, real verdicts, given acceptance.

The target's next token is a function of the token before it: a walk over the vocabulary, in one cycle for each
acceptance. The drafter walks the same way except behind a share 1 - a of the tokens, where it takes another one's
successor. Which tokens these are is drawn, so every drafted token is right with probability a, whatever came
before, and a sequence keeps to the cycle that its prompt's last token lies in.

How models come to walk: embeddings are so long beside what layers add that a row's last hidden state points where
its token's embedding does, and the head's row of the successor points there too. Work and sizes are those of any
model of the shape; only greedy tokens are known beforehand, by a margin that no rounding turns. So tokens do not
depend on how they are computed, drafts are point masses and their verdicts the target's own, which drafting ahead
takes. The drafter's head has to be of its own: a tied one would say the token that it was given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu.common.weights import MadeUp
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models import tensors
from faser.engine.execution.models.weights import WeightSource

Ints = NDArray[np.int64]

_LENGTH = 1600.0  # of embeddings, times those of other weights: a layer adds to an entry of 32 about 2
_BEST_LOGIT = 20.0  # of the successor; the others' lie around 0
_MADE_STD = 0.02  # of an entry that MadeUp makes


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """successor, guess: [vocab] the next token, and what the drafter takes it for. Both are permutations.

    acceptances: cycle i holds the tokens t with t % len(acceptances) == i; so many of its guesses are right.
    """

    acceptances: tuple[float, ...]
    successor: Ints
    guess: Ints

    @classmethod
    def drawn(cls, vocab_size: int, acceptances: tuple[float, ...], seed: int = 0) -> "Walk":
        """Raises ValueError for an acceptance beyond 0 … 1."""
        generator = np.random.default_rng(seed)
        successor = np.empty(vocab_size, dtype=np.int64)
        guess = np.empty_like(successor)
        for place, acceptance in enumerate(acceptances):
            if not 0 <= acceptance <= 1:
                raise ValueError(f"an acceptance is {acceptance}; it must lie between 0 and 1")
            cycle = generator.permutation(np.arange(place, vocab_size, len(acceptances)))
            successor[cycle] = np.roll(cycle, -1)
            guess[cycle] = successor[cycle]
            wrong = generator.permutation(cycle)[round(len(cycle) * acceptance) :]
            if len(wrong) > 1:
                guess[wrong] = np.roll(successor[wrong], -1)
        return cls(acceptances=acceptances, successor=successor, guess=guess)

    def prompts(self, place: int, count: int, length: int, seed: int = 0) -> list[tuple[int, ...]]:
        """Made-up ones, whose answers are walks in cycle number place.

        The i-th of every cycle differ in their last tokens alone, so that the prefix cache holds all of them; two
        of one cycle share no block, as far as chance goes.
        """
        vocab_size, num_cycles = len(self.successor), len(self.acceptances)
        found = []
        for number in range(count):
            generator = np.random.default_rng((seed, number))
            tokens = generator.integers(vocab_size, size=length)
            inside = generator.integers((vocab_size - place - 1) // num_cycles + 1)
            tokens[-1] = place + num_cycles * inside
            found.append(tuple(tokens.tolist()))
        return found


class Walking:
    """A WeightSource: made-up weights of a model whose greedy token behind t is step[t]; its head is not tied."""

    def __init__(self, source: WeightSource, step: Ints) -> None:
        self._source = source
        self._before = torch.from_numpy(np.argsort(step))  # whose successor each token is

    @classmethod
    def of(cls, directory: Path, step: Ints, device: torch.device | str) -> "Walking":
        """Raises ValueError for a shape with a tied head, or with another vocabulary."""
        spec = read_model_config(directory).spec
        if spec.tie_word_embeddings or spec.vocab_size != len(step):
            raise ValueError(
                f"{directory} has a vocabulary of {spec.vocab_size} and "
                f"{'a' if spec.tie_word_embeddings else 'no'} tied head; "
                f"a walk over {len(step)} tokens takes as many and a head of its own"
            )
        return cls(MadeUp(spec, device), step)

    def names(self) -> Sequence[str]:
        return self._source.names()

    def get(self, name: str) -> Tensor:
        if name == tensors.EMBEDDING:
            return self._source.get(name).mul_(_LENGTH)
        if name == tensors.HEAD:
            entries = self._source.get(tensors.EMBEDDING)
            scale = _BEST_LOGIT / (entries.shape[1] * _MADE_STD)
            return entries[self._before.to(entries.device)].mul_(scale)
        return self._source.get(name)
