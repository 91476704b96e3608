"""Reads how a checkpoint makes embeddings or scores, from the files that sentence-transformers writes beside it.

    modules.json                         what follows the model: pooling, a norm, a score of logits
    1_Pooling/config.json                which states make the embedding
    1_LogitScore/config.json             the tokens whose logits make a score
    config_sentence_transformers.json    texts before an input, by name

vLLM's way to say that of a model that judges with words is read as well: classifier_from_token in config.json. A
checkpoint without any of this has the defaults of Embedder.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from faser.errors import ModelError
from faser.files import parse_json
from faser.types.pooling import Embedder, PoolingKind

_MODULES, _PROMPTS, _CONFIG = "modules.json", "config_sentence_transformers.json", "config.json"
# As patterns of a repository.
EMBEDDER_FILES = (_MODULES, _PROMPTS, "sentence_bert_config.json", "[0-9]_*/config.json")

# Older files have a flag for each kind, newer ones a name.
_FLAGS = {
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
_KINDS = {"lasttoken": PoolingKind.LAST, "mean": PoolingKind.MEAN, "cls": PoolingKind.CLS}


def read_embedder(path: Path) -> Embedder:
    """Read how the checkpoint of a model that generates makes embeddings. path: a directory, or a GGUF file.

    Raises ModelError that names the file and what FASER does not compute.
    """
    if not path.is_dir():
        return Embedder()
    found = _read_embedder(path, {})
    if found.kind is PoolingKind.CLS:
        raise ModelError(f"{path} pools the first token, which sees no other one in a model that generates")
    return found


def read_encoder_embedder(path: Path, *, judges_pairs: bool, raw_scores: bool) -> Embedder:
    """Read how an encoder's checkpoint in a directory makes embeddings. Raises ModelError as read_embedder does.

    Without modules.json the vector is that of the first token, as in vLLM, scaled to length 1.
    """
    found = _read_embedder(path, {"kind": PoolingKind.CLS})
    return replace(found, is_encoder=True, judges_pairs=judges_pairs, raw_scores=raw_scores, score_token_ids=())


def _read_embedder(path: Path, defaults: Mapping[str, Any]) -> Embedder:
    config = _read(path / _CONFIG) or {}
    fields: dict[str, Any] = {
        **defaults,
        "is_matryoshka": bool(config.get("is_matryoshka") or config.get("matryoshka_dimensions")),
        "dimensions": _integers(config.get("matryoshka_dimensions")),
    }
    modules = _read(path / _MODULES)
    if modules is not None:
        fields |= {"normalises": False, **_of_modules(path, modules)}
        prompts = (_read(path / _PROMPTS) or {}).get("prompts") or {}
        fields["prompts"] = {str(name): str(text) for name, text in prompts.items()}
    words = config.get("classifier_from_token")
    if words and "score_token_ids" not in fields:
        fields["score_token_ids"] = _tokens_of(path, words)
    return Embedder(**fields)


def _of_modules(path: Path, modules: Any) -> dict[str, Any]:
    """Return the fields of Embedder that follow from modules.json."""
    found: dict[str, Any] = {}
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise ModelError(f"{path / _MODULES} is no list of modules")
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        file = path / str(module.get("path", "")) / "config.json"
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                found["kind"] = _pooling_kind(file, _read(file) or {})
            case "Normalize":
                found["normalises"] = True
            case "LogitScore":
                config = _read(file) or {}
                ids = config.get("true_token_id"), config.get("false_token_id")
                found["score_token_ids"] = _integers([each for each in ids if each is not None])
            case _:
                raise ModelError(
                    f"{path / _MODULES} has the module {kind!r}, which FASER does not compute; it computes "
                    "Transformer, Pooling, Normalize and LogitScore"
                )
    return found


def _pooling_kind(file: Path, config: Mapping[str, Any]) -> PoolingKind:
    name = config.get("pooling_mode")
    named = [name] if name else [each for flag, each in _FLAGS.items() if config.get(flag)]
    others = [each for each in config if each.startswith("pooling_mode_") and config[each] and each not in _FLAGS]
    if others or len(named) != 1 or named[0] not in _KINDS:
        stated = ", ".join([*others, *map(str, named)]) or "no mode"
        raise ModelError(
            f"{file} states {stated}; FASER pools the last token, the mean of all tokens, "
            "or the first one of an encoder"
        )
    return _KINDS[named[0]]


def _tokens_of(path: Path, words: Any) -> tuple[int, ...]:
    """Return the ids of classifier_from_token, which names the false token first."""
    from tokenizers import Tokenizer

    core = Tokenizer.from_file(str(path / "tokenizer.json"))
    found = [core.token_to_id(str(word)) for word in words]
    known = tuple(each for each in found if each is not None)
    if len(found) != 2 or len(known) != 2:
        raise ModelError(f"{path / _CONFIG}: classifier_from_token is {words!r}; it must name two tokens")
    return known[::-1]


def _integers(values: Any) -> tuple[int, ...]:
    return tuple(int(each) for each in values or ())


def _read(file: Path) -> Any:
    """Read JSON; None where there is no such file."""
    try:
        return parse_json(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
