"""Makes the wheel for a platform out of the one for any: adds compiled kernels, and says so in its metadata.

The same contents make the same bytes: times are the one given, modes are fixed, members keep their order.
"""

import base64
import csv
import hashlib
import io
import stat
import time
import zipfile
from collections.abc import Mapping
from email.parser import Parser
from pathlib import Path

PLATFORM = "manylinux_2_28_x86_64"
PREBUILT = "faser/kernels/cpu/native/prebuilt"
_ANY = "py3-none-any"
_TAG = f"py3-none-{PLATFORM}"


def pack(pure: Path, libraries: Mapping[str, bytes], boms: Mapping[str, str], out: Path, *, epoch_s: int) -> Path:
    """Write the wheel for PLATFORM into the folder out. libraries, boms: contents by file name.

    epoch_s: Unix time of every member; zip knows none before 1980.
    """
    target = out / pure.name.replace(_ANY, _TAG)
    with zipfile.ZipFile(pure) as source:
        members = {name: source.read(name) for name in source.namelist()}
    (info,) = {name.partition("/")[0] for name in members if name.endswith(".dist-info/RECORD")}
    members[f"{info}/WHEEL"] = _for_platform(members[f"{info}/WHEEL"].decode()).encode()
    members |= {f"{PREBUILT}/{name}": content for name, content in libraries.items()}
    members |= {f"{info}/sboms/{name}": content.encode() for name, content in boms.items()}
    record = f"{info}/RECORD"
    del members[record]
    ordered = sorted(members, key=lambda name: (name.startswith(info), name))
    members[record] = _record({name: members[name] for name in ordered}, record).encode()
    with zipfile.ZipFile(target, "w") as wheel:
        for name in (*ordered, record):
            member = zipfile.ZipInfo(name, date_time=time.gmtime(max(epoch_s, 315532800))[:6])
            member.external_attr = (stat.S_IFREG | (0o755 if name.endswith(".so") else 0o644)) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            wheel.writestr(member, members[name])
    return target


def _record(members: Mapping[str, bytes], own_name: str) -> str:
    """The file RECORD: name, hash and size of every member, and its own name alone."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, content in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(content)))
    rows.writerow((own_name, "", ""))
    return text.getvalue()


def requirements(wheel: Path) -> list[str]:
    """The lines Requires-Dist of a wheel's metadata."""
    with zipfile.ZipFile(wheel) as source:
        (name,) = [each for each in source.namelist() if each.endswith(".dist-info/METADATA")]
        return Parser().parsestr(source.read(name).decode(), headersonly=True).get_all("Requires-Dist", [])


def _for_platform(wheel_file: str) -> str:
    """The file WHEEL of a wheel that holds compiled code for PLATFORM."""
    lines = {"Root-Is-Purelib: true": "Root-Is-Purelib: false", f"Tag: {_ANY}": f"Tag: {_TAG}"}
    assert set(lines) <= set(wheel_file.splitlines()), wheel_file
    return "".join(f"{lines.get(line, line)}\n" for line in wheel_file.splitlines())
