"""What is compiled ahead is what the phases launch, for a GPU and not for the CPU that it is compiled on."""

import os
import subprocess
import sys

import pytest


@pytest.mark.full
def test_the_kernels_of_layers_of_sampling_and_of_drafts_are_asked_for_as_a_gpu_would() -> None:
    """Planted: mixtures left out; the variant for tensors on a CPU."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.travel.triton_cache", "--keys"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    keys = [line.split(" ", 1) for line in done.stdout.splitlines()]
    names = {name.rpartition(".")[2] for name, _ in keys}
    assert {"_rms_norm", "_rope_append", "_gate_rows", "_gate_up", "_down", "_draw"} <= names
    assert {"_digit_sums", "_settle", "_chunk_probs", "_chunk_best", "_draw_draft", "_route_few"} <= names
    products = [key for name, key in keys if name.endswith(("_gate_up", "_down"))]
    assert {key.partition("]{")[0].rpartition("(")[2] for key in products} == {"'constexpr', False)"}  # WIDE
