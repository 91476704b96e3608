"""The bill of materials names what is inside and what pip brings."""

import json

from deploy.wheel.bill_of_materials import bill_of_materials


def test_it_names_what_is_linked_in_and_what_is_required_but_no_extras() -> None:
    requires = [
        "torch>=2.11",
        'uvloop>=0.21; sys_platform != "win32"',
        'pytest>=8.3; extra == "test"',
        "PyYAML>=6",
    ]
    tools = {"ziglang": "0.17.1"}
    found = json.loads(
        bill_of_materials(version="0.1.0", requires=requires, llvm="22.1.8", tools=tools, epoch_s=1_700_000_000)
    )
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.6")
    assert found["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    assert found["metadata"]["component"]["purl"] == "pkg:pypi/faser@0.1.0"
    purls = [each["purl"] for each in found["components"]]
    assert purls[0] == "pkg:generic/llvm/libc++@22.1.8"
    assert purls[4:] == ["pkg:pypi/torch", "pkg:pypi/uvloop", "pkg:pypi/pyyaml"]
    references = {each["bom-ref"] for each in found["components"]}
    assert set(found["dependencies"][0]["dependsOn"]) == references
