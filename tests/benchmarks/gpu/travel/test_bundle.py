"""The bundle for a machine without a network, with a pip that only pretends."""

import io
import json
import random
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.gpu.common.plan import ON_DEVICE
from benchmarks.gpu.travel.bundle import (
    is_used,
    kernels_of,
    loads_of,
    main,
    needed_modules,
    parts_of,
    split,
)
from benchmarks.gpu.travel.carried import CARRIED

MEMBERS = (
    "flashinfer/__init__.py",
    "flashinfer/data/csrc/norm.cu",
    "flashinfer/data/csrc/gdn/large.cu",
    "flashinfer/data/cutlass/include/large.h",
    "flashinfer/experimental/it/__init__.py",
    "flashinfer/experimental/it/large.cu",
)


class FakePip:
    """Writes wheels as pip would. breaks: at the second one."""

    def __init__(self, *, breaks: bool = False) -> None:
        self.asked: list[str] = []
        self.breaks = breaks

    def __call__(self, command: Sequence[str]) -> None:
        assert "--no-deps" in command
        package, wheels = command[-1], Path(command[command.index("--dest") + 1])
        if self.breaks and self.asked:
            raise ValueError("the network is gone")
        self.asked.append(package)
        wheels.mkdir(exist_ok=True)
        name, _, version = package.partition("==")
        with zipfile.ZipFile(wheels / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
            for member in MEMBERS if name.startswith("flashinfer") else (f"{name.replace('-', '_')}/__init__.py",):
                wheel.writestr(member, member)


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A model, all modules that the phases need, one more, and this project's own checkout."""
    model, modules = tmp_path / "model", tmp_path / "flashinfer-sm90a"
    for name in (*(each.own_name for each in needed_modules(ON_DEVICE)), "other"):
        (modules / name).mkdir(parents=True)
        (modules / name / f"{name}.so").write_bytes(b"compiled")
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(random.Random(1).randbytes(3 << 20))
    return [str(tmp_path / "out"), "--xz-preset", "0", "--smollm2", str(model), "--modules", str(modules)]


def names_in(out: Path, name: str) -> set[str]:
    parts = sorted(out.glob(f"load-*/{name}.tar.xz.*"), key=lambda each: each.name)
    with tarfile.open(fileobj=io.BytesIO(b"".join(part.read_bytes() for part in parts))) as file:
        return set(file.getnames())


def test_a_bundle_has_packages_the_modules_that_phases_need_and_a_model(
    arguments: list[str], tmp_path: Path
) -> None:
    """Planted: sources that nothing is compiled from; modules that no phase needs."""
    assert main(arguments, FakePip()) == 0
    out = tmp_path / "out"
    packaged = {each.removeprefix("packages/") for each in names_in(out, "packages")} - {"wheels.txt"}
    used = {each for each in MEMBERS if "large" not in each}
    assert packaged == used | {"apache_tvm_ffi/__init__.py", "llguidance/__init__.py"}
    wanted = [each.own_name for each in needed_modules(ON_DEVICE)]
    assert names_in(out, "modules") == {f"cache/kernels/flashinfer-sm90a/{name}/{name}.so" for name in wanted}
    assert names_in(out, "model") == {"smollm2/config.json", "smollm2/model.safetensors"}
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["modules"] == {each.name: len(b"compiled") for each in needed_modules(ON_DEVICE)}
    for load, parts in manifest["loads"].items():
        assert json.loads((out / load / "manifest.json").read_text()) == manifest
        for part in parts:
            assert (out / load / part["name"]).stat().st_size == part["bytes"]


def test_the_phases_need_attention_for_both_sizes_of_heads_and_for_few_query_heads_a_kv_head() -> None:
    assert {each.name for each in needed_modules(ON_DEVICE)} == {
        "prefill_64",
        "prefill_128",
        "decode_64",
        "decode_128",
    }


def test_a_module_that_a_phase_needs_and_that_is_missing_is_an_error_with_its_remedy(
    arguments: list[str], tmp_path: Path
) -> None:
    """Planted: a warning, and a bundle without the module."""
    (missing,) = (each for each in needed_modules(ON_DEVICE) if each.name == "decode_64")
    (tmp_path / "flashinfer-sm90a" / missing.own_name / f"{missing.own_name}.so").unlink()
    with pytest.raises(SystemExit, match=r"need modules .* decode_64; faser env --build-.* --only decode_64$"):
        main(arguments, FakePip())
    assert not list((tmp_path / "out").glob("load-*"))


def test_loads_are_no_larger_than_wanted_and_have_all_parts_once(tmp_path: Path) -> None:
    files = []
    for place, size in enumerate((40, 50, 30, 90, 10)):
        files.append(tmp_path / str(place))
        files[-1].write_bytes(bytes(size))
    loads = loads_of(files, most=100)
    assert [[int(each.name) for each in load] for load in loads] == [[0, 1], [2], [3, 4]]
    with pytest.raises(ValueError, match="3 has 90 bytes; a load has 89 at most"):
        loads_of(files, most=89)


def test_a_load_that_cannot_travel_with_the_checkout_is_refused(arguments: list[str]) -> None:
    """Planted: the load measured alone."""
    with pytest.raises(SystemExit, match=r"the checkout of [\d.]+ MiB are more than the 8 MiB that travel; lower"):
        main([*arguments, "--travel-mib", "8"], FakePip())


def test_kernels_that_do_not_compile_are_refused_and_others_listed(arguments: list[str], tmp_path: Path) -> None:
    listed = tmp_path / "kernels.json"
    listed.write_text(json.dumps({"triton": "3.6.0", "kernels": [{"kernel": "_norm", "error": ""}]}))
    assert main([*arguments, "--kernels", str(listed)], FakePip()) == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["kernels"]["triton"] == "3.6.0"
    listed.write_text(json.dumps({"triton": "3.6.0", "kernels": [{"kernel": "_norm", "error": "no"}]}))
    with pytest.raises(ValueError, match="lists kernels that do not compile: _norm"):
        kernels_of(listed)


def test_a_bundle_that_was_broken_off_goes_on_and_a_whole_one_is_kept(
    arguments: list[str], tmp_path: Path
) -> None:
    """Planted: wheels downloaded again; archives packed again."""
    with pytest.raises(SystemExit, match="the network is gone"):
        main(arguments, FakePip(breaks=True))
    again = FakePip()
    main(arguments, again)
    assert [each.partition("==")[0] for each in again.asked] == ["apache-tvm-ffi", "llguidance"]
    part = tmp_path / "out" / "archives" / "model.tar.xz.000"
    before = part.stat().st_mtime_ns
    third = FakePip()
    main(arguments, third)
    assert not third.asked
    assert part.stat().st_mtime_ns == before


def test_packages_are_packed_anew_where_another_wheel_has_come(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the folder of an earlier bundle taken for this one's."""
    main(arguments, FakePip())
    monkeypatch.setitem(CARRIED, "another", "another==1")
    main(arguments, FakePip())
    assert "packages/another/__init__.py" in names_in(tmp_path / "out", "packages")


def test_a_folder_that_is_no_checkpoint_is_refused(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(SystemExit, match=r"model is no checkpoint: it has no config.json"):
        main(arguments, FakePip())


def test_a_folder_without_vllm_is_refused(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no vLLM to import"):
        main([*arguments, "--vllm", str(tmp_path)], FakePip())


def test_parts_are_no_larger_than_wanted_and_join_to_the_archive(tmp_path: Path) -> None:
    whole = tmp_path / "x.tar.xz.tmp"
    whole.write_bytes(bytes(range(250)))
    parts = split(whole, 100)
    assert [part.name for part in parts] == ["x.tar.xz.000", "x.tar.xz.001", "x.tar.xz.002"]
    assert b"".join(part.read_bytes() for part in parts) == bytes(range(250))
    assert parts_of(tmp_path, "x") == parts
    parts[0].unlink()
    assert parts_of(tmp_path, "x") == []


def test_other_packages_are_kept_whole() -> None:
    assert is_used("tvm_ffi/lib/libtvm_ffi.so")
    assert is_used("flashinfer/data/csrc/batch_prefill.cu")
    assert not is_used("flashinfer/data/include/flashinfer/norm.cuh")
