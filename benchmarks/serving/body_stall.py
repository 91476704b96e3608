"""Stall of other requests by hostile bodies of up to 32 MiB. No model: the front-end alone.

    python -m benchmarks serving.body_stall [--out FILE]

A process of its own asks for /version again and again while another one posts a body; the longest wait for an
answer is the stall. The server has the switch interval of `faser serve`.
"""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.runner import command_line, write_json
from tests.api.server import serving
from tests.fake_engine import FakeEngine

_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"
_BYTES = (32 << 20) - 100
_SWITCH_S = 0.001  # as in faser.cli.server

_PROBE = """
import http.client, select, sys, time
connection = http.client.HTTPConnection(sys.argv[1], timeout=60)
worst_s = 0.0
while True:
    began_s = time.perf_counter()
    connection.request("GET", "/version")
    connection.getresponse().read()
    worst_s = max(worst_s, time.perf_counter() - began_s)
    if select.select([sys.stdin], [], [], 0.002)[0]:
        if not sys.stdin.readline():
            break
        print(worst_s, flush=True)
        worst_s = 0.0
"""
_SENDER = """
import http.client, sys
connection = http.client.HTTPConnection(sys.argv[1], timeout=120)
connection.request("POST", sys.argv[2], sys.stdin.buffer.read(), {"Content-Type": "application/json"})
print(connection.getresponse().status)
"""


def _filled(head: bytes, unit: bytes, tail: bytes) -> bytes:
    return head + unit * ((_BYTES - len(head) - len(tail)) // len(unit)) + tail


def bodies() -> dict[str, tuple[str, bytes]]:
    """(route, body) by what is in it."""
    ids, message = b"7," * 1_040_000, b'{"role":"user","content":"x"}'
    return {
        "a million token ids": (_TEXT, b'{"prompt":[' + ids + b"7]}"),
        "a million numbers of 30 digits": (_TEXT, b'{"prompt":[' + (b"7" * 30 + b",") * 1_000_000 + b"7]}"),
        "a million stop ids": (_TEXT, b'{"prompt":"x","stop_token_ids":[' + ids + b"7]}"),
        "a million ids where one number is wanted": (_TEXT, b'{"prompt":"x","n":[' + ids + b"7]}"),
        "20,000 messages": (_CHAT, b'{"messages":[' + (message + b",") * 20_000 + message + b"]}"),
        "32 MiB of text": (_TEXT, _filled(b'{"prompt":"', b"abcdefg ", b'"}')),
        "32 MiB of escapes": (_TEXT, _filled(b'{"prompt":"', b"\\ud83d\\ude00", b'"}')),
        "32 MiB in an unknown field": (_TEXT, _filled(b'{"prompt":"x","zz":"', b"a", b'"}')),
        "a number of 32 MiB": (_TEXT, b'{"prompt":"x","n":' + b"9" * _BYTES + b"}"),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--out", type=Path, help="file for the milliseconds, as JSON")
    options = parser.parse_args()
    sys.setswitchinterval(_SWITCH_S)
    stalls_ms: dict[str, dict[str, float]] = {}
    with serving(FakeEngine()) as url:
        host = url.removeprefix("http://")
        probe = subprocess.Popen(
            [sys.executable, "-c", _PROBE, host], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

        def worst_ms() -> float:
            assert probe.stdin is not None
            assert probe.stdout is not None
            probe.stdin.write("\n")
            probe.stdin.flush()
            return round(1000 * float(probe.stdout.readline()), 1)

        for name, (route, body) in bodies().items():
            worst_ms()
            sent = subprocess.run(
                [sys.executable, "-c", _SENDER, host, route], input=body, capture_output=True, check=True
            )
            size_mib = round(len(body) / 2**20, 1)
            stalls_ms[name] = {"mib": size_mib, "status": int(sent.stdout), "stall_ms": worst_ms()}
        probe.kill()
    print(json.dumps(stalls_ms, indent=1))
    if options.out is not None:
        write_json(options.out, stalls_ms)
