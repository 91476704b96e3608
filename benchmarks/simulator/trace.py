"""Trace: what a drafter proposed at every position of recorded outputs, and how much of it was right.

With sample-and-match verification the target's token at a position follows from the prefix and the seed alone, so
an output does not depend on the drafts. If the first `run` drafted tokens equal the output, min(γ, run) are
accepted for every γ. Reads and writes JSON lines: a header, then a line per request. Knows no engine.

Synthetic traces: every drafted token is right with a given probability, independently of all others.

For closed forms and for questions like "what if acceptance were 0.9". In real text, right tokens cluster.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from faser import __version__
from faser.errors import ConfigError

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """One request, with an entry per output position p: the draft from the prompt and p output tokens.

    runs: leading drafted tokens that equal the output. lengths: tokens drafted, up to the trace's max_tokens; 0
    without a draft. confidences: of each drafted token, as in drafts. methods: index of the drafter's name in the
    trace. seed, prompt_token_ids, output_token_ids: to run the request again; empty in synthetic traces. Raises
    ConfigError where the arrays do not fit each other.
    """

    prompt_len: int
    runs: tuple[int, ...]
    lengths: tuple[int, ...]
    confidences: tuple[tuple[float, ...], ...]
    methods: tuple[int, ...]
    category: str = ""
    seed: int = 0
    prompt_token_ids: tuple[int, ...] = ()
    output_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prompt_len < 1 or not self.runs:
            raise ConfigError(
                f"prompt_len is {self.prompt_len} with {len(self.runs)} positions; both must be at least 1"
            )
        sizes = {len(self.runs), len(self.lengths), len(self.confidences), len(self.methods)}
        if len(sizes) > 1:
            raise ConfigError(f"runs, lengths, confidences and methods have {sorted(sizes)} positions; one each")
        for position, (run, length) in enumerate(zip(self.runs, self.lengths, strict=True)):
            if not 0 <= run <= length or len(self.confidences[position]) != length:
                raise ConfigError(
                    f"position {position} has a run of {run}, a length of {length} and "
                    f"{len(self.confidences[position])} confidences; 0 <= run <= length = confidences"
                )

    @property
    def output_len(self) -> int:
        return len(self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests of one model and one drafter. max_tokens: K, the longest draft; methods: names, by index."""

    model: str
    drafter: str
    max_tokens: int
    temperature: float
    methods: tuple[str, ...]
    requests: tuple[RequestTrace, ...]

    def __post_init__(self) -> None:
        if not self.requests or self.max_tokens < 1:
            raise ConfigError(
                f"the trace has {len(self.requests)} requests and drafts of {self.max_tokens} tokens; "
                "both must be at least 1"
            )
        for number, request in enumerate(self.requests):
            if max(request.lengths) > self.max_tokens or max(request.methods) >= len(self.methods):
                raise ConfigError(
                    f"request {number} has drafts of {max(request.lengths)} tokens and method "
                    f"{max(request.methods)}; the header allows {self.max_tokens} tokens and methods "
                    f"0 … {len(self.methods) - 1}"
                )


def write_trace(trace: Trace, path: Path) -> None:
    """Write the header and a line per request; confidences are rounded to four digits."""
    header = {
        "format": FORMAT,
        "faser": __version__,
        "model": trace.model,
        "drafter": trace.drafter,
        "max_tokens": trace.max_tokens,
        "temperature": trace.temperature,
        "methods": trace.methods,
    }
    with path.open("w", encoding="utf-8") as file:
        for record in (header, *map(_record, trace.requests)):
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def read_trace(path: Path) -> Trace:
    """Raises ConfigError naming the file, and the line, of what cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}") from error
    where = 1
    try:
        header = json.loads(lines[0]) if lines else {}
        if header.get("format") != FORMAT:
            raise ConfigError(f"the header's format is {header.get('format')!r}; it must be {FORMAT}")
        requests = []
        for line in lines[1:]:
            where += 1
            requests.append(_request(json.loads(line)))
        return Trace(
            model=header["model"],
            drafter=header["drafter"],
            max_tokens=header["max_tokens"],
            temperature=header["temperature"],
            methods=tuple(header["methods"]),
            requests=tuple(requests),
        )
    except (ConfigError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path}, line {where}: {error!r} is wrong with this trace") from error


def _record(request: RequestTrace) -> dict[str, Any]:
    rounded = [[round(value, 4) for value in row] for row in request.confidences]
    return asdict(request) | {"confidences": rounded}


def _request(record: dict[str, Any]) -> RequestTrace:
    return RequestTrace(
        prompt_len=record["prompt_len"],
        runs=tuple(record["runs"]),
        lengths=tuple(record["lengths"]),
        confidences=tuple(map(tuple, record["confidences"])),
        methods=tuple(record["methods"]),
        category=record["category"],
        seed=record["seed"],
        prompt_token_ids=tuple(record["prompt_token_ids"]),
        output_token_ids=tuple(record["output_token_ids"]),
    )


def mean_run(requests: Iterable[RequestTrace]) -> float:
    """Tokens a draft of full length gets accepted on average, positions without a draft included."""
    runs = [run for request in requests for run in request.runs]
    return sum(runs) / len(runs)


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
