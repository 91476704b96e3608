"""The C interface of the compiled kernels: structures, argument types, loading the library, its pools of threads.

Mirrors the extern "C" parts of native/*.cpp, field by field. Knows nothing of tensors. Arrays go by id where a
call must be short: native/arrays.h.
"""

import ctypes
import logging
import os
import weakref
from ctypes import c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import TYPE_CHECKING, Any

from faser.errors import ConfigError
from faser.types.activation import Activation

if TYPE_CHECKING:  # what builds the wheel has no numpy
    from numpy.typing import NDArray

FLOAT32 = 0
BFLOAT16 = 1
INT8 = 2  # of a cache only
ACTIVATIONS = {  # FaserActivation
    Activation.SILU: 0,
    Activation.GELU_TANH: 1,
    Activation.SWIGLU_OAI: 2,
    Activation.GELU: 3,
}
EMULATED_TILES, HARDWARE_TILES, ALL_EMULATED_TILES = range(3)  # TileKind
_NO_TILES = {1: "the system refuses them", 2: "they fault", 3: "they compute something else"}
_log = logging.getLogger("faser")
_MOST_LANES = 8  # pools of pinned threads to keep: both lanes of three shares, and two to spare


def address_of(array: "NDArray[Any] | None") -> int | None:
    """Return the address of an array's first value; None for one that is missing."""
    return None if array is None else array.ctypes.data


class LinearStruct(ctypes.Structure):
    """FaserLinear. panels, bias: addresses; columns: N; depth: K."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("columns", c_int64),
        ("depth", c_int64),
        ("dtype", c_int32),
    )


class LowBitPartStruct(ctypes.Structure):
    """FaserLowBitPart. panels: address; first, columns: of the product's columns."""

    _fields_ = (
        ("panels", c_void_p),
        ("first", c_int64),
        ("columns", c_int64),
        *((name, c_int32) for name in ("form", "zero_point", "factors", "has_minimums", "factor_values")),
    )


class LowBitStruct(ctypes.Structure):
    """FaserLowBit. parts, bias: addresses; depth: K."""

    _fields_ = (("parts", c_void_p), ("num_parts", c_int64), ("bias", c_void_p), ("depth", c_int64))


class AnyLinearStruct(ctypes.Structure):
    """FaserAnyLinear. linear or low_bit: address of a FaserLinear or FaserLowBit, the other None.

    adapters: address of FaserAdapters, or None.
    """

    _fields_ = (
        ("linear", c_void_p),
        ("low_bit", c_void_p),
        ("columns", c_int64),
        ("depth", c_int64),
        ("adapters", c_void_p),
    )


class AdapterPartStruct(ctypes.Structure):
    """FaserAdapterPart."""

    _fields_ = (("up", LinearStruct), ("column", c_int64), ("first", c_int64))


class AdapterStruct(ctypes.Structure):
    """FaserAdapter. parts: address."""

    _fields_ = (("down", LinearStruct), ("parts", c_void_p), ("num_parts", c_int64))


class AdapterRowsStruct(ctypes.Structure):
    """FaserAdapterRows. runs: address of [num_runs, 3] int64."""

    _fields_ = (("runs", c_void_p), ("num_runs", c_int64))


class NormedLinearStruct(ctypes.Structure):
    """FaserNormedLinear. norm: address."""

    _fields_ = (("product", AnyLinearStruct), ("norm", c_void_p), ("eps", c_float))


class ExpertsStruct(ctypes.Structure):
    """FaserExperts. gate_up, down, scales, shared, choice_bias: addresses of arrays."""

    _fields_ = (
        ("router", AnyLinearStruct),
        ("gate_up", c_void_p),
        ("down", c_void_p),
        ("num_experts", c_int64),
        ("top_k", c_int64),
        ("renormalise", c_int32),
        ("activation", c_int32),
        ("scales", c_void_p),
        ("shared", c_void_p),
        ("sigmoid", c_int32),
        ("choice_bias", c_void_p),
    )


class ExpertsBesideStruct(ctypes.Structure):
    """FaserExpertsBeside: addresses."""

    _fields_ = tuple(
        (name, c_void_p) for name in ("experts", "norm", "router_norm", "norm_after", "norm_after_network")
    )


class TokenInputsStruct(ctypes.Structure):
    """FaserTokenInputs. norm, room: addresses."""

    _fields_ = (
        ("gate", AnyLinearStruct),
        ("out", AnyLinearStruct),
        ("norm", c_void_p),
        ("room", c_void_p),
        ("stride", c_int64),
    )


