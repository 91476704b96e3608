"""What every system is given, read from the command lines."""

import importlib.metadata
import json
import sys
from pathlib import Path

import pytest

from benchmarks.peers import llamacpp
from benchmarks.peers.run import main
from benchmarks.peers.setup import write_alias
from benchmarks.peers.systems import SYSTEMS, Conditions, build_system


def _conditions(directory: Path, **extra_arguments: str) -> Conditions:
    for peer in ("vllm", "transformers"):
        (directory / peer / "bin").mkdir(parents=True)
        (directory / peer / "bin" / "python").touch()
    (directory / "llamacpp" / "build" / "bin").mkdir(parents=True)
    (directory / "llamacpp" / "build" / "bin" / "llama-server").touch()
    for precision in llamacpp.PRECISIONS:
        (directory / "llamacpp" / f"small-{precision}.gguf").touch()
    return Conditions(
        model=Path("/models/small"),
        cores=(2, 3),
        max_model_len=1024,
        max_num_seqs=16,
        directory=directory,
        faser_python=Path(sys.executable),
        extra_arguments=extra_arguments,
    )


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_serves_the_same_model_on_the_loopback_address(tmp_path: Path, name: str) -> None:
    system = build_system(name, _conditions(tmp_path))

    command = system.recipe("http://127.0.0.1:18123", tmp_path / "log").command

    assert command[0] == str(system.program)
    assert command[-4:] == ("--host", "127.0.0.1", "--port", "18123")
    if name.startswith("llamacpp"):
        precision = name.removeprefix("llamacpp-").removeprefix("mtp-")
        assert f"--model {tmp_path}/llamacpp/small-{precision}.gguf" in " ".join(command)
        assert ("--spec-type draft-mtp" in " ".join(command)) == name.startswith("llamacpp-mtp-")
    elif name.startswith("faser-") and name != "faser-off":
        precision = name.removeprefix("faser-").removeprefix("off-")
        assert f"serve {tmp_path}/llamacpp/small-{precision}.gguf" in " ".join(command)
        assert "--quantization gguf" in " ".join(command)
        assert ("--speculative-policy off" in " ".join(command)) == name.startswith("faser-off-")
    else:
        assert "serve /models/small" in " ".join(command)
        assert "--dtype bfloat16" in " ".join(command)


def test_faser_is_measured_with_default_flags_and_without_speculation_and_remembers_nothing(
    tmp_path: Path,
) -> None:
    conditions = _conditions(tmp_path)
    default, off = (build_system(name, conditions) for name in ("faser", "faser-off"))

    assert off.arguments == (*default.arguments, "--speculative-policy", "off")
    assert not [argument for argument in default.arguments if "spec" in argument]
    for system in (default, off):
        target = system.target("http://127.0.0.1:1")
        assert target.salted("a round").extra_body["cache_salt"] == "a round"
        assert "cache_salt" not in target.extra_body
    assert "cache_salt" not in build_system("vllm", conditions).target("").salted("a round").extra_body


def test_llamacpp_gets_a_full_context_for_every_place_and_keeps_no_prompts(tmp_path: Path) -> None:
    arguments = " ".join(build_system("llamacpp-q4_0", _conditions(tmp_path)).arguments)

    assert f"--parallel 16 --ctx-size {16 * 1024}" in arguments
    assert "--threads 2 --threads-batch 2" in arguments
    assert "--no-cache-prompt" in arguments
    assert "--cache-ram 0" in arguments


def test_faser_and_vllm_get_the_same_limits_threads_and_no_prefix_cache(tmp_path: Path) -> None:
    conditions = _conditions(tmp_path)
    faser, vllm = (build_system(name, conditions) for name in ("faser", "vllm"))

    for line in (" ".join(faser.arguments), " ".join(vllm.arguments)):
        assert "--max-model-len 1024" in line
        assert "--max-num-seqs 16" in line
        assert "--no-enable-prefix-caching" in line
    assert "--num-threads 2" in " ".join(faser.arguments)
    assert vllm.environment["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"
    assert faser.full_length == vllm.full_length


def test_transformers_gets_blocks_for_all_sequences_at_full_length_and_an_end_that_never_comes(
    tmp_path: Path,
) -> None:
    system = build_system("transformers", _conditions(tmp_path))

    assert "--cb-block-size 32 --cb-num-blocks 512" in " ".join(system.arguments)
    assert json.loads(system.full_length["generation_config"])["eos_token_id"] == -1
    assert system.environment["OMP_NUM_THREADS"] == "2"


def test_only_a_server_without_batching_is_left_out_of_crowds(tmp_path: Path) -> None:
    conditions = _conditions(tmp_path)

    limits = {name: build_system(name, conditions).most_at_once for name in SYSTEMS}

    assert [name for name, limit in limits.items() if limit is not None] == ["transformers-generate"]
    assert limits["transformers-generate"] == 1


def test_more_flags_go_to_the_system_they_are_for(tmp_path: Path) -> None:
    conditions = _conditions(tmp_path, faser="--backend torch --note 'two words'")

    for name in ("faser", "faser-off"):
        assert build_system(name, conditions).arguments[-4:] == ("--backend", "torch", "--note", "two words")
    assert "--backend" not in build_system("vllm", conditions).arguments


def test_a_system_that_was_not_set_up_or_does_not_exist_is_refused(tmp_path: Path) -> None:
    conditions = _conditions(tmp_path)
    (tmp_path / "vllm" / "bin" / "python").unlink()

    with pytest.raises(FileNotFoundError, match=r"benchmarks peers\.setup"):
        build_system("vllm", conditions)
    (tmp_path / "llamacpp" / "small-q8_0.gguf").unlink()
    with pytest.raises(FileNotFoundError, match=r"small-q8_0\.gguf.*setup llamacpp"):
        build_system("llamacpp-q8_0", conditions)
    with pytest.raises(ValueError, match="sglang is no system"):
        build_system("sglang", conditions)


def test_the_alias_is_found_as_vllm_with_cpu_as_local_version(tmp_path: Path) -> None:
    write_alias(tmp_path)

    (found,) = importlib.metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.32.0+cpu"
    assert all(Path(str(file.locate())).exists() for file in found.files or [])


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--peers", "faser,sglang"], "sglang: not among"),
        (["--concurrency", "1,0"], "at least 1"),
        (["--rounds", "0"], "at least 1"),
        (["--output-tokens", "1"], "at least 2"),
        (["--cores", "100000"], "at most"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused_before_anything_starts(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--prompts", "question.jsonl", *arguments])

    assert complaint in capsys.readouterr().err
