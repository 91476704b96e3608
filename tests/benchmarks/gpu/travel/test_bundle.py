"""The load for a machine without a network, with a pip, a compiler and a Triton that only pretend."""

import json
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.decoding.environment import needed_modules
from benchmarks.gpu.plan import ON_DEVICE
from benchmarks.gpu.travel import bundle
from benchmarks.gpu.travel.bundle import CARRIED, expect_to_travel, is_used, main
from benchmarks.gpu.travel.vllm_tree import OTHERS, VLLM

MEMBERS = (
    "flashinfer/__init__.py",
    "flashinfer/data/csrc/norm.cu",
    "flashinfer/data/csrc/gdn/large.cu",
    "flashinfer/data/cutlass/include/large.h",
    "flashinfer/experimental/__init__.py",
    "flashinfer/experimental/it/large.cu",
    "flashinfer/experimental/b12x/large.py",
)


class Pretends:
    """Writes wheels as pip would, and a cache as Triton would. asked: packages, and the program."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, command: Sequence[str], more: Mapping[str, str]) -> None:
        if "benchmarks.gpu.travel.triton_cache" in command:
            self.asked.append("triton")
            Path(more["TRITON_CACHE_DIR"], "kernel.cubin").write_text("code")
            return
        assert "--no-deps" in command
        wheels = Path(command[command.index("--dest") + 1])
        wheels.mkdir(parents=True, exist_ok=True)
        for package in (each for each in command if "==" in each and not each.startswith("-")):
            self.asked.append(package)
            name, _, version = package.partition("==")
            with zipfile.ZipFile(wheels / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
                own = (f"{name.replace('-', '_')}/__init__.py",)
                for member in MEMBERS if name.startswith("flashinfer") else own:
                    wheel.writestr(member, member)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """All modules that the phases need, one more, and this project's own checkout."""
    modules = tmp_path / "flashinfer-sm90a"
    for name in (*(each.own_name for each in needed_modules(ON_DEVICE)), "other"):
        (modules / name).mkdir(parents=True)
        (modules / name / f"{name}.so").write_bytes(b"compiled")
    cache = ["--cache", str(tmp_path / "cache"), "--xz-preset", "0"]
    return [str(tmp_path / "load"), "--modules", str(modules), *cache, "--vllm"]


def names_in(load: Path, name: str) -> set[str]:
    with tarfile.open(load / f"{name}.tar.xz") as file:
        return set(file.getnames())


def test_a_load_has_what_the_runs_need(arguments: list[str], tmp_path: Path) -> None:
    """Planted: sources that nothing is compiled from; modules that no phase needs."""
    assert main(arguments, Pretends()) == 0
    load = tmp_path / "load"
    packaged = {each.removeprefix("packages/") for each in names_in(load, "packages")}
    used = {each for each in MEMBERS if "large" not in each}
    assert packaged == used | {"apache_tvm_ffi/__init__.py", "llguidance/__init__.py", "msgspec/__init__.py"}
    wanted = [each.own_name for each in needed_modules(ON_DEVICE)]
    assert names_in(load, "modules") == {f"cache/kernels/flashinfer-sm90a/{name}/{name}.so" for name in wanted}
    assert names_in(load, "triton") == {"triton/kernel.cubin"}
    assert "vllm/vllm/__init__.py" in names_in(load, "vllm")
    manifest = json.loads((load / "manifest.json").read_text())
    assert manifest["modules"] == {each.name: len(b"compiled") for each in needed_modules(ON_DEVICE)}
    assert set(manifest["versions"]) == {"python", "torch", "triton"}
    for each in manifest["archives"]:
        assert (load / each["name"]).stat().st_size == each["bytes"]


