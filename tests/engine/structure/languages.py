"""Finite languages, written out, and which tokens may follow in them: the oracle of masks."""

import functools
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from faser.engine.checkpoints.tokenizer_settings import TokenizerSettings
from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.text.tokenizer import Tokenizer
from faser.types.sampling import StructuredOutput, StructureKind
from tests.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE, tiny_tokenizer

EOS = EOS_TOKEN_ID


@functools.cache
def the_tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(), TokenizerSettings())


@functools.cache
def the_compiler(*, vocab_size: int = VOCAB_SIZE, any_whitespace: bool = False) -> GrammarCompiler:
    return GrammarCompiler(
        the_tokenizer, vocab_size=vocab_size, eos_token_ids=(EOS,), any_whitespace=any_whitespace
    )


@dataclass(frozen=True)
class Language:
    """asked: whose answers are exactly these texts."""

    asked: StructuredOutput
    texts: tuple[bytes, ...]
    prefixes: frozenset[bytes] = field(init=False)

    def __post_init__(self) -> None:
        found = {text[:end] for text in self.texts for end in range(len(text) + 1)}
        object.__setattr__(self, "prefixes", frozenset(found))

    def allowed(self, tokenizer: Tokenizer, before: Iterable[int]) -> set[int]:
        """The tokens that may follow: by their bytes, and the end of the sequence after a whole text."""
        text = b"".join(map(tokenizer.token_bytes, before))
        found = {
            token_id
            for token_id in range(tokenizer.vocab_size)
            if not tokenizer.is_special(token_id)
            and tokenizer.token_bytes(token_id)
            and text + tokenizer.token_bytes(token_id) in self.prefixes
        }
        return found | ({EOS} if text in self.texts else set())


def language(kind: StructureKind, text: str, texts: Iterable[str]) -> Language:
    return Language(StructuredOutput(kind=kind, text=text), tuple(each.encode() for each in texts))


_SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["fox", "foxes", "é"]},
        "the_number_of_legs": {"type": "integer", "minimum": 8, "maximum": 12},
        "quick": {"type": ["boolean", "null"]},
    },
    "required": ["kind", "quick"],
    "additionalProperties": False,
}


def _objects() -> Iterable[str]:
    for kind, legs, quick in itertools.product(("fox", "foxes", "é"), (None, *range(8, 13)), (True, False, None)):
        number = {} if legs is None else {"the_number_of_legs": legs}
        yield json.dumps({"kind": kind, **number, "quick": quick}, ensure_ascii=False)


LANGUAGES = {
    "choice": language(
        StructureKind.CHOICE,
        json.dumps(["the fox", "the quick fox", "then", "", 'a "q" \\ \n', "Größe 🙂"]),
        ["the fox", "the quick fox", "then", "", 'a "q" \\ \n', "Größe 🙂"],
    ),
    "regex": language(
        StructureKind.REGEX,
        r"[ab]{1,3}/(the|then)?\d",
        [
            "".join(head) + "/" + word + str(digit)
            for count in (1, 2, 3)
            for head in itertools.product("ab", repeat=count)
            for word in ("", "the", "then")
            for digit in range(10)
        ],
    ),
    "schema": language(StructureKind.JSON, json.dumps(_SCHEMA), _objects()),
    "GBNF": language(
        StructureKind.GRAMMAR,
        'root ::= "x" pair? | "the" " "\npair ::= ("(" pair? ")") ',
        ["the ", "x", *("x" + "(" * depth + ")" * depth for depth in range(1, 40))],
    ),
    "Lark": language(
        StructureKind.GRAMMAR,
        'start: "a" B "c"\nB: /[0-9]{0,2}/',
        ["ac", *(f"a{i}c" for i in range(10)), *(f"a{i:02}c" for i in range(100))],
    ),
    "tag": language(
        StructureKind.STRUCTURAL_TAG,
        json.dumps(
            {
                "triggers": ["<f"],
                "tags": [
                    {"begin": "<f=a>", "schema": {"enum": [1, 22]}, "end": "</f>"},
                    {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
                ],
                "at_least_one": True,
                "stop_after_first": True,
            }
        ),
        ["<f=a>1</f>", "<f=a>22</f>", "<f=b>true</f>", "<f=b>false</f>"],
    ),
}
