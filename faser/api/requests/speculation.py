"""SpeculationParams of a request, from its `speculative` field, its headers (for gateways) and its class.

The operator's settings bound what a request can ask for; its class provides what the request leaves out.
Nothing here changes the tokens of an answer.
"""

from starlette.datastructures import Headers

from faser.api.bodies.fields import Speculative
from faser.config.speculation import SpeculationConfig
from faser.errors import RequestError
from faser.types import DEFAULT_CLASS, Slo, SpeculationParams

SPECULATIVE_HEADER = "X-Faser-Speculative"
CLASS_HEADER = "X-Faser-Class"


def speculation_params(body: Speculative | None, headers: Headers, config: SpeculationConfig) -> SpeculationParams:
    """The effective parameters. The body overrides headers, both override the class; a cap can only be lowered.

    "auto" means that the class decides whether the request is drafted for.

    Raises RequestError for a malformed header and for a class that the server does not have.
    """
    body = body or Speculative.model_validate({})
    base = config.params_of(_class_name(body, headers, config))
    enabled, max_tokens = _header_params(headers)
    if body.enabled is not None or body.max_tokens is not None:
        enabled = body.enabled if isinstance(body.enabled, bool) else None
        max_tokens = body.max_tokens
    cap = min(limit for limit in (max_tokens, base.max_tokens, config.cap) if limit is not None)
    enabled = (base.enabled if enabled is None else enabled) and cap > 0
    return SpeculationParams(
        enabled=enabled,
        max_tokens=cap if enabled else 0,
        class_name=base.class_name,
        slo=_slo(body, base.slo),
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
    problem = None
    if not streams_choices:
        problem = "it needs a stream of /v1/chat/completions or /v1/completions"
    elif shares_cache:
        problem = "it would tell of other clients' answers; send a cache_salt to have past answers of your own"
    if problem is not None:
        raise RequestError(f"speculative.trace is true; {problem}", param="speculative.trace")


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


def _class_name(body: Speculative, headers: Headers, config: SpeculationConfig) -> str:
    name, param = headers.get(CLASS_HEADER, DEFAULT_CLASS), CLASS_HEADER
    if body.class_ is not None:
        name, param = body.class_, "speculative.class"
    if name not in config.class_names:
        known = ", ".join(config.class_names)
        raise RequestError(f"{param} is {name[:80]}; it must be one of {known}", param=param)
    return name


def _slo(body: Speculative, base: Slo) -> Slo:
    if body.slo is None:
        return base
    return Slo(
        ttft_ms=base.ttft_ms if body.slo.ttft_ms is None else body.slo.ttft_ms,
        tpot_ms=base.tpot_ms if body.slo.tpot_ms is None else body.slo.tpot_ms,
    )
