"""Several models by flags, variable, file and folder: what each of them gets, and what is refused."""

import shlex
from pathlib import Path

import pytest

from faser.config.server import ServerConfig, memory_of
from faser.config.several_models import ModelSettings, settings_of_models
from faser.config.sources import SETTINGS, UsageError, parse, server_settings
from faser.machine import usable_memory


def models(line: str, found: dict[str, str] | None = None) -> list[ModelSettings]:
    """What `faser serve` makes of this line; empty: it serves one model."""
    findings = parse("faser serve", shlex.split(line), SETTINGS)
    server_settings(findings, several=True)
    return settings_of_models(findings, found or {}) if findings.models or found else []


def refusals(line: str, found: dict[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        models(line, found)
    return "\n".join(caught.value.problems)


def file_of(folder: Path, text: str) -> str:
    (folder / "faser.yaml").write_text(text)
    return f"--config {folder / 'faser.yaml'}"


def test_a_repeated_flag_names_several_models_and_other_flags_are_for_all() -> None:
    small, large = models("--model s --model owner/l --max-num-seqs 3 --port 0 --model s")
    assert (small.names, large.names) == (("s",), ("owner/l",))
    assert (small.engine.model, large.engine.model) == ("s", "owner/l")
    assert small.engine.max_num_seqs == large.engine.max_num_seqs == 3


def test_one_model_is_served_as_ever() -> None:
    for line in ("", "m", "--model m", "--model m --model m", "-m m"):
        findings = parse("faser serve", shlex.split(line), SETTINGS)
        engine, _ = server_settings(findings, several=True)
        assert (engine.model, len(findings.models) > 1) == ("m" if line else None, False)


def test_the_variable_names_several_between_commas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FASER_MODEL", "a, owner/b")
    assert [each.names for each in models("")] == [("a",), ("owner/b",)]
    assert models("m") == []
    path = tmp_path / "a,b"
    path.mkdir()
    monkeypatch.setenv("FASER_MODEL", str(path))
    findings = parse("faser serve", [], SETTINGS)
    assert server_settings(findings, several=True)[0].model == str(path)


def test_a_file_lists_models_and_says_what_each_has_of_its_own(tmp_path: Path) -> None:
    file = file_of(
        tmp_path,
        """
        max-num-seqs: 7
        models:
          - model: owner/small
            served-model-name: [small, s]
            max-model-len: 2k
            tool-call-parser: hermes
          - owner/large
        """,
    )
    small, large = models(f"{file} --max-num-seqs 9")
    assert (small.names, small.engine.max_model_len, small.server.tool_call_parser) == (
        ("small", "s"),
        2000,
        "hermes",
    )
    assert (large.names, large.engine.max_model_len, large.server.tool_call_parser) == (
        ("owner/large",),
        None,
        "auto",
    )
    assert small.engine.max_num_seqs == large.engine.max_num_seqs == 9
    assert small.label("max_model_len") == f"{tmp_path / 'faser.yaml'}: models.1.max-model-len"


def test_adapters_are_of_the_model_in_whose_section_they_are(tmp_path: Path) -> None:
    plain, tuned = models(file_of(tmp_path, "{max-loras: 3, models: [a, {model: b, lora-modules: [x=/x, y=/y]}]}"))
    assert (plain.engine.enable_lora, plain.adapters) == (False, {})
    assert (tuned.engine.enable_lora, tuned.engine.max_loras) == (True, 3)
    assert tuned.adapters == {"x": "/x", "y": "/y"}
    assert all(each.engine.enable_lora for each in models("--model a --model b --enable-lora"))


def test_a_list_of_names_in_a_file_is_enough(tmp_path: Path) -> None:
    assert [each.names for each in models(file_of(tmp_path, "model: [a, b]"))] == [("a",), ("b",)]


def test_a_section_of_one_model_is_the_same_as_its_keys_outside(tmp_path: Path) -> None:
    line = file_of(tmp_path, "models: [{model: m, max-model-len: 99, served-model-name: x}]")
    findings = parse("faser serve", shlex.split(line), SETTINGS)
    engine, server = server_settings(findings, several=True)
    assert (engine.model, engine.max_model_len, server.served_model_name, findings.models) == ("m", 99, ("x",), [])


def test_models_of_a_folder_come_after_those_with_names() -> None:
    got = models("--model m --models-dir /d", {"x": "/d/x", "y": "/d/y.gguf"})
    assert [(each.names, each.engine.model) for each in got] == [
        (("m",), "m"),
        (("x",), "/d/x"),
        (("y",), "/d/y.gguf"),
    ]
    assert [each.names for each in models("--models-dir /d", {"x": "/d/x"})] == [("x",)]


@pytest.mark.parametrize(
    "flags, said",
    [
        (
            "--served-model-name x",
            "--served-model-name is x, and there are several models; give it to one of them",
        ),
        ("--tokenizer t", "--tokenizer is t, and there are several models"),
        ("--revision main", "--revision is main, and there are several models"),
        ("-tp 2", "--tensor-parallel-size is 2; with several models it is not supported: each model is in one"),
        ("-dp 2", "--data-parallel-size is 2; with several models it is not supported: an engine of each"),
        ("--record-traffic /tmp/t.jsonl", "--record-traffic is /tmp/t.jsonl; with several models it is not"),
        ("--lora-modules x=/x", "--lora-modules is x=/x, and there are several models; give it to one of them"),
        ("--allow-runtime-lora-updating", "with several models it is not supported: clients could not say"),
        ("--speculative-config.model eagle", '"model": "eagle"}, and there are several models'),
        ("--models-preload a z", "--models-preload has 'z', which is no model; models: a, b"),
        ("--models-memory 1.5", "--models-memory is 1.5; it must be a size, such as 12GiB, or a fraction above 0"),
        ("--models-preset x.ini", "a config file has the settings of each model"),
    ],
)
def test_what_can_only_be_of_one_model_is_refused_by_name(flags: str, said: str) -> None:
    assert said in refusals(f"--model a --model b {flags}")


def test_speculation_without_a_model_is_for_all() -> None:
    assert len(models("--model a --model b --speculative-config.method ngram -tp 1")) == 2


@pytest.mark.parametrize(
    "text, said",
    [
        ("models: m", "models must be a list of models, each with a key model, or its name alone"),
        ("models: [{max-model-len: 5}]", "models.1.model is missing; it names the model"),
        ("models: [a, {model: b, max-model-len: none5}]", "models.2.max-model-len is none5; it must be a whole"),
        ("models: [a, {model: b, port: 5}]", "models.2.unknown key of a model 'port'"),
        ("models: [a, {model: b, served-model-name: a}]", "two models are called 'a'"),
        ("models: [{model: a, lora-modules: b=/x}, b]", "two models are called 'b'"),
        ("models: [a, {model: b, tensor-parallel-size: 2}]", "models.2.tensor-parallel-size is 2; with several"),
        ("{model: m, models: [a, b]}", "names a model too; keep one"),
    ],
)
def test_a_section_that_cannot_be_used_is_named(tmp_path: Path, text: str, said: str) -> None:
    assert said in refusals(file_of(tmp_path, text))


def test_commands_with_one_model_refuse_several(tmp_path: Path) -> None:
    for line in ("--model a --model b", "--models-dir /d", file_of(tmp_path, "models: [a, b]")):
        with pytest.raises(UsageError, match="only faser serve serves several models"):
            server_settings(parse("faser run-batch", shlex.split(line), SETTINGS))


def test_the_memory_is_a_size_or_a_share_of_the_machines() -> None:
    assert (memory_of("2GiB"), memory_of("0.5")) == (2 << 30, usable_memory() // 2)
    assert [memory_of(text) for text in ("0", "-1", "1.5", "much", "nan", "inf")] == [None] * 6
    assert ServerConfig(models_memory="1").models_memory == "1"
