"""GrammarCompiler: from what requests ask for to matchers of llguidance, compiled once for equal ones.

A StructuredOutput is translated to JSON text or to Lark's notation (`grammar_text`), with only its form checked;
whether the grammar makes sense is found when it is compiled. That takes llguidance milliseconds, with the
interpreter lock released; it builds the states of its lexer while masks are computed. Each grammar is first
compiled in a process that can be killed (trials.py), and then here if it stayed within its budget of processor
time, memory and stack. llguidance's own limits cannot replace that: `multipleOf` and `allOf` use no fuel, and
deep references overflow the stack. A list of costly keywords cannot either: their cost depends on their numbers.
"""

import contextlib
import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from faser.engine.structure.grammar_checks import LIMITS, fault, json_options, schema_grammar
from faser.engine.structure.structural_tags import SpecialTokens, structural_tag_grammar
from faser.engine.structure.trials import COSTLY, Budget, Trials
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import GrammarCostError, ModelError, OverloadError, RequestError
from faser.machine import return_free_memory
from faser.types.sampling import StructuredOutput, StructureKind

MAX_CACHED = 128  # grammars
MAX_CACHED_BYTES = 128 << 20  # of them together; ordinary ones take less than a megabyte, the largest 80
MAX_HELD_BYTES = 512 << 20  # of the grammars of open requests
_RETRY_HELD_S = 5
_WORD = 64  # the vocabulary is filled up to a multiple: masks are read in words of 64 bits


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
        self._prepared: tuple[LLTokenizer, dict[str, int], Trials] | None = None
        self._failure: RequestError | None = None
        self._cached: OrderedDict[tuple[StructureKind, str], _Compiled] = OrderedDict()
        self._held: dict[int, _Compiled] = {}  # by the id of what asks for it

    @property
    def mask_words(self) -> int:
        """Words of 64 bits in a mask."""
        tokenizer, _, _ = self._tokenizer()
        return int(tokenizer.vocab_size) // _WORD

    def prepare(self) -> threading.Thread:
        """Load the tokenizer in a thread, which takes a second. A failure is reported to every request."""
        thread = threading.Thread(target=self._prepare, name="faser-grammars", daemon=True)
        thread.start()
        return thread

    def hold(self, asked: StructuredOutput, budget: Budget) -> None:
        """Compile a grammar, and keep it for as long as `asked` exists, so that no step compiles it again.

        Raises what `matcher` raises, and OverloadError where the grammars of open requests take too much memory.
        """
        compiled = self._find(asked, budget)
        held = {id(each): each.num_bytes for each in [*self._held.values(), compiled]}
        if (num_bytes := sum(held.values())) > MAX_HELD_BYTES:
            raise OverloadError(
                f"with this one the grammars of open requests take {num_bytes >> 20} MB; "
                f"the limit is {MAX_HELD_BYTES >> 20} MB; try again when some of them have ended",
                retry_after_s=_RETRY_HELD_S,
            )
        self._held[id(asked)] = compiled
        weakref.finalize(asked, self._held.pop, id(asked), None).atexit = False

    def matcher(self, asked: StructuredOutput, budget: Budget = COSTLY) -> LLMatcher:
        """A matcher at the start of an answer; the caller may advance it.

        Raises RequestError for what cannot be compiled, that says where; its param is that of the request. It is a
        GrammarCostError for what is beyond the budget. Raises TrialUnwantedError as Trials.run does.
        """
        return (self._held.get(id(asked)) or self._find(asked, budget)).matcher.deep_copy()

    def _find(self, asked: StructuredOutput, budget: Budget) -> "_Compiled":
        key = asked.kind, asked.text
        with self._lock:
            found = self._cached.get(key)
            if found is not None:
                self._cached.move_to_end(key)
        if found is None:
            found = self._compile(asked, budget)
            with self._lock:
                self._cached[key] = found
                while len(self._cached) > MAX_CACHED or self._cached_bytes() > MAX_CACHED_BYTES:
                    self._cached.popitem(last=False)
        return found

    def _cached_bytes(self) -> int:
        return sum([each.num_bytes for each in self._cached.values()])

    def alone(self, asked: StructuredOutput) -> LLMatcher:
        """A matcher whose lexer is no other matcher's; compiled anew.

        The lexer of the cached one has met a limit, as all matchers that share it find: it is forgotten. The
        grammar has compiled within its budget before.
        """
        with self._lock:
            self._cached.pop((asked.kind, asked.text), None)
        tokenizer, special_tokens, _ = self._tokenizer()
        text = grammar_text(asked, any_whitespace=self._any_whitespace, special_tokens=special_tokens)
        return LLMatcher(tokenizer, text, log_level=0, limits=self._limits)

    def _prepare(self) -> None:
        with contextlib.suppress(RequestError):
            self._tokenizer()

    def _tokenizer(self) -> tuple[LLTokenizer, dict[str, int], Trials]:
        """llguidance's view of the tokenizer, the special tokens, and trials with the same tokenizer."""
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

    def _read_tokenizer(self) -> tuple[LLTokenizer, dict[str, int], Trials]:
        try:
            tokenizer = self._load_tokenizer()
            size = max(tokenizer.vocab_size, self.vocab_size)
            text, num_tokens = tokenizer.to_json(), -(-size // _WORD) * _WORD
            eos_token = [each for each in self.eos_token_ids if each < size] or None
            found = LLTokenizer(text, n_vocab=num_tokens, eos_token=eos_token)
        except (ModelError, ValueError) as error:
            raise RequestError(
                f"structured output is not possible with this model's tokenizer: {error}"
            ) from error
        special_tokens = tokenizer.special_tokens()
        setup = json.dumps({"tokenizer": text, "n_vocab": num_tokens, "eos_token": eos_token}).encode()
        del tokenizer, text
        return_free_memory()
        return found, special_tokens, Trials(setup)

    def _compile(self, asked: StructuredOutput, budget: Budget) -> "_Compiled":
        tokenizer, special_tokens, trials = self._tokenizer()
        try:
            text = grammar_text(asked, any_whitespace=self._any_whitespace, special_tokens=special_tokens)
            schema = read_json(asked) if asked.kind is StructureKind.JSON else None
            trial = trials.run(text, schema, budget, any_whitespace=self._any_whitespace)
        except GrammarCostError as error:
            raise GrammarCostError(f"{asked.kind} cannot be compiled: {error}", param=asked.param) from None
        except RequestError as error:
            raise RequestError(str(error), param=asked.param) from None
        reason = trial.fault
        if reason is None:
            compiled = _Compiled(LLMatcher(tokenizer, text, log_level=0, limits=self._limits), trial.num_bytes)
            reason = fault(compiled.matcher)
        if reason is not None:
            raise RequestError(f"{asked.kind} cannot be compiled: {reason}", param=asked.param)
        return compiled


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar. matcher: at its start. num_bytes: memory that it takes."""

    matcher: LLMatcher
    num_bytes: int


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
    return schema_grammar(schema, any_whitespace=any_whitespace)


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
