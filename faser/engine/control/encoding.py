"""EncoderScheduler: which of the waiting texts an encoder takes next, and what it reports of them.

A text is computed in one step, so there is nothing to preempt and nothing to cut: a step takes texts in the order
of the WaitingQueue, which shares the encoder fairly among tenants, for as long as they fit. Sees token ids and
seconds, never tensors.
"""

from faser.engine.contract.plan import EncodingBatch, StepDeltas
from faser.engine.contract.target_room import due_s
from faser.engine.control.clock import Clock
from faser.engine.control.kv_cache import SequenceBlocks
from faser.engine.control.sequence import Sequence
from faser.engine.control.waiting_queue import WaitingQueue
from faser.errors import RequestError
from faser.types.answer import FinishReason
from faser.types.request import Request
from faser.types.statistics import EngineStats


class EncoderScheduler:
    """max_texts, max_tokens: of a step; a text longer than max_tokens is taken alone. max_model_len: of a text.

    by_priority: the priorities of requests count.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        max_texts: int,
        max_tokens: int,
        max_model_len: int,
        by_priority: bool,
    ) -> None:
        self._clock, self._by_priority = clock, by_priority
        self._max_texts, self._max_tokens, self._max_model_len = max_texts, max_tokens, max_model_len
        self._waiting = WaitingQueue(clock)
        self._texts: dict[str, Sequence] = {}  # that wait or are computed, by request id
        self._taken: list[Sequence] = []  # of the step that runs
        self._num_added = self._prompt_tokens = 0

    def add(self, request: Request) -> None:
        """Accept a request for a vector. Raises RequestError for one that cannot be served."""
        length = len(request.prompt_token_ids)
        if request.sampling.pooling is None or request.sampling.max_tokens != 0:
            raise RequestError("this model is an encoder, which generates no text", param="model")
        if request.request_id in self._texts:
            raise RequestError(f"request_id is {request.request_id!r}; it is in use", param="request_id")
        if not 1 <= length <= self._max_model_len:
            raise RequestError(
                f"the text has {length} tokens; it must have from 1 to {self._max_model_len}", param="prompt"
            )
        text = Sequence(
            request,
            0,
            priority_key=self._next_key(request),
            tenant=self._waiting.join(request.tenant, 1),
            seed=0,
            table=SequenceBlocks(b""),
            max_total=length,
            eos_token_ids=frozenset(),
        )
        self._texts[request.request_id] = text
        self._waiting.add(text)

    def reclassify(self, request: Request) -> None:
        """Put a request that waits where its new targets belong."""
        text = self._texts.get(request.request_id)
        if text is not None and text not in self._taken:
            self._waiting.remove(text)
            text.request, text.priority_key = request, self._next_key(request)
            self._waiting.add(text)

    def abort(self, request_id: str) -> None:
        """Drop a request that waits. Unknown and finished ones are ignored."""
        text = self._texts.get(request_id)
        if text is not None and text not in self._taken:
            self._waiting.remove(text)
            self._end(text)

    def has_work(self) -> bool:
        return bool(self._texts)

    def plan(self) -> EncodingBatch | None:
        """Take the texts of the next step, which must be committed; None: none waits."""
        batch = EncodingBatch(token_ids=[], counts=[], kinds=[], seconds=[])
        now_s, taken = self._clock.now(), self._taken
        while self._waiting and len(taken) < self._max_texts:
            text = self._waiting.first()
            if taken and len(batch.token_ids) + text.prompt_len > self._max_tokens:
                break
            self._waiting.admit(text, num_uncached=text.prompt_len)
            text.first_scheduled_s = now_s
            taken.append(text)
            pooling = text.sampling.pooling
            assert pooling is not None, "add refuses other requests"
            batch.token_ids.extend(text.token_ids)
            batch.counts.append(text.prompt_len)
            batch.kinds.append(pooling.kind)
            batch.seconds.append(pooling.second_from)
        return batch if taken else None

    def commit(self, vectors: list[bytes]) -> StepDeltas:
        """Report the vectors of the texts of the step, in their order."""
        deltas = StepDeltas()
        assert len(vectors) == len(self._taken), f"{len(vectors)} vectors for {len(self._taken)} texts"
        for at, (text, vector) in enumerate(zip(self._taken, vectors, strict=True)):
            deltas.request_ids.append(text.request.request_id)
            deltas.indices.append(0)
            deltas.counts.append(0)
            deltas.num_cached_tokens.append(0)
            deltas.num_preemptions.append(0)
            deltas.first_scheduled_s.append(text.first_scheduled_s)
            deltas.finish_reasons[at] = FinishReason.LENGTH
            deltas.pooled[at] = vector
            self._prompt_tokens += text.prompt_len
            self._end(text)
        self._taken = []
        return deltas

    def stats(self) -> EngineStats:
        """The queue and its tokens. The engine counts the steps and their times."""
        return EngineStats(
            num_running=len(self._taken), num_waiting=len(self._waiting), prompt_tokens=self._prompt_tokens
        )

    def _next_key(self, request: Request) -> tuple[int, float, int]:
        self._num_added += 1
        return (request.priority if self._by_priority else 0, due_s(request), self._num_added)

    def _end(self, text: Sequence) -> None:
        self._waiting.leave(text)
        del self._texts[text.request.request_id]
