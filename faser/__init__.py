"""FASER: an OpenAI-compatible LLM serving engine that manages speculative decoding per request and per step.

`faser.LLM(model).generate(prompts, faser.SamplingParams(...))` runs a model in this process.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from faser.offline import LLM, LoRARequest
    from faser.sampling_params import SamplingParams

__all__ = ["LLM", "LoRARequest", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Imported on demand: the layers below must not load the engine, and the program `faser` starts at once."""
    if name in ("LLM", "LoRARequest"):
        from faser import offline

        return getattr(offline, name)
    if name == "SamplingParams":
        from faser.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'faser' has no attribute {name!r}")
