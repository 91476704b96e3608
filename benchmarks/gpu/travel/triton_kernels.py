"""Compiles every Triton kernel of the package for a GPU that is not there, and lists them.

    python -m benchmarks.gpu.travel.triton_kernels [--arch 90] [--only KERNEL ...] [--json FILE]

To be run with the Triton of the GPU machine, without TRITON_INTERPRET: a kernel that its compiler
refuses would cost the day there. TYPES has the type of every argument, by its name. Needs no GPU. The exit
status is 1 where a kernel does not compile.
"""

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import faser.kernels.cuda.triton as package
from benchmarks.cells import markdown
from benchmarks.runner import command_line
from faser.files import write_atomically
from faser.kernels.cuda.triton.common import EXACT
from faser.kernels.cuda.triton.experts import ALL_TILES, FEW_ROWS, Tiles, of_fewer_bits
from faser.kernels.cuda.triton.few_row_experts import FEW_ROW_TILES
from faser.kernels.cuda.triton.few_rows import STAGES
from faser.kernels.cuda.triton.grouped_fp8 import ALL_TILES as GROUPED_TILES
from faser.kernels.cuda.triton.low_bit import STAGES as LOW_BIT_STAGES
from faser.kernels.cuda.triton.low_bit import stages_of

TYPES = {
    "*fp32": (
        "logits chunk_largest chunk_next largest best_margin margin margins temperature log_min_p fixed_probs "
        "angles query_angles scales row_scales column_scales"
    ),
    "*fp64": "out top_p chunk_inside",
    "*i64": (
        "seeds positions draft_starts chunk_best best chunk_weight chunk_prob kept_prob rests sums next_sums "
        "top_k chosen token_ids slots chunk_first source "
        "rows words"
    ),
    "*i32": "counts edge_key edge_id prefixes num_gathered gathered",
    "*bf16": "qkv keys values q_weight k_weight x addend residual scaled weight gate_up gated_rows hidden kind",
    "*u8": "codes",
    "i32": ("stride width purpose count num_rows out_stride residual_stride level rest_bits"),
    "i64": "window_bits",
    "fp32": "eps",
}
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names.split()}
SIZES: dict[str, Any] = {"NUM_CHUNKS": 63, "SPAN": 64, "BLOCK": 2048}
SIZES |= {
    "BY_PROB": True,
    "WRITE": True,
    "FIRST": False,
    "NORMED": 40,
    "ROTATE": True,
    "GIVEN": False,
    "AS_FP8": False,
    "SCALED": False,
}
SIZES |= {
    "MOST": 4096,
    "NUM_HEADS": 32,
    "NUM_KV_HEADS": 8,
    "HALF": 64,
    "ADDS": True,
    "HAS_RESIDUAL": True,
    "HAS_SUMS": True,
    "ACTIVATION": "silu",
    "BIASED": False,
    "WIDE": False,
}
SIZES |= {"KERNEL": 4, "K_HEADS": 16, "K_DIM": 128, "V_HEADS": 32, "V_DIM": 128, "TILED": False}
SIZES |= {"NUM_INPUTS": 26, "NUM_KEPT": 23, "SEQUENCES": 64, "BLOCK_K": 128, "BLOCK_V": 32}
SIZES |= {"SHARES": False, "PADDED": True, "RENORMALISE": True, "TOP": 8, "PLACES": 8, "EXPERTS": 128}
OTHERS = {name: {"sums": "*fp32"} for name in ("_scale", "_gate")}
_PAIRS = {
    "pairs": "*i32",
    "offsets": "*i64",
    "size": "i32",
    "num_experts": "i32",
    "groups": "i32",
    "first_weight": "*bf16",
    "inner": "*bf16",
    "biases": "*bf16",
    "order": "*i32",
    **dict.fromkeys(("scale_halves", "minimums", "minimum_halves"), "*fp16"),
}
OTHERS |= {
    "_route": {"chosen": "*i32", "weights": "*fp32", "num_experts": "i32"},
    "_gather_pairs": {"chosen": "*i32", "pairs": "*i32", "read": "*i64", "num_pairs": "i32"},
    "_gate_up": _PAIRS,
    "_down": _PAIRS | {"given": "*fp32", "factors": "*fp32", "arrived": "*i32"},
    "_route_few": {
        **_PAIRS,
        **dict.fromkeys(("norm", "router_norm", "weights"), "*fp32"),
        **dict.fromkeys(("router", "router_bias", "normed"), "*bf16"),
        "read": "*i64",
        "arrived": "*i32",
    },
    "_add": dict.fromkeys(("given", "weights", "shared", "shared_logits"), "*fp32"),
    "_scale_by_sinks": {"mixed": "*bf16", "log2_sums": "*fp32", "sinks": "*fp32"}
    | dict.fromkeys(("num_heads", "head_dim"), "i32"),
}
OTHERS |= {"_add_norm": {"sums": "*fp32", "weight": "*fp32"}, "_rms_norm": {"weight": "*fp32"}}
OTHERS["_rope_append"] = dict.fromkeys(("q_weight", "k_weight", "v_weight"), "*fp32")
_DELTA_NET = {
    "numbers": "*i64",
    "stride": "i32",
    "scale": "fp32",
    **dict.fromkeys(("num_sequences", "step_stride"), "i64"),
    **dict.fromkeys(("inputs", "out"), "*bf16"),
    **dict.fromkeys(["rates", "conv", "convolved", "decay", "dt_bias", "norm", "mixed", "states"], "*fp32"),
    **dict.fromkeys(("kept_keys", "kept_values", "kept_rates"), "*fp32"),
}
OTHERS |= dict.fromkeys(("_convolve", "_chunks", "_finish"), _DELTA_NET)
_DRAFTING = (
    *("sampled", "drafted", "decided", "fed", "first", "known", "match_counts"),
    *("last", "numbers", "lengths", "row_positions", "positions", "slots"),
)
_PLACES = ("page_starts", "pages", "seq_len", "last_page_len")
OTHERS |= {
    name: {**dict.fromkeys(_DRAFTING, "*i64"), **dict.fromkeys(_PLACES, "*i32"), "width": "i64"}
    for name in ("_match", "_advance")
}
SIZES |= {"BLOCK_SIZE": 16}
OTHERS["_few_rows"] = {
    "norm": "*fp32",
    **dict.fromkeys(("bias", "residual", "out"), "*bf16"),
    **dict.fromkeys(("size", "groups"), "i32"),
}
OTHERS["_grouped_product"] = OTHERS["_few_rows"] | {"weight": "*fp8e4nv"}
SIZES |= {"GROUP": 0, "LINES": 1, "CODED": False, "FORM": "", "ZERO": 0, "LOWERED": False, "ORDERED": False}
SIZES |= {"SCALES_HALVED": False, "SCALES_PER_HALF": 1, "MINIMUMS_HALVED": False, "MINIMUMS_PER_HALF": 1}
_BLOCKS = {"GROUP": 128, "LINES": 128}  # of scales, in nearly all checkpoints that have them
_IN_8_BITS = {"SCALED": True, **_BLOCKS}
_LOW_BIT = {
    **dict.fromkeys(("scales", "scale_halves", "minimums", "minimum_halves"), "*fp16"),
    **dict.fromkeys(("bias", "residual", "out"), "*bf16"),
    **dict.fromkeys(("size", "groups", "first"), "i32"),
    "lines": "*i64",
}
OTHERS |= {
    "_few_low_bit_rows": _LOW_BIT | {"codes": "*u32", "norm": "*fp32"},
    "_low_bit_rows": _LOW_BIT,
    "_dequantise": _LOW_BIT,
    "_widen": _LOW_BIT | {"offsets": "*i64", "num_experts": "i32"},
}
OTHERS["_few_row_attention"] = {
    **dict.fromkeys(("q_weight", "k_weight", "v_weight", "sinks", "mixed", "sums"), "*fp32"),
    **dict.fromkeys(("query_indptr", "page_indptr", "page_indices", "seq_len", "arrived"), "*i32"),
    **dict.fromkeys(("scale", "cap"), "fp32"),
    "out": "*bf16",
    "window": "i32",
}
_ADAPTERS = {
    **dict.fromkeys(("down", "up", "out"), "*bf16"),
    **dict.fromkeys(("ranks", "blocks"), "*i32"),
    **dict.fromkeys(("size", "depth", "num_parts", "num_stretches"), "i32"),
    "partial": "*fp32",
}
OTHERS |= dict.fromkeys(("_adapter_down", "_adapter_up"), _ADAPTERS)
SIZES |= {"DEPENDENT": True, "PIECES": 16, "GRANULE": 64, "PAGE": 16}
SIZES |= dict.fromkeys(("CAPPED", "WINDOWED", "SINKS"), False)
_DEPENDENT = {"launch_pdl": True}


