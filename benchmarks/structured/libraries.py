"""Two libraries for structured output, side by side: llguidance and xgrammar.

    python -m benchmarks.structured.libraries --tokenizer PATH --tokenizer OTHER --out structured-libraries.json

A tokenizer is a model's directory or a .gguf file.

For each tokenizer and library: how long it takes to prepare the tokenizer, to compile each of the 200 schemas, and
to compute the mask of one row along random walks through the grammars; and whether what a walk completes validates
with jsonschema. Both walk with the same random numbers, one thread each. xgrammar is no dependency of FASER:
install it with `pip install --no-deps xgrammar apache-tvm-ffi`.
"""

import argparse
import importlib.metadata
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jsonschema
import numpy as np
from numpy.typing import NDArray

from benchmarks.structured.schemas import NamedSchema, all_schemas
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer

MAX_WALK = 200  # tokens
SEPARATORS = (", ", ": ")
_SEED = 7
Words = NDArray[np.int32]


class Matcher(Protocol):
    """One sequence in one grammar."""

    def fill(self, words: Words) -> None:
        """Write the mask of the next token, one bit a token."""
        ...

    def accept(self, token_id: int) -> bool: ...


Compile = Callable[[str], Matcher]


class _Llguidance:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, words: Words) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.consume_token(token_id))


def llguidance_compiler(tokenizer: Tokenizer, eos_token_id: int) -> Compile:
    import llguidance

    prepared = llguidance.LLTokenizer(tokenizer.to_json(), n_vocab=tokenizer.vocab_size, eos_token=eos_token_id)
    item, key = SEPARATORS
    options: Any = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}

    def compile_one(schema: str) -> Matcher:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
        matcher = llguidance.LLMatcher(prepared, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return _Llguidance(matcher)

    return compile_one


class _Xgrammar:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._words: Any = None

    def fill(self, words: Words) -> None:
        import torch

        self._matcher.fill_next_token_bitmask(torch.from_numpy(words)[None])

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))


def xgrammar_compiler(tokenizer: Tokenizer, eos_token_id: int) -> Compile:
    import xgrammar  # type: ignore[import-not-found, unused-ignore]

    vocabulary = [
        b"" if tokenizer.is_special(i) else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)
    ]
    info = xgrammar.TokenizerInfo(
        vocabulary,
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=tokenizer.vocab_size,
        stop_token_ids=[eos_token_id],
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile_one(schema: str) -> Matcher:
        compiled = compiler.compile_json_schema(
            schema, any_whitespace=False, separators=SEPARATORS, strict_mode=True
        )
        return _Xgrammar(xgrammar.GrammarMatcher(compiled))

    return compile_one


LIBRARIES: dict[str, Callable[[Tokenizer, int], Compile]] = {
    "llguidance": llguidance_compiler,
    "xgrammar": xgrammar_compiler,
}


@dataclass(slots=True)
class Measured:
    """Of one library with one tokenizer. masks_us: of rows along the walks; first_masks_us: of first rows."""

    compile_ms: list[float] = field(default_factory=list)
    masks_us: list[float] = field(default_factory=list)
    first_masks_us: list[float] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    invalid: dict[str, str] = field(default_factory=dict)
    completed: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "schemas_compiled": len(self.compile_ms),
            "refused": self.refused,
            "walks_completed": self.completed,
            "completed_and_invalid": self.invalid,
            "compile_ms": _spread(self.compile_ms),
            "first_mask_us": _spread(self.first_masks_us),
            "mask_us": _spread(self.masks_us),
        }


def measure(library: str, tokenizer: Tokenizer, schemas: tuple[NamedSchema, ...]) -> dict[str, Any]:
    """All figures of one library with one tokenizer."""
    eos_token_id = tokenizer.token_id(tokenizer.eos_token or "")
    assert eos_token_id is not None, "the tokenizer names no end-of-sequence token"
    began = time.perf_counter()
    compile_one = LIBRARIES[library](tokenizer, eos_token_id)
    prepare_s = time.perf_counter() - began
    found = Measured()
    for each in schemas:
        began = time.perf_counter()
        try:
            matcher = compile_one(json.dumps(each.schema))
        except Exception as error:
            found.refused[each.name] = str(error)[:200]
            continue
        found.compile_ms.append((time.perf_counter() - began) * 1e3)
        _walk(matcher, each, tokenizer, eos_token_id, found)
    return {"prepare_tokenizer_s": round(prepare_s, 3), **found.as_json()}


def _walk(matcher: Matcher, each: NamedSchema, tokenizer: Tokenizer, eos_token_id: int, found: Measured) -> None:
    """Random allowed tokens until the end or MAX_WALK. The end is taken where it is allowed."""
    rng, token_ids = random.Random(_SEED), list[int]()
    words = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    for i in range(MAX_WALK):
        began = time.perf_counter()
        matcher.fill(words)
        (found.masks_us if i else found.first_masks_us).append((time.perf_counter() - began) * 1e6)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if eos_token_id in allowed:
            found.completed += 1
            _validate(each, tokenizer.decode(token_ids), found)
            return
        token_id = int(allowed[rng.randrange(len(allowed))])
        token_ids.append(token_id)
        if not matcher.accept(token_id):
            found.invalid[each.name] = f"refused a token that its own mask allows, after {i} tokens"
            return


def _validate(each: NamedSchema, text: str, found: Measured) -> None:
    try:
        jsonschema.validate(
            json.loads(text), each.schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
    except (ValueError, jsonschema.ValidationError) as error:
        found.invalid[each.name] = f"{text[:120]!r}: {str(error).splitlines()[0][:120]}"


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 2),
        "p99": round(ordered[min(int(len(ordered) * 0.99), len(ordered) - 1)], 2),
        "max": round(ordered[-1], 2),
        "mean": round(statistics.fmean(ordered), 2),
    }


def installed(library: str) -> dict[str, Any]:
    """Its version, the size of its files, and what else it brings."""
    package = importlib.metadata.distribution(library)
    size = sum(Path(str(package.locate_file(each))).stat().st_size for each in package.files or ())
    needs = [each.split(";")[0].strip() for each in package.requires or () if "extra ==" not in each]
    return {"version": package.version, "size_mb": round(size / 1e6, 1), "requires": needs}


def _results(paths: list[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    schemas = all_schemas()
    for library in LIBRARIES:
        yield library, {"package": installed(library)}
    for path in paths:
        tokenizer = load_tokenizer(path)
        for library in LIBRARIES:
            yield library, {f"vocabulary of {tokenizer.vocab_size}": measure(library, tokenizer, schemas)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    results: dict[str, dict[str, Any]] = {library: {} for library in LIBRARIES}
    for library, part in _results(asked.tokenizer):
        results[library] |= part
    text = json.dumps(results, indent=1, ensure_ascii=False)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
