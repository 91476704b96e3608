"""The n-gram model of a target: counted with its tokenizer in answers of two models.

The answers come with the package as text, so every vocabulary can count them. Made at the first start with a
tokenizer, and kept in the cache under what the tokenizer's file holds. Another model's answers are worth half
of the target's own or more, and more than no table (docs/measurements.md).
"""

import logging
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

from faser.engine.checkpoints.ngram_model import NgramModel, count, load, save, shipped_answers
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import ConfigError, ModelError, RequestError
from faser.files import replacing
from faser.types.engine import ProgressCallback

_log = logging.getLogger("faser")

LEAST_VOCABULARY = 8192  # tokens; smaller ones spell words out, of which a few tokens say little
_MOST_BYTES = 16 << 20  # of a file, from its beginning: that is all of tokenizer.json, and the tokens of GGUF
_FORMAT = b"1"  # of the answers, and of how they are counted


def counted_ngram_model(
    tokenizer: Path, vocab_size: int, folder: Path, report: ProgressCallback
) -> NgramModel | None:
    """Return what was counted with this tokenizer, now or at an earlier start; None where nothing can be.

    tokenizer: its directory, or a GGUF file. folder: of the cache. report: called before it counts.
    """
    if vocab_size < LEAST_VOCABULARY:
        return None
    try:
        path = folder / f"{_digest(tokenizer)}.npz"
        with suppress(ConfigError):  # the file is damaged
            if path.exists():
                return load(path, vocab_size=vocab_size)
        report("counting n-grams", 0, 0)
        encode = load_tokenizer(tokenizer).encode
        texts = [encode(answer, add_special_tokens=False) for answer in shipped_answers()]
        found = count(texts, about={"answers": len(texts), "tokens": sum(map(len, texts))})
    except (ConfigError, ModelError, RequestError, OSError) as error:
        _log.warning("no n-gram model drafts; it would be counted with the model's tokenizer: %s", error)
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            save(found, new)
    except OSError as error:
        _log.warning("the n-gram model cannot be cached and will be counted again at every start: %s", error)
    return found


def _digest(tokenizer: Path) -> str:
    digest = blake2b(_FORMAT, digest_size=12)
    with (tokenizer if tokenizer.is_file() else tokenizer / "tokenizer.json").open("rb") as file:
        digest.update(file.read(_MOST_BYTES))
    return digest.hexdigest()
