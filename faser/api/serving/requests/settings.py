"""ApiSettings: the operator's settings of the HTTP front-end, as plain values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from faser.api.middleware.cors import CorsSettings
from faser.api.middleware.key_limits import KeyLimits
from faser.config.speculation import SpeculationConfig
from faser.types import MAX_LOGPROBS

DEFAULT_MAX_REQUEST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Settings of one front-end.

    served_model_names: at least one; a request without a model name gets the first.
    model: the model as the operator names it, a path or hub id, from which load generators load the tokenizer;
        None: the first served name.
    api_keys: empty: no key is required. enable_metrics_auth: /metrics requires a key too.
    share_cache_across_keys: requests with different keys reuse each other's KV blocks and past answers.
    chat_template: Jinja text that replaces the model's; None keeps the model's.
    tool_call_parser, reasoning_parser: names, or auto: as the template suggests.
    enable_auto_tool_choice: requests may leave it to the model whether it calls functions.
    generation_defaults: values for fields that a request leaves out, by the names of SamplingParams.
    key_limits: of each API key. request_timeout_s: longest time a request may take; None: no limit.
    speculation: the limits of what a request may ask for. spec_decode_metrics: none, summary or detailed.
    page: / shows the page. most_viewers: of its live view, at once.
    """

    served_model_names: tuple[str, ...]
    model: str | None = None
    api_keys: tuple[str, ...] = ()
    share_cache_across_keys: bool = False
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    strict_request_fields: bool = False
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    enable_auto_tool_choice: bool = True
    reasoning_parser: str = "auto"
    generation_defaults: Mapping[str, float] = field(default_factory=dict)
    version: str = "0"
    force_include_usage: bool = False
    max_logprobs: int = MAX_LOGPROBS
    enable_metrics_auth: bool = False
    key_limits: KeyLimits = field(default_factory=KeyLimits)
    cors: CorsSettings = field(default_factory=CorsSettings)
    request_timeout_s: float | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    spec_decode_metrics: str = "none"
    page: bool = True
    most_viewers: int = 32
