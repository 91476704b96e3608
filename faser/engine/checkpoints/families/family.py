"""Family: what is said of a family once, for checkpoints of the hub and for GGUF files.

A family's module has a function that makes a DecoderSpec of a config.json, the GGUF names of its tensors beside
the hub's, and what else its GGUF files need. Formulas and defaults of GGUF are those of llama.cpp's converter,
conversion/*.py, and of its src/models; gguf_config.py reads the keys that all of them share, gguf/rope.py those of
the rotary embedding.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from faser.engine.checkpoints.families.architecture import DecoderSpec

if TYPE_CHECKING:
    from faser.engine.checkpoints.gguf.file import GgufFile

Config = dict[str, Any]
ToSpec = Callable[[Mapping[str, Any]], DecoderSpec]
OwnFields = Callable[["GgufFile", Config], Config]

LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERT = "{}"  # stands for the number of an expert: the file has the matrices of all experts in one tensor
GATE_UP = "gate_up_proj"  # of an expert: the rows of its gate, then those of its other half
SINKS = "self_attn.sinks"
# Names of the hub's without an ending.
A_LOG = "linear_attn.A_log"
DELTA_NORM = "linear_attn.norm"  # the one norm that is stored as it is
CONVOLUTIONS = ("linear_attn.conv1d.weight", "conv.conv.weight")  # [N, 1, kernel] on the hub, [N, kernel] here
BARE = (
    *(SINKS, A_LOG, "linear_attn.dt_bias", "layer_scalar", "router.scale", "router.per_expert_scale"),
    *("attention_conv.base_kernel", "mlp_conv.base_kernel", "feed_forward.expert_bias"),
)
SHARED_GATE = "mlp.shared_expert_gate"
CONFIDENCE = "confidence_head.proj.weight"
VECTORS = (f"{SHARED_GATE}.weight", CONFIDENCE)  # rows of the hub's, [1, N], are vectors here
DRAFT_IDS = "d2t"  # of each row of a drafter's logits: the token itself; on the hub, how far it is behind the row


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models of one architecture. model_type, architecture: in config.json. to_spec: makes a DecoderSpec of that.

    tool_parsers: names of the formats that the chat templates of its models ask for; none: they know no tools.
    examples: ids of models on the hub whose config.json names the architecture. gguf: general.architecture of its
    GGUF files. files: real weights that FASER has served; the rest of its tests have tiny
    ones. note: what else to know of them.
    """

    name: str
    model_type: str
    architecture: str
    to_spec: ToSpec
    tool_parsers: tuple[str, ...]
    examples: tuple[str, ...]
    gguf: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    note: str = ""


def _no_fields(_file: "GgufFile", _config: Config) -> Config:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """Particulars of the files of one architecture.

    class_name, model_type: on the hub. tensors: of a layer, the hub's names by those in the file. permuted: rows
    of q and k are in llama.cpp's order. plus_one: norms are stored plus one, plus_one_last: the last one too.
    not_read: tensors of a layer. partial_rotary: some channels of a head may stay as they are. windows, experts:
    there may be a sliding window, or a mixture of experts. drafting_layers: the last layers may be there to draft
    (nextn): of a head, and none of the model. sizes_by_layer: layers may have key-value heads and networks of
    their own sizes, which own_fields reads. outer: the hub's names of further tensors outside the layers. drafter:
    it drafts for a model, whose embedding it may lack. own_fields: fields of config.json from keys of its own;
    called with the file and the other fields, which they replace.
    """

    class_name: str
    model_type: str
    tensors: Mapping[str, str] = field(default_factory=lambda: LAYER)
    permuted: bool = False
    plus_one: bool = False
    plus_one_last: bool = True
    not_read: tuple[str, ...] = ()
    partial_rotary: bool = False
    windows: bool = False
    experts: bool = False
    drafting_layers: bool = False
    sizes_by_layer: bool = False
    outer: Mapping[str, str] = field(default_factory=dict)
    drafter: bool = False
    own_fields: OwnFields = _no_fields
