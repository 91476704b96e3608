"""HeadSpec: a head as plain values: its layers, its vocabulary, the target's states that it reads.

A head is a small model that drafts from the target's hidden states. Knows no tensors and no files.
"""

from dataclasses import dataclass
from enum import StrEnum

from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.quantization.stored import StoredFp8, StoredLowBit
from faser.errors import ModelError


class HeadKind(StrEnum):
    """The arithmetic of a head. Values are vLLM's names of the methods.

    EAGLE3: Li et al., arXiv 2503.01840.
    """

    EAGLE3 = "eagle3"


class FeatureNorm(StrEnum):
    """How the target's states are normalised before they are projected to features.

    EACH: every layer's states by a norm of their own (`fc_norm`). TOGETHER: the states of all layers by one norm
    (`norm_before_fc`).
    """

    NONE = "none"
    EACH = "fc_norm"
    TOGETHER = "norm_before_fc"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSpec:
    """A head for one target. Checked when built: raises ModelError that names the value and the limit.

    decoder: the layers of the head. Its vocab_size is the target's, which embeddings have; it ties nothing. Medusa
        heads have none: this is the smallest that a cache can be of.
    draft_vocab_size: rows of the head's logits. target_hidden_size: width of a state.
    state_layers: the layers whose input the head reads, ascending: i is the residual stream at the input of the
        target's layer i, and the number of layers is the stream after the last one, before the final norm. This is
        the numbering of `eagle_aux_hidden_state_layer_ids` in vLLM and speculators (DFlash's `target_layer_ids`
        are one less). A row of states is the states of these layers, concatenated in this order.
    states_are_normed: features are computed from states after the target's final norm.
    norm_before_residual: the residual stream begins with the normalised features, else with the features.
    norm_output: the next row takes the normalised output, else the output before the norm.
    num_draft_tokens: how many tokens the checkpoint advises to draft; None: it does not say.
    max_draft_tokens: the longest draft that the head can make; None: of any length.
    medusa_blocks: blocks of each of the max_draft_tokens heads; 0: of another kind of head.
    target_name: of the model that the head was trained for; None: it does not say.
    quantization: of the stored weights; None: they are stored as floats of at least 16 bits.
    """

    kind: HeadKind
    decoder: DecoderSpec
    draft_vocab_size: int
    target_hidden_size: int
    state_layers: tuple[int, ...]
    states_are_normed: bool = False
    feature_norm: FeatureNorm = FeatureNorm.NONE
    norm_before_residual: bool = False
    norm_output: bool = False
    num_draft_tokens: int | None = None
    max_draft_tokens: int | None = None
    medusa_blocks: int = 0
    target_name: str | None = None
    quantization: StoredFp8 | StoredLowBit | None = None

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.decoder.vocab_size:
            raise ModelError(
                f"draft_vocab_size is {self.draft_vocab_size}; the target's vocabulary has "
                f"{self.decoder.vocab_size} tokens"
            )

    @property
    def hidden_size(self) -> int:
        """Width of the head's own stream, and of its features."""
        return self.decoder.hidden_size

    @property
    def states_size(self) -> int:
        """Width of a row of states, of all layers."""
        return len(self.state_layers) * self.target_hidden_size
