"""Which instruction sets a CPU has, and which one is used.

Building the kernels, with scripts in the place of compilers: races, failures, what needs no building.
"""

import _ctypes
import logging
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from faser.errors import ConfigError
from faser.kernels.cpu.build import (
    COMPILING,
    SOURCE_DIR,
    Isa,
    NativeLibrary,
    can_build,
    chosen_isa,
    compiler_flags,
    find_library,
    library_path,
    prebuild,
    prebuilt_name,
    runnable_isas,
)
from tests.disks import filling_up, read_only
from tests.waiting import has_ended


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


_TILES = "amx_tile amx_bf16 amx_int8 avx512_bf16"


@pytest.mark.parametrize(
    "flags, permits, best, place",
    [
        (f"avx512_vnni {_TILES}", True, Isa.AMX, 0),
        (f"avx512_vnni {_TILES}", False, Isa.AVX512_BF16, 2),
        ("avx512_vnni amx_tile amx_int8", True, Isa.AVX512_VNNI, 1),
        ("avx512_vnni avx512_bf16", True, Isa.AVX512_BF16, 2),
    ],
)
def test_tiles_are_best_only_where_the_cpu_has_them_and_the_system_permits_them(
    tmp_path: Path, flags: str, permits: bool, best: Isa, place: int
) -> None:
    """Elsewhere they are emulated for who asks for them, and no other set comes after them that is faster."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"flags : fma avx2 f16c avx512f avx512bw avx512dq avx512vl {flags}\n")
    found = runnable_isas(cpuinfo, "x86_64", permits_tiles=lambda: permits)
    assert found[0] is best
    assert found.index(Isa.AMX) == place


def test_a_system_that_refuses_tiles_is_asked_only_where_the_cpu_has_them(tmp_path: Path) -> None:
    def never() -> bool:
        raise AssertionError

    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : fma avx2 f16c avx512f avx512bw avx512dq avx512vl avx512_vnni avx512_bf16\n")
    assert runnable_isas(cpuinfo, "x86_64", permits_tiles=never)[0] is Isa.AVX512_BF16


def test_a_variable_chooses_an_instruction_set_that_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASER_CPU_ISA", raising=False)
    assert chosen_isa() is runnable_isas()[0]
    monkeypatch.setenv("FASER_CPU_ISA", "generic")
    assert chosen_isa() is Isa.GENERIC
    monkeypatch.setenv("FASER_CPU_ISA", "sse9")
    with pytest.raises(ConfigError, match=r"^the variable FASER_CPU_ISA is sse9; it must be one of amx, avx512"):
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


NOWHERE = Path("/nonexistent")


def fake_compiler(directory: Path, body: str) -> str:
    """A script that answers --version, and otherwise runs body with the output file in $out."""
    path = directory / "fake-compiler"
    path.write_text(f"""#!/bin/sh
