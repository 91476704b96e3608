"""From a command line, an environment and a file to configs: precedence, and every problem at once."""

import functools
from collections.abc import Mapping
from pathlib import Path

import pytest

from faser.config.adapters import AdapterModule
from faser.config.engine import EngineConfig
from faser.config.environment import flag_environment
from faser.config.foreign import Foreign, Support
from faser.config.server import ServerConfig
from faser.config.sources import (
    FOREIGN_FLAGS,
    SETTINGS,
    Findings,
    UsageError,
    add_environment,
    add_file,
    parse,
    settle_server,
)
from faser.config.speculation import SpeculationConfig
from faser.types.request import Slo


def build(
    *arguments: str, environment: Mapping[str, str] | None = None, file: Path | None = None
) -> tuple[EngineConfig, ServerConfig, Findings]:
    parsed = parse("faser serve", arguments, SETTINGS)
    read = functools.partial(flag_environment, environment=environment or {})
    add_environment(parsed, SETTINGS, read)
    if file is not None:
        add_file(parsed, str(file), SETTINGS)
    engine, server = settle_server(parsed)
    return engine, server, parsed


def problems(
    *arguments: str, environment: Mapping[str, str] | None = None, file: Path | None = None
) -> tuple[str, ...]:
    with pytest.raises(UsageError) as caught:
        build(*arguments, environment=environment, file=file)
    return caught.value.problems


def yaml_file(folder: Path, text: str) -> Path:
    path = folder / "faser.yaml"
    path.write_text(text)
    return path


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "port: 1\nseed: 1\nmax-num-seqs: 1\n")
    environment = {"FASER_PORT": "2", "FASER_SEED": "2"}
    engine, server, _ = build("--port", "3", environment=environment, file=file)
    assert (server.port, engine.seed, engine.max_num_seqs, engine.block_size) == (3, 2, 1, 16)


def test_a_flag_a_variable_and_a_key_say_the_same(tmp_path: Path) -> None:
    by_flag = build("--port", "81", "--served-model-name", "a", "b", "--no-enable-prefix-caching")
    variables = {"FASER_PORT": "81", "FASER_SERVED_MODEL_NAME": "a, b", "FASER_ENABLE_PREFIX_CACHING": "false"}
    keys = "port: 81\nserved_model_name: [a, b]\nenable-prefix-caching: false\n"
    by_variable, by_key = build(environment=variables), build(file=yaml_file(tmp_path, keys))
    assert by_flag[:2] == by_variable[:2] == by_key[:2]
    assert by_flag[1].served_model_name == ("a", "b")


@pytest.mark.parametrize(
    "arguments, field, value",
    [
        (["m"], "model", "m"),
        (["--model", "m"], "model", "m"),
        (["m", "--model", "m"], "model", "m"),
        (["--max_num_seqs", "3"], "max_num_seqs", 3),
        (["--max-num-seqs=3"], "max_num_seqs", 3),
        (["--max-num-seqs", "3", "--max-num-seqs", "4"], "max_num_seqs", 4),
        (["--seed", "-5"], "seed", -5),
        (["--kv-cache-memory-bytes", "1G"], "kv_cache_memory", 1 << 30),
        (["--no-enable-prefix-caching", "--enable-prefix-caching"], "enable_prefix_caching", True),
        (["-q", "fp8"], "quantization", "fp8"),
        (["--quantization", "none"], "quantization", "none"),
        (["--enforce-eager"], "enforce_eager", True),
        (["--async-scheduling"], "async_scheduling", True),
        (["--no-async-scheduling"], "async_scheduling", False),
        (["m", "--cudagraph-capture-sizes", "1", "2", "64"], "cudagraph_capture_sizes", (1, 2, 64)),
        (["--device", "cuda:1"], "device", "cuda:1"),
        (["--no-compile-kernels"], "compile_kernels", False),
    ],
)
def test_flags_are_spelt_as_vllms_users_spell_them(arguments: list[str], field: str, value: object) -> None:
    assert getattr(build(*arguments)[0], field) == value


def test_dotted_flags_add_up_to_an_object() -> None:
    arguments = ["--override-generation-config.top_k", "5", "--override-generation-config.temperature=0.5"]
    assert build(*arguments)[1].override_generation_config == {"top_k": 5, "temperature": 0.5}


