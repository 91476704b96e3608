"""AsyncEngine: the engine as asyncio code uses it: submit, abort, health, drain.

Owns the output streams of accepted requests and the engine's state; supervisor.py owns the connection and the
engine's process or thread. Whatever happens to the engine, every accepted request ends with a finish reason or
with an error.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from faser.config.engine import EngineConfig
from faser.engine.client.admission import Admission
from faser.engine.client.engine_host import LaunchedEngine, Place, Transport, start_host
from faser.engine.client.outlook import LoadMonitor, outlook_of
from faser.engine.client.output_stream import OutputStream
from faser.engine.client.queue import PreemptionLog, QueueRoom, QueueSpeed
from faser.engine.client.supervisor import EngineSupervisor, Supervision
from faser.engine.client.traffic import TrafficRecorder
from faser.engine.contract.latency_model import Pace
from faser.engine.contract.messages import (
    Abort,
    AdapterLoaded,
    Configure,
    Deltas,
    DropAdapter,
    FromEngine,
    LoadAdapter,
    Loaded,
    Progress,
    Reclassify,
    Rejected,
    StateChange,
    Submit,
    WatchSteps,
)
from faser.engine.contract.plan import SequenceDelta, StepDeltas
from faser.engine.text.tokenizer import Tokenizer
from faser.errors import (
    ConfigError,
    DeadlineError,
    EngineDiedError,
    EngineError,
    FaserError,
    ModelError,
    NotReadyError,
    OverloadError,
    RequestError,
)
from faser.observer import EngineObserver
from faser.types.adapter import Adapter
from faser.types.answer import FinishReason, RequestOutput, SequenceError
from faser.types.engine import EngineState, ModelInfo, ProgressCallback
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from faser.types.statistics import EngineStats

_MAX_NAMED = 20  # of the wrong token ids in one message
_OUTLOOK_PERIOD_S = 5.0
_DEAD_RETRY_S = 5  # whatever supervises the server starts it again, or another server answers
_MAX_RETRY_AFTER_S = 600  # a client that should wait longer would rather come back another day


class AsyncEngine:
    """One engine. Use it from one event loop only.

    directory: of the model. supervision: whether an engine that died or hangs is started again.
    observer: is told of requests and states. on_progress: called with (stage, done, total) during the first load.
    launched: the first engine, of the same transport, if it has been started already. recorder: takes finished
    answers. place: of an engine's process. adapters: that it must have loaded before it counts as ready.
    """

    def __init__(
        self,
        config: EngineConfig,
        directory: Path,
        tokenizer: Tokenizer,
        *,
        transport: Transport = "process",
        supervision: Supervision | None = None,
        observer: EngineObserver | None = None,
        on_progress: ProgressCallback = lambda *_: None,
        launched: LaunchedEngine | None = None,
        recorder: TrafficRecorder | None = None,
        place: Place | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._first_adapters = tuple(adapters)
        self._config = config
        self._observer = observer or EngineObserver()
        self._on_progress = on_progress
        self._recorder = recorder
        self._supervisor = EngineSupervisor(
            Configure(config, str(directory)),
            supervision or Supervision(),
            transport=transport,
            on_message=self._handle,
            on_end=self._lose,
            launched=launched,
            start=partial(start_host, place=place or Place()),
        )
        self._state = EngineState.LOADING
        self._reason = "the model is being loaded"
        self._restarted_s = 0.0  # when the next engine should be ready
        self._failure: FaserError | None = None
        self._info: ModelInfo | None = None
        self._stats = EngineStats()
        self._streams: dict[str, OutputStream] = {}
        self._adapters: dict[str, list[asyncio.Future[str | None]]] = {}  # that are being loaded, by digest
        self._room = QueueRoom(num_slots=config.max_num_seqs, num_waiting=config.max_num_queued_reqs)
        self._loading_ended = asyncio.Event()  # ready, or dead
        self._dead = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._preemptions = PreemptionLog(max_num_seqs=config.max_num_seqs)
        self._speed = QueueSpeed()
        self._speed_noted_s = time.monotonic()
        self._admission = Admission(config.speculation.params_of, self._observer.admission)
        self._monitor = LoadMonitor(self._speed_noted_s)
        self._outlook_due_s = self._speed_noted_s
        self._outlook: asyncio.Task[None] | None = None  # that is being computed

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def state_reason(self) -> str:
        """The reason for the state, in words."""
        return self._reason

    @property
    def info(self) -> ModelInfo:
        """Raises NotReadyError before the model is loaded."""
        if self._info is None:
            raise NotReadyError(self._reason)
        return self._info

    @property
    def max_samples(self) -> int:
        """Return how many samples one of several tenants may have in flight, running and waiting."""
        return self._room.most_of_one

    @property
    def has_pace(self) -> bool:
        """The engine has said how fast it is, so latencies are predicted."""
        return self._admission.pace is not None

    @property
    def stats(self) -> EngineStats:
        return self._stats

    async def start(self) -> None:
        """Start the engine's process or thread. Returns before the model is loaded."""
        self._supervisor.start()

    async def wait_ready(self) -> ModelInfo:
        """Wait until the engine is ready. Raises ConfigError or EngineError if it cannot load the model."""
        await self._loading_ended.wait()
        if self._failure is not None:
            raise self._failure
        for adapter in self._first_adapters:
            try:
                await self.load_adapter(adapter)
            except RequestError as error:
                raise ModelError(f"adapter {adapter.name}: {error}") from None
        return self.info

    async def wait_dead(self) -> FaserError:
        """Wait until the engine has ended for good. Returns the reason."""
        await self._dead.wait()
        assert self._failure is not None
        return self._failure

    def submit(self, request: Request, *, num_following: int = 0) -> OutputStream:
        """Accept a request. num_following: samples of requests that the same client submits together with it.

        Raises RequestError (the request cannot be served), OverloadError (the queue has no room for this tenant),
        TargetError (a latency target cannot be met, and its class refuses then) or NotReadyError.
        """
        self._check_ready()
        request = self._with_token_limit(request)
        now_s, asked = time.monotonic(), request.speculation
        self._monitor.arrived(asked.class_name, asked.slo, now_s)
        self._check_queue(request, num_following)
        request = self._admission.admit(request, now_s)
        self._monitor.admitted(now_s)
        request_id = request.request_id
        stream = OutputStream(
            request, self.tokenizer, lambda index: self._abort(request_id, index), self._recorder
        )
        self._supervisor.send(Submit(request))
        self._streams[request.request_id] = stream
        if request.deadline_s is not None:
            left_s = max(0.0, request.deadline_s - time.monotonic())
            stream.timer = asyncio.get_running_loop().call_later(left_s, self._expire, stream)
        self._note_speed()
        self._room.take(request.tenant, request.sampling.n)
        self._idle.clear()
        self._observer.admitted(
            n=request.sampling.n,
            max_tokens=request.sampling.max_tokens or 0,
            prompt_tokens=len(request.prompt_token_ids),
        )
        return stream

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load an adapter ahead of the requests that want it; an engine that is started again does so on demand.

        Raises RequestError that says why it is unusable, NotReadyError, or EngineDiedError.
        """
        self._check_ready()
        loaded: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._adapters.setdefault(adapter.digest, []).append(loaded)
        self._supervisor.send(LoadAdapter(adapter))
        if (error := await loaded) is not None:
            raise RequestError(error)

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free an adapter as soon as no accepted request uses it."""
        if self._state is EngineState.READY:
            self._supervisor.send(DropAdapter(adapter.digest))

    def shortfall(self, request: Request) -> int:
        """Return how far from its targets a request would be served here, as in Admission; 0: they can be met."""
        return self._admission.shortfall(request, time.monotonic())

    async def drain(self, timeout_s: float, *, reason: str = "the server is shutting down") -> None:
        """Refuse new requests, wait at most timeout_s for accepted ones, then abort the rest.

        reason: what clients are told. An engine that dies meanwhile, or that is being restarted, is not needed
        any more.
        """
        self._supervisor.end_restarts()
        if self._state is EngineState.DEAD:
            return
        self._enter(EngineState.DRAINING, reason)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        for stream in list(self._streams.values()):
            self._end(stream, FinishReason.ABORT)
            stream.fail(NotReadyError(f"{reason}; the request was not finished within {timeout_s:g} s"))
            self._supervisor.send(Abort(stream.request.request_id))

    async def stop(self) -> None:
        """End the engine now. Unfinished requests fail. Idempotent."""
        self._lose(EngineError("the engine was stopped"), None)
        await self._supervisor.stop()

    def _check_ready(self) -> None:
        """Raises NotReadyError unless requests are accepted."""
        if self._state is EngineState.READY:
            return
        message = f"the engine is {self._state}: {self._reason}"
        if self._state is EngineState.RESTARTING:
            raise NotReadyError(message, retry_after_s=self._restart_wait_s())
        raise NotReadyError(message)

    def _with_token_limit(self, request: Request) -> Request:
        """The request with max_tokens resolved. Raises RequestError if the context or vocabulary is too small."""
        limit, prompt = self.info.max_model_len, len(request.prompt_token_ids)
        sampling = request.sampling
        if not prompt:
            raise RequestError("the prompt is empty: it has 0 tokens; it must have at least 1", param="prompt")
        _check_token_ids(request, self.info.vocab_size)
        _check_min_tokens(request.sampling, self.info)
        if prompt > limit or (prompt == limit and sampling.max_tokens != 0):
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. The prompt has {prompt} tokens and "
                f"leaves no room for an answer.",
                param="prompt",
            )
        if sampling.max_tokens is None:
            return replace(request, sampling=replace(sampling, max_tokens=limit - prompt))
        if prompt + sampling.max_tokens > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. The prompt has {prompt} tokens and "
                f"max_tokens is {sampling.max_tokens}: together {prompt + sampling.max_tokens}.",
                param="max_tokens",
            )
        return request

    def _check_queue(self, request: Request, num_following: int) -> None:
        room, tenant = self._room, request.tenant
        num_samples, most = request.sampling.n, room.most_of(tenant)
        if num_samples > most:
            raise RequestError(f"n is {num_samples}; this server holds at most {most} samples", param="n")
        asked = num_samples + num_following
        if missing := room.missing(tenant, asked):
            self._note_speed()
            wait_s = self._speed.wait_s(missing)
            raise OverloadError(
                f"the queue is full: {room.refusal(tenant, asked)}",
                retry_after_s=min(_MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s))),
            )

    def _note_speed(self) -> None:
        """Count the time since the last call, unless there was no work in it."""
        now = time.monotonic()
        if self._room.num_samples:
            self._speed.pass_time(now - self._speed_noted_s)
        self._speed_noted_s = now

    def _expire(self, stream: OutputStream) -> None:
        """End a request whose deadline has come."""
        request = stream.request
        assert request.deadline_s is not None
        limit_s = request.deadline_s - request.arrival_s
        self._supervisor.send(Abort(request.request_id))
        self._end(stream, FinishReason.ABORT)
        stream.fail(DeadlineError(f"the request was not finished within {limit_s:g} s, its deadline"))

    def _abort(self, request_id: str, index: int | None) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._supervisor.send(Abort(request_id, index))
        if index is None:
            self._end(stream, FinishReason.ABORT)

    def _handle(self, message: FromEngine) -> None:
        """Take a message from the engine. Raises ConfigError if the loaded model cannot be served."""
        match message:
            case Deltas(deltas, stats, pace, uncomputed):
                self._dispatch(deltas, stats)
                if pace is not None:
                    self._admission.pace = pace
                    self._admission.begun(uncomputed)
                    self._look_out(pace)
                self._restore()
            case Progress(stage, done, total):
                if self._state is EngineState.LOADING:
                    self._on_progress(stage, done, total)
            case Loaded(info):
                self._take_info(info)
            case StateChange(state):
                self._enter(state, "")
            case AdapterLoaded(digest, error):
                for loaded in self._adapters.pop(digest, ()):
                    if not loaded.done():  # its caller may have gone
                        loaded.set_result(error)
            case Rejected(request_id, text, param, None):
                self._fail_one(request_id, RequestError(text, param=param))
            case Rejected(request_id, text, _, int(retry_after_s)):
                self._fail_one(request_id, OverloadError(text, retry_after_s=retry_after_s))

    def _restore(self) -> None:
        """Give requests that wait the targets back that they can keep after all."""
        if self._state is not EngineState.READY:
            return
        for request in self._admission.restore(time.monotonic()):
            self._streams[request.request_id].request = request
            self._supervisor.send(Reclassify(request))

    def _look_out(self, pace: Pace) -> None:
        """Compute what is to be expected, in a thread and only now and then."""
        now_s = time.monotonic()
        if now_s < self._outlook_due_s or (self._outlook is not None and not self._outlook.done()):
            return
        load = self._monitor.load(now_s)
        if load is None:
            return
        self._outlook_due_s = now_s + _OUTLOOK_PERIOD_S

        async def compute() -> None:
            self._observer.outlook(await asyncio.to_thread(outlook_of, pace, load))

        self._outlook = asyncio.get_running_loop().create_task(compute(), name="faser-outlook")

    def _take_info(self, info: ModelInfo) -> None:
        """The model is loaded. Raises ConfigError if the tokenizer's base vocabulary is larger than the model's.

        Fine-tuned models often add special tokens beyond the embedding: only a request that uses one is refused.
        """
        size = self.tokenizer.base_vocab_size
        if size > info.vocab_size:
            raise ConfigError(f"the tokenizer has {size} tokens, but the model's vocabulary has {info.vocab_size}")
        self._info = info
        self._observer.watch_steps(lambda watched: self._supervisor.send(WatchSteps(watched)))
        self._observer.separate_layers(info.separate_layers)
        self._observer.cache_config(
            block_size=info.block_size,
            num_gpu_blocks=info.num_blocks,
            cache_dtype=info.kv_cache_dtype,
            max_model_len=info.max_model_len,
        )

    def _enter(self, state: EngineState, reason: str) -> None:
        """Change the state. A drained engine only dies, and a dead one stays dead."""
        if self._state is EngineState.DEAD or (self._state is EngineState.DRAINING and state is EngineState.READY):
            return
        self._state, self._reason = state, reason
        self._observer.engine_state(state)
        if state in (EngineState.READY, EngineState.DEAD):
            self._loading_ended.set()
        if state is EngineState.DEAD:
            self._dead.set()

    def _dispatch(self, deltas: StepDeltas, stats: EngineStats | None) -> None:
        now = time.monotonic()
        if stats is not None:
            self._stats = stats
            self._preemptions.note(stats.num_preemptions, now, self.info.kv_cache_bytes)
            self._observer.engine(stats)
        for request_id, own in _by_request(deltas).items():
            stream = self._streams.get(request_id)
            if stream is None:
                continue  # aborted; the engine had not yet received the abort
            stream.timing.scheduled_s = stream.timing.scheduled_s or own[0].first_scheduled_s
            output = stream.take(own)
            if output is not None:
                self._observe(stream, output, now)
            failed = next((delta for delta in own if delta.error is not None and stream.awaits(delta.index)), None)
            if failed is not None:
                self._supervisor.send(Abort(request_id))
                self._fail_one(request_id, _failure(stream.request, failed.error))

    def _observe(self, stream: OutputStream, output: RequestOutput, now: float) -> None:
        """Count the tokens of one step."""
        timing = stream.timing
        num_tokens: Counter[int] = Counter()  # of this step, by sample
        for delta in output.deltas:
            num_tokens[delta.index] += len(delta.token_ids)
        for index, count in num_tokens.items():
            if not count:
                continue
            timing.num_tokens[index] += count
            if timing.first_token_s is None:
                self._observer.first_token(now - timing.arrival_s)
                self._admission.first_token(output.request_id, now, num_cached=timing.num_cached_tokens)
            before = timing.last_token_s.get(index)
            self._observer.tokens(count, None if before is None else now - before)
            timing.first_token_s = timing.first_token_s or now
            timing.last_token_s[index] = now
        if stream.finished:
            reasons = {delta.finish_reason for delta in output.deltas}
            self._end(stream, FinishReason.STOP if FinishReason.STOP in reasons else FinishReason.LENGTH)

    def _end(self, stream: OutputStream, reason: FinishReason) -> None:
        """Remove a stream, and count how its request ended."""
        if self._streams.pop(stream.request.request_id, None) is None:
            return
        if stream.timer is not None:
            stream.timer.cancel()
        now = time.monotonic()
        self._note_speed()
        self._speed.end(stream.request.sampling.n)
        self._room.give_back(stream.request.tenant, stream.request.sampling.n)
        if not self._streams:
            self._idle.set()
        timing = stream.timing
        longest = max(timing.num_tokens.values(), default=0)
        self._admission.end(stream.request.request_id, num_tokens=longest, tpot_s=timing.tpot_s)
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and longest:
            self._monitor.ended(len(stream.request.prompt_token_ids), longest)
        scheduled_s = timing.scheduled_s or now
        first_token_s = timing.first_token_s or now
        self._observer.finished(
            reason,
            ttft_s=None if timing.first_token_s is None else timing.first_token_s - timing.arrival_s,
            e2e_s=now - timing.arrival_s,
            queue_s=max(0.0, scheduled_s - timing.arrival_s),
            prefill_s=max(0.0, first_token_s - scheduled_s),
            decode_s=now - first_token_s,
            prompt_tokens=len(stream.request.prompt_token_ids),
            cached_tokens=timing.num_cached_tokens,
            generation_tokens=timing.num_tokens.total(),
            longest_generation=longest,
            preemptions=sum(timing.num_preemptions.values()),
        )
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and timing.first_token_s is not None:
            self._observer.answered(
                stream.request.speculation,
                stream.speculation,
                ttft_s=timing.first_token_s - timing.arrival_s,
                tpot_s=timing.tpot_s,
            )
        self._restore()  # before the engine takes the next one from the line

    def _fail_one(self, request_id: str, error: FaserError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._end(stream, FinishReason.ERROR)
            stream.fail(error)

    def _lose(self, error: FaserError, restart_s: float | None) -> None:
        """The engine has ended, and with it all accepted requests. restart_s: as of EngineSupervisor's on_end."""
        if self._state is EngineState.DEAD:
            return
        if restart_s is not None:
            self._restarted_s = time.monotonic() + restart_s
            self._enter(EngineState.RESTARTING, str(error))
            wait_s = self._restart_wait_s()
        else:
            self._failure = error
            self._enter(EngineState.DEAD, str(error))
            wait_s = _DEAD_RETRY_S
        for stream in list(self._streams.values()):
            self._end(stream, FinishReason.ERROR)
            message = f"request {stream.request.request_id}: {error}"
            stream.fail(EngineDiedError(message, retry_after_s=wait_s))
        for loaded in (each for several in self._adapters.values() for each in several if not each.done()):
            loaded.set_exception(EngineDiedError(str(error), retry_after_s=wait_s))
        self._adapters.clear()
        self._stats = EngineStats()
        self._admission.forget()
        self._observer.engine_ended(restarts=restart_s is not None)

    def _restart_wait_s(self) -> int:
        """Seconds until the engine that is started again should be ready."""
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(self._restarted_s - time.monotonic())))


