"""The picture of a run shows what its files say: rates of one sequence, the best fixed length of each cell."""

import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from benchmarks.gpu.archive import read_records
from benchmarks.gpu.picture import picture, policy_lines
from benchmarks.gpu.record import Record

ROOT = Path(__file__).parents[3]


def row(acceptance: float, sequences: int, policy: str, times_off: float) -> dict[str, Any]:
    return {"acceptance": acceptance, "sequences": sequences, "policy": policy, "times_off": times_off}


def test_of_fixed_lengths_the_best_of_each_cell_is_drawn_and_goodput_is_not() -> None:
    """Oracle: by hand. Planted: the best length of all cells together; rows in the order of the file."""
    rows = [
        row(0.9, 8, "fixed:1", 1.1),
        row(0.9, 8, "fixed:3", 1.4),
        row(0.9, 1, "fixed:1", 1.3),
        row(0.9, 1, "fixed:3", 1.2),
        row(0.9, 1, "faser", 1.25),
        row(0.9, 1, "goodput", 9.0),
        row(0.6, 1, "faser", 0.97),
        row(0.6, 1, "off", 1.0),
    ]
    assert policy_lines(rows) == {
        "off": [(1, 1.0), (8, 1.0)],
        "best fixed, 0.9": [(1, 1.3), (8, 1.4)],
        "faser, 0.9": [(1, 1.25)],
        "faser, 0.6": [(1, 0.97)],
    }


def test_the_picture_of_the_documents_is_that_of_the_results() -> None:
    filed = read_records(ROOT / "benchmarks/results/h200")
    found = picture([each.record for each in filed.values()])
    assert found is not None
    assert (ROOT / "docs/images/gpu-h200.svg").read_text("utf-8") == found
    texts = {each.text for each in ET.fromstring(found).iter("{http://www.w3.org/2000/svg}text")}
    plain = "NVIDIA H200: 8B without drafts; vLLM without torch.compile"
    assert {"FASER", "vLLM", "faser, 0.9", "off", plain} <= texts


def test_without_vllm_and_policies_decoding_is_drawn_alone_and_without_any_nothing() -> None:
    """Planted: a panel of vLLM's without its rows, rates of all sequences together."""
    cell = {"sampling": "greedy", "sequences": 8, "tokens_per_s": 1600.0}
    about = Record(phase="environment", dry_run=False, result={"device": {"name": "H100"}})
    found = picture([about, Record(phase="plain", dry_run=False, result={"target": [cell]})])
    assert found is not None
    texts = {each.text for each in ET.fromstring(found).iter("{http://www.w3.org/2000/svg}text")}
    assert {"greedy", "200", "H100: 8B without drafts"} <= texts
    assert picture([about]) is None