def test_keys_may_be_repeated_and_several_names_follow_one_flag() -> None:
    _, server, _ = build("m", "--api-key", "a", "--api-key", "b", "--served-model-name", "x", "y")
    assert server.api_key == ("a", "b")
    assert server.served_model_name == ("x", "y")


def test_all_problems_of_all_sources_are_reported_at_once(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "prot: 1\nblock-size: 8\n")
    found = problems(
        *["--max-num-seqs", "0", "--max-num-batched-token", "5", "--port", "x", "-pp", "2"],
        environment={"FASER_DTYPE": "int8", "FASER_MODLE": "x"},
        file=file,
    )
    assert set(found) == {
        "--pipeline-parallel-size: '2' is known from vLLM but not supported by FASER 0.1.0: "
        "a model runs on one device. Remove it.",
        "--max-num-batched-token: unknown flag. Did you mean '--max-num-batched-tokens'?",
        "FASER_MODLE: unknown variable. Did you mean 'FASER_MODEL'?",
        f"{file}: unknown key 'prot'. Did you mean 'port'?",
        "--port is x; it must be a whole number",
        "FASER_DTYPE is int8; it must be one of auto, bfloat16, float16, float32",
        "--max-num-seqs is 0; it must be at least 1 and at most 4096",
        f"{file}: block-size is 8; it must be a multiple of 16, at least 16 and at most 256",
    }


def test_a_conflict_names_both_flags() -> None:
    assert problems("--max-num-batched-tokens", "8", "--max-num-seqs", "9") == (
        "--max-num-batched-tokens is 8; it must be at least --max-num-seqs, which is 9",
    )


def test_what_is_just_enough_is_no_conflict() -> None:
    assert build("--max-num-batched-tokens", "8", "--max-num-seqs", "8")[0].max_num_seqs == 8


def test_a_value_that_cannot_be_read_causes_no_second_problem() -> None:
    assert problems("--max-num-seqs", "x", "--max-num-batched-tokens", "8") == (
        "--max-num-seqs is x; it must be a whole number, such as 4096, 4k (4000) or 4K (4096)",
    )


def test_a_flag_without_its_value_is_named() -> None:
    assert problems("--port") == ("argument --port: expected one argument",)


def test_two_models_are_one_too_many() -> None:
    assert problems("a", "--model", "b") == ("MODEL is a and --model is b; keep one",)
    assert problems("a", "b") == ("unexpected argument 'b'",)


def test_a_key_is_never_shown_in_a_problem() -> None:
    assert problems("--api-key", " secret ") == (
        "--api-key is ***; it begins or ends with a space, and no client could present it",
    )
    assert problems("--api-key", "secret", "--api-key", "") == (
        "--api-key is ***; it must be text that is not empty",
    )


@pytest.mark.parametrize("name", ["FASER_MODEL", "FASER_PORT", "FASER_API_KEY", "FASER_SPECULATIVE_CONFIG"])
def test_an_empty_variable_is_called_empty(name: str) -> None:
    assert problems(environment={name: ""}) == (f"{name} is empty; give it a value, or leave it out",)


def test_a_date_in_the_file_is_the_text_that_it_would_be_in_a_flag(tmp_path: Path) -> None:
    text = "served-model-name: [2026-01-31, a]\nrevision: 2026-02-30T10:00:00Z\n"
    engine, server, _ = build(file=yaml_file(tmp_path, text))
    assert server.served_model_name == ("2026-01-31", "a")
    assert engine.revision == "2026-02-30T10:00:00Z"


@pytest.mark.parametrize(
    "text",
    [
        "model: !!binary aGVsbG8=",
        "served-model-name: !!set {a, b}",
        "api-key: &a [*a]",
        "lora-modules: !!binary aGVsbG8=",
    ],
)
def test_a_value_of_the_file_that_no_flag_could_have_is_named(tmp_path: Path, text: str) -> None:
    file, key = yaml_file(tmp_path, text), text.partition(":")[0]
    assert problems(file=file) == (f"{file}: {key} has a value that JSON has no form for",)


