"""NgramModel: which token follows the last one to three, counted in text that models themselves have made up.

Models' answers to questions of their own making tell which words follow which in answers to others. The table
knows no client's text: it is made before the model serves, and nothing is ever added to it. The file is numpy's
.npz. Source: arXiv 2411.03786, whose bigrams come from the model's weights instead.
"""

import json
import lzma
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from faser.errors import ConfigError
from faser.files import parse_json
from faser.types.arrays import NO_TOKEN

LONGEST = 3  # tokens of a context; longer ones were found to bring nothing
FEWEST = 2  # times that a context must have occurred
_DOUBT = 2.0  # tokens of context that make one occurrence an even bet are 2
_FORMAT = 1
_ARRAYS = ("contexts", "following", "shares")
_SHARES = 255  # chances are stored in steps of 1 / 255
ANSWERS_END = "\x1e"  # between two answers of the text
_SHIPPED = Path(__file__).parent / "ngrams"


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramModel:
    """contexts: [N, W] int32, each at the end of its row after NO_TOKENs; none twice. following: [N] int32.

    With a context, all that it ends with are there as well. chances: [N] float64, above 0 and below 1, that
    `following` follows. about: how it was made.
    """

    contexts: NDArray[np.int32]
    following: NDArray[np.int32]
    chances: NDArray[np.float64]
    about: dict[str, Any] = field(default_factory=dict)


def count(
    texts: Iterable[Sequence[int]],
    *,
    longest: int = LONGEST,
    fewest: int = FEWEST,
    about: dict[str, Any] | None = None,
) -> NgramModel:
    """The model of these texts, each a sequence of token ids. Contexts do not reach from one text into the next.

    A chance is c / (n + 2 / L): of the n times that a context of L tokens occurred, the token followed c times.
    Raises ConfigError where no context occurs `fewest` times.
    """
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for text in texts:
        for at in range(1, len(text)):
            for length in range(1, min(longest, at) + 1):
                counts[tuple(text[at - length : at])][text[at]] += 1
    rows = []
    for context, found in counts.items():
        if (total := found.total()) >= fewest:
            token, times = min(found.items(), key=lambda item: (-item[1], item[0]))
            rows.append((context, token, times / (total + _DOUBT / len(context))))
    if not rows:
        raise ConfigError(f"no context occurs {fewest} times in these texts; an n-gram model needs more text")
    rows.sort()
    padded = [(NO_TOKEN,) * (longest - len(context)) + context for context, _, _ in rows]
    shares = _stored([chance for _, _, chance in rows])
    return NgramModel(
        contexts=np.array(padded, dtype=np.int32),
        following=np.array([token for _, token, _ in rows], dtype=np.int32),
        chances=_chances(shares),
        about=dict(about or {}),
    )


def shipped_answers() -> list[str]:
    """The answers that come with this package, to be counted with any tokenizer."""
    return lzma.decompress((_SHIPPED / "answers.txt.xz").read_bytes()).decode().split(ANSWERS_END)


def save(model: NgramModel, path: Path) -> None:
    about = json.dumps({"format": _FORMAT, **model.about})
    with path.open("wb") as file:  # to a name numpy would add its own suffix
        np.savez_compressed(
            file,
            contexts=model.contexts,
            following=model.following,
            shares=_stored(model.chances),
            about=np.array(about),
        )


def load(path: Path, *, vocab_size: int) -> NgramModel:
    """Raises ConfigError for a file that is none, and that names a token id which the model's vocabulary lacks."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            about = parse_json(str(stored["about"]))
            contexts, following, shares = (stored[name] for name in _ARRAYS)
    except (OSError, KeyError, TypeError, AttributeError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is no n-gram model: {error}") from error
    if about.pop("format", None) != _FORMAT or not _fit(contexts, following, shares):
        raise ConfigError(f"{path} is no n-gram model of format {_FORMAT}")
    present = contexts != NO_TOKEN
    if not present[:, -1].all() or (present[:, :-1] > present[:, 1:]).any():
        raise ConfigError(f"the n-gram model {path} has a context that is empty, or that has a gap")
    for token_id in (
        int(following.min()),
        int(contexts[present].min()),
        int(following.max()),
        int(contexts.max()),
    ):
        if not 0 <= token_id < vocab_size:
            raise ConfigError(
                f"the n-gram model {path} has token id {token_id}; the model's vocabulary has {vocab_size} "
                "tokens: it was counted for another model"
            )
    return NgramModel(
        contexts=contexts.astype(np.int32),
        following=following.astype(np.int32),
        chances=_chances(shares),
        about=about,
    )


def _fit(contexts: NDArray[Any], following: NDArray[Any], shares: NDArray[Any]) -> bool:
    """Return whether these are the arrays of a model, by their types and sizes."""
    ids = contexts.dtype.kind == following.dtype.kind == "i" and shares.dtype == np.uint8
    sizes = contexts.ndim == 2 and contexts.size > 0 and following.shape == shares.shape == (len(contexts),)
    return ids and sizes


def _stored(chances: Sequence[float] | NDArray[np.float64]) -> NDArray[np.uint8]:
    steps = np.clip(np.rint(np.asarray(chances) * _SHARES), 1, _SHARES - 1)
    return np.asarray(steps, dtype=np.uint8)


def _chances(shares: NDArray[np.uint8]) -> NDArray[np.float64]:
    return shares.astype(np.float64) / _SHARES
