"""Sampling defaults and the recorder, as the settings ask for them."""

import json
import stat
from pathlib import Path

import pytest

from faser.api.middleware.keys import ApiKeys
from faser.cli.application import (
    allowed_hosts,
    has_one_user,
    namespace_secret,
    of_replica,
    open_recorder,
    sampling_defaults,
)
from faser.config.declaration import flag_label
from faser.config.engine import EngineConfig
from faser.config.server import ServerConfig, sampling_problems
from faser.engine.checkpoints.embedded import SMOLLM2
from faser.engine.checkpoints.files import SAMPLING_ADVICE
from faser.errors import ConfigError, ModelError
from faser.types.sampling import SamplingParams


def model(folder: Path, **content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_the_models_defaults_count_and_its_other_keys_do_not(tmp_path: Path) -> None:
    directory = model(tmp_path, temperature=0.6, top_k=None, eos_token_id=[2], max_new_tokens=99)
    assert sampling_defaults(directory, ServerConfig()) == {"temperature": 0.6, "max_tokens": 99}


def test_the_operator_wins_over_the_model(tmp_path: Path) -> None:
    config = ServerConfig(override_generation_config={"temperature": 0.1})
    assert sampling_defaults(model(tmp_path, temperature=0.6, top_p=0.9), config) == {
        "temperature": 0.1,
        "top_p": 0.9,
    }


def test_none_leaves_the_models_file_alone(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    assert sampling_defaults(tmp_path, ServerConfig(generation_config="none")) == {}


@pytest.fixture
def default_model(tmp_path: Path) -> Path:
    """The folder of the embedded model as it is installed: its file names only the ends of a sequence."""
    folder = tmp_path / SMOLLM2.name
    folder.mkdir()
    return model(folder, bos_token_id=1, eos_token_id=[2])


def test_the_default_model_is_greedy(default_model: Path) -> None:
    assert sampling_defaults(default_model, ServerConfig()) == {"temperature": 0.0}


def test_the_operator_wins_over_the_advice_and_may_switch_it_off(default_model: Path) -> None:
    config = ServerConfig(override_generation_config={"temperature": 0.7})
    assert sampling_defaults(default_model, config) == {"temperature": 0.7}
    assert sampling_defaults(default_model, ServerConfig(generation_config="none")) == {}


def test_a_file_with_any_sampling_parameter_replaces_the_whole_advice(default_model: Path) -> None:
    assert sampling_defaults(model(default_model, top_k=5), ServerConfig()) == {"top_k": 5}


def test_every_advice_is_within_the_limits_of_requests_and_lets_steps_be_planned_ahead() -> None:
    """Penalties would not: each step would wait for the tokens of the one before, in every request."""
    for name, advice in SAMPLING_ADVICE.items():
        assert sampling_problems(advice, name) == []
        assert SamplingParams(**advice).needs_only_logits  # type: ignore[arg-type]


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path, ServerConfig()) == {}
    assert sampling_defaults(tmp_path / "model.gguf", ServerConfig()) == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"temperature": 9}', '{"top_p": "high"}'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        sampling_defaults(tmp_path, ServerConfig())


def test_without_the_flag_there_is_none() -> None:
    with open_recorder(ServerConfig(), flag_label, lambda _: None) as recorder:
        assert recorder is None


def test_a_file_that_cannot_be_recorded_to_is_named(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    config = ServerConfig(record_traffic=str(path))
    with (
        open_recorder(config, flag_label, lambda _: None),
        pytest.raises(ConfigError) as caught,
        open_recorder(config, flag_label, lambda _: None),
    ):
        pass
    assert str(caught.value) == f"--record-traffic is {path}; another process records to it"
    with (
        pytest.raises(ConfigError) as caught,
        open_recorder(ServerConfig(record_traffic="/dev/null"), flag_label, lambda _: None),
    ):
        pass
    assert str(caught.value) == "--record-traffic is /dev/null; it cannot be written: it is not a regular file"


def test_with_a_certificate_of_its_own_a_server_answers_to_every_name(tmp_path: Path) -> None:
    """A browser that was led to it under another name refuses the certificate."""
    names = ("llm.example.org",)
    assert allowed_hosts(ServerConfig(allowed_hosts=names)) == names
    (pem := tmp_path / "both.pem").touch()
    tls = ServerConfig(allowed_hosts=names, ssl_certfile=str(pem), ssl_keyfile=str(pem))
    assert allowed_hosts(tls) == ("*",)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_a_server_on_loopback_without_keys_has_one_user(host: str) -> None:
    assert has_one_user(ServerConfig(host=host), ApiKeys([]))


@pytest.mark.parametrize(
    "config, keys",
    [
        pytest.param(ServerConfig(host="0.0.0.0"), [], id="all interfaces"),
        pytest.param(ServerConfig(host="::"), [], id="all interfaces, IPv6"),
        pytest.param(ServerConfig(host="10.0.0.1"), [], id="another address"),
        pytest.param(ServerConfig(host="workstation"), [], id="a name"),
        pytest.param(ServerConfig(), ["one"], id="keys"),
        pytest.param(ServerConfig(allowed_hosts=("llm.example.org",)), [], id="a proxy's name"),
        pytest.param(ServerConfig(allowed_origins=("https://example.org",)), [], id="pages of others"),
        pytest.param(ServerConfig(root_path="/llm"), [], id="a proxy's path"),
    ],
)
def test_a_server_that_others_may_reach_has_several_users(config: ServerConfig, keys: list[str]) -> None:
    assert not has_one_user(config, ApiKeys(keys))


def test_the_secret_of_namespaces_lasts_as_long_as_the_kv_on_disk(tmp_path: Path) -> None:
    config = EngineConfig(kv_cache_dir=str(tmp_path / "kv"))
    secret = namespace_secret(config)
    assert secret is not None
    assert len(secret) == 32
    assert namespace_secret(config) == secret
    assert stat.S_IMODE((tmp_path / "kv" / "secret").stat().st_mode) == 0o600
    (tmp_path / "kv" / "secret").write_bytes(b"half of it")
    assert namespace_secret(config) not in (None, secret)
    assert namespace_secret(EngineConfig()) is None


def test_a_folder_for_kv_that_others_may_write_to_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match=f"kv_cache_dir is {tmp_path}.*other users may write to it"):
        namespace_secret(EngineConfig(kv_cache_dir=str(tmp_path)))


def test_each_of_several_engines_has_a_part_of_the_folder_for_kv() -> None:
    config = EngineConfig(kv_cache_dir="/kv", kv_cache_dir_size=1 << 30)
    assert of_replica(config, 0, 1) == config
    parts = [of_replica(config, number, 2) for number in range(2)]
    assert [each.kv_cache_dir for each in parts] == ["/kv/engine-0", "/kv/engine-1"]
    assert [each.kv_cache_dir_size for each in parts] == [1 << 29, 1 << 29]
