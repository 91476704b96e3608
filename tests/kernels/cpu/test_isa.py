"""Which instruction sets a CPU has, and which one is used."""

from pathlib import Path

import pytest

from faser.errors import ConfigError
from faser.kernels.cpu.build import Isa, chosen_isa, compiler_flags, runnable_isas


@pytest.mark.parametrize(
    "flags, isa",
    [
        ("fma avx2 avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16", Isa.AVX512_BF16),
        ("fma avx2 avx512f avx512bw avx512dq avx512vl avx512_vnni avx_vnni f16c", Isa.AVX512_VNNI),
        ("fma avx2 avx512f avx512bw avx512dq avx512vl avx512_bf16", Isa.AVX512),
        ("fma avx2 f16c avx_vnni", Isa.AVX2_VNNI),
        ("fma avx2 f16c avx512f", Isa.AVX2),
        ("fma avx2", Isa.GENERIC),
        ("avx2", Isa.GENERIC),
        ("sse2", Isa.GENERIC),
    ],
)
def test_the_best_instruction_set_the_cpu_has_is_chosen(tmp_path: Path, flags: str, isa: Isa) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags} ht\n\n")
    assert runnable_isas(cpuinfo, "x86_64")[0] is isa
    assert runnable_isas(cpuinfo, "aarch64")[0] is Isa.GENERIC
    assert runnable_isas(Path("/nonexistent"), "x86_64")[0] is Isa.GENERIC


@pytest.mark.parametrize("features, isa", [("fp asimd asimddp", Isa.DOTPROD), ("fp asimd", Isa.GENERIC)])
def test_dot_products_of_aarch64_are_chosen_where_there_are_any(tmp_path: Path, features: str, isa: Isa) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nFeatures\t: {features}\n\n")
    assert runnable_isas(cpuinfo, "aarch64")[0] is isa
    assert runnable_isas(cpuinfo, "x86_64")[0] is Isa.GENERIC


def test_a_cpu_runs_every_lesser_instruction_set_too(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : fma avx2 f16c avx512f avx512bw avx512dq avx512vl\n")
    found = runnable_isas(cpuinfo, "x86_64")
    assert {Isa.AVX512, Isa.AVX2, Isa.GENERIC} <= set(found)
    assert Isa.AVX512_BF16 not in found


def test_a_variable_chooses_an_instruction_set_that_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASER_CPU_ISA", raising=False)
    assert chosen_isa() is runnable_isas()[0]
    monkeypatch.setenv("FASER_CPU_ISA", "generic")
    assert chosen_isa() is Isa.GENERIC
    monkeypatch.setenv("FASER_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match=r"^the variable FASER_CPU_ISA is sse9; it must be one of avx512bf16, "):
        chosen_isa()
    lacking = [isa for isa in Isa if isa not in runnable_isas()]
    if lacking:
        monkeypatch.setenv("FASER_CPU_ISA", lacking[0])
        with pytest.raises(
            ConfigError, match=f"^the variable FASER_CPU_ISA is {lacking[0]}; this CPU has .*generic$"
        ):
            chosen_isa()


def test_every_instruction_set_but_the_generic_one_has_compiler_flags() -> None:
    assert [bool(compiler_flags(isa)) for isa in Isa] == [True] * (len(Isa) - 1) + [False]
    assert "-mavx512vnni" in compiler_flags(Isa.AVX512_VNNI)
