"""Which n-gram model drafts for the target."""

from pathlib import Path

from faser.config.speculation import NONE, SpeculationConfig
from faser.engine.checkpoints.ngram_model import NgramModel, load, shipped_ngram_model
from faser.errors import ConfigError


def find_ngram_model(speculation: SpeculationConfig, directory: Path, vocab_size: int) -> NgramModel | None:
    """The one that the configuration names, else the one that comes with this package for the target.

    directory: of the target; its name is the model's. None: there is none, or no drafter asks for it. Raises
    ConfigError where the method is ngram_model and there is none, and as load does.
    """
    named = speculation.ngram_model
    if not any(each.name == "ngram_model" for each in speculation.drafters):
        return None
    if named is None:
        path = shipped_ngram_model(directory.name, vocab_size)
    else:
        path = None if named == NONE else Path(named)
    if path is None and speculation.method == "ngram_model":
        raise ConfigError(
            "method is ngram_model; it needs 'ngram_model', a file: "
            f"none comes with this package for {directory.name}"
        )
    return None if path is None else load(path, vocab_size=vocab_size)
