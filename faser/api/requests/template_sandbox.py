"""TemplateSandbox: the Jinja environment of chat templates, which cannot use up a server's time or memory.

A template comes with a checkpoint and is not trusted, and its inputs come from clients. Jinja's sandbox keeps it
away from Python internals and from changes to its inputs. Here loops and macros count their turns, and whatever
makes a text, a list or a number larger says how large before it does so: operators, literals, filters, methods.
What no chat needs and no size is known of is not offered.
"""

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from faser.errors import RequestError

MAX_CHARS = 1 << 26  # of a prompt, and of a text or a list that a template makes
MAX_MADE = 1 << 29  # of all that one rendering makes
MAX_STEPS = 1 << 19  # turns of loops and calls of macros in one rendering
MAX_SECONDS = 5  # of a processor, for one rendering

BUDGET = "faser_budget"  # the variable that has the budget of a rendering

_MAX_BITS = 1024  # of a number
_MAX_WIDTH = 1024  # of a formatted value
_ITEM_CHARS = 8  # an item of a list takes the memory of as many characters
_UNSIZED_FILTERS = ("urlize", "wordwrap", "xmlattr", "pprint", "slice", "batch")
_SPLITTING = frozenset(  # what may make a list of the characters of a text
    (
        *("list", "sort", "unique", "map", "select", "reject", "selectattr", "rejectattr", "groupby", "reverse"),
        *("split", "rsplit", "splitlines"),
    )
)
_UNSIZED_METHODS = frozenset(("translate", "expandtabs", "format_map"))
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?([^a-zA-Z%]*)")
_FORMAT_FIELD = re.compile(r":([^{}]*)")


class OverBudgetError(RequestError):
    """The template takes more steps or time, or makes a longer prompt, than any chat needs."""

    def __init__(self, what: str) -> None:
        super().__init__(f"the chat template cannot render these messages: {what}", param="messages")


class TooSlowError(Exception):
    """A rendering within a short_time takes longer."""


_short_until_s: ContextVar[float] = ContextVar("short_until_s", default=math.inf)


@contextmanager
def short_time(seconds: float) -> Iterator[None]:
    """Context manager in which a rendering that takes longer, of a processor, raises TooSlowError."""
    token = _short_until_s.set(time.thread_time() + seconds)
    try:
        yield
    finally:
        _short_until_s.reset(token)


