"""Heads that draft from hidden states, as vLLM and speculators name them, that FASER does not compute, and why.

One table for the methods of `--speculative-config` and for what the config.json of a checkpoint says.
"""

_BLOCK = (
    "it drafts a block of masked positions at once, each of which attends to the later ones; "
    "FASER's heads draft one token after another"
)

REFUSED_HEADS: dict[str, str] = {
    "dflash": _BLOCK,
    "dflash2": _BLOCK,
    "dspark": _BLOCK,
    "peagle": "it drafts the positions of a block at once from mask tokens; FASER's heads draft one after another",
    "eagle": "EAGLE-3's heads draft better, and they are computed",
    "medusa": "its heads do not read what the earlier ones drafted; EAGLE-3's heads do, and they are computed",
    "mlp_speculator": "each of its positions has layers of its own, which no kernel here computes",
    "eagle3 of another family": "only heads whose layers are Llama's or Qwen3's are computed",
    "mtp": "DeepSeek, GLM, MiMo and Qwen3-Next have such layers, and none of these families is served",
}
