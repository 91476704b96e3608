"""Random lives of an engine: who asks for what and when, who goes away, and what is switched meanwhile.

A life is drawn from a seed. Oracle: the same requests all at once in an engine that never drafts, since an answer
depends on the request alone. Knows nothing of lanes and pruning; engines come from outside.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from faser.engine.contract.plan import SequenceDelta
from faser.engine.engine import Engine
from faser.types.answer import FinishReason, PositionLogprobs
from faser.types.request import Request, SpeculationParams
from faser.types.sampling import SamplingParams
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.pruning_world import CAP

EOS = tuple(range(3, 9))  # many, so that samples end in the middle of drafts
MOST_TOKENS = 60
MOST_STEPS = 2000
PENALTIES = ((1.3, 0.4, 0.3), (1.0, -1.5, -1.0), (1.0, -1.0, -2.0), (0.7, 0.0, 0.0), (2.0, 2.0, 2.0))

Sample = tuple[str, int]  # of which request, and which of its n


@dataclass
class Heard:
    """All that was said of one sample."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    def hear(self, delta: SequenceDelta) -> None:
        assert delta.error is None, delta.error
        assert self.finish_reason is None, "nothing is heard after the end"
        assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            assert self.prompt_logprobs is None, "the prompt's scores come once"
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def begins(self, whole: "Heard") -> bool:
        """Whether this is how the other one begins, which may have gone on."""
        count = len(self.token_ids)
        return (
            self.token_ids == whole.token_ids[:count]
            and self.logprobs == whole.logprobs[:count]
            and self.prompt_logprobs in (None, whole.prompt_logprobs)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """arrivals: requests by step. hang_ups: whole ones dropped. switches: policy and overlap from a step on.

    leaving: after how many tokens the reader of a sample goes away, as whoever has found a stop string does.
    """

    arrivals: dict[int, list[Request]]
    leaving: dict[Sample, int]
    hang_ups: dict[int, str]
    switches: dict[int, tuple[str, str]]

    @property
    def asked(self) -> list[Request]:
        return [request for requests in self.arrivals.values() for request in requests]


def random_life(seed: int) -> Life:
    rng = random.Random(seed)
    texts = [[rng.randrange(15, VOCAB_SIZE) for _ in range(70)] for _ in range(2)]
    arrivals: dict[int, list[Request]] = {}
    leaving: dict[Sample, int] = {}
    hang_ups: dict[int, str] = {}
    for i in range(rng.randint(3, 9)):
        step = rng.choice((0, 0, rng.randint(1, 40)))
        request = _random_request(rng, str(i), texts, arrival_s=float(step))
        arrivals.setdefault(step, []).append(request)
        if request.sampling.stop:
            leaving |= {(str(i), k): rng.randint(1, 12) for k in range(request.sampling.n) if rng.random() < 0.8}
        if rng.random() < 0.15:
            hang_ups[step + rng.randint(0, 15)] = str(i)
    switches = {}
    if rng.random() < 0.5:
        names = ("fixed", "faser", "goodput", "survival", "off")
        switches = {rng.randint(1, 60): (rng.choice(names), rng.choice(("on", "on", "off", "auto"))) for _ in "ab"}
    return Life(arrivals=arrivals, leaving=leaving, hang_ups=hang_ups, switches=switches)


def _random_request(rng: random.Random, name: str, texts: list[list[int]], *, arrival_s: float) -> Request:
    prompt = rng.choice(texts)[: rng.choice((1, 15, 16, 17, 33, 48, 70))]
    prompt = prompt + [rng.randrange(15, VOCAB_SIZE) for _ in range(rng.randint(0, 3))]
    return Request(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=_random_sampling(rng),
        arrival_s=arrival_s,
        priority=rng.randint(-1, 1),
        cache_salt=rng.choice((None, None, None, "salt")),
        speculation=SpeculationParams(
            enabled=rng.random() < 0.85, max_tokens=rng.choice((None, None, 0, 1, 2, CAP))
        ),
        predicted_token_ids=tuple(rng.choices(range(15, VOCAB_SIZE), k=rng.choice((0, 20)))),
    )


def _random_sampling(rng: random.Random) -> SamplingParams:
    given: dict[str, Any] = {
        "n": rng.choice((1, 1, 1, 2, 3)),
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.0)),
        "seed": rng.randrange(2**40),
        "max_tokens": rng.choice((0, 1, 2, 3, *range(4, MOST_TOKENS, 8), *range(30, MOST_TOKENS, 3))),
        "ignore_eos": rng.random() < 0.75,
        "logprobs": rng.choice((None, 0, 2)),
        "prompt_logprobs": rng.choice((None, None, None, 1)),
        "stop": ("never found in here",) if rng.random() < 0.3 else (),
    }
    given["min_tokens"] = rng.choice((0, 0, min(5, given["max_tokens"])))
    if rng.random() < 0.3:
        given["stop_token_ids"] = tuple(rng.sample(range(15, VOCAB_SIZE), 20))
    if rng.random() < 0.3:
        given |= {"top_p": 0.9, "top_k": rng.choice((0, 20)), "min_p": 0.02}
    if rng.random() < 0.4:
        repetition, presence, frequency = rng.choice(PENALTIES)
        given |= {
            "repetition_penalty": repetition,
            "presence_penalty": presence,
            "frequency_penalty": frequency,
        }
    if rng.random() < 0.2:
        given |= {"logit_bias": ((40, 3.0), (41, -4.0)), "allowed_token_ids": tuple(range(0, VOCAB_SIZE, 3))}
    return SamplingParams(**given)


def live(engine: Engine, life: Life) -> dict[Sample, Heard]:
    """Lead the life to its end, which must come; the pool is empty then."""
    heard = _nothing_heard(life.asked)
    leaving = dict(life.leaving)
    last = max((*life.arrivals, *life.hang_ups))
    for step in range(MOST_STEPS):
        for request in life.arrivals.get(step, ()):
            engine.add(request)
        if step in life.hang_ups:
            engine.abort(life.hang_ups[step])
        if step in life.switches:
            policy, overlap = life.switches[step]
            engine.use_policy(policy, overlap=overlap, forget=bool(step % 2))
        _hear(engine, heard)
        for sample in [each for each, most in leaving.items() if len(heard[each].token_ids) >= most]:
            engine.abort(*sample)
            del leaving[sample]
        if step > last and not engine.has_work():
            assert engine.stats().kv_usage == 0.0
            return heard
    raise AssertionError(f"{MOST_STEPS} steps have not brought everything to its end")


def alone(engine: Engine, asked: Sequence[Request]) -> dict[Sample, Heard]:
    """What there is to hear of everybody in an engine to which nothing else happens."""
    heard = _nothing_heard(asked)
    for request in asked:
        engine.add(request)
    while engine.has_work():
        _hear(engine, heard)
    return heard


def check(life: Life, heard: dict[Sample, Heard], expected: dict[Sample, Heard]) -> None:
    """Everybody heard what was to be heard; who went away, the beginning of it."""
    gone = set(life.hang_ups.values())
    for sample, found in heard.items():
        whole = expected[sample]
        if found.finish_reason is not None or not (sample[0] in gone or sample in life.leaving):
            assert found == whole, sample
        else:
            assert found.begins(whole), sample


def _nothing_heard(asked: Sequence[Request]) -> dict[Sample, Heard]:
    return {(each.request_id, index): Heard() for each in asked for index in range(each.sampling.n)}


def _hear(engine: Engine, heard: dict[Sample, Heard]) -> None:
    for delta in engine.step():
        heard[delta.request_id, delta.index].hear(delta)
