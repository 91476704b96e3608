"""Messages cross a socket unchanged, one frame each; a closed connection is None, never half a message."""

import asyncio
import socket
import threading

import pytest

from faser.config.engine import EngineConfig
from faser.engine.contract.messages import (
    Abort,
    Configure,
    Deltas,
    Failed,
    FromEngine,
    Loaded,
    Progress,
    Reclassify,
    Rejected,
    Shutdown,
    StateChange,
    Submit,
    ToEngine,
    WatchSteps,
    frame,
    receive,
    receive_async,
)
from faser.engine.contract.plan import StepDeltas
from faser.types.answer import FinishReason, PositionLogprobs, SequenceError, StepTrace
from faser.types.engine import EngineState, ModelInfo
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from faser.types.statistics import EngineStats

REQUEST = Request(
    request_id="a",
    prompt_token_ids=tuple(range(70_000)),
    sampling=SamplingParams(temperature=0.3, seed=-1, max_tokens=5, logit_bias=((4, -1.5),)),
    arrival_s=1.25,
)
INFO = ModelInfo(
    max_model_len=512,
    vocab_size=500,
    eos_token_ids=(2,),
    dtype="float32",
    device="cpu",
    backend="torch",
    block_size=16,
    num_blocks=64,
    kv_cache_bytes=1 << 40,
    kv_cache_dtype="float32",
    weight_bytes=1,
    num_parameters=1,
)
STATS = EngineStats(
    num_running=1,
    num_waiting=2,
    kv_usage=0.5,
    num_preemptions=0,
    prompt_tokens=3,
    generation_tokens=4,
    prefix_cache_queries=5,
    prefix_cache_hits=6,
    speculation=None,
)
DELTAS = StepDeltas(
    request_ids=["a", "b"],
    indices=[1, 0],
    counts=[2, 0],
    token_ids=[7, 8],
    num_cached_tokens=[0, 3],
    num_preemptions=[2, 0],
    first_scheduled_s=[2.0, None],
    logprobs={0: (PositionLogprobs(token_id=7, logprob=-0.5, rank=1, top=((7, -0.5),)),)},
    finish_reasons={0: FinishReason.STOP, 1: FinishReason.ERROR},
    stop_reasons={0: 8},
    errors={1: SequenceError.NOT_FINITE},
    traces={0: StepTrace(drafter="ngram", gamma=3, accepted=1)},
)
TO_ENGINE: tuple[ToEngine, ...] = (
    Configure(EngineConfig(model="m", max_model_len=512), "/models/m"),
    Submit(REQUEST),
    Reclassify(REQUEST),
    Abort("a"),
    Abort("a", 3),
    WatchSteps(True),
    Shutdown(),
)
FROM_ENGINE: tuple[FromEngine, ...] = (
    Progress("loading", 3, 7),
    StateChange(EngineState.READY),
    Loaded(INFO),
    Deltas(DELTAS, STATS),
    Rejected("a", "too long", "max_tokens"),
    Failed("no such file", operator_error=True),
)


def test_the_engine_receives_what_the_front_end_sent_in_order() -> None:
    near, far = socket.socketpair()
    with near, far:
        everything = b"".join(map(frame, TO_ENGINE))
        sender = threading.Thread(target=near.sendall, args=(everything,))  # more than the socket's buffer holds
        sender.start()
        assert tuple(receive(far) for _ in TO_ENGINE) == TO_ENGINE
        sender.join()


def test_the_front_end_receives_what_the_engine_sent_in_order() -> None:
    async def received() -> list[FromEngine | None]:
        reader = asyncio.StreamReader()
        for message in FROM_ENGINE:
            reader.feed_data(frame(message))
        reader.feed_eof()
        return [await receive_async(reader) for _ in range(len(FROM_ENGINE) + 1)]

    assert asyncio.run(received()) == [*FROM_ENGINE, None]


@pytest.mark.parametrize("sent", [0, 2, 4, 9])
def test_a_connection_that_closes_within_a_frame_brings_no_message(sent: int) -> None:
    near, far = socket.socketpair()
    with far:
        with near:
            near.sendall(frame(Submit(REQUEST))[:sent])
        assert receive(far) is None


@pytest.mark.parametrize("sent", [0, 2, 4, 9])
def test_a_stream_that_ends_within_a_frame_brings_no_message(sent: int) -> None:
    async def received() -> FromEngine | None:
        reader = asyncio.StreamReader()
        reader.feed_data(frame(Loaded(INFO))[:sent])
        reader.feed_eof()
        return await receive_async(reader)

    assert asyncio.run(received()) is None
