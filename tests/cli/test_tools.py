"""`faser env`: what is said of GPUs, and before anything is compiled for them."""

import json
from pathlib import Path

import pytest
import torch

from faser.cli.main import main
from faser.kernels.cuda.flashinfer.build import ALL_MODULES, MODULES


@pytest.mark.parametrize("flag", ["--arch", "--out", "--only"])
def test_settings_of_the_build_are_refused_without_it(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", flag, "x"]) == 2
    assert capsys.readouterr().err == f"faser env: {flag} goes with --build-kernels\n"


def test_the_build_says_what_it_is_about_to_do_and_refuses_what_it_does_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "--build-kernels", "--only", "decode_64,decode_46", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == f"compiling decode_64, decode_46 for 9.0a into {tmp_path / 'out'}\n"
    assert said.err.startswith("faser env: --only names decode_46; there are decode_64, decode_128")


def test_the_help_names_every_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f" {each}," in text for each in MODULES)
    assert "decode_256_window_capped" in text
    assert "decode_256_window_capped" in ALL_MODULES
    assert max(map(len, text.splitlines())) <= 115


def test_gpus_are_reported_on_every_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"cuda", "gpu driver", "flashinfer", "triton", "device", "backend"} <= set(found)
    if not torch.cuda.is_available():
        assert (found["gpus"], found["device"]) == ("none that torch can use", "cpu")


def test_the_instruction_set_of_the_native_kernels_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASER_CPU_ISA", "generic")
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    if found["backend"] == "native":
        isa, origin = found["cpu kernels"].split(", ", 1)
        assert isa == "generic"
        assert origin.startswith(("from the package", "compiled here", "to be compiled by /"))
        assert origin.endswith("; KV cache in --dtype or int8")
    monkeypatch.setenv("FASER_CPU_ISA", "sse9")
    assert main(["env"]) != 0
    assert "the variable FASER_CPU_ISA is sse9" in capsys.readouterr().err
