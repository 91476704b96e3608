"""Scalars of a body, read as tolerantly as vLLM reads them wherever nothing is lost.

A number may come as text ("5", "0.5"), a whole number with a fraction of zero (2.0), and a truth value as 0, 1,
"true" or "false". What would have to be rounded or guessed is left as it is, for the strict check to refuse.
"""

import json
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,30})(\.[0-9]{1,30})?([eE][-+]?[0-9]{1,3})?")
_FLAGS = {0: False, 1: True, "0": False, "1": True, "false": False, "true": True, "False": False, "True": True}


def _as_number(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _as_integer(value: Any) -> Any:
    number = _as_number(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _as_flag(value: Any) -> Any:
    return _FLAGS.get(value, value) if type(value) in (int, str) else value


Integer = Annotated[int, BeforeValidator(_as_integer)]
Number = Annotated[float, BeforeValidator(_as_number)]
Flag = Annotated[bool, BeforeValidator(_as_flag)]
