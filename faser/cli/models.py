"""`faser models [MODEL]`: which models load; or of one model what it is, whether it loads, and why not.

Everything follows from the declaration of families (engine/checkpoints/families/) and from the files of the model,
whose weights are not read. `faser serve` tells the same of the model that it serves. docs/models.md is
`faser models --markdown`.
"""

import json
import textwrap
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from faser.cli.memory import USUAL_GPUS, show_memory
from faser.config.declaration import show_bytes
from faser.config.environment import cache_dir
from faser.config.sources import CommandParser, UsageError
from faser.engine.checkpoints.families import FAMILIES, find_family
from faser.engine.checkpoints.families.family import Family
from faser.engine.checkpoints.files import (
    ModelConfig,
    gguf_file,
    read_config,
    read_model_config,
    refuse_special_files,
    tensor_headers,
)
from faser.engine.checkpoints.gguf.file import READABLE
from faser.engine.checkpoints.gguf_weights import open_gguf
from faser.engine.checkpoints.source import SMOLLM2_ID, cached, check_source
from faser.engine.checkpoints.stored import StoredWeights, stored_weights
from faser.errors import ModelError
from faser.optional import given, maybe
from faser.types.engine import ModelInfo

_HELP = f"""usage: faser models [--json]
       faser models MODEL [--revision REVISION] [--memory[=SIZES]] [--json]

List the families of models that load, or say of one model what it is, whether it loads, and why not.

  MODEL                 a directory, a .gguf file, or a hub id that has been fetched (faser pull), with a
                        tag for one of its GGUF files (owner/name:Q4_K_M); {SMOLLM2_ID}
                        is the embedded model
  --revision REVISION   branch, tag or commit of a hub model [the main branch]
  --memory[=SIZES]      how it fits on one GPU of 24, 48, 80 and 141 GB, or of these sizes (40GiB,24GB): an
                        estimate from config.json, which is fetched if the model has not been
  --json                as JSON
  --markdown            the list as docs/models.md has it

Weights are not read, and without --memory no network is used. The exit status is 0 if the model loads, 2 if not;
with --memory 0 if FASER knows the model."""