@pytest.mark.parametrize("text", ["port: " + "9" * 5000, "speculative-config: " + "[" * 5000])
def test_a_file_that_the_yaml_reader_chokes_on_is_named(tmp_path: Path, text: str) -> None:
    file = yaml_file(tmp_path, text)
    (problem,) = problems(file=file)
    assert problem.startswith(f"--config is {file}; it is not YAML: ")


@pytest.mark.parametrize("flag", ["--max-model-len", "--kv-cache-memory", "--max-num-seqs", "--port", "--seed"])
@pytest.mark.parametrize("text", ["9" * 400, "9" * 4000, "9" * 9000, "-" + "9" * 400, "9" * 400 + ".5"])
def test_a_number_of_hundreds_of_digits_is_one_problem_of_one_short_line(flag: str, text: str) -> None:
    (problem,) = problems(flag, text)
    assert problem.startswith(f"{flag} is ")
    assert "; it must be " in problem
    assert len(problem) < 250


def test_wrong_json_is_answered_with_an_example_of_its_own_flag() -> None:
    assert problems("--speculative-config", "ngram") == (
        '--speculative-config is ngram; it must be a JSON object, such as {"method": "ngram"}',
    )
    assert problems("--override-generation-config", "0.2") == (
        '--override-generation-config is 0.2; it must be a JSON object, such as {"temperature": 0.2}',
    )
    assert problems("--speculative-config", "[" * 100_000)[0].endswith('such as {"method": "ngram"}')


