"""One contract for both transports: an engine in a child process and one in a thread behave alike."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from faser.config.engine import EngineConfig
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.engine_host import Transport
from faser.engine.client.output_stream import OutputStream
from faser.engine.client.supervisor import Supervision
from faser.engine.contract.messages import Rejected
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.engine.worker import HEARTBEAT_S
from faser.errors import (
    ConfigError,
    DeadlineError,
    EngineDiedError,
    EngineError,
    NotReadyError,
    OverloadError,
    RequestError,
    TargetError,
)
from faser.metrics.server import Metrics
from faser.types.answer import FinishReason, OutputDelta
from faser.types.engine import EngineState
from faser.types.outlook import Decision, Target
from faser.types.request import Request
from faser.types.sampling import SamplingParams, StructuredOutput, StructureKind
from faser.types.statistics import EngineStats
from tests.waiting import PATIENCE_S, has_ended

CONFIG = EngineConfig(dtype="float32", backend="torch", max_model_len=256, max_num_seqs=4, kv_cache_memory=1 << 20)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)

both = pytest.mark.parametrize("transport", ["process", "thread"])
# What the transport hardly touches: in a process, which takes seconds to start, with --full.
mostly_alike = pytest.mark.parametrize("transport", [pytest.param("process", marks=pytest.mark.full), "thread"])


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return load_tokenizer(tiny_checkpoint)


@asynccontextmanager
async def running(
    directory: Path, tokenizer: Tokenizer, transport: Transport, config: EngineConfig = CONFIG
) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(config, directory, tokenizer, transport=transport)
    await engine.start()
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.stop()


def request(prompt: str, tokenizer: Tokenizer, sampling: SamplingParams = GREEDY) -> Request:
    return Request(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=tuple(tokenizer.encode(prompt)),
        sampling=sampling,
        arrival_s=time.monotonic(),
    )


async def answer(engine: AsyncEngine, wanted: Request) -> list[OutputDelta]:
    async with engine.submit(wanted) as stream:
        return [delta async for output in stream for delta in output.deltas]


async def read(stream: OutputStream) -> None:
    async with stream:
        async for _ in stream:
            pass


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@mostly_alike
def test_streamed_text_is_the_text_of_the_tokens(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, transport) as engine:
            deltas = await answer(engine, request("the quick brown fox", tokenizer))
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        assert len(token_ids) == 24
        prompt = tokenizer.encode("the quick brown fox")
        whole = tokenizer.decode(prompt + token_ids, True)
        assert "the quick brown fox" + "".join(delta.text for delta in deltas) == whole
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [FinishReason.LENGTH]

    asyncio.run(scenario())


@both
@pytest.mark.full(but=("thread",))
def test_a_crowd_gets_what_each_would_get_alone(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    prompts = [f"token {i} and {'fox ' * i}" for i in range(12)]

    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, transport) as engine:
            alone = [await answer(engine, request(prompt, tokenizer)) for prompt in prompts]
            crowd = await asyncio.gather(*(answer(engine, request(prompt, tokenizer)) for prompt in prompts))
        texts = [["".join(delta.text for delta in deltas) for deltas in each] for each in (alone, crowd)]
        assert texts[0] == texts[1]

    asyncio.run(scenario())


@mostly_alike
def test_a_stop_string_ends_one_sample_and_frees_its_blocks(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    async def scenario() -> None:
        config = replace(CONFIG, enable_prefix_caching=False)
        async with running(tiny_checkpoint, tokenizer, transport, config) as engine:
            whole = "".join(d.text for d in await answer(engine, request("the quick", tokenizer)))
            stop = whole[5:8]
            endless = replace(GREEDY, stop=(stop,), max_tokens=200)
            deltas = await answer(engine, request("the quick", tokenizer, endless))
            assert "".join(d.text for d in deltas) == whole[: whole.index(stop)]
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop)
            await until(lambda: engine.stats.num_running == 0 and engine.stats.kv_usage == 0.0)
            assert engine.stats.generation_tokens < 200

    asyncio.run(scenario())


@mostly_alike
def test_the_text_of_a_stop_token_is_shown_only_if_asked_for(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, transport) as engine:
            plain = await answer(engine, request("the quick", tokenizer))
            stop_id = plain[6].token_ids[0]
            first = next(i for i, delta in enumerate(plain) if delta.token_ids == (stop_id,))
            hidden = replace(GREEDY, stop_token_ids=(stop_id,))
            shown = replace(hidden, include_stop_str_in_output=True)
            for sampling, upto in ((hidden, first), (shown, first + 1)):
                deltas = await answer(engine, request("the quick", tokenizer, sampling))
                ids = [token_id for delta in plain[:upto] for token_id in delta.token_ids]
                assert "the quick" + "".join(d.text for d in deltas) == tokenizer.decode(
                    [*tokenizer.encode("the quick"), *ids], True
                )
                assert sum(len(d.token_ids) for d in deltas) == first + 1
                assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.STOP, stop_id)

    asyncio.run(scenario())


@mostly_alike
def test_samples_of_one_request_are_told_apart(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=8, ignore_eos=True)

    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, transport) as engine:
            deltas = await answer(engine, request("the lazy dog", tokenizer, sampling))
            again = await answer(engine, request("the lazy dog", tokenizer, sampling))
        ids = [[t for d in deltas if d.index == index for t in d.token_ids] for index in range(3)]
        assert [len(each) for each in ids] == [8, 8, 8]
        assert len({tuple(each) for each in ids}) == 3
        assert ids == [[t for d in again if d.index == index for t in d.token_ids] for index in range(3)]

    asyncio.run(scenario())


@mostly_alike
def test_leaving_a_stream_frees_its_blocks(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    async def scenario() -> None:
        config = replace(CONFIG, enable_prefix_caching=False)
        async with running(tiny_checkpoint, tokenizer, transport, config) as engine:
            async with engine.submit(request("the", tokenizer, replace(GREEDY, max_tokens=250))) as stream:
                await anext(stream)
                assert engine.stats.num_running == 1
                steps = engine.stats.num_steps
            await until(lambda: engine.stats.num_running == 0)
            assert engine.stats.kv_usage == 0.0
            assert engine.stats.num_steps < steps + 100
            assert await answer(engine, request("the", tokenizer))

    asyncio.run(scenario())


@both
@pytest.mark.full(but=("thread",))
def test_what_cannot_be_served_is_refused_with_the_value_and_the_limit(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, transport) as engine:
            with pytest.raises(RequestError, match=r"maximum context length is 256 tokens.* 300 tokens"):
                engine.submit(Request(request_id="a", prompt_token_ids=(7,) * 300, sampling=GREEDY))
            with pytest.raises(RequestError, match=r"maximum context length is 256.*together 274"):
                engine.submit(Request(request_id="b", prompt_token_ids=(7,) * 250, sampling=GREEDY))
            with pytest.raises(RequestError, match="token id 512; ids must be at least 0 and at most 511"):
                engine.submit(Request(request_id="c", prompt_token_ids=(7, 512), sampling=GREEDY))
            with pytest.raises(RequestError, match="empty"):
                engine.submit(Request(request_id="d", prompt_token_ids=(), sampling=GREEDY))
            unlimited = replace(GREEDY, max_tokens=None)
            deltas = await answer(engine, Request(request_id="e", prompt_token_ids=(7,) * 250, sampling=unlimited))
            assert sum(len(delta.token_ids) for delta in deltas) == 6

    asyncio.run(scenario())


def test_grammars_that_never_compile_hold_up_no_other_client(tiny_checkpoint: Path, tokenizer: Tokenizer) -> None:
    """Nor do those that overflow the stack; one whose client leaves is dropped."""

    def structured(schema: object, tenant: str) -> Request:
        structure = StructuredOutput(kind=StructureKind.JSON, text=json.dumps(schema), param="response_format")
        sampling = replace(GREEDY, structured_output=structure, ignore_eos=False)
        return replace(request("the", tokenizer, sampling), tenant=tenant)

    links = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}, "type": "array"} for i in range(4_000)}
    deep = {"$ref": "#/$defs/d0", "$defs": {**links, "d4000": {}}}

    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, "thread") as engine:
            numbers = range(9_999_991, 9_999_971, -1)
            endless = [structured({"type": "integer", "multipleOf": number}, "hostile") for number in numbers]
            first, second, *others = [engine.submit(each) for each in endless]
            assert await answer(engine, structured({"enum": ["fox"]}, "bystander"))
            for stream in others:
                async with stream:
                    pass  # its client leaves
            for stream in (first, second):
                with pytest.raises(RequestError, match="takes more than 500 ms of processor time") as refused:
                    await read(stream)
                assert refused.value.param == "response_format"
            with pytest.raises(RequestError, match="overflows the stack"):
                await answer(engine, structured(deep, "hostile"))
            assert await answer(engine, structured({"enum": ["fox"]}, "hostile"))

    asyncio.run(scenario())


def test_a_request_that_the_engine_has_no_room_for_is_told_when_to_try_again(
    tiny_checkpoint: Path, tokenizer: Tokenizer
) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, "thread") as engine:
            asked = request("the", tokenizer)
            stream = engine.submit(asked)
            engine._handle(Rejected(asked.request_id, "grammars are waiting", None, 7))
            with pytest.raises(OverloadError, match="grammars are waiting") as refused:
                await read(stream)
            assert refused.value.retry_after_s == 7

    asyncio.run(scenario())


@pytest.mark.parametrize("prefix", ["", " quick"])
def test_fields_that_leave_no_token_are_the_clients_error_wherever_the_answer_ends(
    tiny_checkpoint: Path, tokenizer: Tokenizer, prefix: str
) -> None:
    """The choice of words starts with what may be said, and goes on with what may not."""
    allowed = tuple(tokenizer.encode(prefix)) or (7,)

    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, "thread") as engine:
            structure = StructuredOutput(kind=StructureKind.CHOICE, text=json.dumps([f"{prefix} brown"]))
            sampling = replace(GREEDY, structured_output=structure, allowed_token_ids=allowed)
            failing = request("the", tokenizer, sampling)
            with pytest.raises(RequestError, match="structured_outputs and allowed_token_ids together leave") as e:
                await answer(engine, failing)
            assert e.value.param == "structured_outputs"
            bad = tuple((token_id,) for token_id in range(512))
            with pytest.raises(RequestError, match="not complete: bad_words leaves no token") as e:
                await answer(engine, request("the", tokenizer, replace(GREEDY, bad_words=bad)))
            assert e.value.param == "bad_words"
            assert await answer(engine, request("the", tokenizer))

    asyncio.run(scenario())


async def until_it_fails(engine: AsyncEngine, wanted: Request) -> tuple[dict[int, str], str | None]:
    """The text of each sample, and why the request failed; None: it did not."""
    texts: dict[int, str] = {}
    try:
        async with engine.submit(wanted) as stream:
            async for output in stream:
                for delta in output.deltas:
                    texts[delta.index] = texts.get(delta.index, "") + delta.text
    except RequestError as error:
        return texts, str(error)
    return texts, None


def test_a_stream_that_fails_has_said_the_same_before_with_drafts_as_without(
    tiny_checkpoint: Path, tokenizer: Tokenizer
) -> None:
    """The prompt repeats the only token, so that drafts reach behind the last one that is allowed."""
    (token_id,) = tokenizer.encode("x")
    limited = replace(GREEDY, allowed_token_ids=(token_id,), bad_words=((token_id,) * 8,))
    wanted = [limited, replace(limited, stop=("xxxx",), n=2), GREEDY]

    async def scenario(config: EngineConfig) -> tuple[list[tuple[dict[int, str], str | None]], float]:
        async with running(tiny_checkpoint, tokenizer, "thread", config) as engine:
            found = [await until_it_fails(engine, request("x" * 40, tokenizer, each)) for each in wanted]
            speculated = engine.stats.speculation
        return found, 0 if speculated is None else sum(each.accepted for each in speculated.methods)

    plain, drafting = (
        asyncio.run(scenario(replace(CONFIG, speculative_config=given)))
        for given in ({"policy": "off"}, {"method": "ngram", "policy": "fixed", "num_speculative_tokens": 8})
    )
    assert plain[0][0][0] == {0: "x" * 7}
    assert plain[0][1] == ({0: "", 1: ""}, None)
    assert [bool(why) for _, why in plain[0]] == [True, False, False]
    assert drafting[0] == plain[0]
    assert drafting[1] > 5


def test_a_storm_of_preemptions_changes_no_token_holds_nothing_and_is_one_line(
    tiny_checkpoint: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the same requests with room for all. Some are given up on the way, some are waited for in vain."""

    async def mixed(engine: AsyncEngine) -> list[list[int]]:
        async def one(number: int) -> list[int]:
            long = SamplingParams(
                temperature=number % 2, max_tokens=60 + 7 * (number % 8), ignore_eos=True, seed=1
            )
            wanted = request(" ".join(["the quick brown fox"] * (1 + number % 5)) + f" {number}", tokenizer, long)
            if number % 4:
                deltas = await answer(engine, wanted)
                assert deltas[-1].finish_reason is FinishReason.LENGTH
                return [token_id for delta in deltas for token_id in delta.token_ids]
            async with engine.submit(wanted) as stream:  # a client that leaves after a few tokens
                async for output in stream:
                    if output.deltas:
                        break
            return []

        found = await asyncio.wait_for(asyncio.gather(*map(one, range(64))), 120)
        await until(lambda: engine.stats.num_running == engine.stats.num_waiting == 0)
        assert engine.stats.kv_usage == 0.0
        return found

    async def scenario(kv_cache_memory: int) -> tuple[list[list[int]], int]:
        config = replace(CONFIG, backend="native", max_num_seqs=64, kv_cache_memory=kv_cache_memory)
        async with running(tiny_checkpoint, tokenizer, "thread", config) as engine:
            return await mixed(engine), engine.stats.num_preemptions

    calm, none = asyncio.run(scenario(16 << 20))
    assert none == 0
    assert "preempted" not in caplog.text
    stormy, many = asyncio.run(scenario(1 << 20))
    assert many >= 5
    assert stormy == calm
    (line,) = [line for line in caplog.messages if "preempted" in line]
    assert "raise --kv-cache-memory, which is 1MiB" in line