def sizes_of(tiles: Tiles) -> dict[str, Any]:
    return {
        "ROWS": tiles.rows,
        "OUTPUTS": tiles.outputs,
        "DEPTH": tiles.depth,
        "WEIGHTS_FIRST": tiles.weights_first,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }


VARIANTS_ONLY = (
    "_gate_up",
    "_down",
    "_route_few",
    "_few_rows",
    "_few_row_attention",
    "_grouped_product",
    "_few_low_bit_rows",
    "_low_bit_rows",
    "_dequantise",
    "_widen",
    "_adapter_down",
    "_adapter_up",
)  # kernels for which the common sizes make no sense
# Arguments that are multiples of 16 in a real launch, of kernels whose code depends on it: Triton copies ahead of
# the computation only what is aligned.
_PIPELINED = {
    "_chunks": ("step_stride",),
    "_gate_up": ("stride", "width", "size"),
    "_down": ("width", "size"),
    "_route_few": ("stride", "width"),
    "_few_rows": ("stride", "residual_stride", "out_stride", "size", "width"),
    "_grouped_product": ("stride", "residual_stride", "out_stride", "size", "width"),
    "_few_row_attention": ("stride",),
    "_few_low_bit_rows": ("stride", "residual_stride", "out_stride", "size", "width"),
    "_low_bit_rows": ("stride", "residual_stride", "out_stride", "size", "width"),
    "_dequantise": ("width",),
    "_widen": ("size", "width"),
    "_adapter_down": ("stride", "depth", "width"),
    "_adapter_up": ("stride", "size", "width"),
}
_PLAIN = {"SCALES_HALVED": False, "SCALES_PER_HALF": 1, "MINIMUMS_HALVED": False, "MINIMUMS_PER_HALF": 1}
_HALVED = {"SCALES_HALVED": True, "SCALES_PER_HALF": 8, "MINIMUMS_HALVED": True, "MINIMUMS_PER_HALF": 8}
# AWQ and GPTQ, Q4_0, Q4_K, MXFP4, Q8_0, Q6_K.
_LOW_BIT_KINDS: tuple[dict[str, Any], ...] = (
    {"FORM": "nibbles", "ZERO": 0, "GROUP": 128, "LOWERED": True, **_PLAIN},
    {"FORM": "nibbles", "ZERO": 8, "GROUP": 32, "LOWERED": False, **_PLAIN},
    {"FORM": "nibbles", "ZERO": 0, "GROUP": 32, "LOWERED": True, **_HALVED},
    {"FORM": "floats", "ZERO": 0, "GROUP": 32, "LOWERED": False, **_PLAIN},
    {"FORM": "bytes", "ZERO": 128, "GROUP": 32, "LOWERED": False, **_PLAIN},
    {"FORM": "bytes", "ZERO": 32, "GROUP": 16, "LOWERED": False, **_HALVED, "SCALES_PER_HALF": 16},
)
_CODED_KINDS = tuple(
    {"CODED": True, "ORDERED": ordered, "BIASED": kind["FORM"] == "floats", **kind}
    for kind in _LOW_BIT_KINDS
    for ordered in ((False, True) if kind["GROUP"] == 128 else (False,))
)
_UNITS: tuple[dict[str, Any], ...] = (
    {"NORMED": True, "ADDS": False, "ACTIVATION": ""},
    {"NORMED": True, "ADDS": False, "ACTIVATION": "silu"},
    {"NORMED": False, "ADDS": True, "ACTIVATION": ""},
)


