"""Seeded heads on disk, in each layout, and a driver that runs one through a paged cache."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from faser.distill.speculators_writer import write_speculators
from faser.engine.checkpoints.families.architecture import (
    AttentionSpec,
    DecoderSpec,
    DenseSpec,
    LayerSpec,
    RopeSpec,
)
from faser.engine.checkpoints.heads import HeadSpec
from faser.engine.execution.drafting.heads import tensors
from faser.engine.execution.drafting.heads.head import Head
from faser.engine.execution.drafting.heads.weights import load_head
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import RowLayout
from tests.checkpoints import VOCAB_SIZE, random_weights, write_checkpoint

BLOCK_SIZE = 16
MAX_POSITIONS = 96
TARGET_HIDDEN = 64
DRAFT_VOCAB = 160
TOKENS: list[int] = torch.randint(VOCAB_SIZE, (19,), generator=torch.Generator().manual_seed(1)).tolist()


def head_layers(
    *,
    num_layers: int = 1,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = TARGET_HIDDEN,
    size: int = 96,
    mlp_bias: bool = False,
    **attention: Any,
) -> DecoderSpec:
    """Llama layers that are as wide as the tiny target. attention: fields of AttentionSpec."""
    heads: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rope": RopeSpec(theta=10_000.0)}
    layer = LayerSpec(
        attention=AttentionSpec(**(heads | attention)), feed_forward=DenseSpec(size=size, bias=mlp_bias)
    )
    return DecoderSpec(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(layer,) * num_layers,
        rms_norm_eps=1e-5,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )


def head_spec(layers: DecoderSpec | None = None, **changes: Any) -> HeadSpec:
    base = HeadSpec(
        decoder=layers or head_layers(),
        draft_vocab_size=DRAFT_VOCAB,
        target_hidden_size=TARGET_HIDDEN,
        state_layers=(0, 1, 2),
    )
    return dataclasses.replace(base, **changes)


def draft_vocabulary(size: int = DRAFT_VOCAB, *, seed: int = 5) -> Tensor:
    """[size] ascending tokens of the tiny target."""
    return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))[:size].sort().values


def seeded_weights(spec: HeadSpec, *, seed: int = 11) -> dict[str, Tensor]:
    """Every tensor of a head, under the names of heads/tensors.py."""
    return random_weights(tensors.eagle3_shapes(spec), seed=seed)


def write_seeded(
    directory: Path,
    spec: HeadSpec,
    *,
    without: Sequence[str] = (),
    seed: int = 11,
    dtype: torch.dtype = torch.float32,
    int8: bool = False,
) -> dict[str, Tensor]:
    """A `speculators` directory of a seeded head, without some tensors. Returns all weights."""
    weights = seeded_weights(spec, seed=seed)
    write_speculators(
        directory,
        spec,
        {name: weight for name, weight in weights.items() if name not in without},
        draft_ids=draft_vocabulary(spec.draft_vocab_size) if spec.draft_vocab_size < VOCAB_SIZE else None,
        target_architectures=["LlamaForCausalLM"],
        dtype=dtype,
        int8=int8,
    )
    return weights


def flattened(
    speculators: Path, directory: Path, config: dict[str, Any], *, prefix: str = "", layer: str = "midlayer."
) -> Path:
    """The same tensors in the flat layout: layer 0 is called `midlayer`. config: of the directory."""
    stored = load_file(speculators / "model.safetensors")
    renamed = {
        (name if name in ("d2t", "t2d", "lm_head.weight") else prefix + name.replace("layers.0.", layer)): tensor
        for name, tensor in stored.items()
    }
    write_checkpoint(directory, config, {})
    save_file(renamed, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def flat_config(**changes: Any) -> dict[str, Any]:
    """As SpecForge and the authors of EAGLE-3 write it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": DRAFT_VOCAB,
        "hidden_size": TARGET_HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
        **changes,
    }


