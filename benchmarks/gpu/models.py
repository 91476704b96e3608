"""Made-up models: their sizes, what a device has room for, weights, and pairs that agree as often as wanted.

Sizes are the published ones of Qwen3-8B, Qwen3-0.6B, Llama-3.1-8B and Llama-3.2-1B, and tiny ones for dry runs.

Weights are seeded, of the size that trained ones have, made where they are used, and never on a disk. Entries have
standard deviation 0.02, norms are one. The head is the exception: after the last norm a row's logits then have a
deviation of LOGIT_STD, and about exp(ln V - LOGIT_STD² / 2) tokens share most of the mass, 43 of 128256. Of flat
logits every choice with top_p would have to look at the whole vocabulary, which no real text asks for.

A walking pair has real drafts and given acceptance. The target's next token is a function of the token before it:
a walk over the vocabulary, in one cycle for each acceptance. The drafter walks the same way except behind a share
1 - a of the tokens, where it takes another one's successor. Which tokens these are is drawn, so every drafted
token is right with probability a, whatever was before, and a sequence keeps to the cycle that its prompt's last
token lies in.

How models walk: embeddings are so long compared with what layers add that a row's last hidden state points where
its token's embedding does, and the head's row of the successor points there too. Only greedy tokens are known
beforehand, by a margin that no rounding turns. So tokens do not depend on how they are computed, and drafts are
point masses. The drafter's head has to be of its own: a tied one would say the token that it was given.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models import tensors
from faser.engine.execution.models.weights import WeightSource

Config = dict[str, Any]

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "torch_dtype": "bfloat16",
}
_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

# Heads of queries and keys have norms of their own.
QWEN3_FIELDS = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "torch_dtype": "bfloat16",
}
QWEN3_8B: Config = QWEN3_FIELDS | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": False,
}
QWEN3_600M: Config = QWEN3_FIELDS | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
LLAMA_8B: Config = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_scaling": _ROPE | {"factor": 8.0},
    "tie_word_embeddings": False,
}
LLAMA_1B: Config = _LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_scaling": _ROPE | {"factor": 32.0},
    "tie_word_embeddings": True,
}
TINY_SIZES = {
    "vocab_size": 512,
    "bos_token_id": 0,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
_TINY = _LLAMA | TINY_SIZES
TINY_NORMED: Config = QWEN3_FIELDS | TINY_SIZES | {"num_hidden_layers": 2, "tie_word_embeddings": False}
TINY_TARGET: Config = _TINY | {"num_hidden_layers": 2, "tie_word_embeddings": False}
TINY_DRAFT: Config = _TINY | {"num_hidden_layers": 1, "tie_word_embeddings": True}


def own_head(config: Config) -> Config:
    """The same with a head of its own, which takes as many bytes as the embedding."""
    return config | {"tie_word_embeddings": False}


def write_shape(directory: Path, config: Config) -> Path:
    """A directory that counts as a checkpoint, whose tensors somebody else makes.

    The empty file stands for them: a directory without any .safetensors is refused as a draft model's.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    (directory / "made-up.safetensors").touch()
    return directory


VALUE_BYTES = 2


def step_bytes(
    spec: DecoderSpec, *, kv_tokens: int, value_bytes: int = 2, product_bytes: int | None = None
) -> int:
    """Return the least bytes that a step reads: every weight once but the embedding's, and the KV cache.

    kv_tokens: positions that the rows' sequences have in the cache, all together. value_bytes: of a weight and of
    a value in the cache. product_bytes: of a weight of the layers' products; None: as of the others.
    """
    weights = tensors.num_parameters(spec)
    if not spec.tie_word_embeddings:
        weights -= spec.vocab_size * spec.hidden_size
    kv_values = 2 * spec.num_layers * spec.attention.kv_size * kv_tokens
    narrower = 0 if product_bytes is None else value_bytes - product_bytes
    return (weights + kv_values) * value_bytes - narrower * _product_parameters(spec)


def _product_parameters(spec: DecoderSpec) -> int:
    """Parameters of the matrices of all layers."""
    shapes = chain.from_iterable(tensors.layer_shapes(spec, layer).values() for layer in spec.layers)
    return sum(math.prod(shape) for shape in shapes if len(shape) == 2)


def step_flops(spec: DecoderSpec, *, rows: int) -> int:
    """Multiplications and additions of a step's products; attention's are left out."""
    return 2 * (step_bytes(spec, kv_tokens=0, value_bytes=1)) * rows


def floor_s(
    spec: DecoderSpec,
    *,
    rows: int,
    kv_tokens: int,
    bytes_s: float,
    flops_s: float,
    product_bytes: int = VALUE_BYTES,
) -> float:
    """The least that a step can take at these rates: the longer of moving and computing.

    flops_s: of products in 16 bits; those of 8 bits take half the time at least.
    """
    moved_s = step_bytes(spec, kv_tokens=kv_tokens, product_bytes=product_bytes) / bytes_s
    return max(moved_s, step_flops(spec, rows=rows) / flops_s * product_bytes / VALUE_BYTES)


BLOCK_SIZE = 16
MORE_TOKENS = 1024  # that a sequence may say behind its prompt while it is measured
_SPARE_BLOCKS = 256  # in addition to those of the sequences: of prompts that stay cached from one turn to the next
_SAID_TOKENS = 40 << 10  # by all sequences of a turn together: half a second of 128 with five tokens a step
_USED = 0.9  # of a device's memory
_OTHER_BYTES = 8 << 30  # logits, a step of 8192 rows, CUDA graphs, workspaces, CUDA itself


def kv_bytes(specs: Sequence[DecoderSpec], *, sequences: int, context: int) -> int:
    """Return the bytes of a cache for this number of sequences with prompts of context tokens, of all models."""
    said = min(sequences * MORE_TOKENS, _SAID_TOKENS)
    tokens = sequences * context + max(said, MORE_TOKENS) + (sequences + _SPARE_BLOCKS) * BLOCK_SIZE
    return tokens * sum(2 * spec.num_layers * spec.attention.kv_size * VALUE_BYTES for spec in specs)


def has_room(memory_bytes: int, models: Sequence[Config], *, sequences: int, context: int) -> bool:
    """Return whether a device holds these models, by their config.json, with these sequences."""
    specs = [decoder_spec(model) for model in models]
    weights = sum(tensors.num_parameters(spec) for spec in specs) * VALUE_BYTES
    needed = weights + kv_bytes(specs, sequences=sequences, context=context) + _OTHER_BYTES
    return needed <= _USED * memory_bytes


LOGIT_STD = 4.0
_STD = 0.02
_BIAS_STD = 0.01  # less than entries of embeddings: rows with much in common would all choose the same experts
_SINK_STD = 2.0


class MadeUp:
    """A WeightSource. Tensors lie on `device`, in bfloat16, each a function of the seed and of its place alone."""

    def __init__(
        self, spec: DecoderSpec, device: torch.device | str, seed: int = 0, *, bias_std: float = _BIAS_STD
    ) -> None:
        self._bias_std = bias_std
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
        std = self._std(name)
        if std is None:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        generator = torch.Generator(self._device).manual_seed((self._seed << 20) + self._places[name])
        made = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
        return made.normal_(0.0, std, generator=generator)

    def _std(self, name: str) -> float | None:
        """None: all entries are one."""
        if len(self._shapes[name]) > 1:
            return self._head_std if name == self._head else _STD
        if name.endswith(".bias"):
            return self._bias_std
        return _SINK_STD if name.endswith(tensors.SINKS) else None


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
