"""What is compiled before the first request is all that requests need.

Oracle: Triton's own keys of every launch, see variants.py. Bugs these tests have been seen to catch: requests
staged at odd places, the lengths of drafts between the shortest and the longest left out, halvings that count for
the variant, uploaded parts one word apart.
"""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("width", "cap"),
    [(40, 5), pytest.param(33, 9, marks=pytest.mark.slow), pytest.param(6400, 1, marks=pytest.mark.slow)],
)
@pytest.mark.full(but=("40-5",))
def test_requests_ask_for_no_kernel_that_the_rehearsal_did_not(width: int, cap: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.cuda.triton.variants", str(width), str(cap)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sorted(set(found["asked"]) - set(found["rehearsed"])) == []
    names = {each.split()[0] for each in found["asked"]}
    assert {"_draw", "_digit_sums", "_chunk_best"} <= names
