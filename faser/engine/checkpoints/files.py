"""Facts from the files of a checkpoint: sizes, dtype, end tokens, and where the weights lie.

Needs no torch, so the front-end reads them as well. gguf_config.py makes a config.json of a GGUF file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.families.wrappers import text_half
from faser.engine.checkpoints.quantized import StoredQuantization, stored_quantization
from faser.errors import ModelError
from faser.files import parse_json

GGUF_WEIGHTS = "model.gguf"  # in a directory whose other files are those of the hub
TORCH_WEIGHTS = "pytorch_model.bin"  # of some heads; no model is read from it

# Sampling by the name of the model's folder, where generation_config.json says nothing. At temperature 1, the
# default of the OpenAI API, models this small drift off.
SAMPLING_ADVICE: Mapping[str, Mapping[str, float]] = {
    # Its card advises temperature .2 and top_p .9, for weights in 16 bits. The file that FASER serves has 4 bits a
    # weight, and the model is small: one unlikely token derails an answer. Greedily a question has the same answer
    # every time. Of thirty first questions as many answers are sane and right as before (90 and 73 of 100; 91 and
    # 72: benchmarks/results/first-answers.json). A frequency penalty ends some loops, but with one every step
    # would wait for the one before.
    "SmolLM2-135M-Instruct": {"temperature": 0.0},
}
TEMPLATES = "additional_chat_templates/*.jinja"
_READ = ("*.json", "*.jinja", TEMPLATES, "*.safetensors", "*.gguf", TORCH_WEIGHTS)
_DTYPES = ("float32", "float16", "bfloat16")
_LENGTH_BYTES = 8  # the first bytes of a file: the length of its header
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A checkpoint's configuration. dtype: float32, float16 or bfloat16; None: not stated.

    eos_token_ids: each of them ends a sequence; in the stated order, without duplicates. quantization: of the
    stored weights; None: they are stored as floats of at least 16 bits, or in a GGUF file. wrapper: the class of
    the vision-language model whose text half this is; None: it is a text model.
    """

    spec: DecoderSpec
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    quantization: StoredQuantization | None = None
    wrapper: str | None = None


def refuse_special_files(directory: Path) -> None:
    """Raise ModelError for a FIFO, a device or a socket where a checkpoint has files: a read might never end."""
    for path in sorted(path for pattern in _READ for path in directory.glob(pattern)):
        if path.exists() and not path.is_file() and not path.is_dir():
            raise ModelError(f"{path} is a FIFO, a device or a socket; put a regular file in its place")


def read_model_config(path: Path) -> ModelConfig:
    """The configuration of a checkpoint directory or of a GGUF file.

    End tokens come from generation_config.json, or else from config.json. Of a vision-language wrapper: the
    configuration of its text half. If its config.json says twice whether embedding and head are one, and not the
    same, they are one if the files have no head.
    Raises ModelError that names the unusable file or field.
    """
    generation = path / "generation_config.json"
    config = read_config(path)
    ends = _read(generation) if path.suffix != ".gguf" and generation.exists() else {}
    half = text_half(config)
    if half is None:
        return _model_config(config, ends)
    if half.tie_is_disputed:
        half.config["tie_word_embeddings"] = not any("lm_head." in name for name in tensor_names(path))
    return _model_config(half.config, ends, wrapper=half.wrapper)


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a checkpoint directory, or what stands for it in a GGUF file. Raises ModelError."""
    if path.suffix == ".gguf":
        from faser.engine.checkpoints.gguf_config import gguf_config

        return gguf_config(path)
    return _read(path / "config.json")


def _model_config(
    config: dict[str, Any], generation: dict[str, Any], *, wrapper: str | None = None
) -> ModelConfig:
    spec = decoder_spec(config)
    dtype = config.get("dtype") or config.get("torch_dtype")
    if dtype is not None and dtype not in _DTYPES:
        raise ModelError(f"config.json: dtype is {dtype!r}; supported are {', '.join(_DTYPES)}")
    ends = generation.get("eos_token_id")
    return ModelConfig(
        spec=spec,
        quantization=stored_quantization(config),
        dtype=dtype,
        wrapper=wrapper,
        eos_token_ids=_token_ids(config.get("eos_token_id") if ends is None else ends, spec.vocab_size),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing; a model directory must have one") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} contains {type(value).__name__}; it must contain an object")
    return value


def _token_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    """Token ids from null, one id or a list of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise ModelError(f"eos_token_id {token_id!r} is not a token; the vocabulary has {vocab_size}")
    return tuple(dict.fromkeys(ids))


def gguf_file(checkpoint: Path) -> Path | None:
    """The GGUF file with the weights of a checkpoint, which may be that file. None: safetensors have them."""
    if checkpoint.suffix == ".gguf":
        return checkpoint
    inside = checkpoint / GGUF_WEIGHTS
    return inside if inside.is_file() and not any(checkpoint.glob("*.safetensors")) else None


def weight_files(checkpoint: Path) -> list[Path]:
    """Return the files that the weights are read from."""
    gguf = gguf_file(checkpoint)
    return sorted(checkpoint.glob("*.safetensors")) if gguf is None else [gguf]


def tensor_names(directory: Path) -> set[str]:
    """The tensors in safetensors files."""
    return set(tensor_headers(directory))


def tensor_headers(directory: Path) -> dict[str, dict[str, Any]]:
    """Read the headers of safetensors files: dtype, shape, data_offsets of each tensor.

    A damaged file is left out: it is found when it is loaded.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = file.read(length) if length <= _LONGEST_HEADER else b""
        try:
            content = parse_json(header)
        except ValueError:
            continue
        found |= {name: each for name, each in content.items() if name != "__metadata__"}
    return found
