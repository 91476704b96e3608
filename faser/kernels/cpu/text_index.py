"""Texts in native memory, and drafts copied from them: the Python side of native/lookup.cpp.

One caller at a time, from any thread; calls release the interpreter lock.
"""

import ctypes
import secrets
import weakref
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from faser.kernels.cpu import library as native_library
from faser.kernels.cpu.build import COMPILERS, PREBUILT_DIR, library_path
from faser.types.engine import ProgressCallback

MAX_TOKEN_ID = 2**31 - 1
UNLIMITED = 2**62  # bytes
_NO_TEXT, _NO_TOKEN = 1, 2  # what calls return; 0: no fault


def text_library(
    cache_dir: Path,
    *,
    compilers: Sequence[str] = COMPILERS,
    prebuilt_dir: Path = PREBUILT_DIR,
    progress: ProgressCallback | None = None,
) -> ctypes.CDLL:
    """The library with the native look-up. progress, ConfigError: as in library_path."""
    return native_library.load(
        library_path(cache_dir=cache_dir, compilers=compilers, prebuilt_dir=prebuilt_dir, progress=progress)
    )


class NgramTable:
    """An n-gram model in native memory. Does not change; any number of indexes may read it.

    contexts: [N, W] int32, each at the end of its row, with -1 before shorter ones; none twice. With a context,
    all that it ends with are there too. following: [N] int32, the token after each. chances: [N] float64.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        contexts: NDArray[np.int32],
        following: NDArray[np.int32],
        chances: NDArray[np.float64],
    ) -> None:
        contexts, following = (np.ascontiguousarray(each, dtype=np.int32) for each in (contexts, following))
        chances = np.ascontiguousarray(chances, dtype=np.float64)
        assert contexts.shape == (len(following), contexts.shape[1]), contexts.shape
        assert len(following) == len(chances), (len(following), len(chances))
        self.address: int = library.faser_ngrams_new(
            contexts.ctypes.data, contexts.shape[1], following.ctypes.data, chances.ctypes.data, len(following)
        )
        weakref.finalize(self, library.faser_ngrams_free, self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """Rules by which drafts are looked up: by suffix, by n-gram, by an n-gram model, or by several of them.

    cap: longest draft, in tokens. depth: longest context that suffix look-up compares; 0: no suffix drafts.
    max_spec_factor: longest suffix draft, as a multiple of its context. min_token_prob: a suffix draft ends before
    a token that follows in a smaller share of the occurrences. max_outputs, max_tokens: limits of the corpus.
    min_n, max_n: lengths of n-grams; 0: no n-gram drafts. ngrams: None: no drafts by an n-gram model.
    chunk: most positions that one call of extend indexes. max_bytes: an index that holds more indexes no more.
    """

    cap: int
    depth: int = 0
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.0
    max_outputs: int = 0
    max_tokens: int = 0
    min_n: int = 0
    max_n: int = 0
    ngrams: NgramTable | None = None
    chunk: int = 2048
    max_bytes: int = UNLIMITED


class TextIndex:
    """Many texts by number, which grow at their ends, and a bounded corpus of the outputs of closed texts.

    extend indexes texts, a chunk a call, so that a long one holds no step up. Of positions that are not indexed
    look-ups scan the latest 4096, so of a text that has just been opened they may miss earlier ones.

    seed: of the keys that contexts are found by, 64 bits. None: a secret one, so that no client can choose tokens
    whose keys collide. No draft depends on it.
    Raises KeyError for a number that has no text, or that has one already when it is opened; ValueError for a
    token id that is negative or above MAX_TOKEN_ID. A call that raises has changed nothing.
    """

    def __init__(self, library: ctypes.CDLL, rules: TextRules, *, seed: int | None = None) -> None:
        assert rules.max_n == 0 or 1 <= rules.min_n <= rules.max_n, rules
        self.rules = rules
        struct = native_library.TextRulesStruct(
            cap=rules.cap,
            depth=rules.depth,
            max_outputs=rules.max_outputs,
            max_tokens=rules.max_tokens,
            min_n=rules.min_n,
            max_n=rules.max_n,
            chunk=rules.chunk,
            max_bytes=rules.max_bytes,
            factor=rules.max_spec_factor,
            min_share=rules.min_token_prob,
            seed=secrets.randbits(64) if seed is None else seed,
            ngrams=None if rules.ngrams is None else rules.ngrams.address,
        )
        self.num_methods = (rules.depth > 0) + (rules.max_n > 0) + (rules.ngrams is not None)
        self._library = library
        self._extend_call, self._look_up_call = library.faser_texts_extend, library.faser_texts_look
        self.address: int = library.faser_texts_new(ctypes.addressof(struct))
        weakref.finalize(self, library.faser_texts_free, self.address)

    @property
    def num_remembered(self) -> int:
        """Tokens in the corpus."""
        return int(self._library.faser_texts_remembered(self.address))

    @property
    def num_bytes(self) -> int:
        return int(self._library.faser_texts_bytes(self.address))

    def open(self, number: int, token_ids: Sequence[int], *, unsaid: int = 0, salt: bytes = b"") -> None:
        """A text begins. unsaid: index of the first token that goes into the corpus when the text is closed.

        salt: a digest, of which 64 bits count; only texts of the same salt find it there.
        """
        assert 0 <= unsaid <= len(token_ids), (unsaid, len(token_ids))
        tokens = _packed(token_ids)
        done = self._library.faser_texts_open(
            self.address, number, tokens.buffer_info()[0], len(tokens), unsaid, int.from_bytes(salt[-8:])
        )
        _check(done, (number,), token_ids)

    def extend(self, numbers: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> None:
        """Append to text numbers[i] the next counts[i] of the tokens, and index a chunk of any text."""
        assert sum(counts) == len(token_ids), (counts, len(token_ids))
        tokens, which, num_new = _packed(token_ids), array("q", numbers), array("q", counts)
        done = self._extend_call(
            self.address,
            which.buffer_info()[0],
            num_new.buffer_info()[0],
            len(which),
            tokens.buffer_info()[0],
        )
        if done:
            _check(done, numbers, tokens)

    def close(self, number: int) -> None:
        """Free a text. With suffix look-up, its tokens from `unsaid` on go into the corpus."""
        _check(self._library.faser_texts_close(self.address, number), (number,), ())

    def rebuild(self, number: int | None) -> bool:
        """Compare a text's index with one made anew from its tokens, and take that one where they differ.

        number: None: the corpus. Returns whether they differed.
        """
        return bool(self._library.faser_texts_rebuild(self.address, -1 if number is None else number))

    def look_up(
        self,
        numbers: Sequence[int],
        max_tokens: Sequence[int],
        unverified: Sequence[Sequence[int]],
        *,
        lengths: NDArray[np.int64],
        token_ids: NDArray[np.int64],
        confidences: NDArray[np.float64],
    ) -> None:
        """Drafts of at most max_tokens[i] tokens for text numbers[i], as if it ended with unverified[i].

        They are written into lengths, [D], token_ids and confidences, [D, K]: one for each of the N texts by the
        first method (suffix, n-gram, n-gram model), then by the next, so D is N times num_methods. What lies
        beyond a length is left as it was.
        """
        count = len(numbers)
        shape = (self.num_methods * count, token_ids.shape[1])
        assert lengths.shape == shape[:1], (lengths.shape, shape)
        assert token_ids.shape == confidences.shape == shape, (token_ids.shape, confidences.shape, shape)
        tokens = _packed(chain.from_iterable(unverified))
        which, limits = array("q", numbers), array("q", max_tokens)
        num_unverified = array("q", map(len, unverified))
        done = self._look_up_call(
            self.address,
            which.buffer_info()[0],
            limits.buffer_info()[0],
            num_unverified.buffer_info()[0],
            count,
            tokens.buffer_info()[0],
            shape[1],
            id(lengths),
            id(token_ids),
            id(confidences),
        )
        if done:
            _check(done, numbers, tokens)


def _packed(token_ids: Iterable[int]) -> "array[int]":
    try:
        return array("i", token_ids)
    except OverflowError as error:
        raise ValueError(f"a token id does not fit; it must be at most {MAX_TOKEN_ID}: {error}") from error


def _check(done: int, numbers: Sequence[int], token_ids: Iterable[int]) -> None:
    if done == _NO_TOKEN:
        raise ValueError(f"a token id is {min(token_ids)}; it must be at least 0 and at most {MAX_TOKEN_ID}")
    if done == _NO_TEXT:
        raise KeyError(f"one of the numbers {list(numbers)} names no text, or one that is open already")
