"""What a request says about speculation: the speculative field, the headers for gateways, and its class.

What it may ask for is bounded by the operator; what it leaves out is its class's. Speculation never changes
tokens, so nothing here does.
"""

from starlette.datastructures import Headers

from faser.api.protocol.common import Speculative
from faser.config.speculation import SpeculationConfig
from faser.errors import RequestError
from faser.types import DEFAULT_CLASS, Slo, SpeculationParams

SPECULATIVE_HEADER = "X-Faser-Speculative"
CLASS_HEADER = "X-Faser-Class"


def speculation_params(body: Speculative | None, headers: Headers, config: SpeculationConfig) -> SpeculationParams:
    """A request's effective wishes. The body wins over headers, both over the class; caps only get lower.

    auto leaves it to the class whether there are drafts at all.

    Raises RequestError for a header of the wrong shape and a class that the server has not.
    """
    asked = body or Speculative.model_validate({})
    base = config.params_of(_class_name(asked, headers, config))
    enabled, max_tokens = _header_wishes(headers)
    if asked.enabled is not None or asked.max_tokens is not None:
        enabled = asked.enabled if isinstance(asked.enabled, bool) else None
        max_tokens = asked.max_tokens
    cap = min(limit for limit in (max_tokens, base.max_tokens, config.cap) if limit is not None)
    enabled = (base.enabled if enabled is None else enabled) and cap > 0
    return SpeculationParams(
        enabled=enabled,
        max_tokens=cap if enabled else 0,
        class_name=base.class_name,
        slo=_targets(asked, base.slo),
    )


def _header_wishes(headers: Headers) -> tuple[bool | None, int | None]:
    """(enabled, max_tokens), None where the header leaves it to the class."""
    word = headers.get(SPECULATIVE_HEADER)
    if word is None:
        return None, None
    if word in ("off", "auto"):
        return (False if word == "off" else None), None
    if not (word.isascii() and word.isdecimal()):
        raise RequestError(
            f"{SPECULATIVE_HEADER} is {word[:80]}; it must be off, auto or a number of tokens",
            param=SPECULATIVE_HEADER,
        )
    return None, int(word[:9])  # more digits change nothing: there is a cap


def _class_name(asked: Speculative, headers: Headers, config: SpeculationConfig) -> str:
    name, param = headers.get(CLASS_HEADER, DEFAULT_CLASS), CLASS_HEADER
    if asked.class_ is not None:
        name, param = asked.class_, "speculative.class"
    if name not in config.class_names:
        known = ", ".join(config.class_names)
        raise RequestError(f"{param} is {name[:80]}; it must be one of {known}", param=param)
    return name


def _targets(asked: Speculative, base: Slo) -> Slo:
    if asked.slo is None:
        return base
    return Slo(
        ttft_ms=base.ttft_ms if asked.slo.ttft_ms is None else asked.slo.ttft_ms,
        tpot_ms=base.tpot_ms if asked.slo.tpot_ms is None else asked.slo.tpot_ms,
    )
