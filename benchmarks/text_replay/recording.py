"""Recordings: answers of a model, token by token, with the tokens that it thought likeliest at every position.

Owns the asking and the file: JSON lines, one for each answer.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import faser
from benchmarks.text_replay.traffic import Conversation, grown
from faser.api.requests.chat_template import ChatTemplate
from faser.types import SamplingParams

TOP = 8
_QUESTION_TOKENS = 96
_FEWEST_QUESTION_TOKENS = 6
_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer. conversation: its name. top: for each of its tokens the TOP likeliest ids, likeliest first.

    top_logprobs: of these ids, before temperature.
    """

    kind: str
    conversation: str
    temperature: float
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top: tuple[tuple[int, ...], ...] = ()
    top_logprobs: tuple[tuple[float, ...], ...] = ()

    def cut(self, most: int) -> "Answer":
        """The first tokens of the answer."""
        top, top_logprobs = self.top[:most], self.top_logprobs[:most]
        return replace(self, tokens=self.tokens[:most], top=top, top_logprobs=top_logprobs)


class Model:
    """A model that answers conversations without drafts."""

    def __init__(self, name: str | None) -> None:
        self._llm = faser.LLM(name, speculative_policy="off", max_num_seqs=_AT_ONCE)
        tokenizer = self._llm.tokenizer
        source = tokenizer.chat_template
        if not isinstance(source, str):
            raise SystemExit("the model has no chat template")
        self._template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)

    def close(self) -> None:
        self._llm.close()

    def converse(
        self, kind: str, conversations: Sequence[Conversation], *, temperature: float, max_tokens: int
    ) -> list[Answer]:
        """Every turn of every conversation, the first turn of all, then the second, and so on."""
        texts: dict[str, list[str]] = {each.name: [] for each in conversations}
        found: list[Answer] = []
        for turn in range(max(each.num_turns for each in conversations)):
            going = [each for each in conversations if turn < each.num_turns]
            prompts = [self._encode(grown(each, texts[each.name]), open_ended=False) for each in going]
            sampling = [
                SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number, logprobs=TOP)
                for number in range(len(going))
            ]
            for each, done in zip(going, self._llm.generate(prompts, sampling, progress=True), strict=True):
                sample = done.samples[0]
                texts[each.name].append(sample.text)
                found.append(
                    Answer(
                        kind=kind,
                        conversation=each.name,
                        temperature=temperature,
                        prompt=done.prompt_token_ids,
                        tokens=tuple(sample.token_ids),
                        top=tuple(tuple(token for token, _ in place.top[:TOP]) for place in sample.logprobs),
                        top_logprobs=tuple(
                            tuple(round(value, 3) for _, value in place.top[:TOP]) for place in sample.logprobs
                        ),
                    )
                )
        return found

    def self_made(self, count: int, *, max_tokens: int, seed: int = 0) -> list[Answer]:
        """Questions that the model makes up after its template's opening of the user's turn, and their answers."""
        opening = self._encode([{"role": "user", "content": ""}], open_ended=True)
        sampling = [
            SamplingParams(temperature=1.0, top_p=0.95, max_tokens=_QUESTION_TOKENS, seed=seed + number)
            for number in range(count)
        ]
        asked = [each.samples[0].text for each in self._llm.generate([opening] * count, sampling, progress=True)]
        questions = [text.strip() for text in dict.fromkeys(asked) if len(text.split()) >= _FEWEST_QUESTION_TOKENS]
        prompts = [self._encode([{"role": "user", "content": each}], open_ended=False) for each in questions]
        answering = [
            SamplingParams(temperature=0.0 if number % 2 else 0.8, max_tokens=max_tokens, seed=number)
            for number in range(len(prompts))
        ]
        return [
            Answer(
                kind="self-made",
                conversation=f"self-made {seed + number}",
                temperature=sampled.temperature,
                prompt=done.prompt_token_ids,
                tokens=tuple(done.samples[0].token_ids),
            )
            for number, (done, sampled) in enumerate(
                zip(self._llm.generate(prompts, answering, progress=True), answering, strict=True)
            )
        ]

    def _encode(self, messages: list[dict[str, str]], *, open_ended: bool) -> list[int]:
        """open_ended: the text ends where the content of the last message would go on."""
        text = self._template.render(
            messages, add_generation_prompt=not open_ended, continue_final_message=open_ended, extra={}
        )
        return self._llm.tokenizer.encode(text, add_special_tokens=False)


def write(path: Path, answers: Iterable[Answer]) -> None:
    """Append a line for each."""
    with path.open("a", encoding="utf-8") as file:
        for each in answers:
            file.write(json.dumps(asdict(each), separators=(",", ":")) + "\n")


def read(path: Path) -> list[Answer]:
    found = []
    for line in path.read_text("utf-8").splitlines():
        raw = json.loads(line)
        for name in ("prompt", "tokens"):
            raw[name] = tuple(raw[name])
        for name in ("top", "top_logprobs"):
            raw[name] = tuple(map(tuple, raw[name]))
        found.append(Answer(**raw))
    return found
