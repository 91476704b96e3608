"""How many connections a limit on open files has room for. In processes of their own, which keep their limits."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def run(program: str) -> str:
    """What the program prints, with both limits set by set_limits(soft, hard) before."""
    beginning = (
        "import resource\n"
        "from faser.api.http.limits import connection_room, raise_open_files_limit\n"
        "def set_limits(soft, hard): resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))\n"
    )
    command = [sys.executable, "-c", beginning + program]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def test_connections_leave_descriptors_for_everything_else() -> None:
    room = int(run("set_limits(128, 128); print(connection_room(None))"))
    assert 64 <= room <= 128 - 32 - 3  # standard streams are open, too


def test_fewer_connections_can_be_asked_for_and_more_cannot() -> None:
    assert run("set_limits(128, 128); print(connection_room(20))") == "20"
    assert int(run("set_limits(128, 128); print(connection_room(1000))")) < 128


def test_a_limit_that_is_too_low_is_named() -> None:
    message = run(
        "set_limits(40, 40)\n"
        "from faser.errors import ConfigError\n"
        "try: connection_room(None)\n"
        "except ConfigError as error: print(error)"
    )
    assert message.startswith("the limit on open files (ulimit -n) is 40; it must be at least ")


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    program = "raise_open_files_limit(); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    assert run(f"set_limits(128, 512); {program}") == "(512, 512)"
    assert run(f"set_limits(128, 128); {program}") == "(128, 128)"
