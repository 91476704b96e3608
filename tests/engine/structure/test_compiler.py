"""What cannot be compiled is refused with its place and its field; equal grammars are compiled once."""

import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from faser.engine.structure.compiler import MAX_CACHED, MAX_CACHED_BYTES, MAX_HELD_BYTES, GrammarCompiler
from faser.engine.structure.trials import COSTLY
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import ModelError, OverloadError, RequestError
from faser.types.sampling import MAX_STRUCTURE_CHARS, StructuredOutput, StructureKind
from tests.engine.structure.languages import EOS, LANGUAGES, the_compiler, the_tokenizer

JSON = StructureKind.JSON


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return the_compiler()


@pytest.mark.parametrize(
    "schema, message",
    [
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"type": "object", "properties": {"a": {"uniqueItems": True}}}, "at /properties/a: Unimplemented keys"),
        (
            {"$defs": {"n": {"type": "integer"}}, "anyOf": [{"$ref": "#/$defs/n"}, {"items": {"if": {}}}]},
            'at /anyOf/1/items: Unimplemented keys: ["if"]',
        ),
        ({"properties": {"x": {"type": "string", "pattern": "(["}}}, "at /properties/x: regex parse error"),
        (
            {
                "type": "object",
                "properties": {"x": {"minimum": 3, "maximum": 2, "type": "integer"}},
                "required": ["x"],
            },
            "required property 'x' is unsatisfiable",
        ),
        ({"$ref": "#/$defs/none"}, "'/$defs/none' does not exist"),
        ({"$ref": "#"}, "NoExtensionBias"),
        ([1], "the JSON schema is [1]; it must be an object"),
        (
            {"allOf": [{"anyOf": [{"properties": {f"{side}{i}": {}}} for side in "ab"]} for i in range(14)]},
            "too large",
        ),
        (
            {
                "type": "object",
                "allOf": [
                    {"anyOf": [{"properties": {f"{side}{i}": {"type": "integer"}}} for side in "ab"]}
                    for i in range(8)
                ],
            },
            "max is 2000",
        ),
    ],
)
def test_a_schema_that_cannot_be_compiled_is_refused_with_its_place(
    schema: Any, message: str, compiler: GrammarCompiler
) -> None:
    text = json.dumps(schema)
    with pytest.raises(RequestError) as refused:
        compiler.matcher(StructuredOutput(kind=JSON, text=text, param="response_format"))
    assert message in str(refused.value)
    assert refused.value.param == "response_format"


@pytest.mark.parametrize(
    "kind, text, message",
    [
        (StructureKind.REGEX, "(a", "unclosed group"),
        (StructureKind.REGEX, "a(?=b)", "look-around"),
        (StructureKind.GRAMMAR, "start: missing", 'unknown name: "missing"'),
        (StructureKind.GRAMMAR, "root ::= (", "grammar"),
        (StructureKind.CHOICE, "[]", "choice must be a list of one or more strings"),
        (StructureKind.CHOICE, "[1]", "choice must be a list of one or more strings"),
        (StructureKind.JSON, "{", "json is not JSON"),
        (StructureKind.JSON, "[" * 100_000, "json is not JSON"),
    ],
)
def test_other_kinds_are_refused_with_the_reason(
    kind: StructureKind, text: str, message: str, compiler: GrammarCompiler
) -> None:
    with pytest.raises(RequestError, match=message.replace("(", r"\(")):
        compiler.matcher(StructuredOutput(kind=kind, text=text))


def test_a_text_that_is_too_long_is_refused_when_it_is_made() -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_STRUCTURE_CHARS} are allowed"):
        StructuredOutput(kind=JSON, text=" " * (MAX_STRUCTURE_CHARS + 1))


def test_copies_of_a_matcher_are_independent(compiler: GrammarCompiler) -> None:
    first, second = (compiler.matcher(LANGUAGES["choice"].asked) for _ in range(2))
    token_id = the_tokenizer().encode("the")[0]
    assert first.consume_token(token_id)
    assert first.compute_bitmask() != second.compute_bitmask()
    assert second.compute_bitmask() == compiler.matcher(LANGUAGES["choice"].asked).compute_bitmask()


