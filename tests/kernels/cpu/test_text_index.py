"""Texts in native memory: what they refuse, what they cost, and that equal keys are not taken for equal contexts.

tests/engine/execution/drafting/test_native_lookup.py compares its drafts with those of Python. Planted bugs
that these tests have caught: found contexts are not compared; keys, holes or chains of forgotten text stay;
contexts reach from one output into the next; a closed text or an index is not freed; half a refused call is done;
a look-up, or a call of extend, indexes a whole text; an index grows beyond its bytes.
"""

import ctypes
import gc
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from faser.errors import ConfigError
from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.build import library_path
from faser.kernels.cpu.text_index import MAX_TOKEN_ID, TextIndex, TextRules, text_library

NGRAM = TextRules(cap=8, min_n=2, max_n=5)
SUFFIX = TextRules(cap=8, depth=24, max_outputs=100, max_tokens=5000)
BOTH = TextRules(cap=8, depth=24, max_outputs=100, max_tokens=5000, min_n=2, max_n=5)


@pytest.fixture(scope="module")
def library(kernel_cache: Path) -> ctypes.CDLL:
    return native_library.load(library_path(cache_dir=kernel_cache))


def drafts(index: TextIndex, numbers: Sequence[int], unverified: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of at most 8 tokens, by method and within a method by text."""
    count = index.num_methods * len(numbers)
    lengths, token_ids = np.zeros(count, dtype=np.int64), np.full((count, 9), -1)
    confidences = np.zeros((count, 9))
    index.look_up(
        numbers,
        [8] * len(numbers),
        unverified,
        lengths=lengths,
        token_ids=token_ids,
        confidences=confidences,
    )
    beyond = np.arange(9) >= lengths[:, None]
    assert (token_ids[beyond] == -1).all()
    assert not confidences[beyond].any()
    return [line[:length].tolist() for line, length in zip(token_ids, lengths, strict=True)]


def drafted(index: TextIndex, number: int, unverified: tuple[int, ...] = ()) -> list[list[int]]:
    """By method; empty where no method has a draft."""
    found = drafts(index, [number], [unverified])
    return found if any(found) else []


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("bad", [-1, -(2**31), MAX_TOKEN_ID + 1, -(2**31) - 1, 2**64])
def test_what_is_no_token_id_is_refused_and_changes_nothing(library: ctypes.CDLL, bad: int) -> None:
    index = TextIndex(library, BOTH)
    index.open(0, [7, 8, 9, 7, 8])
    before = drafted(index, 0)
    with pytest.raises(ValueError, match="a token id"):
        index.open(1, [1, bad])
    with pytest.raises(ValueError, match="a token id"):
        index.extend([0, 0], [1, 1], [9, bad])
    with pytest.raises(ValueError, match="a token id"):
        drafts(index, [0], [[bad]])

    assert drafted(index, 0) == before == [[9, 7], [9, 7, 8, 9, 7, 8, 9, 7]]
    index.open(1, [1])


def test_the_largest_token_id_is_drafted(library: ctypes.CDLL) -> None:
    index = TextIndex(library, NGRAM)
    index.open(0, [0, MAX_TOKEN_ID, MAX_TOKEN_ID, 0, MAX_TOKEN_ID])
    assert drafted(index, 0) == [[MAX_TOKEN_ID, 0, MAX_TOKEN_ID] * 2 + [MAX_TOKEN_ID, 0]]


def test_a_number_names_at_most_one_text(library: ctypes.CDLL) -> None:
    index = TextIndex(library, BOTH)
    index.open(3, [1, 2, 1])
    with pytest.raises(KeyError, match="3"):
        index.open(3, [1])
    for number in (-1, 0, 4, 10**12):
        with pytest.raises(KeyError, match=str(number)):
            index.extend([3, number], [1, 1], [2, 2])
        with pytest.raises(KeyError, match=str(number)):
            drafts(index, [3, number], [(), ()])
        with pytest.raises(KeyError, match=str(number)):
            index.close(number)
    assert drafted(index, 3) == [], "nothing was appended"


def test_of_an_output_longer_than_the_corpus_the_end_is_remembered(library: ctypes.CDLL) -> None:
    index = TextIndex(library, TextRules(cap=8, depth=4, max_outputs=3, max_tokens=10))
    index.open(0, [])
    index.extend([0], [100], range(100))
    index.close(0)
    assert index.num_remembered == 10
    for number, (context, expected) in enumerate([((88, 89), []), ((89, 90), []), ((90, 91), [[92, 93]])]):
        index.open(number, context)
        assert drafted(index, number) == expected


def test_a_long_text_is_indexed_in_chunks(library: ctypes.CDLL) -> None:
    """And its end is found before: what is not indexed is scanned, up to 4096 positions."""
    index = TextIndex(library, replace(BOTH, chunk=1000))
    text = [*range(10_000, 20_000)]
    index.open(0, text)
    early, late = tuple(text[1490:1499]), tuple(text[-3000:-2990])
    seen = []
    for _ in range(3):
        seen.append((bool(drafted(index, 0, early)), bool(drafted(index, 0, late))))
        index.extend([], [], [])
    assert seen == [(False, True), (False, True), (True, True)]
    assert drafted(index, 0, early) == [text[1499:1507]] * 2


def test_long_texts_take_turns_at_a_chunk(library: ctypes.CDLL) -> None:
    index = TextIndex(library, replace(BOTH, chunk=6000))
    texts = [range(begin, begin + 9000) for begin in (10_000, 30_000)]
    for number, text in enumerate(texts):
        index.open(number, text)
    seen = []
    for _ in range(3):
        index.extend([], [], [])
        seen.append([bool(drafted(index, number, tuple(text[2400:2406]))) for number, text in enumerate(texts)])
    assert seen == [[True, False], [True, True], [True, True]]


def test_an_index_that_is_full_indexes_no_more_and_still_scans(library: ctypes.CDLL) -> None:
    index = TextIndex(library, replace(BOTH, max_bytes=1 << 20))
    text = [*range(10_000, 50_000)]
    index.open(0, text)
    sizes = []
    for _ in range(20):
        index.extend([], [], [])
        sizes.append(index.num_bytes)
    assert sizes[-1] == sizes[-2] < 2 << 20, "one chunk may double the table"
    assert drafted(index, 0, tuple(text[1000:1006])) == [text[1006:1012], text[1006:1014]]
    assert not drafted(index, 0, tuple(text[30_000:30_006]))
    assert drafted(index, 0, tuple(text[39_000:39_006])) == [text[39_006:39_012], text[39_006:39_014]]


@pytest.mark.parametrize("rules", [NGRAM, SUFFIX, BOTH])
def test_closed_texts_leave_nothing_but_a_bounded_corpus(library: ctypes.CDLL, rules: TextRules) -> None:
    rng = random.Random(1)
    index = TextIndex(library, rules)
    sizes = []
    for _ in range(400):
        for number in range(3):
            index.open(number, [rng.randrange(5000) for _ in range(40)])
            index.extend([number], [40], [rng.randrange(5000) for _ in range(40)])
            drafted(index, number)
        for number in range(3):
            index.close(number)
        sizes.append(index.num_bytes)
    assert index.num_remembered == (0 if rules is NGRAM else 5000 // 80 * 80)
    assert max(sizes[60:]) == max(sizes[:60]) < (2000 if rules is NGRAM else 1_000_000)


@pytest.mark.full
def test_memory_is_given_back(library: ctypes.CDLL) -> None:
    """By closing a text as well as with the index: each of 16 texts has some 2 MB."""
    tokens = np.random.default_rng(0).integers(0, 100_000, 10_000).tolist()
    kept = 0
    for turn in range(8):
        index = TextIndex(library, BOTH)
        for number in range(2):
            index.open(number, tokens)
            for _ in range(10):
                index.extend([], [], [])
        assert index.num_bytes > 2 * 100 * len(tokens)
        index.close(0)
        del index
        gc.collect()
        if turn == 3:
            kept = resident_bytes()
    assert resident_bytes() - kept < 16 << 20


def colliding_contexts(length: int, seed: int) -> tuple[list[int], list[int]]:
    """Two contexts of this length with the same key: a last token makes hashes equal that nearly are."""
    tokens = np.random.default_rng(1).integers(0, MAX_TOKEN_ID, (1 << 19, length - 1), dtype=np.uint64)
    hashes = np.full(len(tokens), seed, dtype=np.uint64)
    for at in range(length - 1):  # the last token of the context is the first of the hash
        with np.errstate(over="ignore"):
            hashes = (hashes ^ tokens[:, at]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(32)
    order = np.argsort(hashes)
    high = (hashes >> np.uint64(31))[order]
    at = int(np.flatnonzero(high[1:] == high[:-1])[0])
    one, other = order[at], order[at + 1]
    firsts = 5, 5 ^ int(hashes[one] ^ hashes[other])
    return [firsts[0], *tokens[one, ::-1].tolist()], [firsts[1], *tokens[other, ::-1].tolist()]


@pytest.mark.parametrize("rules", [NGRAM, SUFFIX])
def test_another_context_with_the_same_key_is_not_taken_for_this_one(
    library: ctypes.CDLL, rules: TextRules
) -> None:
    seed = 0x0123456789ABCDEF
    known, other = colliding_contexts(5, seed)
    assert known != other
    index = TextIndex(library, rules, seed=seed)
    index.open(0, [*known, 77, 78, 1, *other])
    index.open(1, [*known, 77, 78, 1, *known])
    assert drafted(index, 0) == []
    assert drafted(index, 1)[0][:2] == [77, 78]

    index.extend([0], [1 + len(known)], [79, *known])
    assert drafted(index, 0)[0][0] == 77, "though 79 is the latest with the key"


def test_without_a_compiler_there_is_no_library(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler found .* install g\+\+"):
        text_library(tmp_path, compilers=("no-such-compiler",), prebuilt_dir=tmp_path)


def test_the_library_is_the_one_of_the_native_kernels(kernel_cache: Path) -> None:
    assert hasattr(text_library(kernel_cache), "faser_linear")
