"""Instruction sets: those that the kernels are compiled for, those that this CPU has, and the one in use."""

import platform
from enum import StrEnum
from pathlib import Path

from faser.config.environment import cpu_isa
from faser.errors import ConfigError

_CPUINFO = Path("/proc/cpuinfo")


class Isa(StrEnum):
    """Instruction sets the kernels are compiled for, best first."""

    AVX512_BF16 = "avx512bf16"
    AVX512_VNNI = "avx512vnni"
    AVX512 = "avx512"
    AVX2_VNNI = "avx2vnni"
    AVX2 = "avx2"
    DOTPROD = "dotprod"
    GENERIC = "generic"


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
_AVX2 = ("avx2", "fma", "f16c")
# As /proc/cpuinfo spells them; on x86 the compiler's flags are the same words without underscores.
_CPU_FEATURES = {
    Isa.AVX512_BF16: (*_AVX512, "avx512_vnni", "avx512_bf16"),
    Isa.AVX512_VNNI: (*_AVX512, "avx512_vnni"),
    Isa.AVX512: _AVX512,
    Isa.AVX2_VNNI: (*_AVX2, "avx_vnni"),
    Isa.AVX2: _AVX2,
    Isa.DOTPROD: ("asimddp",),
    Isa.GENERIC: (),
}
_ISAS = {
    **dict.fromkeys(("x86_64", "AMD64"), tuple(each for each in Isa if each is not Isa.DOTPROD)),
    **dict.fromkeys(("aarch64", "arm64"), (Isa.DOTPROD, Isa.GENERIC)),
}
LOW_BIT_INSTRUCTIONS = {
    Isa.AVX512_BF16: "vpdpbusd, 512 bits",
    Isa.AVX512_VNNI: "vpdpbusd, 512 bits",
    Isa.AVX512: "vpmaddubsw, 512 bits",
    Isa.AVX2_VNNI: "vpdpbusd, 256 bits",
    Isa.AVX2: "vpmaddubsw, 256 bits",
    Isa.DOTPROD: "sdot, 128 bits",
    Isa.GENERIC: "no instruction for them",
}


def chosen_isa() -> Isa:
    """The instruction set that the variable FASER_CPU_ISA names, else the best of this CPU.

    Raises ConfigError for one that there is not or that the CPU lacks.
    """
    asked, runnable = cpu_isa(), runnable_isas()
    if asked is None:
        return runnable[0]
    if asked not in tuple(Isa):
        raise ConfigError(f"the variable FASER_CPU_ISA is {asked}; it must be one of {', '.join(Isa)}")
    if asked not in runnable:
        raise ConfigError(f"the variable FASER_CPU_ISA is {asked}; this CPU has {', '.join(runnable)}")
    return Isa(asked)


def detect_isa(cpuinfo: Path = _CPUINFO, machine: str | None = None) -> Isa:
    """The best instruction set of this CPU; generic if it cannot be determined."""
    return runnable_isas(cpuinfo, machine)[0]


def runnable_isas(cpuinfo: Path = _CPUINFO, machine: str | None = None) -> tuple[Isa, ...]:
    """The instruction sets that this CPU has, best first; generic always."""
    if not cpuinfo.exists():
        return (Isa.GENERIC,)
    flags: set[str] = set()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):  # the words of x86 and of aarch64
            flags.update(line.partition(":")[2].split())
            break
    return tuple(isa for isa in isas_of(machine or platform.machine()) if flags.issuperset(_CPU_FEATURES[isa]))


def isas_of(machine: str) -> tuple[Isa, ...]:
    """The instruction sets of an architecture, by the name that platform.machine() gives it."""
    return _ISAS.get(machine, (Isa.GENERIC,))


def compiler_flags(isa: Isa) -> tuple[str, ...]:
    """What makes g++ and clang++ compile for an instruction set."""
    if isa is Isa.DOTPROD:
        return ("-mcpu=generic+dotprod",)
    return tuple(f"-m{feature.replace('_', '')}" for feature in _CPU_FEATURES[isa])
