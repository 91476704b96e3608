"""GrammarCompiler: from what requests ask for to matchers of llguidance, compiled once for equal ones.

A StructuredOutput is translated to JSON text or to Lark's notation (`grammar_text`), with only its form checked;
whether the grammar makes sense is found when it is compiled. That takes llguidance milliseconds, with the
interpreter lock released; it builds the states of its lexer while masks are computed. The limits here bound both:
a grammar beyond them is refused, so no request can hold up a step.
"""

import contextlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from faser.engine.structure.structural_tags import SpecialTokens, structural_tag_grammar
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import ModelError, RequestError
from faser.machine import return_free_memory
from faser.types import StructuredOutput, StructureKind

# The keys of a JSON schema that hold further schemas: one, a list of them, or one for each name.
_SCHEMA_KEYS = ("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
_SCHEMA_LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

MAX_CACHED = 128  # grammars
_WORD = 64  # the vocabulary is filled up to a multiple: masks are read in words of 64 bits
LIMITS = LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 15 ms
    step_max_items=20_000,  # 1 ms
    max_lexer_states=50_000,  # up to 100 MB
    max_grammar_size=50_000,
    verbose_errors=False,
)
_MOST_CHECKED = 200  # schemas within a schema that are compiled by themselves to find the faulty one
_LONGEST_REASON = 600  # characters


if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions


class GrammarCompiler:
    """Threads may share it. load_tokenizer: called once, by `prepare` or by the first request.

    vocab_size: of the model. eos_token_ids: the model's; they end an answer whose structure is complete.
    any_whitespace: as in json_options.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        any_whitespace: bool = False,
        limits: LLParserLimits = LIMITS,
    ) -> None:
        self._load_tokenizer = load_tokenizer
        self.vocab_size = vocab_size
        self._any_whitespace = any_whitespace
        self._limits = limits
        self.eos_token_ids = eos_token_ids
        self._lock = threading.Lock()
        self._preparing = threading.Lock()
        self._prepared: tuple[LLTokenizer, dict[str, int]] | None = None
        self._failure: RequestError | None = None
        self._cached: OrderedDict[tuple[StructureKind, str], LLMatcher] = OrderedDict()

    @property
    def mask_words(self) -> int:
        """Words of 64 bits in a mask."""
        tokenizer, _ = self._tokenizer()
        return int(tokenizer.vocab_size) // _WORD

    def prepare(self) -> threading.Thread:
        """Load the tokenizer in a thread, which takes a second. A failure is reported to every request."""
        thread = threading.Thread(target=self._prepare, name="faser-grammars", daemon=True)
        thread.start()
        return thread

    def matcher(self, asked: StructuredOutput) -> LLMatcher:
        """A matcher at the start of an answer; the caller may advance it.

        Raises RequestError for what cannot be compiled, that says where; its param is that of the request.
        """
        key = asked.kind, asked.text
        with self._lock:
            found = self._cached.get(key)
            if found is not None:
                self._cached.move_to_end(key)
        if found is None:
            found = self._compile(asked)
            with self._lock:
                self._cached[key] = found
                while len(self._cached) > MAX_CACHED:
                    self._cached.popitem(last=False)
        return found.deep_copy()

    def alone(self, asked: StructuredOutput) -> LLMatcher:
        """A matcher whose lexer is no other matcher's; compiled anew.

        The lexer of the cached one has met a limit, as all matchers that share it find: it is forgotten.
        """
        with self._lock:
            self._cached.pop((asked.kind, asked.text), None)
        return self._compile(asked)

    def _prepare(self) -> None:
        with contextlib.suppress(RequestError):
            self._tokenizer()

    def _tokenizer(self) -> tuple[LLTokenizer, dict[str, int]]:
        """llguidance's view of the tokenizer, and the special tokens."""
        with self._preparing:
            if self._failure is not None:
                raise RequestError(str(self._failure), param=self._failure.param)
            if self._prepared is None:
                try:
                    self._prepared = self._read_tokenizer()
                except RequestError as error:
                    self._failure = error
                    raise
            return self._prepared

    def _read_tokenizer(self) -> tuple[LLTokenizer, dict[str, int]]:
        try:
            tokenizer = self._load_tokenizer()
            size = max(tokenizer.vocab_size, self.vocab_size)
            found = LLTokenizer(
                tokenizer.to_json(),
                n_vocab=-(-size // _WORD) * _WORD,
                eos_token=[each for each in self.eos_token_ids if each < size] or None,
            )
        except (ModelError, ValueError) as error:
            raise RequestError(
                f"structured output is not possible with this model's tokenizer: {error}"
            ) from error
        special_tokens = tokenizer.special_tokens()
        del tokenizer
        return_free_memory()
        return found, special_tokens

    def _compile(self, asked: StructuredOutput) -> LLMatcher:
        tokenizer, special_tokens = self._tokenizer()
        try:
            text = grammar_text(asked, any_whitespace=self._any_whitespace, special_tokens=special_tokens)
        except RequestError as error:
            raise RequestError(str(error), param=asked.param) from None
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=self._limits)
        failed = _failed(matcher)
        if failed is None:
            return matcher
        reason = _reason(failed)
        where = ""
        if asked.kind is StructureKind.JSON:
            where = _place_of_fault(read_json(asked), reason, tokenizer, any_whitespace=self._any_whitespace)
        raise RequestError(f"{asked.kind} cannot be compiled: {where}{reason}", param=asked.param)


