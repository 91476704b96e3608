"""What a request says about speculation: the speculative field, and the headers for gateways.

This build has no drafters, so a permission to speculate has no effect, and neither has a limit. What would
need a policy (a class, an SLO) is refused. Speculation never changes tokens, with drafters or without.
"""

from starlette.datastructures import Headers

from faser.api.schemas.common import Speculative
from faser.errors import RequestError

SPECULATIVE_HEADER = "X-Faser-Speculative"
CLASS_HEADER = "X-Faser-Class"


def check_speculation(body: Speculative | None, headers: Headers) -> None:
    """Raises RequestError for what has the wrong shape or cannot be honoured. The body wins over headers."""
    limit = headers.get(SPECULATIVE_HEADER)
    if limit is not None and limit not in ("off", "auto") and not (limit.isascii() and limit.isdecimal()):
        raise RequestError(
            f"{SPECULATIVE_HEADER} is {limit[:80]}; it must be off, auto or a number of tokens",
            param=SPECULATIVE_HEADER,
        )
    if body is not None and body.class_ is not None:
        raise RequestError(
            f"speculative.class is {body.class_[:80]}; this server has no classes", param="speculative.class"
        )
    if CLASS_HEADER in headers and (body is None or body.class_ is None):
        raise RequestError(f"{CLASS_HEADER} is {headers[CLASS_HEADER][:80]}; this server has no classes")
    if body is not None and body.slo is not None:
        for name in ("ttft_ms", "tpot_ms"):
            if getattr(body.slo, name) is not None:
                raise RequestError(
                    f"`speculative.slo.{name}` is not supported: this build has no policy that keeps it",
                    param=f"speculative.slo.{name}",
                )
