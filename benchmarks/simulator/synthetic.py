"""Synthetic traces: every drafted token is right with a given probability, independently of all others.

For closed forms and for questions like "what if acceptance were 0.9". In real text, right tokens cluster.
"""

import numpy as np

from benchmarks.simulator.trace import RequestTrace, Trace
from faser.errors import ConfigError


def iid_trace(
    acceptance: float,
    *,
    max_tokens: int = 8,
    num_requests: int = 16,
    prompt_len: int = 64,
    output_len: int = 64,
    method: str = "draft_model",
    spread: float = 0.0,
    seed: int = 0,
) -> Trace:
    """Requests whose drafted tokens are accepted with probability `acceptance`, in 0 … 1.

    spread: 0: confidences are all alike and tell nothing. Above 0, up to 1: each token's own probability is drawn
    from Beta(acceptance / spread, (1 - acceptance) / spread) and its confidence, the logit of it, tells it.
    Raises ConfigError for what lies outside.
    """
    if not 0 <= acceptance <= 1 or not 0 <= spread <= 1:
        raise ConfigError(f"acceptance is {acceptance} and spread is {spread}; both must be in 0 … 1")
    random = np.random.default_rng(seed)
    shape = (num_requests, output_len, max_tokens)
    chances = np.full(shape, acceptance)
    if spread > 0 and 0 < acceptance < 1:
        chances = random.beta(acceptance / spread, (1 - acceptance) / spread, shape)
    runs = (random.random(shape) < chances).cumprod(axis=-1).sum(axis=-1)
    sure = np.clip(chances, 1e-4, 1 - 1e-4)
    confidences = np.log(sure / (1 - sure)).round(4)
    return Trace(
        model="synthetic",
        drafter=method,
        max_tokens=max_tokens,
        temperature=0.0,
        methods=(method,),
        requests=tuple(
            RequestTrace(
                prompt_len=prompt_len,
                runs=tuple(runs[i].tolist()),
                lengths=(max_tokens,) * output_len,
                confidences=tuple(map(tuple, confidences[i].tolist())),
                methods=(0,) * output_len,
            )
            for i in range(num_requests)
        ),
    )