@pytest.mark.parametrize(
    "text, problem",
    [
        ("- 1", "it must contain keys and values, like port: 8000"),
        ("a: [", "it is not YAML"),
        ("port: {a: 1}", "it must be a whole number"),
        ("host: [a, 1]\nport: null", ""),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = yaml_file(tmp_path, text)
    if problem:
        assert problem in problems(file=file)[0]
    else:
        assert build(file=file)[1].host == "1"


def test_a_file_that_cannot_be_read_is_named() -> None:
    assert problems(file=Path("/no/such.yaml")) == (
        "--config is /no/such.yaml; it cannot be read: No such file or directory",
    )


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert build(file=yaml_file(tmp_path, ""))[:2] == build()[:2]


def test_what_kubernetes_sets_for_a_service_called_faser_is_not_a_setting() -> None:
    environment = {
        "FASER_PORT": "tcp://10.0.0.7:8000",
        "FASER_PORT_8000_TCP_ADDR": "10.0.0.7",
        "FASER_SERVICE_HOST": "10.0.0.7",
        "FASER_SERVICE_PORT_HTTP": "8000",
    }
    _, server, findings = build(environment=environment)
    assert server.port == 8000
    (warning,) = findings.warnings
    assert warning.startswith("FASER_PORT is tcp://10.0.0.7:8000: set by Kubernetes")


def test_no_flag_of_vllms_shadows_one_of_ours() -> None:
    ours = {flag for each in SETTINGS for flag in (each.flag, *each.aliases)}
    theirs = [flag for each in FOREIGN_FLAGS for flag in each.names]
    assert len(set(theirs)) == len(theirs)
    assert not ours & set(theirs)


@pytest.mark.parametrize("each", FOREIGN_FLAGS, ids=lambda each: each.key)
def test_a_flag_of_vllms_is_refused_or_accepted_as_its_support_says(tmp_path: Path, each: Foreign) -> None:
    by_flag = [each.names[0]] if each.switch else [each.names[0], "77"]
    by_key = yaml_file(tmp_path, f"{each.key}: {'true' if each.switch else '77'}\n")
    if each.support is Support.REFUSE:
        assert each.reason in problems(*by_flag)[0]
        assert each.reason in problems(file=by_key)[0]
    else:
        warnings = [build(*by_flag)[2].warnings, build(file=by_key)[2].warnings]
        assert [len(found) for found in warnings] == ([1, 1] if each.support is Support.WARN else [0, 0])


@pytest.mark.parametrize("each", FOREIGN_FLAGS, ids=lambda each: each.key)
def test_a_value_that_asks_for_nothing_is_always_accepted(each: Foreign) -> None:
    if each.switch:
        build("--no-" + each.key)
    for text in ("none", *each.neutral):
        if not each.switch:
            build(each.names[-1], text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speculative-config", '{"method": "ngram", "slo": {"ttft_ms": 200, "tpot_ms": 20}}'],
        ["-sc", '{"method": "ngram", "slo": {"ttft_ms": 200, "tpot_ms": 20}}'],
        [
            *("--speculative-config.method", "ngram", "--speculative-config.slo.ttft_ms=200"),
            *("--speculative_config.slo.tpot_ms", "20"),
        ],
        ["--speculative-config", '{"method": "ngram"}', "--slo-ttft-ms", "200", "--slo-tpot-ms", "20"],
    ],
)
def test_speculation_is_set_by_json_by_dots_or_by_flags(arguments: list[str]) -> None:
    expected = SpeculationConfig(method="ngram", slo=Slo(ttft_ms=200, tpot_ms=20))
    assert build(*arguments)[0].speculation == expected


def test_speculation_is_set_by_a_mapping_in_the_file(tmp_path: Path) -> None:
    text = "speculative-config:\n  method: ngram\n  num_speculative_tokens_per_batch_size: [[1, 8, 4]]\n"
    read = build(file=yaml_file(tmp_path, text))[0].speculation
    assert (read.method, read.policy, read.table) == ("ngram", "table", ((1, 8, 4),))


def test_the_policy_has_a_flag_and_a_short_one() -> None:
    assert build("--speculative-policy", "off")[0].speculation.policy == "off"
    assert build("--spec-policy", "goodput")[0].speculation.policy == "goodput"


def test_problems_of_speculation_are_named_by_their_source() -> None:
    found = problems(
        *("--speculative-config", '{"polcy": "off", "policy": "fixed"}', "--spec-policy", "off"),
        environment={"FASER_SLO_TPOT_MS": "0"},
    )
    assert found[0] == "FASER_SLO_TPOT_MS is 0.0; it must be above 0"
    assert found[1].startswith("--speculative-config: unknown key 'polcy'. Did you mean 'policy'? Known keys: ")
    assert found[2] == (
        "--speculative-config: 'policy' and --speculative-policy ask for different policies (fixed, off); "
        "keep one."
    )
    assert len(found) == 3


@pytest.mark.parametrize(
    "flag, value, instead",
    [
        ("--speculative-model", "d/m", """--speculative-config '{"model": "d/m"}'"""),
        ("--num-speculative-tokens", "4", """--speculative-config '{"num_speculative_tokens": 4}'"""),
    ],
)
def test_a_flag_of_older_versions_is_refused_with_the_json_that_replaces_it(
    flag: str, value: str, instead: str
) -> None:
    (problem,) = problems(flag, value)
    assert problem.endswith(f"Remove it or use {instead}.")


def test_a_generated_command_line_of_vllms_starts() -> None:
    arguments = "m --tensor-parallel-size 1 -pp 1 --enforce-eager --trust-remote-code --disable-log-requests "
    arguments += "--gpu-memory-utilization 0.9 --max-model-len 2048 --dtype auto --enable-chunked-prefill"
    assert build(*arguments.split())[0].max_model_len == 2048


def test_sizes_of_recordings_come_from_a_list_in_the_file_or_a_text_in_a_variable(tmp_path: Path) -> None:
    file = yaml_file(tmp_path, "cudagraph-capture-sizes: [1, 8]\n")
    assert build(file=file)[0].cudagraph_capture_sizes == (1, 8)
    environment = {"FASER_CUDAGRAPH_CAPTURE_SIZES": "2, 16"}
    assert build(environment=environment)[0].cudagraph_capture_sizes == (2, 16)


def test_a_flag_of_older_versions_may_have_several_values() -> None:
    engine, _, findings = build("m", "--cuda-graph-sizes", "1", "2", "4", "--seed", "3")
    assert (engine.model, engine.seed) == ("m", 3)
    assert len(findings.warnings) == 1


def test_a_device_and_what_it_cannot_do_are_named_by_their_flags() -> None:
    assert problems("--device", "cpu", "--dtype", "half", "--backend", "flashinfer") == (
        "--backend is flashinfer; it computes on cuda, and --device is cpu",
        "--dtype is float16; it is not computed on a CPU; use bfloat16 or float32",
    )


@pytest.mark.parametrize(
    "flags",
    [
        ("--allowed-origins", '["https://a.example", "https://b.example"]'),
        ("--allowed-origins", "https://a.example", "--allowed-origins", "https://b.example"),
    ],
)
def test_origins_are_repeated_or_a_json_list_as_vllm_writes_it(flags: tuple[str, ...]) -> None:
    _, server, _ = build(*flags, "--allow-credentials")
    assert server.allowed_origins == ("https://a.example", "https://b.example")
    assert server.allow_credentials


def test_origins_that_are_no_list_are_refused() -> None:
    (problem,) = problems("--allowed-origins", '["https://a.example"')
    assert problem.startswith('--allowed-origins is ["https://a.example"; it must be text, or a JSON list')


@pytest.mark.parametrize("variable", ["FASER_API_KEY", "VLLM_API_KEY"])
def test_a_variable_holds_several_api_keys(variable: str) -> None:
    _, server, _ = build(environment={variable: "one, two"})
    assert server.api_key == ("one", "two")


def test_a_key_that_nobody_could_present_is_refused_and_not_shown() -> None:
    (problem,) = problems("--api-key", " hidden ")
    assert problem == "--api-key is ***; it begins or ends with a space, and no client could present it"


def test_adapters_are_named_by_flags_a_variable_or_the_file(tmp_path: Path) -> None:
    sql = AdapterModule(name="sql", path="/a/sql=1")
    poems = AdapterModule(name="poems", path="/a/poems", base_model_name="base")
    as_json = '{"name": "poems", "path": "/a/poems", "base_model_name": "base"}'
    file = yaml_file(
        tmp_path, "lora-modules:\n- sql=/a/sql=1\n- {name: poems, path: /a/poems, base_model_name: base}\n"
    )
    assert build("--lora-modules", "sql=/a/sql=1", as_json)[1].adapter_modules == (sql, poems)
    assert build("--lora-modules=sql=/a/sql=1", f"--lora-modules={as_json}")[1].adapter_modules == (sql, poems)
    assert build(file=file)[1].adapter_modules == (sql, poems)
    by_variable = [{"FASER_LORA_MODULES": text} for text in ("sql=/a/sql=1, x=/x", as_json)]
    assert build(environment=by_variable[0])[1].adapter_modules == (sql, AdapterModule(name="x", path="/x"))
    assert build(environment=by_variable[1])[1].adapter_modules == (poems,)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("sql", "it must be NAME=PATH, or"),
        ("=/a/sql", "1 to 256 printable characters"),
        ("sql=", "it must be NAME=PATH"),
        ("a,b=/x", "no comma"),
        ('{"name": "sql"}', "it must be NAME=PATH, or"),
        ('{"name": "sql", "path": 1}', "it must be NAME=PATH, or"),
        ('{"name": "sql", "path": "/a", "rank": 1}', "the key 'rank'; known keys: name, path, base_model_name"),
        ("{", "it must be NAME=PATH, or"),
        ("sql=/a sql=/b", "another adapter, or the model, has the name sql"),
        ("tiny=/a --served-model-name tiny", "another adapter, or the model, has the name tiny"),
    ],
)
def test_an_adapter_that_could_not_be_named_is_refused(arguments: str, said: str) -> None:
    words = [arguments] if arguments.startswith("{") else arguments.split()
    (problem,) = problems("--lora-modules", *words)
    assert problem.startswith("--lora-modules has ")
    assert said in problem


def test_adapters_imply_the_room_for_them() -> None:
    assert not build()[0].enable_lora
    for flags in (["--lora-modules", "sql=/a"], ["--allow-runtime-lora-updating"]):
        assert build(*flags)[0].enable_lora
        assert problems("--no-enable-lora", *flags) == (f"--enable-lora is false; {flags[0]} needs it",)


def test_the_folder_of_adapters_must_be_there(tmp_path: Path) -> None:
    assert build("--lora-dir", str(tmp_path))[1].lora_dir == str(tmp_path)
    assert problems("--lora-dir", "/nowhere") == ("--lora-dir is /nowhere; it must be the path of a folder",)