def test_a_second_bundle_downloads_compiles_and_packs_nothing_again(arguments: list[str], tmp_path: Path) -> None:
    """Planted: archives packed again; a cache that is trusted without a look at its files."""
    first = Pretends()
    main(arguments, first)
    assert first.asked == [*CARRIED.values(), "triton", VLLM, *OTHERS]
    packed = {each: each.stat().st_mtime_ns for each in (tmp_path / "cache").glob("*.tar.xz")}
    assert len(packed) == 4
    second = Pretends()
    main(arguments, second)
    assert second.asked == []
    assert {each: each.stat().st_mtime_ns for each in packed} == packed
    (tmp_path / "cache" / "triton" / "kernel.cubin").write_text("damaged")
    main(arguments, second)
    assert second.asked == ["triton"]


def test_modules_that_are_missing_are_compiled_from_the_whole_package(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: compiled from the stripped tree, which has no headers."""
    (missing,) = (each for each in needed_modules(ON_DEVICE) if each.name == "prefill_64")
    folder = tmp_path / "flashinfer-sm90a" / missing.own_name
    (folder / f"{missing.own_name}.so").unlink()
    built: list[str] = []

    def build(names: list[str], *, environment: Mapping[str, str], out: Path, **_: Any) -> None:
        built.extend(names)
        paths = [Path(each) for each in environment["PYTHONPATH"].split(":") if each]
        assert any((each / "flashinfer/data/cutlass/include/large.h").exists() for each in paths)
        (out / missing.own_name / f"{missing.own_name}.so").write_bytes(b"built")

    monkeypatch.setattr(bundle, "build_modules", build)
    assert main(arguments, Pretends()) == 0
    assert built == ["prefill_64"]
    assert not (tmp_path / "cache" / "whole").exists()


def test_the_phases_need_attention_for_all_sizes_of_heads_for_windows_and_for_few_query_heads_a_kv_head() -> None:
    names = {each.name for each in needed_modules(ON_DEVICE)}
    wide = {"prefill_256", "prefill_256_window"}
    others = {"prefill_128_fp8", "cublaslt", "tinygemm"}  # keys and values in 8 bits, and products
    assert names == {"prefill_64", "prefill_64_window", "prefill_128"} | wide | others


def test_a_load_that_cannot_travel_with_the_checkout_is_refused_with_all_sizes(
    arguments: list[str], tmp_path: Path
) -> None:
    """Planted: the load measured alone."""
    with pytest.raises(SystemExit, match=r"vllm.tar.xz 0.0 and the checkout [\d.]+ MiB are more than the 1 MiB"):
        main([*arguments, "--travel-mib", "1"], Pretends())
    assert not (tmp_path / "load").exists()
    parts = [{"name": "a", "bytes": 3 << 20}, {"name": "b", "bytes": 2 << 20}]
    expect_to_travel(parts, 1 << 20, 6 << 20)
    with pytest.raises(
        ValueError, match=r"^a 3.0, b 2.0 and the checkout 1.0 MiB are more than the 5 MiB that travel"
    ):
        expect_to_travel(parts, 1 << 20, 5 << 20)


def test_another_triton_than_the_lent_machines_is_named(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bundle, "_triton_version", lambda: "9.9")
    main(arguments, Pretends())
    assert (
        "this is Triton 9.9; the GPU machine has 3.6.0 and will compile everything anew" in capsys.readouterr().out
    )


def test_other_packages_are_kept_but_for_what_only_compilers_need() -> None:
    assert is_used("tvm_ffi/lib/libtvm_ffi.so")
    assert not is_used("tvm_ffi/include/tvm/ffi/any.h")
    assert is_used("flashinfer/data/csrc/batch_prefill.cu")
    assert not is_used("flashinfer/data/include/flashinfer/norm.cuh")
    assert is_used("flashinfer/gemm/gemm_base.py")
    assert not is_used("flashinfer/cake_gdp_backend/csrc/kernel.cu")
    assert is_used("flashinfer/experimental/cake_nvfp4_per_token/support.py")
    assert not is_used("flashinfer/experimental/cake_nvfp4/support.py")
