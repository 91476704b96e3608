"""The audit of wheels, by planted faults: in the record, in the contents, in libraries that g++ makes here."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("elftools", reason="make deploy-tools installs it")

from deploy.wheel.audit import faults, library_faults
from deploy.wheel.pack import pack
from faser.kernels.cpu.build import isas_of, prebuilt_name

INFO = "faser-0.1.dist-info"
needs_gcc = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "faser"
    folder.mkdir()
    (folder / "__init__.py").write_text("# a package\n")
    return folder


@pytest.fixture
def wheel(package: Path, tmp_path: Path) -> Path:
    """A wheel for a platform with one file and libraries that are none."""
    pure = tmp_path / "faser-0.1-py3-none-any.whl"
    with zipfile.ZipFile(pure, "w") as made:
        made.write(package / "__init__.py", "faser/__init__.py")
        made.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        made.writestr(f"{INFO}/RECORD", "")
    libraries = {prebuilt_name(isa): library("int faser_one() { return 1; }") for isa in isas_of("x86_64")}
    return pack(pure, libraries, {}, tmp_path, epoch_s=1_700_000_000)


def library(source: str, *flags: str) -> bytes:
    """A library without the startup code of the C library, which refers to a newer one."""
    return linked(f'extern "C" {source}', "-s", "-nostdlib", "-Wl,--as-needed", *flags)


def linked(source: str, *flags: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "library.so")
        command = ["g++", "-x", "c++", "-shared", "-fPIC", *flags, "-o", str(target), "-"]
        subprocess.run(command, input=source.encode(), capture_output=True, check=True)
        return target.read_bytes()


@needs_gcc
def test_a_library_without_faults_has_none() -> None:
    assert list(library_faults(library("int faser_one() { return 1; }"))) == []


@needs_gcc
@pytest.mark.parametrize(
    "source, flags, fault",
    [
        ("int one() { return 1; }", (), "shows one"),
        ("int faser_one() { return 1; }", ("-Wl,-rpath,/opt/x", "-Wl,--enable-new-dtags"), "has DT_RUNPATH"),
        ("int faser_one() { return 1; }", ("-Wl,-rpath,/opt/x", "-Wl,--disable-new-dtags"), "has DT_RPATH"),
        ("int faser_one() { return 1; }", ("-Wl,-z,execstack",), "asks for a stack that can be executed"),
        ("int faser_one() { return 1; }", ("-Wl,--no-as-needed", "-lstdc++"), "needs libstdc++.so.6"),
        ('const char* faser_one() { return "/home/me/x.cpp"; }', (), "holds a path: /home/me/x.cpp"),
    ],
)
def test_each_fault_of_a_library_is_named(source: str, flags: tuple[str, ...], fault: str) -> None:
    assert list(library_faults(library(source, *flags))) == [fault]


@needs_gcc
def test_symbols_for_debuggers_are_a_fault() -> None:
    found = list(library_faults(linked('extern "C" int faser_one() { return 1; }', "-g", "-nostdlib")))
    assert "has symbols for debuggers" in found
    assert "has the section .debug_info" in found


@needs_gcc
def test_what_this_machines_compiler_links_as_usual_is_not_for_others() -> None:
    """It needs the machine's C++ library, and shows what it instantiates of it."""
    source = """
        #include <map>
        #include <string>
        std::map<std::string, int> kept;
        extern "C" int faser_one() { return kept["one"]++; }
    """
    found = list(library_faults(linked(source, "-s")))
    assert "needs libstdc++.so.6" in found
    assert any(fault.startswith("needs GLIBCXX_") for fault in found)
    assert any(fault.startswith("shows _Z") for fault in found)