if [ "$1" = --version ]; then echo fake 1.0; exit; fi
echo "$@" >> {directory}/calls
for word; do out="$word"; done
{body}
""")
    path.chmod(0o755)
    return str(path)


def test_a_library_is_compiled_once_and_then_found(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'echo library > "$out"')
    paths = {
        library_path(Isa.GENERIC, cache_dir=tmp_path / "cache", compilers=(compiler,), prebuilt_dir=NOWHERE)
        for _ in range(3)
    }
    assert [path.read_text() for path in paths] == ["library\n"]
    assert len(links(tmp_path)) == 1


def links(directory: Path) -> list[str]:
    """The calls of the fake compiler that made a library."""
    return [call for call in (directory / "calls").read_text().splitlines() if "-shared" in call.split()]


def test_every_source_is_compiled_once_and_all_of_them_are_linked(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'echo object > "$out"')
    library_path(Isa.AVX2, cache_dir=tmp_path / "cache", compilers=(compiler,), prebuilt_dir=NOWHERE)
    *compiled, link = [call.split() for call in (tmp_path / "calls").read_text().splitlines()]
    assert sorted(call[-3] for call in compiled) == sorted(map(str, SOURCE_DIR.rglob("*.cpp")))
    assert sorted(word for word in link if word.endswith(".o")) == sorted(call[-1] for call in compiled)
    assert all("-mavx2" in call for call in (*compiled, link))
    assert not Path(compiled[0][-1]).exists()


def test_each_instruction_set_has_a_library_of_its_own(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'echo library > "$out"')
    paths = {
        library_path(isa, cache_dir=tmp_path / "cache", compilers=(compiler,), prebuilt_dir=NOWHERE) for isa in Isa
    }
    assert len(paths) == len(Isa)
    calls = links(tmp_path)
    assert ["-mavx512bf16" in call for call in calls] == [isa is Isa.AVX512_BF16 for isa in Isa]
    assert ["-DFASER_TILES" in call for call in calls] == [isa is Isa.AMX for isa in Isa]
    assert not any("-march=native" in call for call in calls)


def test_builders_in_a_race_all_get_a_whole_library_that_one_of_them_has_compiled(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'printf half > "$out"; sleep 0.1; printf " and half" >> "$out"')
    cache = tmp_path / "cache"

    def build(_: int) -> str:
        return library_path(Isa.GENERIC, cache_dir=cache, compilers=(compiler,), prebuilt_dir=NOWHERE).read_text()

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(build, range(6))) == {"half and half"}
    assert len(list(cache.iterdir())) == 1
    assert len(links(tmp_path)) == 1


def test_a_failing_compiler_is_quoted_and_leaves_no_files(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'for i in 1 2 3 4 5 6 7 8 9 10; do echo "error $i" >&2; done; exit 1')
    with pytest.raises(ConfigError, match=r"for avx2:\nerror 1\n(.*\n)*error 8$"):
        library_path(Isa.AVX2, cache_dir=tmp_path / "cache", compilers=(compiler,), prebuilt_dir=NOWHERE)
    assert not list((tmp_path / "cache").iterdir())


def test_a_disk_that_fills_while_kernels_are_compiled_is_one_line_with_both_folders(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'head -c 1000000 /dev/zero > "$out" || { echo "1 error" >&2; exit 1; }')
    with filling_up(tmp_path / "disk", kib=100) as disk:
        with pytest.raises(ConfigError) as caught:
            library_path(Isa.GENERIC, cache_dir=disk / "kernels", compilers=(compiler,), prebuilt_dir=NOWHERE)
        assert not list((disk / "kernels").iterdir())
    found = str(caught.value)
    assert found.startswith(f"cannot compile kernels into {disk}/kernels, with temporary files in ")
    assert "No space left on device; the variables FASER_CACHE_DIR and TMPDIR name other folders" in found
    assert "\n" not in found


class Cancelled(Exception):
    pass


def test_compiling_is_reported_and_what_is_there_already_is_not(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, 'sleep 0.3; echo library > "$out"')
    reports: list[tuple[str, int, int]] = []
    for _ in range(2):
        library_path(
            Isa.GENERIC,
            cache_dir=tmp_path / "cache",
            compilers=(compiler,),
            prebuilt_dir=NOWHERE,
            progress=lambda *report: reports.append(report),
        )
    assert len(reports) >= 2
    assert set(reports) == {(COMPILING, 0, 0)}


def test_a_cancelled_compilation_ends_the_compiler_with_its_children_and_leaves_no_files(tmp_path: Path) -> None:
    compiler = fake_compiler(tmp_path, f'sleep 60 & echo $! > {tmp_path}/child; echo half > "$out"; wait')

    def cancel(*_: object) -> None:
        if (tmp_path / "child").exists():
            raise Cancelled

    with pytest.raises(Cancelled):
        library_path(
            Isa.GENERIC,
            cache_dir=tmp_path / "cache",
            compilers=(compiler,),
            prebuilt_dir=NOWHERE,
            progress=cancel,
        )
    assert not list((tmp_path / "cache").iterdir())
    assert has_ended(int((tmp_path / "child").read_text()))


def test_what_killed_compilations_left_is_removed_at_the_next_start(tmp_path: Path) -> None:
    compiler, cache = fake_compiler(tmp_path, 'echo library > "$out"'), tmp_path / "cache"

    def build() -> Path:
        return library_path(Isa.GENERIC, cache_dir=cache, compilers=(compiler,), prebuilt_dir=NOWHERE)

    library = build()
    for name, hours in ((".avx2-0123.so-abcdefgh.tmp", 2), ("tmpabcdefgh", 2), (".avx2-0123.so-ijklmnop.tmp", 0)):
        (cache / name).write_text("half")
        then = time.time() - 3600 * hours
        os.utime(cache / name, (then, then))
    assert build() == library
    assert sorted(path.name for path in cache.iterdir()) == [".avx2-0123.so-ijklmnop.tmp", library.name]


def test_a_cache_that_is_read_only_is_named_with_the_variable_that_moves_it(tmp_path: Path) -> None:
    with read_only(tmp_path / "disk") as disk, pytest.raises(ConfigError) as caught:
        library_path(Isa.GENERIC, cache_dir=disk / "kernels", prebuilt_dir=NOWHERE)
    assert str(caught.value) == (
        f"cannot write compiled kernels to {disk}/kernels: Read-only file system; the variable FASER_CACHE_DIR "
        f"names another folder"
    )


def test_no_compiler_is_an_error_that_names_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler found \\(looked for no-such-compiler\\)"):
        library_path(Isa.GENERIC, cache_dir=tmp_path, compilers=("no-such-compiler",), prebuilt_dir=NOWHERE)
    assert not can_build(compilers=("no-such-compiler",), prebuilt_dir=NOWHERE)


def test_a_prebuilt_library_needs_no_compiler(tmp_path: Path) -> None:
    prebuilt = loadable(tmp_path / prebuilt_name(runnable_isas()[0]))
    found = library_path(cache_dir=NOWHERE, compilers=("no-such-compiler",), prebuilt_dir=tmp_path)
    assert found == prebuilt
    assert can_build(compilers=("no-such-compiler",), prebuilt_dir=tmp_path)


def loadable(path: Path) -> Path:
    """Some library that this process can load."""
    shutil.copy(_ctypes.__file__, path)
    return path


@pytest.mark.parametrize("fault", ["of another machine", "of other sources"])
def test_a_prebuilt_library_that_does_not_fit_is_reported_once_and_compiled_instead(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    name = prebuilt_name(Isa.GENERIC)
    if fault == "of another machine":
        (folder / name).write_text("no library of this machine")
    else:
        loadable(folder / "generic-0123456789abcdef.so")
    compiler = fake_compiler(tmp_path, 'echo library > "$out"')
    with caplog.at_level(logging.WARNING, logger="faser"):
        for _ in range(2):
            path = library_path(
                Isa.GENERIC, cache_dir=tmp_path / "cache", compilers=(compiler,), prebuilt_dir=folder
            )
            assert path.parent == tmp_path / "cache"
    (said,) = caplog.messages
    assert said.startswith(
        f"the compiled kernels that came with the package do not fit this machine: {folder}/{name}"
    )


def test_a_library_says_where_it_comes_from(tmp_path: Path) -> None:
    compiler, cache = fake_compiler(tmp_path, 'echo library > "$out"'), tmp_path / "cache"

    def find(prebuilt_dir: Path) -> NativeLibrary:
        return find_library(Isa.GENERIC, cache_dir=cache, compilers=(compiler,), prebuilt_dir=prebuilt_dir)

    assert find(NOWHERE).origin == f"to be compiled by {compiler}"
    assert (
        library_path(Isa.GENERIC, cache_dir=cache, compilers=(compiler,), prebuilt_dir=NOWHERE)
        == find(NOWHERE).path
    )
    assert find(NOWHERE).origin == "compiled here"
    loadable(tmp_path / prebuilt_name(Isa.GENERIC))
    assert find(tmp_path).origin == "from the package"


def test_another_compiler_can_make_the_libraries_of_the_package(tmp_path: Path) -> None:
    def compile_with(isa: Isa, flags: Sequence[str], sources: Sequence[Path], target: Path) -> None:
        assert "linear.cpp" in [path.name for path in sources]
        target.write_text(f"{isa} {'-mavx2' in flags}")

    made = prebuild(tmp_path / "out", (Isa.AVX2, Isa.GENERIC), compile_with)
    assert [path.read_text() for path in made] == ["avx2 True", "generic False"]
    assert [path.name for path in made] == [prebuilt_name(Isa.AVX2), prebuilt_name(Isa.GENERIC)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="cannot write compiled kernels to"):
        library_path(Isa.GENERIC, cache_dir=tmp_path / "cache" / "deep", prebuilt_dir=NOWHERE)


def test_a_cache_below_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    compiler = fake_compiler(tmp_path, 'echo library > "$out"')
    with pytest.raises(ConfigError, match=f"cannot write compiled kernels to {tmp_path}/file/cache"):
        library_path(
            Isa.GENERIC, cache_dir=tmp_path / "file" / "cache", compilers=(compiler,), prebuilt_dir=NOWHERE
        )
