"""FASER: an OpenAI-compatible LLM serving engine that manages speculative decoding per request and per step.

`faser.LLM(model).generate(prompts, faser.SamplingParams(...))` runs a model in this process.
"""

from typing import TYPE_CHECKING

from faser.types import SamplingParams

if TYPE_CHECKING:
    from faser.offline import LLM

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """LLM is imported when it is asked for: the layers below must not load the engine."""
    if name == "LLM":
        from faser.offline import LLM

        return LLM
    raise AttributeError(f"module 'faser' has no attribute {name!r}")