@needs_gcc
def test_a_function_of_a_newer_c_library_is_a_fault() -> None:
    source = """
        extern "C" int later(int);
        __asm__(".symver later, later@GLIBC_2.99");
        extern "C" int faser_one() { return later(1); }
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "versions").write_text("GLIBC_2.99 { later; };")
        libc = linked(
            'extern "C" int later(int x) { return x; }',
            "-nostdlib",
            "-Wl,-soname,libc.so.6",
            f"-Wl,--version-script={folder}/versions",
        )
        Path(folder, "libc.so.6").write_bytes(libc)
        made = linked(source, "-s", "-nostdlib", f"-Wl,--no-as-needed,{folder}/libc.so.6")
    assert list(library_faults(made)) == ["needs GLIBC_2.99 of libc.so.6"]


def test_what_is_no_library_is_a_fault() -> None:
    assert list(library_faults(b"text")) == ["is no library: Magic number does not match"]


def test_a_library_for_another_machine_is_a_fault() -> None:
    header = bytearray(64)
    header[:7] = b"\x7fELF\x02\x01\x01"
    header[16:20] = (3).to_bytes(2, "little") + (183).to_bytes(2, "little")  # a library, for aarch64
    header[54:64] = b"".join(each.to_bytes(2, "little") for each in (56, 0, 64, 0, 0))
    assert list(library_faults(bytes(header))) == ["is ET_DYN for EM_AARCH64; it must be a library for x86-64"]


@needs_gcc
def test_a_library_that_lacks_a_function_of_the_python_side_is_a_fault(wheel: Path, package: Path) -> None:
    found = faults(wheel, package)
    assert any("undefined symbol: faser_" in fault for fault in found)
    assert [fault for fault in found if "undefined symbol" not in fault] == []


def edited(wheel: Path, name: str, content: bytes | None) -> Path:
    """The wheel with a member replaced, or left out."""
    target = wheel.parent / "edited" / wheel.name
    target.parent.mkdir()
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as made:
        for each in {*source.namelist(), name}:
            if each != name:
                made.writestr(each, source.read(each))
            elif content is not None:
                made.writestr(each, content)
    return target


@needs_gcc
@pytest.mark.parametrize(
    "name, content, expected",
    [
        (
            "faser/__init__.py",
            b"# another\n",
            {"faser/__init__.py is not what RECORD says", "faser/__init__.py differs from its source"},
        ),
        ("faser/__init__.py", None, {"faser/__init__.py is in RECORD alone", "faser/__init__.py is missing"}),
        ("tests/x.py", b"", {"tests/x.py is not in RECORD", "tests/x.py does not belong into it"}),
        (
            f"{INFO}/WHEEL",
            b"Root-Is-Purelib: true\nTag: py3-none-manylinux_2_28_x86_64\n",
            {f"{INFO}/WHEEL is not what RECORD says", "WHEEL lacks the line Root-Is-Purelib: false"},
        ),
    ],
)
def test_each_fault_of_a_wheel_is_named(
    name: str, content: bytes | None, expected: set[str], wheel: Path, package: Path
) -> None:
    found = faults(edited(wheel, name, content), package)
    assert {fault for fault in found if "undefined symbol" not in fault} == expected


@needs_gcc
def test_a_missing_variant_and_a_stale_one_are_faults(wheel: Path, package: Path) -> None:
    missing = f"faser/kernels/cpu/native/prebuilt/{prebuilt_name(isas_of('x86_64')[0])}"
    assert f"{missing} is missing" in faults(edited(wheel, missing, None), package)
    shutil.rmtree(wheel.parent / "edited")
    stale = "faser/kernels/cpu/native/prebuilt/avx2-0123.so"
    found = faults(edited(wheel, stale, library("int faser_one() { return 1; }")), package)
    assert f"{stale} is of other sources or flags" in found


def test_what_builds_the_wheel_needs_neither_torch_nor_numpy() -> None:
    """The environment of `make wheel` has neither. Planted: numpy imported by the kernels' interface."""
    program = "import sys; sys.modules |= {'torch': None, 'numpy': None}; import deploy.wheel.__main__"

    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
