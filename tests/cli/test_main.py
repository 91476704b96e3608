"""The program as a whole: commands, exit statuses, and one clear line for each problem."""

import json
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from faser import __version__
from faser.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("name", COMMANDS)
def test_without_a_working_directory_it_says_so(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert main([name]) == 2
    wanted = "there is no working directory (No such file or directory); cd to a folder that exists"
    assert capsys.readouterr().err == f"faser {name}: {wanted}\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["srve"],
            "faser: unknown command 'srve'. Did you mean 'serve'? Commands: serve, chat, models, pull, ",
        ),
        (["complete"], "faser: 'complete' is known from vLLM but is no command of FASER. Use faser chat"),
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
    said = f"faser serve: --port is {port}; 127.0.0.1:{port} cannot be used: Address already in use; "
    assert error.startswith(said)
    assert error.endswith(f", such as --port {port + 1}\n")


def test_a_model_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/no/such/model", "--port", "0"]) == 2
    error = capsys.readouterr().err
    assert "/no/such/model" in error
    assert "Traceback" not in error


def test_a_key_file_without_a_key_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--api-key-file", "/dev/null"]) == 2
    assert capsys.readouterr().err == "faser serve: --api-key-file is /dev/null; it contains no key\n"


@pytest.mark.parametrize("flag", ["--api-key-file", "--chat-template", "--config"])
def test_a_file_that_is_not_utf_8_is_one_line_before_the_model_is_looked_for(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"caf\xe9\n")
    assert main(["serve", "/no/such/model", "--port", "0", flag, str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"faser serve: {flag} is {path}; ")
    assert line.endswith(("it must be text in UTF-8, and its byte 3 is not", "invalid continuation byte"))


def test_a_template_that_does_not_compile_is_named_before_the_model_is_looked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.jinja"
    path.write_text("{% for message in messages %}")
    assert main(["serve", "/no/such/model", "--port", "0", "--chat-template", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"faser serve: --chat-template is {path}; the chat template does not compile: line 1: "
    )
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            ["--trace-steps", "/no/such/folder/trace.json"],
            "--trace-steps is /no/such/folder/trace.json; it must be",
        ),
        (["--trace-steps", "/"], "--trace-steps is /; it must be the path of a file that can be written"),
        (
            ["--speculative-config", '{"model": "/no/such/draft"}'],
            "'/no/such/draft' is neither a local path nor a hub id",
        ),
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_fetched(
    flags: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The default model is not there, and would be fetched."""
    monkeypatch.setenv("FASER_CACHE_DIR", str(tmp_path))
    assert main(["serve", "--port", "0", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"faser serve: {message}")
    assert list(tmp_path.iterdir()) == []


_INTERRUPTED_IMPORT = """
import builtins, sys
real = builtins.__import__
def importing(name, *rest):
    if name == "faser.cli.main":
        raise KeyboardInterrupt
    return real(name, *rest)
builtins.__import__ = importing
from faser.__main__ import main
sys.exit(main())
"""


def test_an_interrupt_while_modules_are_imported_is_one_line_and_status_130() -> None:
    done = subprocess.run([sys.executable, "-c", _INTERRUPTED_IMPORT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "faser: interrupted\n")


@pytest.mark.parametrize("command, status", [("serve", 0), ("chat", -signal.SIGTERM)])
def test_sigterm_while_modules_are_imported_ends_a_server_with_status_0(command: str, status: int) -> None:
    """The first process of a container ignores signals that it has no handler for, so `serve` has one at once."""
    program = _INTERRUPTED_IMPORT.replace("raise KeyboardInterrupt", "os.kill(os.getpid(), signal.SIGTERM)")
    done = subprocess.run(
        [sys.executable, "-c", f"import os, signal\n{program}", command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (status, "")


def test_the_installed_program_is_the_one_that_takes_interrupts() -> None:
    """Its own import loads nothing that takes time."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["faser"]
    assert declared == "faser.__main__:main"
    program = "import sys; import faser.__main__; print(sorted(m for m in sys.modules if m.startswith('faser')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['faser', 'faser.__main__']\n"


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