T = TypeVar("T")
_WIDTH = 100
_PAGE_WIDTH = 115
_PAGE = """# Models

Made by `faser models --markdown`.

A model loads if its `config.json` names an architecture of this table, or its GGUF file one of the column GGUF.
`faser models MODEL` says of a directory, a `.gguf` file or a fetched hub id what it is, whether it loads, and why
not; `--json` gives both as JSON. The examples have these architectures by their `config.json`. What has been
served with its real weights is in the last column.

The column of tool calls names the formats (`--tool-call-parser`) that the chat templates of a family ask for; the
template of a checkpoint decides which it is. Families with none have templates that know no tools: FASER then
describes the functions in the prompt, and asks for `hermes`. So it does for older models of the other families.

{table}

Notes (for families that have run on a GPU, see [gpu.md](gpu.md#what-was-checked)):

{notes}

Of Qwen2.5-VL, Qwen3-VL, Qwen3.5, Gemma 3, Gemma 4 and Mistral 3 checkpoints that also read images the text half is
served. Encoders, other mixtures of experts, and whatever else is not in the table are refused by name.

## Formats

| weights | families |
| --- | --- |
| safetensors in bfloat16, float16 or float32 | all |
| GGUF, with [these types of tensors](quantization.md#gguf-files-as-they-are-stored) | those named in the column |
| fp8, AWQ, GPTQ, compressed-tensors | tested with Llama only; other families should load too |
| MXFP4 | the experts of gpt-oss |

A model split by llama.cpp's `gguf-split` is named by any of its parts, or by the folder that has them. A folder
with one GGUF model is that model; files whose name has `mmproj` or `imatrix` are ignored.

On the Hugging Face hub, `owner/name:Q4_K_M` (also as `hf.co/owner/name:Q4_K_M`) fetches the GGUF files of that
quantization alone. Without a tag, a repository that has only GGUF files gives `Q4_K_M`, or else its first one.

The tokenizer of a GGUF file is rebuilt from its metadata. By `tokenizer.ggml.model` it is `llama` (sentencepiece),
`gemma4`, or `gpt2` that splits text in one of these ways of `tokenizer.ggml.pre`:

{splittings}

Others are refused by name, and so is `gpt2` without `tokenizer.ggml.pre`; `--tokenizer` then names a directory
with the model's own tokenizer. A GGUF file does not say which special tokens absorb the white space around them:
those of Phi-3 with sentencepiece do, no others.

## What is tested

Every family is compared with transformers, on tiny models with seeded weights: the logits of every position, and
greedy tokens through the paged cache (`tests/engine/checkpoints/test_families.py`). GGUF files are held against
the library that writes them (`tests/engine/checkpoints/gguf/`). These real weights have been served:

{served}

To add a family: [What to change](architecture.md#what-to-change).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """Facts from a model's files. problems: reasons why it does not load; empty: it does.

    weight_bytes: of the files. max_model_len: the longest context in tokens. None: the files do not say it.
    """

    model: str
    path: str | None = None
    family: str | None = None
    architecture: str | None = None
    parameters: int | None = None
    weights: str | None = None
    weight_bytes: int | None = None
    max_model_len: int | None = None
    chat_template: bool | None = None
    problems: tuple[str, ...] = ()

    @property
    def loads(self) -> bool:
        return not self.problems


def models(arguments: Sequence[str]) -> int:
    """List the families, or report on one model; returns 0, or 2 for a model that does not load."""
    parser = CommandParser("faser models")
    parser.add_argument("MODEL", nargs="?")
    parser.add_argument("--revision")
    parser.add_argument("--memory", nargs="?", const=USUAL_GPUS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--help", "-h", action="store_true")
    given = parser.parse_args(arguments)
    if given.help:
        print(_HELP)
        return 0
    if given.MODEL is None:
        for name in ("revision", "memory"):
            if getattr(given, name) is not None:
                raise UsageError([f"--{name} goes with MODEL"])
        print(_families_json() if given.json else markdown() if given.markdown else families_text())
        return 0
    if given.markdown:
        raise UsageError(["--markdown goes without MODEL"])
    if given.memory is not None:
        return show_memory(given.MODEL, given.revision, given.memory, as_json=given.json)
    found = report(given.MODEL, given.revision)
    print(json.dumps(asdict(found) | {"loads": found.loads}, indent=2) if given.json else _report_text(found))
    return 0 if found.loads else 2


def _families_json() -> str:
    fields = ("name", "architecture", "model_type", "gguf", "tool_parsers", "examples", "files", "note")
    found = [{name: getattr(each, name) for name in fields} | {"formats": _formats(each)} for each in FAMILIES]
    return json.dumps(found, indent=2)


def _formats(family: Family) -> list[str]:
    return ["safetensors", "GGUF"] if family.gguf else ["safetensors"]


def families_text() -> str:
    """The table of families for a terminal, at most 100 characters wide."""
    head = ("family", "architecture", "GGUF", "models, among others")
    rows = [
        (each.name, each.architecture, ", ".join(each.gguf) or "-", ", ".join(each.examples)) for each in FAMILIES
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(3)]
    lines = [line for row in (head, *rows) for line in _lines(row, widths)]
    lines += [
        "",
        "Weights: safetensors (16 or 32 bits, fp8, AWQ, GPTQ, compressed-tensors, MXFP4); GGUF if named.",
    ]
    lines += ["Tool calls, by --tool-call-parser; none: the templates know no tools, FASER describes them:"]
    by_format = defaultdict[str, list[str]](list)
    for each in FAMILIES:
        for name in each.tool_parsers or ("none",):
            by_format[name].append(each.name)
    for name, families in sorted(by_format.items()):
        lines += ["  " + line for line in _lines((name, ", ".join(families)), widths[:1])]
    lines += ["Tested: every family against transformers, on tiny models. Served with real weights:"]
    lines += [f"  {each.name:<{widths[0]}}  {file}" for each in FAMILIES for file in each.files]
    lines += ["", "Of one model: faser models MODEL"]
    return "\n".join(lines)


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """One row; its last cell may take several lines."""
    start = "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False))
    parts = textwrap.wrap(row[-1], _WIDTH - len(start) - 2, break_on_hyphens=False)
    return [f"{start if number == 0 else ' ' * len(start)}  {part}" for number, part in enumerate(parts)]


def markdown() -> str:
    """The page docs/models.md."""
    from faser.engine.checkpoints.gguf_tokenizer import SPLITTINGS  # imports the tokenizers library

    rows = [
        "| family | architecture | GGUF | tool calls | models, among others | real weights |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in FAMILIES:
        gguf = ", ".join(f"`{each}`" for each in each.gguf) or "no"
        files = "; ".join(each.files) or "no"
        calls = ", ".join(f"`{name}`" for name in each.tool_parsers) or "none"
        examples = ", ".join(each.examples)
        rows.append(f"| {each.name} | `{each.architecture}` | {gguf} | {calls} | {examples} | {files} |")
    splittings = ", ".join(f"`{each}`" for each in SPLITTINGS)
    return _PAGE.format(
        splittings="\n".join(textwrap.wrap(splittings, _PAGE_WIDTH, break_on_hyphens=False)),
        table="\n".join(rows),
        notes="\n".join(f"- {each.name}: {each.note}" for each in FAMILIES if each.note),
        served="\n".join(f"- {file}" for each in FAMILIES for file in each.files),
    ).rstrip()


def report(model: str, revision: str | None = None) -> ModelReport:
    """Describe a model and list why it does not load. model: the operator's name for it.

    Reads headers and the tokenizer, and no weights; uses no network.
    """
    path = Path(model).expanduser()
    try:
        path = cached(model, cache_dir(), revision=revision)
    except ModelError as error:
        if not (path / "config.json").is_file():  # a directory with one can be described, whatever it lacks
            return ModelReport(model=model, problems=(str(error),))
    return inspect(path, model)


def inspect(path: Path, model: str) -> ModelReport:
    """Describe a checkpoint directory or a GGUF file, as `report` does. model: its name in the report."""
    problems: list[str] = []

    def tried(ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except ModelError as error:
            if str(error) not in problems:
                problems.append(str(error))
            return None

    from faser.engine.text.tokenizer import load_tokenizer

    tried(lambda: refuse_special_files(path))
    if problems:
        return ModelReport(model=model, path=str(path), problems=tuple(problems))
    content = tried(lambda: read_config(path)) or {}
    family = tried(lambda: find_family(content)) if content else None
    config = tried(lambda: read_model_config(path)) if family else None
    tried(lambda: check_source(str(path), None))
    stored = tried(lambda: stored_weights(path, config)) if config and not problems else None
    if config and stored:
        tried(lambda: _check_tensors(path, config))
    tokenizer = tried(lambda: load_tokenizer(path)) if config else None
    named = content.get("architectures") or [content.get("model_type")]
    return ModelReport(
        model=model,
        path=str(path),
        family=family.name if family else None,
        architecture=family.architecture if family else str(named[0]) if named[0] else None,
        parameters=_num_parameters(config) if config and not problems else None,
        weights=stored.form if stored else None,
        weight_bytes=stored.num_bytes if stored else None,
        max_model_len=config.spec.max_position_embeddings if config else None,
        chat_template=maybe(lambda found: found.chat_template is not None, tokenizer),
        problems=tuple(problems),
    )


def _num_parameters(config: ModelConfig) -> int:
    from faser.engine.execution.models.tensors import num_parameters

    return num_parameters(config.spec)


def _check_tensors(path: Path, config: ModelConfig) -> None:
    """Raises ModelError unless the files have the tensors of the config; quantised ones have others."""
    from faser.engine.execution.models.tensors import iter_shapes

    shapes: dict[str, tuple[int, ...]]
    if (file := gguf_file(path)) is not None:
        source = open_gguf(file)
        shapes = {name: source.shape(name) for name in source.names()}
        for name in shapes:
            if (kind := source.format(name)) not in READABLE:
                raise ModelError(f"{file}: {name} is stored as {kind}; supported are {', '.join(READABLE)}")
    elif config.quantization is None:
        shapes = {name: tuple(each.get("shape", ())) for name, each in tensor_headers(path).items()}
    else:
        return
    for name, shape in iter_shapes(config.spec):
        if name not in shapes:
            raise ModelError(f"{path} lacks the tensor {name}")
        if shapes[name] != shape:
            raise ModelError(f"{path}: {name} has the shape {shapes[name]}; its config describes {shape}")


def _report_text(found: ModelReport) -> str:
    rows: dict[str, Any] = {"model": found.model}
    if found.path is not None and found.path != found.model:
        rows["path"] = found.path
    rows |= given(
        {
            "architecture": f"{found.family} ({found.architecture})" if found.family else found.architecture,
            "parameters": maybe(show_count, found.parameters),
            "weights": maybe(lambda size: f"{found.weights}, {show_bytes(size)}", found.weight_bytes),
            "context": maybe("{} tokens".format, found.max_model_len),
            "chat": maybe({True: "yes", False: "no: the model has no chat template"}.get, found.chat_template),
        }
    )
    rows["loads"] = "yes" if found.loads else f"no: {found.problems[0]}"
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {value}" for name, value in rows.items()]
    return "\n".join(lines + [f"{'':<{width}}      {each}" for each in found.problems[1:]])


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts from the files of the served model."""

    family: Family
    stored: StoredWeights

    @classmethod
    def of(cls, path: Path) -> "ServedModel":
        """path: of a directory or a GGUF file. Raises ModelError for a model that FASER does not know."""
        return cls(find_family(read_config(path)), stored_weights(path, read_model_config(path)))


def model_line(served: ServedModel, info: ModelInfo) -> str:
    """Return the line in which `faser serve` describes the model that it has loaded."""
    family, stored = served.family, served.stored
    tokens = info.num_blocks * info.block_size
    return (
        f"{family.name} ({family.architecture}) · {show_count(info.num_parameters)} parameters · {stored.form}, "
        f"{show_bytes(stored.num_bytes)} on disk, {show_bytes(info.weight_bytes)} in memory · KV cache: "
        f"{tokens:,} tokens ({tokens / info.max_model_len:.3g} x the {info.max_model_len}-token context)"
    )


def show_count(number: int) -> str:
    """134515008 is "134.5M"."""
    for unit, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f}".removesuffix(".0") + unit
    return str(number)
