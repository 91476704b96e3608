"""What comes with this package to draft for a model: made by it from its own answers, found by its name.

ngrams/NAME-VOCABULARY.npz    an n-gram model (checkpoints/ngram_model.py)
heads/NAME-VOCABULARY/        a head as `faser distill` writes it, with its log
"""

from pathlib import Path

FOLDER = Path(__file__).parent


def shipped_ngram_model(model_name: str, vocab_size: int) -> Path | None:
    """The file for a model of this name and vocabulary; None: there is none."""
    path = FOLDER / "ngrams" / f"{_key(model_name, vocab_size)}.npz"
    return path if path.exists() else None


def shipped_head(model_name: str, vocab_size: int) -> Path | None:
    """The folder for a model of this name and vocabulary; None: there is none."""
    path = FOLDER / "heads" / _key(model_name, vocab_size)
    return path if path.exists() else None


def _key(model_name: str, vocab_size: int) -> str:
    return f"{model_name.lower()}-{vocab_size}"
