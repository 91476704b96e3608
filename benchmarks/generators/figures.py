"""Figures: what a load generator says of a run, in one form for all of them.

Times are in seconds, as the server's are.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """One kind of latency. count: observations. percentiles: 50, 90 and 99 where the tool gives them."""

    count: int
    mean_s: float
    percentiles: Mapping[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """A tool's block about speculative decoding. by_position: accepted tokens a draft, from the first position."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    by_position: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run. None: the tool does not say.

    completed, failed, cancelled: requests. input_tokens, output_tokens: of the completed ones, from the usage in
    the answers. own_input_tokens, own_output_tokens: counted by the tool's tokenizer instead, from the texts.
    in_chat: the server puts the texts into its chat template. chunks: time between two chunks of a stream.
    tpot: mean of a request per token after its first. also_sent: requests that these figures leave out.
    """

    completed: int
    failed: int = 0
    cancelled: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    own_input_tokens: int | None = None
    own_output_tokens: int | None = None
    in_chat: bool = False
    ttft: Latency | None = None
    chunks: Latency | None = None
    tpot: Latency | None = None
    e2e: Latency | None = None
    drafts: Drafts | None = None
    also_sent: "Figures | None" = None