class Budget:
    """The steps, the time and the memory that are left of one rendering."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._made = MAX_MADE
        self._end_s = time.thread_time() + MAX_SECONDS
        self._short_until_s = _short_until_s.get()
        self._sizes: dict[int, tuple[Any, int]] = {}  # of containers, which stay alive, by their identities

    def step(self) -> bool:
        """Count a step. Returns True, as a part of conditions. Raises OverBudgetError."""
        self._steps -= 1
        if self._steps < 0:
            raise OverBudgetError(f"its loops take more than {MAX_STEPS} turns")
        self._check_time()
        return True

    def reserve(self, size: int) -> None:
        """Count what is about to be made. Raises OverBudgetError."""
        self._made -= size
        if size > MAX_CHARS:
            raise OverBudgetError(f"it makes a text or a list of {size} characters; at most {MAX_CHARS} fit")
        if self._made < 0:
            raise OverBudgetError(f"it makes texts and lists of more than {MAX_MADE} characters")
        self._check_time()

    def size(self, value: Any) -> int:
        """Return how many characters a value has, all that it contains included, however often."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | Mapping):
            return 1
        if (known := self._sizes.get(id(value))) is not None:
            return known[1]
        items: Iterable[Any] = value
        if isinstance(value, Mapping):
            items = (each for item in value.items() for each in item)
        found = _ITEM_CHARS * len(value) + sum(map(self.size, items))
        self._sizes[id(value)] = value, found
        return found

    def sized(self, value: Any, size: int | None = None) -> Any:
        """Return a value that a template has just made. size: where it is known. Raises OverBudgetError."""
        if size is None:
            size = self.size(value)
        elif not isinstance(value, str):
            self._sizes[id(value)] = value, size
        if size > MAX_CHARS:
            raise OverBudgetError(f"it makes a list of {size} characters; at most {MAX_CHARS} fit")
        return value

    def joined(self, *parts: Any) -> str:
        """Return what the operator ~ makes of its operands."""
        self.reserve(sum(map(self.size, parts)))
        return "".join(map(str, parts))

    def _check_time(self) -> None:
        now_s = time.thread_time()
        if now_s > self._short_until_s:
            raise TooSlowError
        if now_s > self._end_s:
            raise OverBudgetError(f"it takes more than {MAX_SECONDS} seconds")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Renders with a Budget in the variable BUDGET. Filters that are set later are bounded by `bound_filters`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        del self.globals["lipsum"]  # texts of any length
        for name in _UNSIZED_FILTERS:
            del self.filters[name]

    def bound_filters(self) -> None:
        """Let every filter say how large its result is."""
        self.filters = {name: _bounded(name, each) for name, each in self.filters.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The template, whose loops and macros begin with a call that counts them."""
        template: nodes.Template = _Sizes().visit(super()._parse(source, name, filename))
        loops: Iterator[nodes.For | nodes.Macro | nodes.CallBlock] = template.find_all(
            (nodes.For, nodes.Macro, nodes.CallBlock)
        )
        for loop in loops:
            count = _of_budget("step", [], loop.lineno)
            if isinstance(loop, nodes.For) and loop.test is not None:  # turns that its condition leaves out count
                loop.test = nodes.And(count, loop.test, lineno=loop.lineno)
            else:
                loop.body.insert(0, nodes.ExprStmt(count, lineno=loop.lineno))
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (
            isinstance(obj, str | bytes) and attr in _UNSIZED_METHODS
        )

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raises OverBudgetError for a result that is too large, ValueError for such a number."""
        budget: Budget = context[BUDGET]
        if isinstance(left, int | float) and isinstance(right, int | float):
            _check_number(operator, left, right)
            return super().call_binop(context, operator, left, right)
        size, of_right = budget.size(left), budget.size(right)
        if operator == "%" and isinstance(left, str):
            _check_widths(_PERCENT_FIELD.findall(left))
            size += left.count("%") * of_right
        elif operator == "*":
            times = next((each for each in (left, right) if isinstance(each, int)), 1)
            size = max(size, of_right) * max(times, 0)
        else:
            size += of_right
        budget.reserve(size)
        return budget.sized(super().call_binop(context, operator, left, right), size)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Methods of texts say how large their results are."""
        budget: Budget = context[BUDGET]
        method = getattr(obj, "__wrapped__", obj)  # Jinja's own, of format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            name = method.__name__
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
            _reserve(budget, name, text, args, kwargs)
        made = super().call(context, obj, *args, **kwargs)
        return budget.sized(made)


def _bounded(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that says how large its result is before it makes it."""
    passes = getattr(plain, "jinja_pass_arg", None)

    @pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget: Budget = context[BUDGET]
        if name == "join":
            value = list(value)
        elif name == "sum" and not isinstance(kwargs.get("start", args[1] if len(args) > 1 else 0), int | float):
            raise ValueError("the filter sum adds up numbers only")
        _reserve(budget, name, value, args, kwargs)
        given = {"context": context, "environment": context.environment, "eval_context": context.eval_ctx}
        first = () if passes is None else (given[passes.name],)
        return plain(*first, value, *args, **kwargs)

    return bounded


def _reserve(budget: Budget, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Count what a method of a text, or a filter of a value, makes."""
    size, others = budget.size(value), [*args, *kwargs.values()]
    numbers = [each for each in others if isinstance(each, int)]
    widest = max((abs(each) for each in numbers), default=0)
    match name:
        case "center" | "ljust" | "rjust" | "zfill":
            size = max(size, widest)
        case "indent":
            width = max(widest, *(len(each) for each in others if isinstance(each, str)), 4)
            size += (str(value).count("\n") + 1) * width
        case "replace" if len(others) > 1:
            old, new = str(others[0]), str(others[1])
            size += (str(value).count(old) if old else size + 1) * len(new)
        case "join" if isinstance(value, str):
            size = budget.size(args[0]) + len(value) * len(args[0]) if args else size
        case "join":
            size += len(value) * max((len(str(each)) for each in others[:1]), default=0)
        case "format":
            text = str(value)
            _check_widths(_FORMAT_FIELD.findall(text) + _PERCENT_FIELD.findall(text))
            if re.search(r"\{[^{}]*\{", text):
                raise ValueError("a width within a format is not supported")
            size += (text.count("{") + text.count("%")) * sum(map(budget.size, others))
        case "tojson":
            _check_widths([str(widest)])
            size *= 1 + widest
        case _ if isinstance(value, str) and name in _SPLITTING:
            size *= _ITEM_CHARS
    budget.reserve(size)


def _check_number(operator: str, left: float, right: float) -> None:
    if not isinstance(left, int) or not isinstance(right, int):
        return
    bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
    if operator in ("*", "**") and bits > _MAX_BITS:
        raise ValueError(f"a number of {bits} bits is too large; at most {_MAX_BITS} are computed")


def _check_widths(fields: Iterable[str]) -> None:
    """Raises ValueError for a field of a format that is too wide, or takes its width from an argument."""
    for each in fields:
        if "*" in each or any(int(number[:10]) > _MAX_WIDTH for number in re.findall(r"\d+", each)):
            raise ValueError(f"the format {each!r} is wider than {_MAX_WIDTH} characters")


def _of_budget(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    budget = nodes.Name(BUDGET, "load", lineno=line)
    return nodes.Call(nodes.Getattr(budget, name, "load", lineno=line), args, [], None, None, lineno=line)


class _Sizes(NodeTransformer):
    """Lets the operator ~ and literals of lists and objects say how large their results are."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # Jinja's names
        self.generic_visit(node)
        return _of_budget("joined", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._literal(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._literal(node, node.items) if node.ctx == "load" else node

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._literal(node, [each.value for each in node.items])

    def _literal(self, node: nodes.Expr, values: Sequence[nodes.Expr]) -> nodes.Node:
        if all(isinstance(each, nodes.Const) for each in values):
            return node
        self.generic_visit(node)
        return _of_budget("sized", [node], node.lineno)


class _GenerationTag(Extension):
    """{% generation %} … {% endgeneration %}: marks the model's own text, for training. Renders its content."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
