"""The requests of a cell: prompts with a sampling seed each, the same for every policy."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from faser.bench.prompts import BenchPrompt
from faser.types import Request, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """One prompt to answer. seed: of its sampling."""

    prompt: BenchPrompt
    seed: int

    def request(self, name: str, *, temperature: float, output_tokens: int, cache_salt: str | None) -> Request:
        """All answers have output_tokens tokens, so that the work of a run does not depend on their text."""
        return Request(
            request_id=name,
            prompt_token_ids=self.prompt.token_ids,
            sampling=SamplingParams(
                temperature=temperature, seed=self.seed, max_tokens=output_tokens, ignore_eos=True
            ),
            arrival_s=time.monotonic(),
            cache_salt=cache_salt,
        )


def bench_requests(prompts: Sequence[BenchPrompt], count: int) -> list[BenchRequest]:
    """count requests. They cycle through the prompts; each has its index as seed."""
    return [BenchRequest(prompt=prompts[index % len(prompts)], seed=index) for index in range(count)]
