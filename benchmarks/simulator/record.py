"""Records a Trace: a real engine answers prompts while its drafter proposes at every position.

Owns how raw recordings become runs. Imports no torch.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from benchmarks.engines import StepEngine, closed_loop
from benchmarks.simulator.trace import RequestTrace, Trace
from faser.cli.bench.prompts import BenchPrompt
from faser.config.speculation import DRAFT_METHODS
from faser.engine.contract.drafts import DraftTable, empty_table
from faser.engine.control.sequence import sample_seed
from faser.errors import ConfigError
from faser.types.request import Request
from faser.types.sampling import SamplingParams

_NO_DRAFT = empty_table([0], DRAFT_METHODS[0], 0)  # of position 0, whose token is sampled with the prompt
_SPARE = 2  # tokens after the last draft, so that the end of a request cuts no draft


class RecordedEngine(StepEngine, Protocol):
    """The part of Engine that recording uses."""

    def use_policy(self, name: str, gamma: int | None = None, *, overlap: str | None = None) -> None: ...


class RecordedSequence(Protocol):
    """The part of draft_recorder.Recording that becomes a trace."""

    @property
    def seed(self) -> int: ...
    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...
    @property
    def output_token_ids(self) -> list[int]: ...
    @property
    def drafts(self) -> dict[int, DraftTable]: ...
    @property
    def max_tokens(self) -> dict[int, int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Settings of a recording. max_tokens: K; output_tokens: positions to record of each prompt's answer."""

    model: str
    drafter: str
    max_tokens: int
    output_tokens: int
    temperature: float = 0.0
    seed: int = 0
    clients: int = 4


def record(
    engine: RecordedEngine,
    recordings: Callable[[], Sequence[RecordedSequence]],
    prompts: Sequence[BenchPrompt],
    session: Session,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Trace:
    """Answer every prompt with the engine, whose drafter is recorded, and make a trace of it.

    progress: called with (answered, all). Raises ConfigError if no output has a position to show.
    """
    engine.use_policy("fixed", session.max_tokens)
    requests = [
        Request(
            request_id=str(number),
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(
                temperature=session.temperature,
                seed=session.seed + number,
                max_tokens=session.output_tokens + session.max_tokens + _SPARE,
            ),
            arrival_s=float(number),
        )
        for number, prompt in enumerate(prompts)
    ]
    for done, _ in enumerate(closed_loop(engine, requests, session.clients), start=1):
        progress(done, len(requests))
    by_seed = {each.seed: each for each in recordings()}
    methods: dict[str, int] = {}
    found = []
    for number, prompt in enumerate(prompts):
        recording = by_seed[sample_seed(session.seed + number, 0)]
        traced = _traced(recording, session, methods)
        if traced is not None:
            found.append(replace(traced, category=prompt.category, seed=session.seed + number))
    if not found:
        raise ConfigError(f"none of {len(prompts)} outputs is long enough to record; use longer --output-tokens")
    return Trace(
        model=session.model,
        drafter=session.drafter,
        max_tokens=session.max_tokens,
        temperature=session.temperature,
        methods=tuple(methods),
        requests=tuple(found),
    )


def _traced(recording: RecordedSequence, session: Session, methods: dict[str, int]) -> RequestTrace | None:
    """The trace of one output; None if it has no position. methods: index by name; new methods are added.

    A position counts if a draft of full length was requested and can be compared: the output continues for K more
    tokens, or it ended by itself, and then tokens drafted beyond its end are wrong. Position 0 may have no draft,
    because its token is sampled with the prompt.
    """
    output = recording.output_token_ids
    drafts = [recording.drafts.get(0) or _NO_DRAFT]
    for position in range(1, min(len(output), session.output_tokens)):
        if recording.max_tokens.get(position) != session.max_tokens:
            break
        drafts.append(recording.drafts[position])
    if len(drafts) < 2:
        return None
    names = [DRAFT_METHODS[(drafts[1] if each is _NO_DRAFT else each).methods.item()] for each in drafts]
    return RequestTrace(
        prompt_len=len(recording.prompt_token_ids),
        runs=tuple(_run(draft, output[position:]) for position, draft in enumerate(drafts)),
        lengths=tuple(draft.lengths.item() for draft in drafts),
        confidences=tuple(tuple(draft.confidences[0, : draft.lengths.item()].tolist()) for draft in drafts),
        methods=tuple(methods.setdefault(name, len(methods)) for name in names),
        prompt_token_ids=recording.prompt_token_ids,
        output_token_ids=tuple(output[: len(drafts)]),
    )


def _run(draft: DraftTable, output: Sequence[int]) -> int:
    """Number of leading tokens of the draft that equal the output."""
    pairs = zip(draft.tokens(0), output, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
