"""The picture of what adapters add to a step is that of the filed figures."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

from benchmarks.kernels.adapters import picture

RESULTS = Path(__file__).parents[3] / "benchmarks/results"


def test_the_picture_of_the_documents_is_that_of_the_results() -> None:
    found = picture(json.loads((RESULTS / "adapters-step.json").read_text("utf-8")))
    assert (RESULTS / "adapters-step.svg").read_text("utf-8") == found
    texts = {each.text for each in ET.fromstring(found).iter("{http://www.w3.org/2000/svg}text")}
    assert {
        f"{weights} r={rank}, {arm}"
        for weights in ("bf16", "int8")
        for rank in (8, 16)
        for arm in ("one", "eight")
    } <= texts
