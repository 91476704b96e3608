"""Values of Python literals that JSON has too. Nothing is computed, and no name is looked up."""

import ast
import math
import warnings
from typing import Any

_WORDS = {"true": True, "false": False, "null": None}  # JSON's, which models mix in


def literal_value(text: str) -> Any:
    """A string, number, truth value, None, list, tuple, or dict with strings as keys.

    Raises ValueError for anything else.
    """
    try:
        with warnings.catch_warnings():  # unknown escapes, which Python keeps
            warnings.simplefilter("ignore")
            tree = ast.parse(text.strip(), mode="eval")
        return _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | str()):
            return node.value
        case ast.Constant(value=float() as number) if math.isfinite(number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)) if math.isfinite(
            number
        ) and not isinstance(number, bool):
            return -number
        case ast.List() | ast.Tuple():
            return [_value(each) for each in node.elts]
        case ast.Dict():
            return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
        case ast.Name() if node.id in _WORDS:
            return _WORDS[node.id]
    raise ValueError(f"{ast.dump(node)[:80]} is not a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a key is not a string")
