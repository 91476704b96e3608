"""Whether there is a tracer, and what is said when there cannot be one."""

import subprocess
import sys
from importlib.machinery import ModuleSpec

import pytest

from faser.cli.serve import tracing
from faser.cli.serve.tracing import open_tracer
from faser.config.declaration import flag_label
from faser.config.server import ServerConfig
from faser.errors import ConfigError

URL = "http://127.0.0.1:9/v1/traces"


def test_without_the_flag_nothing_of_the_sdk_is_imported() -> None:
    """FastAPI itself imports OpenTelemetry's API, which does nothing without an SDK."""
    program = (
        "import sys\n"
        "from faser.cli.serve.command import open_tracer\n"
        "import faser.cli.serve.server\n"
        "from faser.config.declaration import flag_label\n"
        "from faser.config.server import ServerConfig\n"
        "assert open_tracer(ServerConfig(), flag_label) is None\n"
        "parts = ('opentelemetry.sdk', 'opentelemetry.exporter', 'google.protobuf', 'requests')\n"
        "print([name for name in sys.modules if name.startswith(parts)])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_flag_needs_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleSpec | None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(tracing, "find_spec", missing)
    with pytest.raises(ConfigError) as caught:
        open_tracer(ServerConfig(otlp_traces_endpoint=URL), flag_label)
    assert str(caught.value) == (
        f"--otlp-traces-endpoint is {URL}; it needs OpenTelemetry, which is missing: pip install 'faser[otel]'"
    )


def test_another_protocol_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is grpc; spans are sent as http/protobuf"):
        open_tracer(ServerConfig(otlp_traces_endpoint=URL), flag_label)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    tracer = open_tracer(ServerConfig(otlp_traces_endpoint=URL), flag_label)
    assert tracer is not None
    tracer.close(1.0)
