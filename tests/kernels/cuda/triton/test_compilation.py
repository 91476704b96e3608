"""The kernels as a GPU would run them, as far as it shows without one. Bugs seen caught: fusion left on;
a row read before the launch that writes it has ended."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.full
def test_every_kernel_compiles_for_sm_90_and_rounds_every_product(tmp_path: Path) -> None:
    """The interpreter rounds each product alone; compilers fuse them with sums unless an option forbids it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    listed = tmp_path / "kernels.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.travel.triton_kernels", "--json", str(listed)],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(listed.read_text())["kernels"]
    assert {
        "_draw",
        "_digit_sums",
        "_rope_append",
        "_chunks",
    } <= {each["kernel"] for each in found}
    fused = {each["kernel"] for each in found if each["fuses"]}
    assert fused == {"_few_rows", "_few_low_bit_rows"}, "which ask for it"
    assert all(each["registers"] and each["code_bytes"] for each in found)
    unspilled = [
        each
        for each in found
        if each["kernel"].startswith(("_few", "_low_bit", "_widen")) or "CODED=True" in each["variant"]
    ]
    assert {each["stack_bytes"] for each in unspilled} == {0}, "which spill nothing"
    assert {each["early_loads"] for each in found} == {0}, "as what is read may not be written yet"