def _check_token_ids(request: Request, vocab_size: int) -> None:
    """Raises RequestError for an id outside the vocabulary, of those that clients can send."""
    sampling = request.sampling
    for param, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("prediction", request.predicted_token_ids),
        ("logit_bias", tuple(token_id for token_id, _ in sampling.logit_bias)),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("bad_words", tuple(token_id for word in sampling.bad_words for token_id in word)),
        ("stop_token_ids", sampling.stop_token_ids),
    ):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]
            named = ", ".join(map(str, wrong[:_MAX_NAMED])) + (", …" if len(wrong) > _MAX_NAMED else "")
            raise RequestError(
                f"{param} has token id{'s' * (len(wrong) > 1)} {named}; ids must be at least 0 and at most "
                f"{vocab_size - 1}: the vocabulary has {vocab_size}",
                param=param,
            )


def _check_min_tokens(sampling: SamplingParams, info: ModelInfo) -> None:
    """Raises RequestError if every allowed token would end a sample: min_tokens could not be reached."""
    if not sampling.min_tokens:
        return
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else info.eos_token_ids)}
    allowed = sampling.allowed_token_ids
    if len(ends) >= info.vocab_size if allowed is None else ends.issuperset(allowed):
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}, and every allowed token would end the answer before; "
            f"at least one other must be allowed",
            param="min_tokens",
        )


def _failure(request: Request, why: SequenceError | None) -> FaserError:
    """Return the error of a request that cannot go on: the client's fault where its fields leave no token."""
    sampling = request.sampling
    fields = [] if sampling.structured_output is None else [sampling.structured_output.param]
    fields += [name for name in ("allowed_token_ids", "bad_words", "min_tokens") if getattr(sampling, name)]
    if why is SequenceError.GRAMMAR_TOO_SLOW:
        return RequestError(
            f"the answer cannot go on, and is not complete: {why}; use a grammar with fewer ways to read a text",
            param=fields[0],
        )
    if why is not SequenceError.NONE_ALLOWED or not fields:
        return EngineError(f"request {request.request_id} failed: {why}")
    named = " and ".join(filter(None, (", ".join(fields[:-1]), fields[-1])))
    leave = "together leave" if len(fields) > 1 else "leaves"
    return RequestError(
        f"the answer cannot go on, and is not complete: {named} {leave} no token to choose", param=fields[0]
    )


def _by_request(deltas: StepDeltas) -> dict[str, list[SequenceDelta]]:
    grouped: dict[str, list[SequenceDelta]] = {}
    for delta in deltas:
        grouped.setdefault(delta.request_id, []).append(delta)
    return grouped
