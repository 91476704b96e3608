"""SpeculationParams of a request, from its `speculative` field, its headers (for gateways) and its class.

The names of others stand for the same: OpenAI's `service_tier` and the headers by which llm-d's router routes. The
body wins over FASER's headers, and these over the names of others; so a router in front reads what FASER obeys.

The operator's settings bound what a request can ask for; its class provides what the request leaves out.
Nothing here changes the tokens of an answer.
"""

import math

from starlette.datastructures import Headers

from faser.api.bodies.fields import Speculative
from faser.config.speculation import SpeculationConfig
from faser.errors import RequestError
from faser.optional import or_else, present
from faser.types.request import DEFAULT_CLASS, NO_TARGETS, Slo, SpeculationParams

SPECULATIVE_HEADER = "X-Faser-Speculative"
CLASS_HEADER = "X-Faser-Class"

# llm-d's: names of the router's configuration, and targets in milliseconds.
OBJECTIVE_HEADER = "x-llm-d-inference-objective"
TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")


def speculation_params(
    body: Speculative | None, headers: Headers, config: SpeculationConfig, *, service_tier: str | None = None
) -> SpeculationParams:
    """The effective parameters. The body overrides headers, both override the class; a cap can only be lowered.

    "auto" means that the class decides whether the request is drafted for. service_tier: of the body; a class, if
    the server has one of that name.

    Raises RequestError for a malformed header and for a class that the server does not have.
    """
    body = body or Speculative.model_validate({})
    base = config.params_of(_class_name(body, headers, config, service_tier))
    enabled, max_tokens = _header_params(headers)
    if body.enabled is not None or body.max_tokens is not None:
        enabled = body.enabled if isinstance(body.enabled, bool) else None
        max_tokens = body.max_tokens
    cap = min(present((max_tokens, base.max_tokens, config.cap)))
    enabled = or_else(enabled, base.enabled) and cap > 0
    return SpeculationParams(
        enabled=enabled,
        max_tokens=cap if enabled else 0,
        class_name=base.class_name,
        slo=_slo(body, headers, base.slo),
        trace=bool(body.trace),
        admission=base.admission,
    )


def check_trace(params: SpeculationParams, *, streams_choices: bool, shares_cache: bool) -> None:
    """Raises RequestError for a trace that the request cannot have.

    Which tokens were drafted and accepted depends on the past answers that are drafted from. A request that shares
    these with other clients would learn of their texts.
    """
    if not params.trace:
        return
    if not streams_choices:
        raise _no_trace("it needs a stream of /v1/chat/completions or /v1/completions")
    if shares_cache:
        raise _no_trace("it would reveal other clients' answers; send a cache_salt to draft from your own alone")


def _no_trace(reason: str) -> RequestError:
    return RequestError(f"speculative.trace is true; {reason}", param="speculative.trace")


def _header_params(headers: Headers) -> tuple[bool | None, int | None]:
    """(enabled, max_tokens) of the header; None: the class decides."""
    value = headers.get(SPECULATIVE_HEADER)
    if value is None:
        return None, None
    if value in ("off", "auto"):
        return (False if value == "off" else None), None
    if not (value.isascii() and value.isdecimal()):
        raise RequestError(
            f"{SPECULATIVE_HEADER} is {value[:80]}; it must be off, auto or a number of tokens",
            param=SPECULATIVE_HEADER,
        )
    return None, int(value[:9])  # further digits do not matter: the cap is lower


def _class_name(body: Speculative, headers: Headers, config: SpeculationConfig, service_tier: str | None) -> str:
    """Classes that FASER's own names ask for must exist; what others name need not concern this server."""
    for name, param in ((body.class_, "speculative.class"), (headers.get(CLASS_HEADER), CLASS_HEADER)):
        if name is None:
            continue
        if name not in config.class_names:
            known = ", ".join(config.class_names)
            raise RequestError(f"{param} is {name[:80]}; it must be one of {known}", param=param)
        return name
    foreign = (service_tier, headers.get(OBJECTIVE_HEADER))
    return next((name for name in foreign if name in config.class_names), None) or DEFAULT_CLASS


def _slo(body: Speculative, headers: Headers, base: Slo) -> Slo:
    own = body.slo or NO_TARGETS
    ttft_ms, tpot_ms = own.ttft_ms, own.tpot_ms
    ttft_ms = _target(headers, TTFT_HEADERS) if ttft_ms is None else ttft_ms
    tpot_ms = _target(headers, TPOT_HEADERS) if tpot_ms is None else tpot_ms
    return Slo(
        ttft_ms=or_else(ttft_ms, base.ttft_ms),
        tpot_ms=or_else(tpot_ms, base.tpot_ms),
    )


def _target(headers: Headers, names: tuple[str, ...]) -> float | None:
    """Milliseconds of the first of these headers that there is."""
    for name in names:
        if (text := headers.get(name)) is None:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise RequestError(f"{name} is {text[:80]}; it must be a number of milliseconds above 0", param=name)
        return value
    return None
