"""The most arithmetic that this CPU's cores do in registers: the ceiling of products of bytes and of bfloat16.

Compiles a loop of independent vpdpbusd (and one of vdpbf16ps) with 512-bit vectors, and runs it on every thread.
"""

import ctypes
import subprocess
import tempfile
import threading
import time
from pathlib import Path

from faser.kernels.cpu.build import Isa, find_compiler, runnable_isas

_CHAINS = 16  # independent sums: more than latency times instructions a cycle
_SOURCE = """
#include <immintrin.h>
#define UNROLLED _Pragma("GCC unroll 32")
extern "C" int bytes(long n, int seed) {
    __m512i a = _mm512_set1_epi32(seed), b = _mm512_set1_epi32(seed + 1), s[CHAINS];
    UNROLLED for (int i = 0; i < CHAINS; i++) s[i] = _mm512_set1_epi32(i);
    for (long k = 0; k < n; k++) {
        UNROLLED for (int i = 0; i < CHAINS; i++) {
            s[i] = _mm512_dpbusd_epi32(s[i], a, b);
            asm volatile("" : "+v"(s[i]));
        }
    }
    UNROLLED for (int i = 1; i < CHAINS; i++) s[0] = _mm512_add_epi32(s[0], s[i]);
    return _mm512_reduce_add_epi32(s[0]);
}
extern "C" int halves(long n, int seed) {
    __m512bh a = (__m512bh)_mm512_set1_epi32(seed), b = (__m512bh)_mm512_set1_epi32(seed + 1);
    __m512 s[CHAINS];
    UNROLLED for (int i = 0; i < CHAINS; i++) s[i] = _mm512_set1_ps(float(i));
    for (long k = 0; k < n; k++) {
        UNROLLED for (int i = 0; i < CHAINS; i++) {
            s[i] = _mm512_dpbf16_ps(s[i], a, b);
            asm volatile("" : "+v"(s[i]));
        }
    }
    UNROLLED for (int i = 1; i < CHAINS; i++) s[0] = _mm512_add_ps(s[0], s[i]);
    return int(_mm512_reduce_add_ps(s[0]));
}
"""
_OPERATIONS = {"bytes": 2 * 64, "halves": 2 * 32}  # of one instruction: multiplications and additions
_REPEATS = 400_000


def register_peaks(threads: int, tries: int = 7) -> dict[str, float]:
    """int8 and bfloat16: 10^9 operations a second of all threads, the best of the tries. Empty: no such CPU."""
    compiler = find_compiler()
    if compiler is None or Isa.AVX512_BF16 not in runnable_isas():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "peak.cpp", Path(folder) / "peak.so"
        source.write_text(_SOURCE)
        flags = ("-O3", "-shared", "-fPIC", f"-DCHAINS={_CHAINS}", "-mavx512f", "-mavx512vnni", "-mavx512bf16")
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
        return {
            name: round(
                max(_rate(getattr(loaded, function), _OPERATIONS[function], threads) for _ in range(tries))
            )
            for name, function in (("int8", "bytes"), ("bfloat16", "halves"))
        }


def _rate(function: "ctypes._NamedFuncPointer", operations: int, threads: int) -> float:
    others = [
        threading.Thread(target=function, args=(ctypes.c_long(_REPEATS), number)) for number in range(threads - 1)
    ]
    began = time.perf_counter()
    for each in others:
        each.start()
    function(ctypes.c_long(_REPEATS), 1)
    for each in others:
        each.join()
    return threads * _REPEATS * _CHAINS * operations / (time.perf_counter() - began) / 1e9
