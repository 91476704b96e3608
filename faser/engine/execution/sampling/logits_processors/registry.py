"""All logits processors, in the order in which they edit logits."""

from faser.engine.execution.sampling.logits_processors.allowed_tokens import AllowedTokens
from faser.engine.execution.sampling.logits_processors.bad_words import BadWords
from faser.engine.execution.sampling.logits_processors.bias import Bias
from faser.engine.execution.sampling.logits_processors.min_tokens import MinTokens
from faser.engine.execution.sampling.logits_processors.penalties import Penalties
from faser.engine.execution.sampling.logits_processors.processor import LogitsProcessor
from faser.engine.execution.sampling.logits_processors.structure import Structure
from faser.engine.structure.sequence_matchers import SequenceMatchers


def make_logits_processors(
    num_slots: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    matchers: SequenceMatchers | None = None,
) -> tuple[LogitsProcessor, ...]:
    """matchers: None where no request has structured output."""
    return (
        Bias(vocab_size),
        Penalties(num_slots),
        AllowedTokens(vocab_size, eos_token_ids),
        BadWords(vocab_size),
        MinTokens(vocab_size, eos_token_ids),
        *(() if matchers is None else (Structure(matchers),)),
    )