def _failed(matcher: LLMatcher) -> LLMatcher | None:
    """The matcher, or a copy of it that has taken a token, if it is in error; some faults show only then.

    What the first token needs is computed here, not in a step.
    """
    if matcher.is_error():
        return matcher
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    if matcher.is_error():
        return matcher
    after = matcher.deep_copy()
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    if len(allowed) and after.consume_token(int(allowed[-1])):
        after.compute_bitmask()
    return after if after.is_error() else None


def _reason(matcher: LLMatcher) -> str:
    """What is wrong, without the state of the parser."""
    text = str(matcher.get_error()).partition("<state>")[0].strip()
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}…"


def _place_of_fault(schema: Any, reason: str, tokenizer: LLTokenizer, *, any_whitespace: bool) -> str:
    """ "at /properties/a: ", the innermost schema that fails for the same reason by itself; empty at the top."""
    if not isinstance(schema, dict):
        return ""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, left = "", _MOST_CHECKED
    descends = True
    while descends:
        descends = False
        for name, inner in _schemas_in(schema):
            left -= 1
            text = json_grammar({**definitions, **inner}, any_whitespace=any_whitespace)
            error, messages = LLMatcher.validate_grammar_with_warnings(text, tokenizer, limits=LIMITS)
            if error and any(reason[:80] in each for each in messages):
                path, schema, descends = f"{path}/{name}", inner, True
                break
            if left <= 0:
                return f"at {path}: " if path else ""
    return f"at {path}: " if path else ""


def _schemas_in(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly within one, with their places."""
    for key in _SCHEMA_KEYS:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
    for key in _SCHEMA_LIST_KEYS:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}/{i}", each) for i, each in enumerate(schema[key]) if isinstance(each, dict))
    for key in _SCHEMA_MAP_KEYS:
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}/{name}", each) for name, each in schema[key].items() if isinstance(each, dict))


def grammar_text(asked: StructuredOutput, *, any_whitespace: bool, special_tokens: SpecialTokens) -> str:
    """The grammar of what is asked for. any_whitespace: as in json_options. Raises RequestError."""
    match asked.kind:
        case StructureKind.JSON_OBJECT:
            return json_grammar({"type": "object"}, any_whitespace=any_whitespace)
        case StructureKind.JSON:
            return json_grammar(read_json(asked), any_whitespace=any_whitespace)
        case StructureKind.REGEX:
            return str(LLMatcher.grammar_from_lark(f"start: /{lark_regex(asked.text)}/"))
        case StructureKind.CHOICE:
            return str(LLMatcher.grammar_from_lark(_choice_grammar(asked)))
        case StructureKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(lark_grammar(asked.text)))
        case StructureKind.STRUCTURAL_TAG:
            tree = read_json(asked)
            options = dict(json_options(any_whitespace=any_whitespace))
            return str(LLMatcher.grammar_from_lark(structural_tag_grammar(tree, options, special_tokens)))


def json_grammar(schema: Any, *, any_whitespace: bool) -> str:
    """The grammar of the JSON values that match a schema. Raises RequestError unless it is an object or true."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(f"the JSON schema is {json.dumps(schema)[:80]}; it must be an object")
    text = json.dumps(schema)
    return str(LLMatcher.grammar_from_json_schema(text, overrides=json_options(any_whitespace=any_whitespace)))


def json_options(*, any_whitespace: bool) -> "JsonCompileOptions":
    """How llguidance writes JSON.

    any_whitespace: between values there may be any. Otherwise it is as in json.dumps: a space follows each comma
    and colon, so that the text between two values is known, and a model cannot fill its answer with blanks.
    """
    if any_whitespace:
        return {"whitespace_flexible": True}
    return {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def lark_grammar(text: str) -> str:
    """Lark's notation of a grammar in Lark's or in GBNF's notation. Raises RequestError."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises plain exceptions for bad input
        raise RequestError(f"the grammar cannot be read: {error}") from None


def lark_regex(text: str) -> str:
    """The regular expression as it stands between slashes in Lark's notation; \\d, \\w and \\s are ASCII."""
    return str(regex_to_lark(text, "dws"))


def read_json(asked: StructuredOutput) -> Any:
    """Raises RequestError for text that is not JSON, or is nested too deeply."""
    try:
        return json.loads(asked.text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{asked.kind} is not JSON: {error}") from None


def _choice_grammar(asked: StructuredOutput) -> str:
    choices = read_json(asked)
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise RequestError("choice must be a list of one or more strings")
    return "start: " + " | ".join(json.dumps(each, ensure_ascii=False) for each in choices)
