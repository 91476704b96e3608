"""The wheel's software bill of materials: what is linked into its libraries, and which packages it requires.

CycloneDX 1.6 as JSON, in the folder of the wheel where PEP 770 puts it.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

NAME = "faser.cdx.json"
_LLVM_LICENSE = [{"expression": "Apache-2.0 WITH LLVM-exception"}]
_LINKED = ("libc++", "libc++abi", "libunwind", "compiler-rt")


def bill_of_materials(
    *, version: str, requires: Sequence[str], llvm: str, tools: dict[str, str], epoch_s: int
) -> str:
    """version: FASER's. requires: the lines Requires-Dist. llvm: version of the C++ library that is linked in.

    tools: versions of the packages that built the wheel, by name. epoch_s: Unix time that stands for the build's.
    """
    linked = [
        _component(name, llvm, f"pkg:generic/llvm/{name}@{llvm}", licenses=_LLVM_LICENSE) for name in _LINKED
    ]
    required = [_required(line) for line in requires if "extra ==" not in line]
    own = f"pkg:pypi/faser@{version}"
    found = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch_s, UTC).isoformat(),
            "tools": {
                "components": [
                    {"type": "application", "name": name, "version": number}
                    for name, number in sorted(tools.items())
                ]
            },
            "component": _component("faser", version, own, licenses=[{"license": {"id": "Apache-2.0"}}]),
        },
        "components": [*linked, *required],
        "dependencies": [
            {"ref": own, "dependsOn": [each["bom-ref"] for each in (*linked, *required)]},
            *({"ref": each["bom-ref"]} for each in (*linked, *required)),
        ],
    }
    return json.dumps(found, indent=1) + "\n"


def _component(name: str, version: str, purl: str, **more: Any) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl, **more}


def _required(line: str) -> dict[str, Any]:
    """A package that pip installs beside the wheel, in any version that fits: it has no version here."""
    requirement = line.partition(";")[0].strip()
    name = next((requirement[:i] for i, char in enumerate(requirement) if char in "<>=!~[ ("), requirement)
    purl = f"pkg:pypi/{name.lower().replace('_', '-')}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "purl": purl,
        "scope": "required",
        "properties": [{"name": "faser:requires", "value": requirement}],
    }