def target(
    directory: Path, backend: Backend, dtype: torch.dtype = torch.float32, *, quantization: str | None = None
) -> Decoder:
    return load_decoder(
        directory,
        backend,
        dtype,
        max_model_len=MAX_POSITIONS,
        max_rows=64,
        quantization=quantization,
        progress=lambda *_: None,
    )


class PagedHead:
    """A head, a cache of its own and one shuffled block table for each sequence."""

    def __init__(self, head: Head, backend: Backend, dtype: torch.dtype, *, num_sequences: int = 1) -> None:
        self.head = head
        self._backend = backend
        decoder = head.spec.decoder
        blocks_each = MAX_POSITIONS // BLOCK_SIZE
        self._cache = backend.allocate_kv(
            KvShape(
                heads=decoder.kv_heads,
                num_blocks=num_sequences * blocks_each,
                block_size=BLOCK_SIZE,
                dtype=dtype,
            )
        )
        shuffled = torch.randperm(num_sequences * blocks_each, generator=torch.Generator().manual_seed(3))
        self._tables = shuffled.int().view(num_sequences, blocks_each)
        self._lengths = [0] * num_sequences

    @torch.inference_mode()
    def run(self, batch: Sequence[tuple[int, Sequence[int]]], features: Tensor) -> Tensor:
        """Append rows: (sequence, token_ids) each, and their features, [R, H]. Returns the head's output."""
        counts = torch.tensor([len(token_ids) for _, token_ids in batch], dtype=torch.int32)
        starts = torch.tensor([self._lengths[sequence] for sequence, _ in batch], dtype=torch.int32)
        layout = RowLayout(
            query_start=torch.cat((torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int())),
            seq_len=starts + counts,
            positions=torch.cat(
                [
                    torch.arange(int(start), int(start + count)).int()
                    for start, count in zip(starts, counts, strict=True)
                ]
            ),
            block_table=self._tables[[sequence for sequence, _ in batch]],
        )
        for sequence, token_ids in batch:
            self._lengths[sequence] += len(token_ids)
        ids = torch.tensor([token for _, token_ids in batch for token in token_ids])
        return self.head.run(ids, features, self._cache, self._backend.plan(layout, BLOCK_SIZE))

    @torch.inference_mode()
    def draft(
        self, token_ids: Sequence[int], states: Tensor, count: int, *, chunk: int
    ) -> tuple[list[int], Tensor]:
        """See references.Eagle3.draft; of sequence 0. states: [T, K * H] of the rows. chunk: rows of a step."""
        for first in range(0, len(token_ids), chunk):
            features = self.head.features(states[first : first + chunk])
            hidden = self.run([(0, token_ids[first : first + chunk])], features)[-1:]
        found: list[int] = []
        logits = []
        while True:
            logits.append(self.head.logits(hidden).clone())
            row = int(logits[-1].argmax())
            found.append(row if self.head.draft_ids is None else int(self.head.draft_ids[row]))
            if len(found) == count:
                return found, torch.cat(logits)
            hidden = self.run([(0, found[-1:])], hidden)[-1:]


def seeded_states(spec: HeadSpec, rows: int) -> torch.Tensor:
    """[rows, K * H]: layers of very different scales, as those of a model are."""
    generator = torch.Generator().manual_seed(9)
    scales = torch.tensor([0.5, 2.0, 9.0])[: len(spec.state_layers)].repeat_interleave(spec.target_hidden_size)
    return torch.randn((rows, spec.states_size), generator=generator) * scales


def load_paged(
    directory: Path,
    tiny_checkpoint: Path,
    backend: Backend,
    dtype: torch.dtype,
    *,
    of_target: str | None = None,
    **options: Any,
) -> PagedHead:
    """The head in directory for the tiny target, on this backend. of_target: the target's quantization."""
    head = load_head(
        directory,
        target(tiny_checkpoint, backend, dtype, quantization=of_target),
        backend,
        max_positions=MAX_POSITIONS,
        max_rows=32,
        **options,
    )
    return PagedHead(head, backend, dtype)