class FeedForwardStruct(ctypes.Structure):
    """FaserFeedForward. Norms, experts, beside, token_inputs: addresses."""

    _fields_ = (
        ("attention_out", AnyLinearStruct),
        ("gate_up", NormedLinearStruct),
        ("down", AnyLinearStruct),
        ("activation", c_int32),
        ("norm_after_attention", c_void_p),
        ("norm_after", c_void_p),
        ("after_eps", c_float),
        ("experts", c_void_p),
        ("beside", c_void_p),
        ("token_inputs", c_void_p),
        ("scale", c_float),
    )


class BlockRowsStruct(ctypes.Structure):
    """FaserBlockRows. normed, gate_up, inner, adapted: addresses."""

    _fields_ = (
        ("rows", c_int64),
        ("dtype", c_int32),
        *((name, c_void_p) for name in ("normed", "gate_up", "inner", "adapted")),
    )


class CacheStruct(ctypes.Structure):
    """FaserCache, of one layer. data: address."""

    _fields_ = (
        ("data", c_void_p),
        ("block_size", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("dtype", c_int32),
    )


class HeadsStruct(ctypes.Structure):
    """FaserHeads. window, score_cap: 0 is none. sinks: address."""

    _fields_ = (
        ("num_heads", c_int64),
        ("scale", c_float),
        ("window", c_int64),
        ("score_cap", c_float),
        ("sinks", c_void_p),
    )


class DeltaNetStruct(ctypes.Structure):
    """FaserDeltaNet. conv, decay, dt_bias, norm: addresses."""

    _fields_ = (
        *((name, c_int64) for name in ("num_k_heads", "num_v_heads", "k_dim", "v_dim", "kernel")),
        *((name, c_void_p) for name in ("conv", "decay", "dt_bias", "norm")),
        ("eps", c_float),
        ("tiled", c_int32),
    )


class ShortConvStruct(ctypes.Structure):
    """FaserShortConv. conv: address."""

    _fields_ = (("channels", c_int64), ("kernel", c_int64), ("conv", c_void_p))


class StatesStruct(ctypes.Structure):
    """FaserStates, of one layer. Addresses, then how many rows and inputs a sequence keeps."""

    _fields_ = (
        *((name, c_void_p) for name in ("state", "keys", "changes", "decays", "inputs")),
        *((name, c_int64) for name in ("rows", "inputs_kept")),
    )


class StateStepStruct(ctypes.Structure):
    """FaserStateStep: addresses of arrays."""

    _fields_ = (
        ("num_sequences", c_int64),
        *((name, c_void_p) for name in ("slots", "ends", "starts", "counts", "num_drafts", "first_rows")),
    )


class StatesOfStepStruct(ctypes.Structure):
    """FaserStatesOfStep: addresses."""

    _fields_ = tuple((name, c_void_p) for name in ("layers", "step", "rates"))


class LayerStruct(ctypes.Structure):
    """FaserLayer. Angles, norms, states, delta_net, short_conv, lent: addresses."""

    _fields_ = (
        ("qkv", NormedLinearStruct),
        ("feed_forward", FeedForwardStruct),
        ("heads", HeadsStruct),
        *(
            (name, c_void_p)
            for name in ("angles", "query_angles", "q_norm", "k_norm", "v_norm", "wide_q_norm", "wide_k_norm")
        ),
        ("eps", c_float),
        ("states", c_void_p),
        ("states_stride", c_int64),
        ("gated", c_int32),
        ("rates", NormedLinearStruct),
        ("delta_net", c_void_p),
        ("short_conv", c_void_p),
        ("kv_layer", c_int64),
        ("lent", c_void_p),
    )


class DraftHeadStruct(ctypes.Structure):
    """FaserDraftHead. Norms, layers and draft_ids: addresses."""

    _fields_ = (
        ("embedding", AnyLinearStruct),
        ("embedding_norm", c_void_p),
        ("state_norms", c_void_p),
        ("num_state_norms", c_int64),
        ("fc", AnyLinearStruct),
        ("feature_norm", c_void_p),
        ("eps", c_float),
        ("stream", AnyLinearStruct),
        ("residual_is_normed", c_int32),
        ("qkv", AnyLinearStruct),
        ("layers", c_void_p),
        ("num_layers", c_int64),
        ("logits", NormedLinearStruct),
        ("norm_output", c_int32),
        ("draft_ids", c_void_p),
    )


_ROOM = ("states", "features", "embedded", "joined", "hidden", "qkv", "mixed", "logits")


class DraftRoomStruct(ctypes.Structure):
    """FaserDraftRoom: addresses after the block's."""

    _fields_ = (
        ("block", BlockRowsStruct),
        *((name, c_void_p) for name in _ROOM),
    )


class DraftRulesStruct(ctypes.Structure):
    """FaserDraftRules: addresses of arrays, and numbers."""

    _fields_ = (
        ("num_sequences", c_int64),
        ("width", c_int64),
        *((name, c_void_p) for name in ("max_tokens", "temperature", "log_min_p", "top_k", "top_p", "noise")),
        ("pass_prices", c_void_p),
        *((name, c_double) for name in ("row_price", "intercept", "slope")),
    )


class BlockDrafterStruct(ctypes.Structure):
    """FaserBlockDrafter. mask, norms, layers, causal, draft_ids, confidences: addresses."""

    _fields_ = (
        ("embedding", AnyLinearStruct),
        ("mask", c_void_p),
        ("mask_token", c_int64),
        ("fc", AnyLinearStruct),
        ("hidden_norm", c_void_p),
        ("eps", c_float),
        ("layers", c_void_p),
        ("causal", c_void_p),
        ("num_layers", c_int64),
        ("norm", c_void_p),
        ("head", AnyLinearStruct),
        ("num_candidates", c_int64),
        ("draft_ids", c_void_p),
        ("predicts_from_anchor", c_int32),
        ("markov_before", AnyLinearStruct),
        ("markov_candidates", AnyLinearStruct),
        *((name, c_void_p) for name in ("confidence_of_hidden", "confidence_of_before")),
        ("confidence_bias", c_float),
    )


class BlockRoomStruct(ctypes.Structure):
    """FaserBlockRoom: addresses after the block's, and how many rows the logits have."""

    _fields_ = (
        ("block", BlockRowsStruct),
        *((name, c_void_p) for name in ("inputs", "hidden", "qkv", "mixed", "logits")),
        ("logit_rows", c_int64),
    )


class BlockInputStruct(ctypes.Structure):
    """FaserBlockInput: addresses of arrays, and numbers."""

    _fields_ = (
        *((name, c_void_p) for name in ("starts", "context", "anchors", "states")),
        ("states_stride", c_int64),
        ("block_table", c_void_p),
        ("table_width", c_int64),
        ("block_size", c_int64),
    )


class HeadRowsStruct(ctypes.Structure):
    """FaserHeadRows: addresses of arrays, and numbers."""

    _fields_ = (
        ("num_rows", c_int64),
        ("token_ids", c_void_p),
        ("states", c_void_p),
        ("states_stride", c_int64),
        *((name, c_void_p) for name in ("query_start", "places", "block_table")),
        ("table_width", c_int64),
        ("block_size", c_int64),
    )


class DraftsStruct(ctypes.Structure):
    """FaserDrafts: addresses."""

    _fields_ = tuple((name, c_void_p) for name in ("token_ids", "margins", "counts", "num_fed"))


class ChoiceStruct(ctypes.Structure):
    """FaserChoice: addresses of arrays, and a number."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "best", "temperature", "log_min_p", "top_k", "top_p", "ids")),
        ("ids_stride", c_int64),
    )


class TextRulesStruct(ctypes.Structure):
    """FaserTextRules. ngrams: address."""

    _fields_ = (
        *((name, c_int64) for name in ("cap", "depth", "max_outputs", "max_tokens", "min_n", "max_n")),
        ("chunk", c_int64),
        ("max_bytes", c_int64),
        ("factor", c_double),
        ("min_share", c_double),
        ("seed", c_uint64),
        ("ngrams", c_void_p),
    )


class AcceptanceArraysStruct(ctypes.Structure):
    """FaserAcceptanceArrays: numbers, addresses of arrays, constants."""

    _fields_ = (
        *((name, c_int64) for name in ("num_methods", "num_slots", "cap")),
        *((name, c_void_p) for name in ("kinds", "teaches", "samples", "prior_precision", "prior_curvature")),
        *((name, c_void_p) for name in ("weights", "curvature", "depths", "offset", "precision")),
        *((name, c_void_p) for name in ("shift", "shift_precision", "own", "all")),
        *((name, c_double) for name in ("depth_scale", "curve_kept", "longest_step", "largest_offset")),
        *(
            (name, c_double)
            for name in ("precision_kept", "shift_prior", "shift_kept", "lowest", "highest", "least_survival")
        ),
        *((name, c_double) for name in ("largest_margin", "edge", "own_kept", "all_kept")),
    )


# Names, argument types and result of every function, in the order of the C declarations.
_P, _L, _I, _F, _D, _U = c_void_p, c_int64, c_int32, c_float, c_double, c_uint64
_TABLE = (_P,) * 5  # the columns of drafts
_FUNCTIONS: dict[str, tuple[tuple[type, ...], type | None]] = {
    "faser_pool_new": ((_I,), _P),
    "faser_pool_on": ((_P, _I), _P),
    "faser_pool_rest": ((_P,), None),
    "faser_pool_free": ((_P,), None),
    "faser_packed_bytes": ((_L, _L, _I), _L),
    "faser_linear_tiles": ((_I, _L), _L),
    "faser_pack": ((_P, _P, _P), None),
    "faser_linear": ((_P, _P, _P, _L, _L, _P, _L, _I, _P, _L), None),
    "faser_add_adapters": ((_P, _P, _P, _P, _L, _P, _L, _I), None),
    "faser_use_tiles": ((_I,), _I),
    "faser_embed": ((_P, _P, _P, _L, _P), _L),
    "faser_low_bit_bytes": ((_P, _L), _L),
    "faser_low_bit_pack": ((_P, _P, _L, _I, _P), None),
    "faser_low_bit_pack_codes": ((_P, _P, _L, _P, _P, _P), None),
    "faser_low_bit_quantise": ((_P, _P, _L, _P, _I), None),
    "faser_low_bit_tiles": ((_I, _L), _L),
    "faser_low_bit_linear": ((_P, _P, _P, _L, _I, _L, _P, _L, _I, _P, _L, _P), None),
    "faser_low_bit_embed": ((_P, _P, _P, _L, _P, _I), _L),
    "faser_rms_norm": ((_P, _P, _L, _L, _L, _P, _F, _P, _L, _I, _P), None),
    "faser_gate": ((_P, _P, _L, _L, _L, _P, _L, _I, _I), None),
    "faser_activate": ((_P, _P, _L, _L, _I, _I), None),
    "faser_layer_norm": ((_P, _P, _L, _L, _P, _P, _F, _P, _P, _I), None),
    "faser_sigmoid_gate": ((_P, _P, _L, _L, _P, _L, _I), None),
    "faser_experts": ((_P, _P, _P, _P, _L, _P, _I), None),
    "faser_experts_read": ((_P,), _L),
    "faser_normed_linear": ((_P, _P, _P, _P, _L, _P, _I), None),
    "faser_feed_forward": ((_P, _P, _P, _P, _P, _P, _P), None),
    "faser_layers": ((_P, _P, _L, _L, _P, _P, _P, _P, _P, _P, _P, _I, _P), None),
    "faser_delta_net": ((_P, _P, _P, _P, _P, _P, _P, _I), None),
    "faser_short_conv": ((_P, _P, _P, _P, _P, _P, _I), None),
    "faser_head_draft": ((_P, _P, _P, _P, _P, _P, _P), _L),
    "faser_block_draft": ((_P, _P, _P, _P, _P, _P, _P), None),
    "faser_rope_append": ((_P, _P, _P, _L, _P, _L, _P, _P, _P, _P, _P, _F, _I), None),
    "faser_best": ((_P, _P, _L, _L, _L, _P, _P), None),
    "faser_draw": ((_P, _P, _L, _L, _P, _L, _P, _P, _P), None),
    "faser_fixed_point_probs": ((_P, _P, _L, _L, _P, _L), None),
    "faser_philox": ((_P, _P, _L, _P), None),
    "faser_mask": ((_P, _P, _L, _L, _P, _L, _P, _L), None),
    "faser_plan_new": ((_P, _P, _P, _P, _L, _L, _L, _L), _P),
    "faser_plan_free": ((_P,), None),
    "faser_attend": ((_P, _P, _P, _P, _P, _L, _P, _L, _I), None),
    "faser_array_data": ((_P,), _P),
    "faser_acceptance_new": ((_P,), _P),
    "faser_acceptance_free": ((_P,), None),
    "faser_acceptance_survival": ((_P, _L, *_TABLE, _P), None),
    "faser_acceptance_choose": ((_P, _L, *_TABLE, _L, _P, _D, _P, _P, _P), None),
    "faser_acceptance_note": ((_P, _I, _L, _P, _P, _P), None),
    "faser_acceptance_hold": ((_P, _L, *_TABLE, _P, _P), None),
    "faser_acceptance_judge": ((_P, _L, _P, _P, _P, _L, *_TABLE, _P, _P, _L, *_TABLE, _P, _P, _L, _L, _I), None),
    "faser_acceptance_look": ((_P, _P, _P, _L, _P, _P, _D, _P, _P, _P), _L),
    "faser_acceptance_judge_look": ((_P, _L, _P, _P, _P, _L, *_TABLE, _P, _P), None),
    "faser_acceptance_drop": ((_P, _L), None),
    "faser_acceptance_learn": ((_P,), None),
    "faser_best_prefixes": ((_P, _L, _P, _P, _P, _P, _D, _P), _D),
    "faser_ngrams_new": ((_P, _L, _P, _P, _L), _P),
    "faser_ngrams_free": ((_P,), None),
    "faser_texts_new": ((_P,), _P),
    "faser_texts_free": ((_P,), None),
    "faser_texts_open": ((_P, _L, _P, _L, _L, _U), _I),
    "faser_texts_extend": ((_P, _P, _P, _L, _P), _I),
    "faser_texts_close": ((_P, _L), _I),
    "faser_texts_look": ((_P, _P, _P, _P, _L, _P, _L, _P, _P, _P), _I),
    "faser_texts_rebuild": ((_P, _L), _I),
    "faser_texts_remembered": ((_P,), _L),
    "faser_texts_bytes": ((_P,), _L),
}


def load(path: Path) -> ctypes.CDLL:
    """Load the library and declare its functions. Their calls release the interpreter lock.

    Raises ConfigError if this process cannot load the file.
    """
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"cannot load the native kernels from {path}: {error}") from error
    for name, (arguments, result) in _FUNCTIONS.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = result
    try:
        import numpy as np
    except ModuleNotFoundError:  # what builds the wheel only loads the kernels
        return library
    probe = np.zeros(1)
    if library.faser_array_data(id(probe)) != probe.ctypes.data:
        raise ConfigError(f"numpy {np.__version__} lays out its arrays as the native kernels do not expect")
    return library


def use_tiles(library: ctypes.CDLL) -> None:
    """Use the tiles of AMX, in a library that has them. Where they do not work, a warning says so."""
    if (reason := _NO_TILES.get(library.faser_use_tiles(HARDWARE_TILES))) is not None:
        _log.warning(
            "tiles of AMX are emulated, because %s: products in bfloat16 have the same bits, but are slower; the "
            "variable FASER_CPU_ISA names a faster set, such as avx512bf16, with bits of its own",
            reason,
        )


class NativePool:
    """A pool of threads. address: of its C++ Pool, which this object frees."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, address: int, library: ctypes.CDLL) -> None:
        self.address = address
        weakref.finalize(self, _free, library, address, os.getpid())


class LanePools:
    """The pools of one backend, one of them in use. address: of that one.

    full: unpinned threads; other backends may share it. usable: the cores of this process.
    """

    def __init__(self, library: ctypes.CDLL, full: NativePool, usable: frozenset[int]) -> None:
        self._library = library
        self._full = full
        self._lanes: dict[tuple[int, ...], NativePool] = {}
        self._using = full
        self.address = full.address
        self._usable = usable

    def use(self, cores: tuple[int, ...] | None) -> None:
        """Switch to the pool of these cores; None: the full pool.

        The threads of the previous pool stop spinning at once. Raises ConfigError for cores that this process
        cannot use.
        """
        pool = self._full if cores is None else self._lanes.get(cores) or self._new(cores)
        if pool is not self._using:
            self._library.faser_pool_rest(self._using.address)
            self._using = pool
            self.address = pool.address

    def _new(self, cores: tuple[int, ...]) -> NativePool:
        if not cores or len(set(cores)) < len(cores) or not self._usable.issuperset(cores):
            raise ConfigError(
                f"a lane's cores are {list(cores)}; they must be distinct, at least one, and among the usable "
                f"ones, {sorted(self._usable)}"
            )
        numbers = (c_int32 * len(cores))(*cores)
        address = self._library.faser_pool_on(ctypes.addressof(numbers), len(cores))
        if not address:
            raise ConfigError(f"the system does not put threads on the cores {list(cores)}")
        while len(self._lanes) >= _MOST_LANES:
            del self._lanes[next(iter(self._lanes))]
        pool = self._lanes[cores] = NativePool(address, self._library)
        return pool


def full_pool(library: ctypes.CDLL, num_threads: int) -> NativePool:
    """num_threads unpinned threads, the caller's included."""
    return NativePool(library.faser_pool_new(num_threads), library)


def _free(library: ctypes.CDLL, address: int, owner: int) -> None:
    """Free the pool, except in a forked child: it has the pool's memory but no threads that it could join."""
    if os.getpid() == owner:
        library.faser_pool_free(address)
