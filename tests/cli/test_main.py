"""The program as a whole: commands, exit statuses, and one clear line for each problem."""

import json
import socket
import subprocess
import sys

import pytest

from faser import __version__
from faser.cli.main import COMMANDS, main


def test_without_a_command_it_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert all(capsys.readouterr().out.count(f"\n  {name} ") == 2 for name in list(COMMANDS)[:1])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: faser {name}")


def test_it_tells_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"faser {__version__}\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["srve"], "faser: unknown command 'srve'. Did you mean 'serve'? Commands: serve, chat, pull, bench, env"),
        (["run-batch"], f"faser: 'run-batch' is known from vLLM but not supported by FASER {__version__}"),
        (["serve", "--port", "99999"], "faser serve: --port is 99999; it must be at least 0 and at most 65535"),
        (["serve", "--help=prot"], "faser serve: --help=prot: no such topic. Did you mean 'port'? Groups: "),
        (["env", "--jsn"], "faser env: unrecognized arguments: --jsn"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_two_mistakes_are_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "-1", "--max-num-seqs", "0"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "faser serve: --max-num-seqs is 0; it must be at least 1 and at most 4096",
        "faser serve: --port is -1; it must be at least 0 and at most 65535",
    ]


def test_a_port_in_use_is_named_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "/no/such/model", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error == f"faser serve: --port is {port}; 127.0.0.1:{port} cannot be used: Address already in use\n"


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model", "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "/no/such/model" in error
    assert "Traceback" not in error


def test_a_key_file_without_a_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--api-key-file", "/dev/null"]) == 2
    assert capsys.readouterr().err == "faser serve: --api-key-file is /dev/null; it contains no key\n"


def test_env_tells_versions_and_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["faser"] == __version__
    assert found["torch"].startswith("2.")
    assert "missing" not in found.values()
    assert not any("key" in name.lower() for name in found)


def test_it_runs_as_a_module_and_loads_no_torch() -> None:
    program = (
        "import sys; from faser.cli.main import main; main(['serve', '--help']); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    as_module = subprocess.run([sys.executable, "-m", "faser", "serve", "--help"], capture_output=True, text=True)
    assert as_module.stdout == done.stdout
