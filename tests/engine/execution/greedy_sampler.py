"""A TokenSampler of largest logits, for runners that sample and do not draft."""

from dataclasses import dataclass

from torch import Tensor

from faser.engine.execution.sampling.tokens import SampledTokens


@dataclass
class GreedyTokens:
    """tokens: [N] int64 on the CPU."""

    tokens: Tensor

    def wait(self) -> SampledTokens:
        return SampledTokens(token_ids=self.tokens.numpy())


class GreedySampler:
    def take(self, logits: Tensor, _requests: object) -> GreedyTokens:
        return GreedyTokens(logits.argmax(-1))

    def draft(self, _logits: Tensor, _requests: object) -> GreedyTokens:
        raise NotImplementedError
