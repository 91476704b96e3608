"""A program: compiles every kernel for sm_90 and prints as JSON which of them use fused multiplications.

Needs no GPU. Run without TRITON_INTERPRET, so in a process of its own.
"""

import importlib
import json
import pkgutil
import re
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import faser.kernels.cuda.triton as package
from faser.kernels.cuda.triton.common.tensors import EXACT

TYPES = {
    "*fp32": (
        "logits chunk_largest chunk_next largest best_margin margin margins temperature log_min_p fixed_probs "
        "angles scales row_scales column_scales"
    ),
    "*fp64": "out bias output_counts repetition frequency presence top_p draft_probs chunk_inside",
    "*i64": (
        "seeds positions draft_starts chunk_best best chunk_weight chunk_prob kept_prob rests sums next_sums "
        "chunk_ties top_k chosen drafted final_ids chunk_residual chunk_target token_ids slots chunk_first source "
        "rows row_start"
    ),
    "*i32": "counts edge_key edge_id prefixes first_row num_accepted",
    "*bf16": "qkv keys values q_weight k_weight x addend residual scaled",
    "*u8": "codes",
    "i32": (
        "stride width purpose count num_rows draft_stride out_stride residual_stride level rest_bits num_halvings"
    ),
    "i64": "window_bits",
    "fp32": "eps",
}
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}
SIZES: dict[str, Any] = {"NUM_CHUNKS": 63, "SPAN": 64, "BLOCK": 2048, "SPAN_ROWS": 8}
SIZES |= {
    "BY_PROB": True,
    "WRITE": True,
    "FIRST": False,
    "NORM": True,
    "ROTATE": True,
    "GIVEN": False,
    "AS_FP8": False,
}
SIZES |= {"MOST": 1024, "NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": 64, "ADDS": True, "HAS_RESIDUAL": True}
OTHERS = {"_scale": {"sums": "*fp32"}}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "_digit_sums": [{"BY_PROB": by_prob, "FIRST": first} for by_prob in (True, False) for first in (True, False)],
    "_settle": [{"BY_PROB": False}],
    "_chunk_probs": [{"WRITE": False}],
    "_draw": [{"GIVEN": True}],
    "_drawn_draft": [{"GIVEN": True}],
    "_chunk_draft": [{"GIVEN": True}],
    "_rope_append": [{"AS_FP8": True}],
}


def assembly(kernel: Any, changed: dict[str, Any]) -> str:
    """PTX of a kernel. changed: sizes unlike the common ones."""
    name = kernel.__name__
    sizes = {each: changed.get(each, SIZES[each]) for each in kernel.arg_names if each.isupper()}
    types = TYPE_OF | OTHERS.get(name, {}) | ({"source": "*fp64"} if changed.get("GIVEN") else {})
    types |= {"keys": "*u8", "values": "*u8"} if changed.get("AS_FP8") else {}
    signature = {each: "constexpr" if each in sizes else types[each] for each in kernel.arg_names}
    constants = {(kernel.arg_names.index(each),): sizes[each] for each in sizes}
    source = ASTSource(kernel, signature, constexprs=constants)
    done = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=EXACT)
    return str(done.asm["ptx"])


def main() -> None:
    found = {}
    for module_info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        module = importlib.import_module(module_info.name)
        for name, kernel in vars(module).items():
            is_own = isinstance(kernel, triton.JITFunction) and kernel.__module__ == module.__name__
            if is_own and "tl.program_id(0)" in kernel.src:
                texts = [assembly(kernel, changed) for changed in ({}, *VARIANTS.get(name, []))]
                found[name] = any(re.search(r"\bfma\.rn\.f(32|64)", text) for text in texts)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
