"""What comes with this package to draft for a model: made by it from its own answers, found by its name.

ngrams/NAME-VOCABULARY.npz    an n-gram model (checkpoints/ngram_model.py)
"""

from pathlib import Path

FOLDER = Path(__file__).parent


def shipped_ngram_model(model_name: str, vocab_size: int) -> Path | None:
    """The file for a model of this name and vocabulary; None: there is none."""
    path = FOLDER / "ngrams" / f"{model_name.lower()}-{vocab_size}.npz"
    return path if path.exists() else None
