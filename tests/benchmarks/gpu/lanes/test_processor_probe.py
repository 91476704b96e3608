"""The processor probe refuses to run without a GPU, and compiles for one. Its counts are checked on a GPU only."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from benchmarks.gpu.lanes.places import (
    MOST_PROCESSORS,
    blocks_by_processor,
    count_blocks,
    processors_of,
)
from faser.errors import EngineError

COMPILE = """
import json, sys
from benchmarks.gpu.travel.triton_kernels import compiled
from benchmarks.gpu.lanes import processor_probe
json.dump(compiled(processor_probe._count_blocks, {}, 90).asm["ptx"], sys.stdout)
"""


def test_blocks_on_a_cpu_are_nowhere() -> None:
    with pytest.raises(EngineError, match="only blocks on a GPU have a processor; counts is on cpu"):
        count_blocks(torch.zeros(MOST_PROCESSORS, dtype=torch.int32), 132)


@pytest.mark.parametrize("ask", [processors_of, blocks_by_processor])
def test_what_is_no_stream_of_a_gpu_is_refused(ask: Any) -> None:
    with pytest.raises(EngineError, match="'the current one' is no stream of a GPU"):
        ask(cast(torch.cuda.Stream, "the current one"))


@pytest.mark.slow
def test_for_sm_90_every_block_reads_its_processor_once_and_rests(tmp_path: Path) -> None:
    """Caught: reading and resting taken for pure, and left out or moved."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = json.loads(done.stdout).splitlines()
    at = {
        part: [number for number, line in enumerate(lines) if part in line]
        for part in ("%smid", "nanosleep", "atom.")
    }
    assert {part: len(found) for part, found in at.items()} == {"%smid": 1, "nanosleep": 1, "atom.": 1}
    assert at["%smid"] <= at["nanosleep"] < at["atom."]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_ordinary_streams_blocks_run_on_all_processors() -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    assert len(processors_of(stream)) == torch.cuda.get_device_properties(stream.device).multi_processor_count
