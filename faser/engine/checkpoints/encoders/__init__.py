"""The encoder families: from a checkpoint's config.json to an EncoderSpec. Models that generate are in families/.

A family is one module: how its config.json is read, and the names of its tensors. To add one, write its module
with FAMILIES and list it in _MODULES: `faser models` and docs/models.md follow. Start with spec.py and bert.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from faser.engine.checkpoints.encoders import bert, modernbert, nomic
from faser.engine.checkpoints.encoders.spec import EncoderFamily, EncoderSpec, tensor_shapes
from faser.engine.checkpoints.files import read_config, tensor_headers
from faser.errors import ModelError
from faser.files import parse_json

_MODULES = (bert, modernbert, nomic)
ENCODERS: tuple[EncoderFamily, ...] = tuple(family for module in _MODULES for family in module.FAMILIES)
_DTYPES = ("float32", "float16", "bfloat16")
_LENGTHS = "sentence_bert_config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Configuration of an encoder's checkpoint. max_tokens: of a text, special tokens included.

    dtype: float32, float16 or bfloat16; None: not stated. architecture: its class on the hub. prefix: before the
    names of its tensors. raw_scores: a score is the logit itself, not its sigmoid.
    """

    family: EncoderFamily
    spec: EncoderSpec
    architecture: str
    dtype: str | None
    max_tokens: int
    prefix: str = ""
    raw_scores: bool = False

    @property
    def is_classifier(self) -> bool:
        return self.spec.classifier is not None


def find_encoder(config: Mapping[str, Any]) -> tuple[EncoderFamily, str] | None:
    """Return the family and the architecture that a config.json names; None: it names no encoder."""
    named = config.get("architectures") or []
    model_type = config.get("model_type")
    for family in ENCODERS:
        if not named and model_type == family.model_type:
            return family, family.architecture
        if isinstance(named, list) and (
            found := next((each for each in named if each in family.architectures), None)
        ):
            return family, str(found)
    return None


def read_encoder(path: Path) -> EncoderConfig | None:
    """Read the configuration of an encoder's checkpoint; None: another kind of model lies there.

    Raises ModelError that names the unusable file or field.
    """
    if not path.is_dir() or not (path / "config.json").exists():
        return None
    config = read_config(path)
    if (found := find_encoder(config)) is None:
        return None
    family, architecture = found
    spec = family.to_spec(config)
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is not None and dtype not in _DTYPES:
        raise ModelError(f"config.json: dtype is {dtype!r}; supported are {', '.join(_DTYPES)}")
    if spec.max_position_embeddings < 1:
        raise ModelError(f"config.json: max_position_embeddings leaves {spec.max_position_embeddings} positions")
    if architecture == family.classifier:
        _check_labels(config)
    else:
        spec = replace(spec, classifier=None)
    return EncoderConfig(
        family=family,
        spec=spec,
        architecture=architecture,
        dtype=dtype,
        max_tokens=min(spec.max_position_embeddings, _stated_length(path) or spec.max_position_embeddings),
        prefix=_prefix(path, family, spec),
        raw_scores=_has_raw_scores(config),
    )


def checked_names(path: Path, config: EncoderConfig) -> dict[str, str]:
    """Return the name in the files of each tensor of the model, by its name in the spec.

    Raises ModelError that names a tensor that is missing, unexpected, or of another shape than config.json says.
    """
    headers, names = tensor_headers(path), {}
    for name, shape in tensor_shapes(config.spec).items():
        stored = _stored_name(name, config)
        if stored not in headers:
            raise ModelError(f"{path} lacks the tensor {stored}")
        if (found := tuple(headers[stored].get("shape", ()))) != shape:
            raise ModelError(f"{path}: {stored} has the shape {found}; its config describes {shape}")
        names[name] = stored
    read = set(names.values())
    for stored in headers:
        if stored not in read and not stored.removeprefix(config.family.prefix).startswith(config.spec.ignored):
            raise ModelError(f"{path} has the tensor {stored}, which {config.architecture} does not have")
    return names


def _stored_name(name: str, config: EncoderConfig) -> str:
    head = config.spec.classifier
    of_head = () if head is None else (head.dense, head.out, *([head.norm] if head.norm else []))
    is_outer = name.rpartition(".")[0] in of_head and not name.startswith("pooler.")
    return name if is_outer else config.prefix + name


def _prefix(path: Path, family: EncoderFamily, spec: EncoderSpec) -> str:
    """Return the prefix of the names in the files: of a model for a task, or of one stored without it."""
    return "" if f"{spec.names.word}.weight" in tensor_headers(path) else family.prefix


def _check_labels(config: Mapping[str, Any]) -> None:
    """Raise ModelError unless a model that classifies has one label: how well a pair fits."""
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels", 2)
    if count != 1:
        raise ModelError(
            f"config.json has {count} labels; of models that classify, those with one label are served"
        )


def _has_raw_scores(config: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint says, as sentence-transformers writes it, that scores are bare logits.

    Raises ModelError for another function than sigmoid or none.
    """
    own = config.get("sentence_transformers")
    stated = own.get("activation_fn") if isinstance(own, dict) else None
    stated = stated or config.get("sbert_ce_default_activation_function")
    name = "Sigmoid" if stated is None else str(stated).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity"):
        raise ModelError(f"config.json: scores go through {stated}; supported are Sigmoid and Identity")
    return name == "Identity"


def _stated_length(path: Path) -> int | None:
    """Return the tokens of the longest text for which the model is meant; None: the files do not say it."""
    file = path / _LENGTHS
    if not file.exists():
        return None
    try:
        found = parse_json(file.read_text(encoding="utf-8")).get("max_seq_length")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
    if found is not None and (not isinstance(found, int) or found < 1):
        raise ModelError(f"{file}: max_seq_length is {found!r}; it must be an integer of at least 1")
    return found
