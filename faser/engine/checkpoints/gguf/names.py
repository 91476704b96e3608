"""Names of GGUF files: parts of a split model, quantizations, and files that go with a model. Opens no file.

Source of the names of parts: gguf-split of llama.cpp, NAME-00001-of-00003.gguf.
"""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from faser.errors import ModelError

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_COMPANIONS = ("mmproj", "imatrix")  # encoders of images, and statistics for quantizing
_QUANTIZATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d(?:_\w+)?|TQ\d_\d|(?:BF|FP|F)(?:16|32)|(?:MX|NV)FP4(?:_\w+)?))(?=$|[-.])",
    re.IGNORECASE,
)
_PREFERRED = "Q4_K_M"  # where a hub repository has several and the operator names none
_ANY_TAG = "latest"  # Ollama's name for no tag


def part_number(path: Path) -> tuple[int, int] | None:
    """The number of a part, from 1, and the number of parts, by the name of the file; None: it states none."""
    match = _match(path.name)
    return None if match is None else (int(match["number"]), int(match["count"]))


def _match(file: str) -> re.Match[str] | None:
    match = _PART.fullmatch(file)
    return match if match is not None and 1 <= int(match["number"]) <= int(match["count"]) else None


def part_names(name: str) -> list[str]:
    """The names of all parts of a split model, in order, whichever of them is given; of another file, its own."""
    path = PurePosixPath(name)
    match = _match(path.name)
    if match is None:
        return [name]
    count = int(match["count"])
    return [str(path.with_name(f"{match['name']}-{i:05}-of-{count:05}.gguf")) for i in range(1, count + 1)]


def part_paths(path: Path) -> list[Path]:
    """Paths of all parts of the model that a file belongs to, whether they exist or not."""
    return [Path(each) for each in part_names(str(path))]


def model_files(names: Iterable[str]) -> dict[str, str]:
    """The GGUF models among the names of files, by quantization: Q4_K_M → the file, or the first of its parts.

    Files that go with a model, such as mmproj-F16.gguf, are left out. Models of the same quantization, and those
    whose name states none, go by the name of the file without its ending.
    """
    found = {
        part_names(name)[0]: None
        for name in sorted(names)
        if name.endswith(".gguf") and not any(each in PurePosixPath(name).name.lower() for each in _COMPANIONS)
    }
    labels = {name: _quantization(name) for name in found}
    times = Counter(labels.values())
    return {
        label if label is not None and times[label] == 1 else _stem(name): name for name, label in labels.items()
    }


def choose(names: Iterable[str], tag: str | None, *, repository: str) -> str:
    """The GGUF model that a tag names: its quantization or its file; without one Q4_K_M, else the first.

    Raises ModelError that lists the tags of the repository.
    """
    models = model_files(names)
    if not models:
        raise ModelError(f"{repository} has no GGUF files; name it without a tag")
    by_tag = {label.casefold(): name for label, name in models.items()}
    for label, name in models.items():
        by_tag.setdefault(label.casefold().removeprefix("ud-"), name)
        by_tag.setdefault(_stem(name).casefold(), name)
    if tag is None or tag.casefold() == _ANY_TAG:
        return by_tag.get(_PREFERRED.casefold()) or next(iter(models.values()))
    wanted = tag.casefold().removesuffix(".gguf")
    if wanted not in by_tag:
        raise ModelError(
            f"{repository} has no GGUF file of {tag}; it has {', '.join(models)}: name one as "
            f"{repository}:{next(iter(models))}"
        )
    return by_tag[wanted]


def _quantization(name: str) -> str | None:
    """The last quantization that the name of a file states, or else that of its folder, in capitals."""
    for part in (_stem(name), PurePosixPath(name).parent.name):
        if found := _QUANTIZATION.findall(part):
            return str(found[-1]).upper()
    return None


def _stem(name: str) -> str:
    """The name of a model's file without folders, number of the part and ending."""
    file = PurePosixPath(name).name
    match = _match(file)
    return file.removesuffix(".gguf") if match is None else match["name"]