@both
@pytest.mark.full(but=("thread",))
def test_a_full_queue_refuses_and_recovers(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    async def scenario() -> None:
        config = replace(CONFIG, max_num_queued_reqs=2)
        async with running(tiny_checkpoint, tokenizer, transport, config) as engine:
            work = [engine.submit(request("the", tokenizer)) for _ in range(6)]
            with pytest.raises(OverloadError, match=r"6 samples are in flight.*the limit is 6") as refusal:
                engine.submit(request("the", tokenizer))
            assert 1 <= refusal.value.retry_after_s <= 60
            for stream in work:
                assert [output async for output in stream]
            assert await answer(engine, request("the", tokenizer))

    asyncio.run(scenario())


def test_a_target_that_cannot_be_met_is_refused_once_the_engine_has_a_pace(
    tiny_checkpoint: Path, tokenizer: Tokenizer
) -> None:
    """A microsecond per token is too little for any engine; one that refuses nothing is accepted all along."""

    async def scenario() -> None:
        classes = {"fast": {"slo": {"tpot_ms": 0.001}, "admission": "refuse"}}
        config = replace(CONFIG, speculative_config={"classes": classes})
        fast = replace(request("the", tokenizer), speculation=config.speculation.params_of("fast"))
        async with running(tiny_checkpoint, tokenizer, "thread", config) as engine:
            await answer(engine, request("the quick", tokenizer))
            await until(lambda: engine.has_pace)
            with pytest.raises(TargetError, match=r"TPOT target of 0.001 ms cannot be met now.*retry after \d+ s"):
                engine.submit(fast)
            for _ in range(3):
                assert await answer(engine, request("the", tokenizer))
            assert engine.stats.num_running == 0
            load = engine._monitor.load(time.monotonic())
            assert load is not None
            assert load.admitted == pytest.approx(load.offered * 4 / 5)

    asyncio.run(scenario())


@mostly_alike
def test_a_degraded_request_gets_its_class_back_while_it_waits(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    """One slot, held by a long answer: the target is out of reach until that is aborted."""
    decisions: list[tuple[str, str]] = []

    class Watched(Metrics):
        def admission(self, class_name: str, decision: Decision, target: Target) -> None:
            decisions.append((class_name, decision.value))
            super().admission(class_name, decision, target)

    async def scenario() -> None:
        classes = {"agent": {"slo": {"ttft_ms": 60_000}, "admission": "batch"}, "batch": {}}
        config = replace(CONFIG, max_num_seqs=1, speculative_config={"classes": classes})
        metrics = Watched(model_name="tiny", max_model_len=256, speculation=config.speculation)
        engine = AsyncEngine(config, tiny_checkpoint, tokenizer, transport=transport, observer=metrics)
        agent = replace(
            request("the", tokenizer, replace(GREEDY, max_tokens=2)),
            speculation=config.speculation.params_of("agent"),
        )
        await engine.start()
        try:
            await engine.wait_ready()
            await answer(engine, request("the quick", tokenizer))
            await until(lambda: engine.has_pace)
            held = engine.submit(request("the", tokenizer, replace(GREEDY, max_tokens=250)))
            await anext(held)
            engine._admission.first_margin.value = 1e9  # nothing is met while anything else is in flight
            stream = engine.submit(agent)
            assert stream.request.speculation.class_name == "batch"
            held.close()
            assert [output async for output in stream]
            assert decisions == [("agent", "degraded"), ("agent", "restored")]
            assert stream.request.speculation.class_name == "agent"
        finally:
            await engine.stop()

    asyncio.run(scenario())


@mostly_alike
def test_requests_that_come_together_are_accepted_together_or_not_at_all(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    async def scenario() -> None:
        config = replace(CONFIG, max_num_queued_reqs=2)
        async with running(tiny_checkpoint, tokenizer, transport, config) as engine:
            with pytest.raises(OverloadError, match=r"0 samples are in flight and 7 more.*the limit is 6"):
                engine.submit(request("the", tokenizer), num_following=6)
            assert await answer(engine, request("the", tokenizer))

    asyncio.run(scenario())


def test_one_tenants_flood_leaves_room_for_others(tiny_checkpoint: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        config = replace(CONFIG, max_num_seqs=1, max_num_queued_reqs=35)
        async with running(tiny_checkpoint, tokenizer, "thread", config) as engine:
            flood = replace(request("the", tokenizer, replace(GREEDY, max_tokens=200)), tenant="flood")
            with pytest.raises(OverloadError, match="0 samples are in flight"):
                engine.submit(flood, num_following=36)
            for number in range(32):
                engine.submit(replace(flood, request_id=str(number)))
            with pytest.raises(
                OverloadError, match=r"32 .*limit is 36, and a client that holds 32 of them leaves"
            ):
                engine.submit(flood)
            assert engine.max_samples == 32
            assert await answer(engine, replace(request("the", tokenizer), tenant="another"))

    asyncio.run(scenario())


@pytest.mark.alone
def test_retry_after_is_the_time_until_there_is_room(tiny_checkpoint: Path, tokenizer: Tokenizer) -> None:
    """Oracle: the test's clock over the samples that have ended; what the machine does next has no part in it."""

    async def scenario() -> None:
        config = replace(CONFIG, max_num_seqs=1, max_num_queued_reqs=59)
        async with running(tiny_checkpoint, tokenizer, "thread", config) as engine:
            long = replace(GREEDY, max_tokens=240)
            began_s = time.monotonic()
            tasks = [asyncio.create_task(answer(engine, request("the", tokenizer, long))) for _ in range(60)]
            await until(lambda: sum(task.done() for task in tasks) >= 10, 60)
            num_done = sum(task.done() for task in tasks)
            with pytest.raises(OverloadError) as refusal:
                engine.submit(
                    request("the", tokenizer), num_following=num_done + 39
                )  # 40 more than there is room for
            expected_s = 40 * (time.monotonic() - began_s) / num_done
            assert expected_s / 2 <= refusal.value.retry_after_s <= expected_s + 1
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(scenario())


@both
@pytest.mark.full(but=("thread",))
def test_a_request_is_aborted_at_its_deadline(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    async def scenario() -> None:
        config = replace(CONFIG, enable_prefix_caching=False, max_num_seqs=1)
        async with running(tiny_checkpoint, tokenizer, transport, config) as engine:
            wanted = request("the quick", tokenizer, replace(GREEDY, max_tokens=240))
            running_one = engine.submit(replace(wanted, deadline_s=wanted.arrival_s + 0.04))
            other = request("the quick", tokenizer)
            waiting_one = engine.submit(replace(other, deadline_s=other.arrival_s + 0.03))
            for stream, limit in ((waiting_one, "0.03"), (running_one, "0.04")):
                with pytest.raises(DeadlineError, match=f"the request was not finished within {limit} s"):
                    await read(stream)
            await until(lambda: engine.stats.num_running == 0 and engine.stats.kv_usage == 0.0)
            assert engine.stats.num_waiting == 0
            assert engine.stats.generation_tokens < 240

            in_time = request("the", tokenizer)
            assert await answer(engine, replace(in_time, deadline_s=in_time.arrival_s + 30))

    asyncio.run(scenario())


@both
@pytest.mark.full(but=("thread",))
def test_draining_finishes_what_runs_and_takes_nothing_new(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, transport) as engine:
            work = asyncio.create_task(answer(engine, request("the", tokenizer)))
            await asyncio.sleep(0)
            drained = asyncio.create_task(engine.drain(PATIENCE_S))
            await asyncio.sleep(0)
            assert engine.state is EngineState.DRAINING
            with pytest.raises(NotReadyError, match="draining"):
                engine.submit(request("the", tokenizer))
            await drained
            assert sum(len(delta.token_ids) for delta in await work) == 24

    asyncio.run(scenario())


@mostly_alike
def test_draining_gives_up_after_its_time(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, transport) as engine:
            stream = engine.submit(request("the", tokenizer, replace(GREEDY, max_tokens=250)))
            await engine.drain(0.0)
            with pytest.raises(NotReadyError, match="shutting down; the request was not finished within 0 s"):
                async for _ in stream:
                    pass

    asyncio.run(scenario())


@both
def test_stopping_fails_every_waiter(tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, transport) as engine:
            stream = engine.submit(request("the", tokenizer, replace(GREEDY, max_tokens=250)))
            await engine.stop()
            assert engine.state is EngineState.DEAD
            with pytest.raises(EngineError, match="stopped"):
                async for _ in stream:
                    pass
            with pytest.raises(NotReadyError, match="dead"):
                engine.submit(request("the", tokenizer))

    asyncio.run(scenario())


@mostly_alike
def test_a_broken_checkpoint_is_the_operators_error(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])

    async def scenario() -> None:
        engine = AsyncEngine(CONFIG, broken, tokenizer, transport=transport)
        await engine.start()
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            await engine.wait_ready()
        assert engine.state is EngineState.DEAD
        await engine.stop()

    asyncio.run(scenario())


@both
@pytest.mark.full(but=("process",))
def test_an_idle_engine_gives_signs_of_life(
    tiny_checkpoint: Path, tokenizer: Tokenizer, transport: Transport
) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, transport) as engine:
            seen = engine.stats
            await until(lambda: engine.stats is not seen, HEARTBEAT_S + 5.0)

    asyncio.run(scenario())


def children() -> list[int]:
    listed = subprocess.run(
        ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True, check=True
    )
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if "faser.engine.worker" in line]


@pytest.mark.full
def test_a_killed_engine_fails_its_waiters_and_says_why(tiny_checkpoint: Path, tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        async with running(tiny_checkpoint, tokenizer, "process") as engine:
            stream = engine.submit(request("the", tokenizer, replace(GREEDY, max_tokens=250)))
            await anext(stream)
            (pid,) = children()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineError, match="signal 9"):
                async for _ in stream:
                    pass
            assert engine.state is EngineState.DEAD
            assert "signal 9" in engine.state_reason

    asyncio.run(scenario())


@pytest.mark.full
def test_a_killed_engine_is_restarted_and_counts_and_answers_as_before(
    tiny_checkpoint: Path, tokenizer: Tokenizer
) -> None:
    metrics = Metrics(model_name="tiny", max_model_len=256)

    def series(name: str) -> float:
        lines = metrics.render().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    async def scenario() -> None:
        engine = AsyncEngine(
            CONFIG, tiny_checkpoint, tokenizer, supervision=Supervision(max_restarts=1), observer=metrics
        )
        await engine.start()
        await engine.wait_ready()
        before = await answer(engine, request("the quick", tokenizer))
        streams = [
            engine.submit(request("the", tokenizer, replace(GREEDY, max_tokens=250)))
            for _ in range(CONFIG.max_num_seqs)
        ]
        await anext(streams[0])
        assert series("vllm:num_requests_running") > 0
        generated = series("vllm:generation_tokens_total")
        (pid,) = children()
        os.kill(pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineDiedError, match="signal 9") as died:
                async for _ in stream:
                    pass
            assert died.value.retry_after_s >= 2  # a pause of a second, and a start
        assert engine.state is EngineState.RESTARTING
        assert engine.info.max_model_len == 256
        with pytest.raises(NotReadyError, match="restarting") as refused:
            engine.submit(request("the", tokenizer))
        assert refused.value.retry_after_s <= died.value.retry_after_s
        assert engine.stats == EngineStats()
        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert series(f"vllm:{gauge}") == 0
        assert series('faser_engine_state{engine="0",model_name="tiny",state="restarting"}') == 1
        await until(lambda: engine.state is EngineState.READY, 60)
        assert children() != [pid]
        after = await answer(engine, request("the quick", tokenizer))
        assert "".join(delta.text for delta in after) == "".join(delta.text for delta in before)
        assert series("faser_engine_restarts_total") == 1
        assert series('faser_engine_state{engine="0",model_name="tiny",state="ready"}') == 1
        assert series("vllm:generation_tokens_total") >= generated + 24
        await engine.stop()
        assert children() == []

    asyncio.run(scenario())


@pytest.mark.full
def test_an_engine_ends_when_its_front_end_is_gone(tiny_checkpoint: Path) -> None:
    """The front-end is a process of its own here, and is killed while its engine works."""
    script = f"""
import asyncio, pathlib, sys
from tests.engine.client.test_async_engine import CONFIG, GREEDY, children, load_tokenizer
from tests.engine.client.test_async_engine import replace, request, AsyncEngine
async def scenario():
    path = pathlib.Path({str(tiny_checkpoint)!r})
    tokenizer = load_tokenizer(path)
    engine = AsyncEngine(CONFIG, path, tokenizer)
    await engine.start()
    await engine.wait_ready()
    stream = engine.submit(request("the", tokenizer, replace(GREEDY, max_tokens=250)))
    await anext(stream)
    print(children()[0], flush=True)
    await asyncio.sleep(60)
asyncio.run(scenario())
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as front_end:
        assert front_end.stdout is not None
        engine_pid = int(front_end.stdout.readline())
        front_end.kill()
    assert has_ended(engine_pid)