def _stages(outputs: int, kind: dict[str, Any], unit: dict[str, Any]) -> int:
    return stages_of(outputs, kind["GROUP"], gated=bool(unit["ACTIVATION"]))


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "_add": [{"SHARES": True}],
    "_few_rows": [
        {"ROWS": rows, "OUTPUTS": outputs, "STAGES": STAGES[outputs], **scaling, **unit, **_DEPENDENT}
        for scaling in ({"SCALED": False}, {"SCALED": True}, _IN_8_BITS)
        for unit in _UNITS
        for rows in (1, 2, 4, 8)
        for outputs in STAGES
    ],
    "_grouped_product": [
        {
            "ROWS": tiles.rows,
            "OUTPUTS": tiles.outputs,
            "DEPTH": tiles.depth,
            "num_warps": tiles.warps,
            "num_stages": tiles.stages,
            **_BLOCKS,
        }
        for tiles in GROUPED_TILES
    ],
    "_few_low_bit_rows": [
        {"ROWS": rows, "OUTPUTS": outputs, "STAGES": _stages(outputs, kind, unit), **kind, **unit, **_DEPENDENT}
        for kind in _LOW_BIT_KINDS
        for unit in _UNITS
        for rows in (1, 2, 4)
        for outputs in LOW_BIT_STAGES
    ],
    "_low_bit_rows": [
        {"ROWS": rows, "OUTPUTS": 64, "DEPTH": 128, "num_stages": 3, "ADDS": True, **kind}
        for kind in _LOW_BIT_KINDS
        for rows in (16, 32, 64)
    ],
    "_dequantise": [
        {"LINES": 16, "DEPTH": 256, "LISTED": listed, **kind}
        for kind in _LOW_BIT_KINDS
        for listed in (False, True)
    ],
    "_widen": [{"LINES": 16, "DEPTH": 256, **kind} for kind in _LOW_BIT_KINDS],
    "_few_row_attention": [
        {"ROWS": rows, "QUERIES": queries, "NORMED": 2, **kind, **_DEPENDENT}
        for rows, queries in ((1, 16), (2, 16), (8, 32))
        for kind in ({}, {"NUM_HEADS": 16}, {"WINDOWED": True, "SINKS": True}, {"HALF": 32})
    ],
    **{
        name: [{"MAX_RANK": rank, "RANKS": min(rank, 64), **sizes} for rank in (16, 64, 256)]
        for name, sizes in (("_adapter_down", {"STRETCH": 512}), ("_adapter_up", {"COLUMNS": 64}))
    },
    "_match": [{"MOST": 64, "num_warps": 1}],
    "_advance": [{"FIRST": first, "num_warps": 1} for first in (True, False)],
    "_chunks": [{"TILED": True}],
    "_digit_sums": [{"BY_PROB": by_prob, "FIRST": first} for by_prob in (True, False) for first in (True, False)],
    "_gather": [{"BY_PROB": False}],
    "_settle": [{"BY_PROB": False}],
    "_chunk_probs": [{"WRITE": False}],
    "_draw": [{"GIVEN": True}],
    "_rope_append": [
        {"AS_FP8": True},
        {"NORMED": 0},
        {"NORMED": 48, "HALF": 256},  # values too
        {"NORMED": 32, "HALF": 256, "NUM_KV_HEADS": 0},  # queries alone
    ],
    "_route": [{"SCALED": True}],
    "_rms_norm": [{"BLOCK": 4096, "num_warps": 8}, {"HAS_RESIDUAL": False}],
    "_gate_rows": [{"ACTIVATION": "gelu_tanh"}, {"ACTIVATION": "swigluoai"}],
    "_add_norm": [{"HAS_SUMS": False}, {"BLOCK": 4096, "num_warps": 8}],
    "_gate": [{"BLOCK": 16384, "num_warps": 32}],
    "_gate_up": [
        sizes_of(tiles) | {"ACTIVATION": activation, "BIASED": activation == "swigluoai"}
        for tiles in dict.fromkeys((*ALL_TILES, *FEW_ROW_TILES.values()))
        for activation in ("silu", "gelu_tanh", "swigluoai")
    ]
    + [
        sizes_of(of_fewer_bits(tiles)) | {"ACTIVATION": "silu"} | _IN_8_BITS
        for tiles in dict.fromkeys((*ALL_TILES, *FEW_ROW_TILES.values()))
    ]
    + [
        sizes_of(of_fewer_bits(tiles)) | {"ACTIVATION": "swigluoai" if kind["BIASED"] else "silu", **kind}
        for kind in _CODED_KINDS
        for tiles in dict.fromkeys((*ALL_TILES, *FEW_ROW_TILES.values()))
    ],
    "_down": [
        sizes_of(of_fewer_bits(tiles) if stored else tiles) | {"BIASED": biased, "ADD_ROWS": add_rows} | stored
        for add_rows, some in ((0, ALL_TILES), (FEW_ROWS, FEW_ROW_TILES.values()))
        for tiles in some
        for biased, stored in ((False, {}), (True, {}), (False, _IN_8_BITS), *((False, k) for k in _CODED_KINDS))
    ],
    "_route_few": [
        {"ROWS": FEW_ROWS, "SUM_ROWS": 16, "OUTPUTS": 16, "DEPTH": 128, "num_warps": 4, "num_stages": 3}
        | {"BLOCK": experts, "SHARES": shares, "SCALED": scaled, "BIASED": biased}
        for experts, shares, scaled, biased in (
            (32, False, False, True),
            (128, False, False, False),
            (128, False, True, False),
            (256, True, False, False),
            (512, True, False, False),
        )
    ],
}


