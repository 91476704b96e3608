"""Clients of a server in a container: OpenAI's package from outside, and a stream that is read while it stops."""

import threading
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI

from benchmarks.image.containers import TrialError

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
_LONG: Any = [{"role": "user", "content": "Count from one to five hundred, one number a line."}]


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(url: str) -> str:
    """The answer, plain and as a stream, which must be the same. Raises TrialError if it is not, or is wrong."""
    asked = client(url)
    (model,) = asked.models.list().data
    plain = asked.chat.completions.create(model=model.id, messages=QUESTION, temperature=0, max_tokens=24)
    stream = asked.chat.completions.create(
        model=model.id, messages=QUESTION, temperature=0, max_tokens=24, stream=True
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    answer = plain.choices[0].message.content or ""
    if streamed != answer or "Paris" not in answer:
        raise TrialError(f"answered {answer!r}, streamed {streamed!r}")
    return answer


@dataclass(slots=True)
class LongStream:
    """A stream of num_tokens tokens, read by a thread. begun: it has some tokens. tokens: as its usage says."""

    url: str
    num_tokens: int
    begun: threading.Event = field(default_factory=threading.Event)
    tokens: int = 0
    finish_reason: str | None = None
    error: Exception | None = None

    def start(self) -> threading.Thread:
        """The thread, which has read a few tokens. Raises TrialError if none come."""
        thread = threading.Thread(target=self._read)
        thread.start()
        if not self.begun.wait(60):
            raise TrialError(f"the stream did not begin: {self.error}")
        return thread

    def check_whole(self) -> None:
        """Raises TrialError if tokens are missing."""
        if self.error is not None or (self.tokens, self.finish_reason) != (self.num_tokens, "length"):
            raise TrialError(
                f"{self.tokens} of {self.num_tokens} tokens, finish_reason {self.finish_reason}, {self.error}"
            )

    def _read(self) -> None:
        try:
            asked = client(self.url)
            (model,) = asked.models.list().data
            stream = asked.chat.completions.create(
                model=model.id, messages=_LONG, max_tokens=self.num_tokens, stream=True,
                stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
            )  # fmt: skip
            for number, chunk in enumerate(stream):
                if number == 3:
                    self.begun.set()
                for choice in chunk.choices:
                    self.finish_reason = choice.finish_reason or self.finish_reason
                if chunk.usage is not None:
                    self.tokens = chunk.usage.completion_tokens
        except Exception as error:
            self.error = error
