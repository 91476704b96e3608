"""FakeEngine: an engine without a model, with scripted answers, that records its requests."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Self

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from faser.engine.checkpoints.tokenizer_settings import TokenizerSettings
from faser.engine.client.output_stream import Timing
from faser.engine.text.tokenizer import Tokenizer
from faser.engine.text.vocabulary import BYTE_OF_CHAR
from faser.errors import FaserError, NotReadyError, RequestError
from faser.types.adapter import Adapter
from faser.types.answer import FinishReason, OutputDelta, PositionLogprobs, RequestOutput, SpeculationSummary
from faser.types.engine import EngineState, ModelInfo
from faser.types.pooling import EMBEDDER
from faser.types.request import Request
from faser.types.statistics import EngineStats

MAX_MODEL_LEN = 4096
END = 256  # the one special token
CHAT_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

Step = RequestOutput | FaserError | Exception
Script = Callable[[Request], Iterable[Step]]


def byte_tokenizer(
    chat_template: str | None = CHAT_TEMPLATE, *, special_tokens: tuple[str, ...] = ()
) -> Tokenizer:
    """Token ids are bytes; 256 ends an answer. Nothing is put around a text. special_tokens: further ones."""
    core = tokenizers.Tokenizer(models.BPE(vocab=BYTE_OF_CHAR, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    settings = TokenizerSettings(
        eos_token="<|end|>",
        chat_template=chat_template,
        special_tokens=tuple(
            AddedToken(token, special=True, normalized=False) for token in ("<|end|>", *special_tokens)
        ),
    )
    return Tokenizer(core, settings)


def model_info() -> ModelInfo:
    return ModelInfo(
        max_model_len=MAX_MODEL_LEN,
        vocab_size=257,
        eos_token_ids=(END,),
        dtype="float32",
        device="cpu",
        backend="fake",
        block_size=16,
        num_blocks=256,
        kv_cache_bytes=1 << 20,
        kv_cache_dtype="float32",
        weight_bytes=1 << 20,
        num_parameters=1000,
    )


def saying(
    text: str, *, tokens_per_step: int = 1, cached: int = 0, summaries: Sequence[SpeculationSummary] = ()
) -> Script:
    """Every sample says text and ends, or is cut at max_tokens. All samples advance together.

    summaries: what comes with the end of each sample; empty: the engine does not speculate.
    """
    spoken = text.encode()

    def script(request: Request) -> Iterator[Step]:
        limit = len(spoken) if request.sampling.max_tokens is None else request.sampling.max_tokens
        said = spoken[:limit]
        for begin in range(0, max(1, len(said)), tokens_per_step):
            step = said[begin : begin + tokens_per_step]
            last = begin + tokens_per_step >= len(said)
            reason = FinishReason.LENGTH if len(said) < len(spoken) else FinishReason.STOP
            yield RequestOutput(
                request_id=request.request_id,
                deltas=tuple(
                    delta(
                        request,
                        index,
                        step,
                        finish_reason=reason if last else None,
                        speculation=summaries[index] if last and summaries else None,
                    )
                    for index in range(request.sampling.n)
                ),
                num_cached_tokens=cached,
                prompt_logprobs=prompt_logprobs_of(request) if begin == 0 else None,
            )

    return script


def delta(
    request: Request,
    index: int,
    said: bytes,
    *,
    finish_reason: FinishReason | None = None,
    stop_reason: int | str | None = None,
    speculation: SpeculationSummary | None = None,
) -> OutputDelta:
    """One step of one sample, with the logprobs the request asks for."""
    asked = request.sampling.logprobs
    return OutputDelta(
        index=index,
        text=said.decode("utf-8", "ignore"),
        token_ids=tuple(said),
        logprobs=None if asked is None else tuple(position(token_id, asked) for token_id in said),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        speculation=speculation,
    )


def position(token_id: int, num_top: int) -> PositionLogprobs:
    """The chosen token is always the most likely, at -0.5; those after it lie at -1.5, -2.5, ..."""
    top = tuple(((token_id + rank) % 256, -0.5 - rank) for rank in range(num_top))
    return PositionLogprobs(token_id=token_id, logprob=-0.5, rank=1, top=top)


def prompt_logprobs_of(request: Request) -> tuple[PositionLogprobs | None, ...] | None:
    asked = request.sampling.prompt_logprobs
    if asked is None:
        return None
    return (None, *(position(token_id, asked) for token_id in request.prompt_token_ids[1:]))


class FakeEngine:
    """step_s: how long each step takes. refusals: raised by the next submissions, None accepts one."""

    def __init__(self, script: Script | None = None, *, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer or byte_tokenizer()
        self.stats = EngineStats()
        self.reset(script)

    def reset(self, script: Script | None = None) -> None:
        self.script = script or saying("Hello!")
        self.state = EngineState.READY
        self.state_reason = ""
        self.max_samples = 4096
        self.hidden_size = 0
        self.embedder = EMBEDDER
        self.loaded = True
        self.step_s = 0.0
        self.refusals: list[FaserError | None] = []
        self.requests: list[Request] = []
        self.following: list[int] = []  # of each submission
        self.aborted: list[str] = []
        self.adapters: list[Adapter] = []  # that are loaded
        self.bad_adapters: set[str] = set()  # digests of those that cannot be loaded
        self.num_open = 0

    @property
    def info(self) -> ModelInfo:
        if not self.loaded:
            raise NotReadyError("the model is being loaded")
        return replace(model_info(), hidden_size=self.hidden_size, embedder=self.embedder)

    async def load_adapter(self, adapter: Adapter) -> None:
        await asyncio.sleep(self.step_s)
        if adapter.digest in self.bad_adapters:
            raise RequestError(f"{adapter.path} does not fit the model")
        self.adapters.append(adapter)

    def drop_adapter(self, adapter: Adapter) -> None:
        self.adapters = [each for each in self.adapters if each.digest != adapter.digest]

    def submit(self, request: Request, *, num_following: int = 0) -> "FakeStream":
        self.following.append(num_following)
        refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is not None:
            raise refusal
        asked = len(request.prompt_token_ids) + (request.sampling.max_tokens or 1)
        if asked > MAX_MODEL_LEN:
            raise RequestError(
                f"This model's maximum context length is {MAX_MODEL_LEN} tokens; asked for {asked}", param="prompt"
            )
        self.requests.append(request)
        self.num_open += 1
        return FakeStream(self, request, iter(self.script(request)))


class FakeStream:
    """The scripted outputs of one request."""

    def __init__(self, engine: FakeEngine, request: Request, steps: Iterator[Step]) -> None:
        self._engine = engine
        self._request = request
        self._steps = steps
        self._finished = False
        self.timing = Timing(arrival_s=request.arrival_s)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        timing = self.timing
        timing.scheduled_s = timing.scheduled_s or time.monotonic()
        await asyncio.sleep(self._engine.step_s)
        step = next(self._steps, None)
        if step is None or isinstance(step, Exception):
            self._finished = True
            raise StopAsyncIteration if step is None else step
        now = time.monotonic()
        timing.first_token_s = timing.first_token_s or now
        timing.last_token_s |= {each.index: now for each in step.deltas}
        return step

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._engine.num_open -= 1
        if not self._finished:
            self._engine.aborted.append(self._request.request_id)