_WARP = 32
_LEFT_IN_MEMORY = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_WIDE_LOAD = re.compile(r"\bLDG(?:STS)?\.[A-Z.]*128\b")
_FUSED = re.compile(r"\bfma\.rn\.f(32|64)")
_LOAD = re.compile(r"\b(?:ld\.global|cp\.async)\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One variant of a kernel. variant: its sizes unlike the common ones, as text.

    registers: of a thread. stack_bytes: of a thread, spilled registers and arrays without constant indices; None
    where cuobjdump is missing. shared_bytes: of a block. wide_loads: instructions that load 16 bytes from
    memory. fuses: whether a product and a sum share a rounding. early_loads: that a launch which may begin early
    makes before it waits for the launch before. error: of the compiler; empty: none.
    """

    kernel: str
    module: str
    variant: str
    seconds: float
    registers: int | None = None
    stack_bytes: int | None = None
    shared_bytes: int = 0
    wide_loads: int | None = None
    code_bytes: int = 0
    fuses: bool = False
    early_loads: int = 0
    error: str = ""


def compile_all(arch: int, asked: Sequence[str] = ()) -> Iterator[Compiled]:
    """Every variant of every kernel, as it is compiled. arch: such as 90. asked: names of kernels; none: all."""
    for module, kernel in kernels():
        if asked and kernel.__name__ not in asked:
            continue
        common: list[dict[str, Any]] = [] if kernel.__name__ in VARIANTS_ONLY else [{}]
        for changed in (*common, *VARIANTS.get(kernel.__name__, [])):
            began_s = time.perf_counter()
            variant = ", ".join(f"{name}={value}" for name, value in changed.items())
            about = {"kernel": kernel.__name__, "module": module.removeprefix(f"{package.__name__}.")}
            try:
                found = describe(compiled(kernel, changed, arch))
            except Exception as error:  # whatever the compiler says: the other kernels are wanted too
                found = {"error": f"{type(error).__name__}: {error}"}
            yield Compiled(**about, variant=variant, seconds=round(time.perf_counter() - began_s, 2), **found)


def kernels() -> Iterator[tuple[str, Any]]:
    """(module, kernel) of all that are launched; functions that kernels call are none of them."""
    for module_info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        module = importlib.import_module(module_info.name)
        for kernel in vars(module).values():
            is_own = isinstance(kernel, triton.JITFunction) and kernel.__module__ == module.__name__
            if is_own and "tl.program_id(0)" in kernel.src:
                yield module.__name__, kernel


def compiled(kernel: Any, changed: dict[str, Any], arch: int) -> Any:
    """changed: sizes unlike the common ones, and options of the compiler.

    Raises KeyError for an argument that TYPES lacks.
    """
    name = kernel.__name__
    sizes = {each: (SIZES | changed)[each] for each in kernel.arg_names if each.isupper()}
    types = TYPE_OF | OTHERS.get(name, {}) | ({"source": "*fp64"} if changed.get("GIVEN") else {})
    types |= {"keys": "*u8", "values": "*u8"} if changed.get("AS_FP8") else {}
    floats = {"weight" if name == "_few_rows" else "first_weight": "*fp8e4nv"}
    types |= floats if changed.get("SCALED") and name in ("_few_rows", "_gate_up", "_down") else {}
    types |= {"first_weight": "*u8", "scales": "*fp16"} if changed.get("CODED") else {}
    types |= {"scales": "*i8", "minimums": "*i8"} if changed.get("SCALES_HALVED") else {}
    types |= {"scales": "*u8", "minimums": "*u8"} if changed.get("FORM") == "floats" else {}
    signature = {each: "constexpr" if each in sizes else types[each] for each in kernel.arg_names}
    constants = {(kernel.arg_names.index(each),): sizes[each] for each in sizes}
    aligned = _PIPELINED.get(name, ())
    attributes = {
        (at,): [["tt.divisibility", 16]]
        for at, each in enumerate(kernel.arg_names)
        if aligned and each not in sizes and (types[each].startswith("*") or each in aligned)
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {each: value for each, value in changed.items() if not each.isupper()}
    return triton.compile(source, target=GPUTarget("cuda", arch, _WARP), options=EXACT | options)


def describe(found: Any) -> dict[str, Any]:
    """Describe a compiled kernel by the fields of Compiled."""
    code: bytes = found.asm["cubin"]
    registers, stack = resources(code)
    return {
        "registers": registers,
        "stack_bytes": stack,
        "shared_bytes": int(found.metadata.shared),
        "wide_loads": wide_loads(code),
        "code_bytes": len(code),
        "fuses": _FUSED.search(found.asm["ptx"]) is not None,
        "early_loads": early_loads(found.asm["ptx"]),
    }


def resources(code: bytes) -> tuple[int | None, int | None]:
    """Registers and bytes of stack of a thread, by the cuobjdump that comes with Triton; None without it."""
    found = _LEFT_IN_MEMORY.search(_told_by("cuobjdump", code, "--dump-resource-usage") or "")
    return (None, None) if found is None else (int(found[1]), int(found[2]))


def wide_loads(code: bytes) -> int | None:
    """Instructions that load 16 bytes from memory, by the nvdisasm that comes with Triton; None without it."""
    listing = _told_by("nvdisasm", code)
    return None if listing is None else len(_WIDE_LOAD.findall(listing))


def early_loads(ptx: str) -> int:
    """Count loads before the wait for the launch before, of which the compiler may move none there."""
    before, wait, _ = ptx.partition("griddepcontrol.wait")
    return len(_LOAD.findall(before)) if wait else 0


def _told_by(name: str, code: bytes, *options: str) -> str | None:
    """Return what a program that comes with Triton prints of a kernel; None without it."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not program.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(program), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def page(found: list[Compiled]) -> str:
    """All of them as a table."""
    columns = ("kernel", "variant", "s", "registers", "stack B", "shared B", "16-byte loads", "code B", "")
    rows = [
        (
            each.kernel,
            each.variant,
            f"{each.seconds:.1f}",
            _or_dash(each.registers),
            _or_dash(each.stack_bytes),
            str(each.shared_bytes),
            _or_dash(each.wide_loads),
            str(each.code_bytes),
            each.error.splitlines()[0] if each.error else "",
        )
        for each in found
    ]
    return markdown(columns, rows)


def _or_dash(value: int | None) -> str:
    return "–" if value is None else str(value)


def main(arguments: list[str]) -> int:
    asked = parser().parse_args(arguments)
    if not isinstance(next(kernels(), (None, None))[1], triton.JITFunction):
        sys.exit("TRITON_INTERPRET is set: nothing would be compiled")
    found = list(compile_all(asked.arch, asked.only))
    if asked.json is not None:
        content = {"triton": triton.__version__, "arch": asked.arch, "kernels": [asdict(each) for each in found]}
        write_atomically(asked.json, json.dumps(content, indent=1) + "\n")
    print(page(found))
    print(f"{len(found)} variants of {len({each.kernel for each in found})} kernels, Triton {triton.__version__}")
    return 1 if any(each.error for each in found) else 0


def parser() -> argparse.ArgumentParser:
    made = command_line(__doc__)
    made.add_argument("--arch", type=int, default=90, help="compute capability without its point [90]")
    made.add_argument("--only", nargs="+", default=(), metavar="KERNEL", help="these kernels instead of all")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the list there as well")
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