def test_the_oldest_grammars_are_forgotten() -> None:
    compiler = GrammarCompiler(the_tokenizer, vocab_size=512, eos_token_ids=(EOS,))
    for i in range(MAX_CACHED + 10):
        compiler.matcher(StructuredOutput(kind=StructureKind.REGEX, text=f"a{{{i}}}"))
    assert len(compiler._cached) == MAX_CACHED


def test_the_grammar_of_an_open_request_is_not_compiled_again() -> None:
    """Whatever else is compiled before it starts to run, so that no step has to compile."""
    compiler = GrammarCompiler(the_tokenizer, vocab_size=512, eos_token_ids=(EOS,))
    asked = StructuredOutput(kind=StructureKind.REGEX, text="held")
    compiler.hold(asked, COSTLY)
    compiler._cached.clear()
    assert not compiler.matcher(asked).is_error()
    assert not compiler._cached
    del asked
    assert not compiler._held


def test_large_grammars_are_forgotten_earlier() -> None:
    compiler = GrammarCompiler(the_tokenizer, vocab_size=512, eos_token_ids=(EOS,))
    compiler.matcher(LANGUAGES["choice"].asked)
    for key, found in [*compiler._cached.items()]:
        assert 0 < found.num_bytes < 8 << 20
        compiler._cached[key] = replace(found, num_bytes=MAX_CACHED_BYTES)
    compiler.matcher(LANGUAGES["regex"].asked)
    assert [kind for kind, _ in compiler._cached] == [StructureKind.REGEX]


def test_grammars_of_open_requests_have_a_limit_of_memory() -> None:
    compiler = GrammarCompiler(the_tokenizer, vocab_size=512, eos_token_ids=(EOS,))
    first, second, third = LANGUAGES["choice"].asked, LANGUAGES["regex"].asked, replace(LANGUAGES["choice"].asked)
    compiler.hold(first, COSTLY)
    (key,) = compiler._cached
    large = replace(compiler._cached[key], num_bytes=MAX_HELD_BYTES)
    compiler._cached[key] = compiler._held[id(first)] = large
    compiler.hold(third, COSTLY)  # an equal one takes nothing more
    with pytest.raises(OverloadError, match=r"the limit is 512 MB; try again when some of them have ended"):
        compiler.hold(second, COSTLY)


def test_the_tokenizer_is_loaded_once_by_many_threads() -> None:
    loaded = []

    def load() -> Tokenizer:
        loaded.append(1)
        return the_tokenizer()

    compiler = GrammarCompiler(load, vocab_size=512, eos_token_ids=(EOS,))
    compiler.prepare()
    threads = [threading.Thread(target=compiler.matcher, args=(each.asked,)) for each in LANGUAGES.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == [1]


def test_a_tokenizer_that_cannot_be_used_is_reported_to_every_request() -> None:
    def load() -> Tokenizer:
        raise ModelError("no tokenizer.json")

    compiler = GrammarCompiler(load, vocab_size=512, eos_token_ids=(EOS,))
    compiler.prepare().join()
    for _ in range(2):
        with pytest.raises(RequestError, match=r"this model's tokenizer: no tokenizer\.json"):
            compiler.matcher(LANGUAGES["choice"].asked)


def test_white_space_is_fixed_unless_the_operator_allows_any() -> None:
    asked, tokenizer = StructuredOutput(kind=JSON, text='{"const": {"a": [1, 2]}}'), the_tokenizer()

    def num_allowed(text: str, *, any_whitespace: bool) -> bool:
        token_ids = tokenizer.encode(text)
        matcher = the_compiler(any_whitespace=any_whitespace).matcher(asked)
        return bool(matcher.validate_tokens(token_ids) == len(token_ids))

    for text, fixed in (('{"a": [1, 2]}', True), ('{"a":[1,2]}', False), ('{\n  "a": [1,  2]\n}', False)):
        assert num_allowed(text, any_whitespace=False) is fixed
        assert num_allowed(text, any_whitespace=True) is True
