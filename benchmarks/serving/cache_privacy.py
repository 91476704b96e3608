"""Attack of one client that reads another's answers off its own, as a program against a running server.

    faser serve --api-key VICTIM --api-key ATTACKER
    python -m benchmarks serving.cache_privacy --victim-key VICTIM --attacker-key ATTACKER [--probes 1000]

There are three modes to try: these flags; these and --share-cache-across-keys; and no keys on either side,
where both clients are anonymous. The attacker knows eight tokens of an answer of the victim's and guesses the
next two. Its prompt is those eight; bias and penalty make the model say the guess, whatever it would say
itself. A draft from the victim's answer is then accepted exactly where the guess is right. Half of the guesses
are right. Of the others, one half changes the second token, the other half shuffles the eight.

Every probe is asked twice, before and after the victim has its answers. Counted are answers that differ in any
byte but their id and date, and hits among right and wrong guesses by what an answer shows. The victim's tokens
are known beforehand from the same requests under a `cache_salt` of their own. Then prompts are probed:
does the server know the text of an answer, or its shuffled tokens? The median times show what remains: see
docs/security.md. Exit status 1: something was learned.
"""

import json
import random
import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from benchmarks.runner import command_line

_CONTEXT = 8
_GUESSED = 2
_SAID = _GUESSED + 1  # a draft is verified in the step after the one that it continues
_ROUTE = "/v1/completions"
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt of the attacker's. is_right: the victim got exactly this.

    guess: the tokens that the attacker makes the model say; none: it asks for the prompt alone.
    trace: the attacker also asks where each token comes from, which the server refuses where answers are shared.
    """

    prompt: tuple[int, ...]
    guess: tuple[int, ...] = ()
    is_right: bool
    trace: bool = False

    def body(self) -> dict[str, Any]:
        """The request. The penalty on the guess's first token outweighs its bias, so the second one follows."""
        forced: dict[str, Any] = {}
        if self.guess:
            first, second = self.guess
            forced = {
                "allowed_token_ids": [first, second],
                "logit_bias": {str(first): 100, str(second): 50},
                "repetition_penalty": 10,
                "speculative": {"enabled": True, "trace": self.trace},
            }
        return {
            "prompt": list(self.prompt),
            "max_tokens": _SAID if self.guess else 1,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
            **forced,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One answer. events: of its stream, but for what differs between equal answers. seconds: until its end."""

    events: tuple[dict[str, Any], ...]
    seconds: float

    @property
    def text(self) -> str:
        return json.dumps(self.events)

    def count(self, name: str) -> int:
        metrics = self.events[-1].get("metrics") or {}
        return int((metrics.get("faser") or {}).get(name, 0))

    @property
    def cached_tokens(self) -> int:
        details = self.events[-1]["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    @property
    def most_tokens_at_once(self) -> int:
        """Return the most tokens of one of its events."""
        return max(len(choice["token_ids"]) for event in self.events for choice in event["choices"])

    @property
    def num_traced(self) -> int:
        """Tokens that a trace says were drafted and accepted."""
        traces = [choice.get("trace") or {} for event in self.events for choice in event["choices"]]
        return sum(token["origin"] == "accepted" for trace in traces for token in trace.get("tokens", ()))


# What an answer may show, by name.
SIGNS: dict[str, Callable[[Observation], bool]] = {
    "accepted": lambda seen: seen.count("accepted") > 0,
    "drafted": lambda seen: seen.count("drafted") > 0,
    "fewer steps than tokens": lambda seen: 0 < seen.count("steps") < _SAID,
    "two tokens in one event": lambda seen: seen.most_tokens_at_once > 1,
    "a token traced to a draft": lambda seen: seen.num_traced > 0,
    "cached tokens": lambda seen: seen.cached_tokens > 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Hits of a sign among right and wrong probes."""

    right: int
    wrong: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """num_right, num_wrong: guesses. changed: answers to guesses that differ once the victim has its answers.

    guesses: by sign. prompts: cached tokens, for the victim's texts and for shuffled ones, num_prompts of each.
    seconds: medians of right and wrong guesses, and of right and wrong prompts.
    """

    num_right: int
    num_wrong: int
    changed: int
    guesses: dict[str, Finding]
    num_prompts: int
    prompts: Finding
    seconds: tuple[float, float, float, float]

    @property
    def learned(self) -> bool:
        """Return whether an answer says anything about the victim's, other than by the time it takes."""
        unequal = [each for each in (*self.guesses.values(), self.prompts) if each.right != each.wrong]
        return self.changed > 0 or bool(unequal)


def attack(
    victim: httpx.Client,
    attacker: httpx.Client,
    *,
    probes: int,
    answers: int,
    tokens: int,
    seed: int = 0,
    trace: bool = False,
) -> Findings:
    """The attack on a server without other clients. answers: of the victim's, of `tokens` tokens each.

    Raises httpx.HTTPError, and ValueError where the answers have too few places or differ when repeated.
    """
    rng = random.Random(seed)
    texts = [_told(victim, number, tokens, salt=secrets.token_hex()) for number in range(answers)]
    guesses = [replace(each, trace=trace) for each in _guesses([answer for _, answer in texts], probes, rng)]
    before = [observe(attacker, each) for each in guesses]
    if [_told(victim, number, tokens, salt=None) for number in range(answers)] != texts:
        raise ValueError("the victim's answers are not those of the same requests before: nothing can be compared")
    after = [observe(attacker, each) for each in guesses]
    right = [seen for guess, seen in zip(guesses, after, strict=True) if guess.is_right]
    wrong = [seen for guess, seen in zip(guesses, after, strict=True) if not guess.is_right]
    known, unknown = _prompts([(*prompt, *answer) for prompt, answer in texts], attacker, rng)
    return Findings(
        num_right=len(right),
        num_wrong=len(wrong),
        changed=sum(one.text != other.text for one, other in zip(before, after, strict=True)),
        guesses={name: _finding(sign, right, wrong) for name, sign in SIGNS.items()},
        num_prompts=len(known),
        prompts=_finding(SIGNS["cached tokens"], known, unknown),
        seconds=(_median_s(right), _median_s(wrong), _median_s(known), _median_s(unknown)),
    )


def observe(client: httpx.Client, probe: Probe) -> Observation:
    began_s = time.perf_counter()
    answer = client.post(_ROUTE, json=probe.body())
    seconds = time.perf_counter() - began_s
    answer.raise_for_status()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    events = [
        {key: value for key, value in json.loads(line).items() if key not in ("id", "created")} for line in lines
    ]
    return Observation(events=tuple(events), seconds=seconds)


def _told(
    client: httpx.Client, number: int, tokens: int, *, salt: str | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of a prompt of the victim's, and of the answer to it. No two prompts begin alike."""
    body = {
        "prompt": f"{number} is the number of this story, which nobody else is told. Once upon a time",
        "max_tokens": tokens,
        "temperature": 1,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }
    answer = client.post(_ROUTE, json=body)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    return tuple(choice["prompt_token_ids"]), tuple(choice["token_ids"])


def _guesses(answers: Sequence[tuple[int, ...]], probes: int, rng: random.Random) -> list[Probe]:
    places = [
        (answer[at - _CONTEXT : at], answer[at : at + _GUESSED])
        for answer in answers
        for at in range(_CONTEXT, len(answer) - _GUESSED)
        if len({*answer[at - _CONTEXT : at + _GUESSED]}) == len({*answer[at - _CONTEXT : at]}) + _GUESSED
    ]
    if len(places) < probes:
        raise ValueError(f"the answers have {len(places)} places to guess at; {probes} probes need as many")
    others = [token for answer in answers for token in answer]
    found = []
    for number, (context, guess) in enumerate(rng.sample(places, probes)):
        if number % 2 == 0:
            found.append(Probe(prompt=context, guess=guess, is_right=True))
        elif number % 4 == 1:
            other = rng.choice([token for token in others if token not in (*context, *guess)])
            found.append(Probe(prompt=context, guess=(guess[0], other), is_right=False))
        else:
            shuffled = tuple(rng.sample(context, len(context)))
            found.append(Probe(prompt=shuffled, guess=guess, is_right=False))
    return found


def _prompts(
    texts: Sequence[tuple[int, ...]], attacker: httpx.Client, rng: random.Random
) -> tuple[list[Observation], list[Observation]]:
    """Return the attacker's view of the victim's texts, and of their shuffled tokens. Each is asked for once."""
    known = [observe(attacker, Probe(prompt=text, is_right=True)) for text in texts]
    shuffled = [tuple(rng.sample(text, len(text))) for text in texts]
    return known, [observe(attacker, Probe(prompt=text, is_right=False)) for text in shuffled]


def _finding(
    sign: Callable[[Observation], bool], right: Sequence[Observation], wrong: Sequence[Observation]
) -> Finding:
    return Finding(right=sum(map(sign, right)), wrong=sum(map(sign, wrong)))


def _median_s(seen: Sequence[Observation]) -> float:
    return round(statistics.median(each.seconds for each in seen), 4)


def table(found: Findings) -> str:
    right, wrong, known, unknown = found.seconds
    prompts, count = found.prompts, found.num_prompts
    lines = [
        "| an answer shows | right guesses | wrong guesses |",
        "| --- | --- | --- |",
        *(
            f"| {name} | {each.right} of {found.num_right} | {each.wrong} of {found.num_wrong} |"
            for name, each in found.guesses.items()
        ),
        f"| median seconds | {right} | {wrong} |",
        "",
        "| prompts | the victim's text | its tokens shuffled |",
        "| --- | --- | --- |",
        f"| cached tokens | {prompts.right} of {count} | {prompts.wrong} of {count} |",
        f"| median seconds | {known} | {unknown} |",
        "",
        f"Answers that the victim's changed: {found.changed} of {found.num_right + found.num_wrong}.",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--victim-key", default="none")
    parser.add_argument("--attacker-key", default="none")
    parser.add_argument("--probes", type=int, default=1000)
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer of the victim's")
    parser.add_argument("--out", type=Path, help="write the findings as JSON")
    options = parser.parse_args()
    with client(options.url, options.victim_key) as victim, client(options.url, options.attacker_key) as attacker:
        found = attack(victim, attacker, probes=options.probes, answers=options.answers, tokens=options.tokens)
    print(table(found))
    if options.out is not None:
        options.out.write_text(json.dumps(asdict(found), indent=1) + "\n")
    return int(found.learned)


def client(url: str, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=False)
