"""How many sequences of which models a device has room for, in bytes. Owns no tensor."""

from collections.abc import Sequence

from benchmarks.gpu.common.shapes import Config
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.execution.models import tensors

BLOCK_SIZE = 16
MORE_TOKENS = 1024  # that a sequence may say behind its prompt while it is measured
_SPARE_BLOCKS = 256  # beside those of the sequences: of prompts that stay cached from one turn to the next
_SAID_TOKENS = 40 << 10  # by all sequences of a turn together: half a second of 128 with five tokens a step
_VALUE_BYTES = 2
_USED = 0.9  # of a device's memory
_OTHER_BYTES = 8 << 30  # logits, a step of 8192 rows, CUDA graphs, workspaces, CUDA itself


def kv_bytes(specs: Sequence[DecoderSpec], *, sequences: int, context: int) -> int:
    """Of a cache for this number of sequences with prompts of context tokens, of all these models."""
    said = min(sequences * MORE_TOKENS, _SAID_TOKENS)
    tokens = sequences * context + max(said, MORE_TOKENS) + (sequences + _SPARE_BLOCKS) * BLOCK_SIZE
    return tokens * sum(2 * spec.num_layers * spec.kv_size * _VALUE_BYTES for spec in specs)


def has_room(memory_bytes: int, models: Sequence[Config], *, sequences: int, context: int) -> bool:
    """Whether a device holds these models, by their config.json, with these sequences."""
    specs = [decoder_spec(model) for model in models]
    weights = sum(tensors.num_parameters(spec) for spec in specs) * _VALUE_BYTES
    needed = weights + kv_bytes(specs, sequences=sequences, context=context) + _OTHER_BYTES
    return needed <= _USED * memory_bytes
