"""open_tracer: the tracer that the settings ask for. Imports OpenTelemetry only then."""

from importlib.util import find_spec

from faser import __version__
from faser.config.declaration import Label
from faser.config.environment import traces_protocol
from faser.config.server import ServerConfig
from faser.errors import ConfigError
from faser.tracing.span import Tracer

# After the last answer. Spans are sent every few seconds, so few are left; supervisors wait 5 s longer than the
# drain before they kill.
FLUSH_TIMEOUT_S = 2.0

_NEEDED = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")
_PROTOCOL = "http/protobuf"


def open_tracer(config: ServerConfig, label: Label) -> Tracer | None:
    """None: no traces are asked for. label: what messages call a setting.

    Raises ConfigError if the packages are missing, or if the environment asks for another protocol.
    """
    endpoint = config.otlp_traces_endpoint
    if endpoint is None:
        return None
    named = f"{label('otlp_traces_endpoint')} is {endpoint}"
    if not all(map(_is_there, _NEEDED)):
        raise ConfigError(f"{named}; it needs OpenTelemetry, which is missing: pip install 'faser[otel]'")
    variable, protocol = traces_protocol()
    if protocol not in (None, _PROTOCOL):
        raise ConfigError(f"{variable} is {protocol}; spans are sent as {_PROTOCOL} only, mostly to port 4318")
    from faser.tracing.opentelemetry import OpenTelemetryTracer

    return OpenTelemetryTracer(endpoint, version=__version__)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False
