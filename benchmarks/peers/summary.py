"""From exchanges to numbers: one measurement per system, round and concurrency; medians and ratios over rounds.

Owns what is computed from the times, and the bars that FASER is held to. Pure functions of plain values.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.peers.llamacpp import QUANTISED
from benchmarks.peers.load import Exchange

FASER, FASER_OFF = "faser", "faser-off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One system answering one set of prompts. Latencies are medians over requests (itl: over gaps), in seconds.

    prompt_tokens: by request, in the prompts' order. foreign_cores: mean number of cores that neither client
    nor server had, while it ran.
    """

    system: str
    round: int
    concurrency: int
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    wall_s: float
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    itl_s: float
    foreign_cores: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Median, least and greatest of one number over the rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The output tokens/s of `of`, a form of FASER, shall be at least `factor` times this system's."""

    system: str
    concurrency: int
    factor: float
    of: str = FASER


BARS = (
    Bar(system="transformers", concurrency=1, factor=1.3),
    Bar(system="transformers-generate", concurrency=1, factor=1.3),
    Bar(system="vllm", concurrency=1, factor=1.0),
    Bar(system="vllm", concurrency=4, factor=1.0),
    Bar(system="vllm", concurrency=16, factor=1.0),
    *(
        Bar(
            system=f"llamacpp-{precision}",
            concurrency=at,
            factor=1.2 if at == 1 else 1.5,
            of=f"{FASER_OFF}-{precision}",
        )
        for precision in QUANTISED
        for at in (1, 4, 16)
    ),
)


def measure(
    exchanges: Sequence[Exchange], *, system: str, round: int, concurrency: int, foreign_s: float
) -> Measurement:
    """foreign_s: processor seconds that others spent from the first request to the last token."""
    began_s = min(exchange.sent_s for exchange in exchanges)
    ended_s = max(exchange.token_times_s[-1] for exchange in exchanges)
    output_tokens = sum(exchange.output_tokens for exchange in exchanges)
    return Measurement(
        system=system,
        round=round,
        concurrency=concurrency,
        prompt_tokens=tuple(exchange.prompt_tokens for exchange in exchanges),
        output_tokens=output_tokens,
        wall_s=ended_s - began_s,
        output_tokens_per_s=output_tokens / (ended_s - began_s),
        ttft_s=median(exchange.ttft_s for exchange in exchanges),
        tpot_s=median(exchange.tpot_s for exchange in exchanges),
        itl_s=median(gap for exchange in exchanges for gap in exchange.gaps_s),
        foreign_cores=foreign_s / (ended_s - began_s),
    )


def check_same_work(measurements: Iterable[Measurement]) -> None:
    """Raises ValueError unless all systems read the same prompt tokens, request by request, in every round."""
    seen: dict[tuple[int, int], Measurement] = {}
    for found in measurements:
        first = seen.setdefault((found.round, found.concurrency), found)
        if (found.prompt_tokens, found.output_tokens) != (first.prompt_tokens, first.output_tokens):
            raise ValueError(
                f"round {found.round}, concurrency {found.concurrency}: {found.system} read "
                f"{found.prompt_tokens} prompt tokens and wrote {found.output_tokens}, {first.system} "
                f"read {first.prompt_tokens} and wrote {first.output_tokens}"
            )


def spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    return Spread(median=median(ordered), low=ordered[0], high=ordered[-1])


def speeds(measurements: Iterable[Measurement]) -> dict[tuple[str, int], Spread]:
    """Output tokens/s by system and concurrency."""
    found: dict[tuple[str, int], list[float]] = {}
    for one in measurements:
        found.setdefault((one.system, one.concurrency), []).append(one.output_tokens_per_s)
    return {key: spread(values) for key, values in found.items()}


def ratios(measurements: Iterable[Measurement], system: str = FASER) -> dict[tuple[str, int], Spread]:
    """Speed of `system` over that of each other one in the same round, by other system and concurrency."""
    by_round: dict[tuple[int, int], dict[str, float]] = {}
    for one in measurements:
        by_round.setdefault((one.round, one.concurrency), {})[one.system] = one.output_tokens_per_s
    found: dict[tuple[str, int], list[float]] = {}
    for (_, concurrency), rates in by_round.items():
        for other, rate in rates.items():
            if system in rates and other != system:
                found.setdefault((other, concurrency), []).append(rates[system] / rate)
    return {key: spread(values) for key, values in found.items()}


def same_file(measurements: Sequence[Measurement]) -> dict[tuple[str, int], Spread]:
    """Speed of each faser-…FILE over that of llama.cpp with the same file, by FASER's name and concurrency."""
    found: dict[tuple[str, int], Spread] = {}
    for precision in QUANTISED:
        for name in (f"{FASER}-{precision}", f"{FASER_OFF}-{precision}"):
            for (other, concurrency), ratio in ratios(measurements, name).items():
                if other == f"llamacpp-{precision}":
                    found[name, concurrency] = ratio
    return found


def verdicts(measurements: Sequence[Measurement]) -> list[tuple[Bar, float, bool]]:
    """Each bar whose ratio was measured, with its median ratio and whether that reaches the bar."""
    found = {of: ratios(measurements, of) for of in {bar.of for bar in BARS}}
    measured = [(bar, found[bar.of].get((bar.system, bar.concurrency))) for bar in BARS]
    return [(bar, ratio.median, ratio.median >= bar.factor) for bar, ratio in measured if ratio is not None]
