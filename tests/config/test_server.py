"""What settings of the server can be, and the messages that refuse them."""

from pathlib import Path

import pytest

from faser.config.server import ServerConfig
from faser.errors import ConfigError


def test_every_default_is_sound() -> None:
    assert ServerConfig().port == 8000


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"port": 65536}, "port is 65536; it must be at least 0 and at most 65535"),
        ({"host": ""}, "host is ; it must be text"),
        ({"api_key": ("",)}, "api_key is ***; it must be text that is not empty"),
        (
            {"chat_template": "/no/such"},
            "chat_template is /no/such; it must be the path of a file that can be read",
        ),
        (
            {"otlp_traces_endpoint": "localhost:4318"},
            "otlp_traces_endpoint is localhost:4318; it must be a URL such as http://127.0.0.1:4318/v1/traces",
        ),
        (
            {"otlp_traces_endpoint": "grpc://collector:4317"},
            "otlp_traces_endpoint is grpc://collector:4317; it must be a URL such as "
            "http://127.0.0.1:4318/v1/traces",
        ),
        (
            {"otlp_traces_endpoint": "http://collector:4317"},
            "otlp_traces_endpoint is http://collector:4317; it must be a URL with a path, mostly "
            "http://collector:4318/v1/traces: spans are sent over HTTP",
        ),
        (
            {"otlp_traces_endpoint": "https://user:secret@collector/v1/traces"},
            "otlp_traces_endpoint has a user or a query; send credentials in the variable "
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
        ),
        (
            {"otlp_traces_endpoint": "https://collector/v1/traces?key=secret"},
            "otlp_traces_endpoint has a user or a query; send credentials in the variable "
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
        ),
        ({"log_format": "xml"}, "log_format is xml; it must be one of text, json"),
        ({"root_path": "x"}, "root_path is x; it must begin with /"),
        ({"api_key": (" k ",)}, "api_key is ***; it begins or ends with a space, and no client could present it"),
        (
            {"api_key": ("k", "a\nb")},
            "api_key is ***; it has a character that is not printable, and no client could present it",
        ),
        ({"key_rpm_limit": 60}, "key_rpm_limit is 60; it needs API keys, and there are none"),
        ({"key_tpm_limit": 0, "api_key": ("k",)}, "key_tpm_limit is 0; it must be at least 1"),
        (
            {"record_traffic": "traffic.jsonl", "api_key": ("k",)},
            "record_traffic is traffic.jsonl; with API keys it needs share_cache_across_keys: requests of one key "
            "are kept from other clients, and nothing would be recorded",
        ),
        ({"request_timeout": 0}, "request_timeout is 0; it must be above 0"),
        (
            {"allowed_origins": ("https://a.example/",)},
            "allowed_origins has https://a.example/; it must be * or an origin such as https://example.org",
        ),
        (
            {"allowed_hosts": ("*", "llm.example.org", "http://a.example")},
            "allowed_hosts has http://a.example; it must be a name without scheme and port, such as "
            "llm.example.org or *.example.org, or *",
        ),
        (
            {"allowed_hosts": ("*.example.org", "a.example:8000")},
            "allowed_hosts has a.example:8000; it must be a name without scheme and port, such as "
            "llm.example.org or *.example.org, or *",
        ),
        (
            {"allowed_methods": ("GET", "POST")},
            "allowed_methods is GET POST; it needs allowed_origins, which is not set",
        ),
        (
            {"allow_credentials": True, "allowed_origins": ("*",)},
            "allow_credentials is true; it needs allowed_origins with origins by name: any page could otherwise "
            "act for its visitor",
        ),
        (
            {"override_generation_config": {"temprature": 1}},
            "override_generation_config: unknown key 'temprature'. Known keys: temperature, top_p, top_k, min_p, "
            "presence_penalty, frequency_penalty, repetition_penalty, max_tokens",
        ),
        (
            {"override_generation_config": {"temperature": 3.0}},
            "override_generation_config: temperature is 3.0; it must be at least 0.0 and at most 2.0",
        ),
        (
            {"override_generation_config": {"top_k": 1.5}},
            "override_generation_config: top_k is 1.5; it must be a whole number",
        ),
    ],
)
def test_an_impossible_server_setting_names_value_and_limit(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    certificate = tmp_path / "cert.pem"
    certificate.touch()
    with pytest.raises(ConfigError, match="it needs ssl_keyfile, which is not set"):
        ServerConfig(ssl_certfile=str(certificate))


def test_limits_of_keys_are_taken_with_a_key_or_a_file_of_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("k\n")
    by_key = ServerConfig(api_key=("k",), key_rpm_limit=60, key_tpm_limit=1000, key_max_parallel_requests=2)
    assert (by_key.key_rpm_limit, by_key.key_tpm_limit, by_key.key_max_parallel_requests) == (60, 1000, 2)
    assert ServerConfig(api_key_file=str(file), key_rpm_limit=60).key_rpm_limit == 60
