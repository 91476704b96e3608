"""A LoRA adapter (arXiv:2106.09685), which a request names as its model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter as front-end and engine know it. Its weights are read in the data plane alone.

    name: the model of requests that want it. path: a folder in PEFT's format, or a GGUF file. digest: of the
    content of the files, in hexadecimal: caches tell adapters apart by it, so a name may be loaded anew with
    other files.
    """

    name: str
    path: str
    digest: str
