"""Loads a block drafter from its directory, for a loaded target.

Tensors have the names of heads/tensors.py. The embedding and the head are the target's own where the checkpoint
lacks or repeats them. A head over the whole of a large vocabulary would be most of what a pass reads: some of its
rows, a copy for drafts alone, take its place.
"""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from faser.config.speculation import DFLASH
from faser.engine.checkpoints.blocks import BlockSpec
from faser.engine.execution.drafting.blocks.dflash2 import Convolution, LayerConvolutions
from faser.engine.execution.drafting.blocks.model import BlockModel, BlockWeights, MarkovWeights
from faser.engine.execution.drafting.heads import tensors
from faser.engine.execution.drafting.heads.weights import RowsSource, check_quantization, head_packer, open_head
from faser.engine.execution.models.decoder import Buffers, Decoder
from faser.engine.execution.models.rope import RotaryTables
from faser.engine.execution.models.weights import ByteProgress, Packer, WeightSource
from faser.errors import ModelError
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import PackedLinear


def load_block(
    directory: Path,
    spec: BlockSpec,
    target: Decoder,
    backend: Backend,
    *,
    max_positions: int,
    max_rows: int,
    max_logit_rows: int,
    quantization: str | None = None,
    draft_ids: Tensor | None = None,
    progress: ByteProgress = lambda *_: None,
) -> BlockModel:
    """Load the block drafter in a directory. The arguments and what is raised: see load_head.

    max_logit_rows: rows whose logits are computed at once; a pass may have more. draft_ids: [Vd] int64, ascending:
    the tokens that it chooses from where its own logits are of the whole vocabulary; None: all.
    """
    check_quantization(quantization, spec, backend, directory)
    source: WeightSource
    source = stored = open_head(directory)
    own_ids = tensors.draft_token_ids(source, spec)
    if own_ids is None and draft_ids is not None and spec.quantization is None:
        source = RowsSource(stored, (tensors.HEAD, tensors.corrections(spec)[1]), draft_ids)
        spec = replace(spec, draft_vocab_size=len(draft_ids))
    else:
        draft_ids = own_ids
    has_mask = _has_mask(source, spec, directory)
    shapes = tensors.block_shapes(spec, has_mask=has_mask)
    packer, shared = head_packer(source, shapes, spec, draft_ids, target, backend, quantization, progress)

    def product(name: str) -> PackedLinear:
        return shared[name] if name in shared else packer.product(name)

    weights = BlockWeights(
        embedding=product(tensors.EMBEDDING),
        fc=packer.layer_product(tensors.FC),
        hidden_norm=packer.norm(tensors.BLOCK_HIDDEN_NORM),
        layers=tuple(
            packer.layer(tensors.layer_prefix(number), layer, spec.decoder)
            for number, layer in enumerate(spec.decoder.layers)
        ),
        norm=packer.norm(tensors.NORM),
        head=product(tensors.HEAD),
        mask=packer.norm(tensors.MASK).to(target.dtype) if has_mask else None,
        markov=_markov(spec, packer),
        confidence=_confidence(spec, packer),
        convolutions=_convolutions(spec, packer),
        num_bytes=packer.packed_bytes,
    )
    buffers = Buffers.allocate(
        replace(spec.decoder, vocab_size=spec.draft_vocab_size),
        target.dtype,
        backend.device,
        max_rows=max_rows,
        max_logit_rows=max_logit_rows,
    )
    rotary = RotaryTables(spec.decoder, num_positions=max_positions, device=backend.device)
    draft_ids = None if draft_ids is None else draft_ids.to(backend.device)
    return BlockModel(spec, backend, weights, draft_ids, rotary, buffers)


def _has_mask(source: WeightSource, spec: BlockSpec, directory: Path) -> bool:
    """Return whether rows behind an anchor have an embedding of their own. DSpark's files may have an unused one.

    Raises ModelError where they have neither that nor a token.
    """
    has_mask = tensors.MASK in source.names()
    if spec.mask_token_id is None and not has_mask:
        raise ModelError(
            f"{directory} has neither mask_token_id in its config.json nor a tensor {tensors.MASK}; a block "
            "drafter needs one of them"
        )
    return has_mask and (spec.mask_token_id is None or spec.method == DFLASH)


def _markov(spec: BlockSpec, packer: Packer) -> MarkovWeights | None:
    if not spec.markov_rank:
        return None
    before, candidates = tensors.corrections(spec)
    return MarkovWeights(
        before=packer.product(before),
        candidates=packer.product(candidates),
        hidden=packer.layer_product(tensors.SELECTOR_HIDDEN) if spec.selector else None,
    )


def _convolutions(spec: BlockSpec, packer: Packer) -> tuple[LayerConvolutions, ...] | None:
    if not spec.conv_kernel_size:
        return None

    def convolution(prefix: str) -> Convolution:
        return Convolution(
            base=packer.norm(prefix + tensors.CONV_BASE),
            dynamic=packer.layer_product(prefix + tensors.CONV_DYNAMIC),
            group_size=spec.conv_group_size,
        )

    return tuple(
        LayerConvolutions(
            attention=convolution(tensors.layer_prefix(number) + tensors.ATTENTION_CONV),
            network=convolution(tensors.layer_prefix(number) + tensors.NETWORK_CONV),
        )
        for number in range(spec.decoder.num_layers)
    )


def _confidence(spec: BlockSpec, packer: Packer) -> tuple[Tensor, Tensor, Tensor] | None:
    if not spec.confidence:
        return None
    weight = packer.norm(tensors.CONFIDENCE)[0]
    return weight[: spec.hidden_size], weight[spec.hidden_size :], packer.norm(tensors.CONFIDENCE_BIAS)
