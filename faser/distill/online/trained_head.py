"""TrainedHead: a head that is read to be trained further, and written as speculators_writer.py does."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from faser.distill.speculators_writer import write_speculators
from faser.distill.target import FrozenTarget
from faser.engine.checkpoints.heads import HeadSpec, read_head_spec, untrainable
from faser.engine.checkpoints.quantization.stored import StoredLowBit
from faser.engine.execution.drafting import head_tensors as tensors
from faser.engine.execution.drafting.head_tensors import draft_token_ids
from faser.engine.execution.drafting.head_weights import open_head
from faser.engine.execution.models.stored_codes import CodeSource
from faser.errors import ModelError


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedHead:
    """weights: float32, named as in head_tensors.py, without the embedding. draft_ids: [Vd] int64, ascending."""

    spec: HeadSpec
    weights: dict[str, Tensor]
    draft_ids: Tensor


def read_trained_head(directory: Path, target: FrozenTarget) -> TrainedHead:
    """Raises ModelError for a head that cannot be read or trained."""
    spec = read_head_spec(directory, target.config.spec)
    if reason := untrainable(spec, directory):
        raise ModelError(f"the head in {directory} cannot be trained: {reason}")
    shapes = tensors.eagle3_shapes(spec)
    source = open_head(directory)
    draft_ids = draft_token_ids(source, spec)
    if draft_ids is None:
        draft_ids = torch.arange(spec.decoder.vocab_size)
    if isinstance(spec.quantization, StoredLowBit):
        source = CodeSource(source, spec.quantization, shapes)
    own = set(source.names())
    weights = {name: source.get(name).float().clone() for name in shapes if name in own}
    if tensors.HEAD not in own:
        weights[tensors.HEAD] = target.head_rows(draft_ids).float().cpu()
    draft_ids, order = draft_ids.sort()
    weights[tensors.HEAD] = weights[tensors.HEAD][order].contiguous()
    missing = sorted(shapes.keys() - weights.keys() - {tensors.EMBEDDING})
    if missing:
        raise ModelError(f"the head in {directory} has no tensor {missing[0]}")
    return TrainedHead(spec=spec, weights=weights, draft_ids=draft_ids)


def write_trained_head(directory: Path, head: TrainedHead, target: FrozenTarget, *, int8: bool) -> None:
    whole = len(head.draft_ids) == head.spec.decoder.vocab_size
    write_speculators(
        directory,
        head.spec,
        {name: weight.detach() for name, weight in head.weights.items()},
        draft_ids=None if whole else head.draft_ids,
        target_architectures=target.architectures,
        int8=int8,
    )
