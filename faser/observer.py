"""The observer of an engine's requests and states; metrics are one."""

from collections.abc import Callable, Sequence

from faser.types.answer import FinishReason, SpeculationSummary
from faser.types.engine import EngineState
from faser.types.outlook import Decision, Outlook, Target
from faser.types.request import SpeculationParams
from faser.types.statistics import EngineStats


class EngineObserver:
    """Observer of one engine, called on its event loop. This one keeps nothing, a subclass what it overrides."""

    def admitted(self, *, n: int, max_tokens: int, prompt_tokens: int) -> None:
        """A request was accepted. max_tokens: per sample, resolved."""

    def admission(self, class_name: str, decision: Decision, target: Target) -> None:
        """A newly arrived request with targets was decided upon; target: the one that cannot be met."""

    def outlook(self, outlook: Outlook) -> None:
        """The latency model expects this now."""

    def first_token(self, ttft_s: float) -> None:
        """A request received its first token. ttft_s: since its arrival."""

    def tokens(self, count: int, gap_s: float | None) -> None:
        """A sample received count tokens in one step. gap_s: since its previous tokens; None: its first."""

    def finished(
        self,
        reason: FinishReason,
        *,
        ttft_s: float | None,
        e2e_s: float,
        queue_s: float,
        prefill_s: float,
        decode_s: float,
        prompt_tokens: int,
        cached_tokens: int,
        generation_tokens: int,
        longest_generation: int,
        preemptions: int,
    ) -> None:
        """A request ended. Tokens and preemptions are those of all samples, longest_generation of the longest."""

    def answered(
        self,
        params: SpeculationParams,
        summaries: Sequence[SpeculationSummary],
        *,
        ttft_s: float,
        tpot_s: float | None,
    ) -> None:
        """A request ended with an answer. summaries: of its samples. tpot_s: of the slowest; None: one token."""

    def engine(self, stats: EngineStats) -> None:
        """The engine's latest snapshot."""

    def engine_state(self, state: EngineState) -> None:
        """The engine has entered a state."""

    def engine_ended(self, *, restarts: bool) -> None:
        """The engine has ended: nothing runs, nothing waits, no block is held."""

    def separate_layers(self, count: int) -> None:
        """Note how many layers of the model run in single operations."""

    def cache_config(self, *, block_size: int, num_gpu_blocks: int, cache_dtype: str, max_model_len: int) -> None:
        """The KV cache is known. num_gpu_blocks: blocks on any device."""

    def watch_steps(self, tell: Callable[[bool], None]) -> None:
        """An engine has started. tell: whether it is to send the statistics of every step; may be called often."""
