"""What a file of recorded traffic has: whole lines, of those who let it, readable by its owner alone.

Planted bugs that these tests have caught: half a line left on a full disk; a salted request recorded; tokens of
two samples in one line.
"""

import asyncio
import json
import logging
import os
import stat
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faser.distill.operator_files import TrafficFile
from faser.engine.client.async_engine import AsyncEngine
from faser.engine.client.traffic import (
    Outcome,
    RequestTraffic,
    TrafficRecorder,
)
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.types.adapter import Adapter
from faser.types.answer import FinishReason, OutputDelta
from faser.types.request import Request
from faser.types.sampling import SamplingParams
from tests.disks import filling_up
from tests.engine.client.test_async_engine import CONFIG
from tests.waiting import until


def request(prompt: tuple[int, ...] = (1, 2), **fields: Any) -> Request:
    sampling = fields.pop("sampling", SamplingParams(temperature=0.5))
    return Request(request_id=uuid.uuid4().hex, prompt_token_ids=prompt, sampling=sampling, **fields)


def delta(
    *token_ids: int, index: int = 0, reason: FinishReason | None = None, stop: str | None = None
) -> OutputDelta:
    return OutputDelta(
        index=index, text="", token_ids=token_ids, logprobs=None, finish_reason=reason, stop_reason=stop
    )


def finish(traffic: RequestTraffic) -> None:
    traffic.add(delta(7, reason=FinishReason.STOP))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_tokens_of_one_finished_sample(tmp_path: Path) -> None:
    path, counts = tmp_path / "traffic.jsonl", Counter[Outcome]()
    recorder = TrafficRecorder(path, lambda outcome: counts.update([outcome]))
    before_s = time.time()
    traffic = RequestTraffic(request(sampling=SamplingParams(temperature=0.5, n=2)), recorder)
    traffic.add(delta(3, 4))
    traffic.add(delta(5, index=1, reason=FinishReason.LENGTH))
    traffic.add(delta(6, reason=FinishReason.STOP, stop="x"))
    RequestTraffic(request(), recorder).add(delta(8, reason=FinishReason.ABORT))
    RequestTraffic(request(), recorder).add(delta(reason=FinishReason.LENGTH))
    recorder.close(10)
    found = lines(path)
    assert all(abs(each.pop("time") - before_s) < 60 for each in found)  # a date, which may jump
    common = {"prompt_token_ids": [1, 2], "temperature": 0.5}
    assert found == [
        common | {"answer_token_ids": [5], "finish_reason": "length"},
        common | {"answer_token_ids": [3, 4, 6], "finish_reason": "stop", "stop_reason": "x"},
    ]
    assert counts == {"recorded": 2}


def test_requests_that_are_kept_apart_or_say_so_are_not_recorded(tmp_path: Path) -> None:
    path, counts = tmp_path / "traffic.jsonl", Counter[Outcome]()
    recorder = TrafficRecorder(path, lambda outcome: counts.update([outcome]))
    adapter = Adapter(name="x", path="x", digest="0f")
    kept_apart: list[dict[str, Any]] = [{"cache_salt": "s"}, {"may_record": False}, {"adapter": adapter}]
    for fields in kept_apart:
        finish(RequestTraffic(request(**fields), recorder))
    recorder.close(10)
    assert path.read_bytes() == b""
    assert counts == {"withheld": 3}


def test_the_file_is_its_owners_alone_and_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "traffic.jsonl"
    path.write_text('{"prompt": "the", "answer": "fox"}')  # its end of line was lost
    path.chmod(0o644)
    recorder = TrafficRecorder(path, lambda _: None)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finish(RequestTraffic(request(), recorder))
    recorder.close(10)
    assert [each.get("answer_token_ids") for each in lines(path)] == [None, [7]]
    new = tmp_path / "new.jsonl"
    TrafficRecorder(new, lambda _: None).close(10)
    assert stat.S_IMODE(new.stat().st_mode) == 0o600


def test_one_file_has_one_writer(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "traffic.jsonl", lambda _: None)
    with pytest.raises(BlockingIOError):
        TrafficRecorder(tmp_path / "traffic.jsonl", lambda _: None)
    recorder.close(10)
    TrafficRecorder(tmp_path / "traffic.jsonl", lambda _: None).close(10)


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_another_file_gets_nothing_through_a_link(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    other, path = tmp_path / "other", tmp_path / "traffic.jsonl"
    other.write_text("mine")
    other.chmod(0o644)
    link(other, path)
    with pytest.raises(OSError, match=r"it is a link; name the file itself|has 2 names; it must have one"):
        TrafficRecorder(path, lambda _: None)
    assert (other.read_text(), stat.S_IMODE(other.stat().st_mode)) == ("mine", 0o644)


def test_what_is_no_file_is_refused() -> None:
    with pytest.raises(OSError, match="it is not a regular file"):
        TrafficRecorder(Path("/dev/null"), lambda _: None)


def test_a_full_disk_is_said_once_and_leaves_whole_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with filling_up(tmp_path / "small", kib=64) as folder:
        path, counts = folder / "traffic.jsonl", Counter[Outcome]()
        recorder = TrafficRecorder(path, lambda outcome: counts.update([outcome]))
        with caplog.at_level(logging.WARNING, "faser.traffic"):
            for _ in range(20):
                finish(RequestTraffic(request(prompt=(12345,) * 1500), recorder))
            recorder.close(10)
        assert [len(each["prompt_token_ids"]) for each in lines(path)] == [1500] * counts["recorded"]
        assert 0 < counts["recorded"] < 20
        assert counts["failed"] == 20 - counts["recorded"]
    assert [each.getMessage() for each in caplog.records] == [
        f"answers are not recorded: {path}: No space left on device; tried again every 10 s"
    ]


@pytest.mark.parametrize("frees", ["another file", "the recording itself"])
def test_recording_goes_on_when_the_disk_has_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, frees: str
) -> None:
    """A recording that the operator moves away is begun anew: what went to the old file would be lost."""
    now_s = [0.0]
    with filling_up(tmp_path / "small", kib=64) as folder, caplog.at_level(logging.WARNING, "faser.traffic"):
        path, other, outcomes = folder / "traffic.jsonl", folder / "other", list[Outcome]()
        other.write_bytes(bytes(32 << 10))
        recorder = TrafficRecorder(path, outcomes.append, now=lambda: now_s[0])

        def record(count: int) -> list[Outcome]:
            before = len(outcomes)
            for _ in range(count):
                finish(RequestTraffic(request(prompt=(12345,) * 1500), recorder))
            until(lambda: len(outcomes) == before + count)
            return outcomes[before:]

        first = record(5)
        num_kept = first.count("recorded")
        assert 0 < num_kept < 5
        assert first[-1] == "failed"
        now_s[0] += 11
        assert record(1) == ["failed"]  # still full, and said no second time
        if frees == "another file":
            other.unlink()
        else:
            path.unlink()
        now_s[0] += 9
        assert record(2) == ["failed"] * 2  # not tried yet
        now_s[0] += 2
        assert record(1) == ["recorded"]
        recorder.close(10)
        num_kept = num_kept + 1 if frees == "another file" else 1
        assert [len(each["prompt_token_ids"]) for each in lines(path)] == [1500] * num_kept
    num_missed = outcomes.count("failed")
    assert [each.getMessage() for each in caplog.records] == [
        f"answers are not recorded: {path}: No space left on device; tried again every 10 s",
        f"answers are recorded again: {path}; {num_missed} were not",
    ]


def test_what_the_disk_does_not_take_in_time_is_dropped(tmp_path: Path) -> None:
    """The writer is held in its first report, as by a disk that does not answer."""
    path, counts = tmp_path / "traffic.jsonl", Counter[Outcome]()
    long, held = request(prompt=(1,) * 900_000), True

    def count(outcome: Outcome) -> None:
        while outcome == "recorded" and held:
            time.sleep(0.001)
        counts[outcome] += 1

    recorder = TrafficRecorder(path, count)
    finish(RequestTraffic(request(), recorder))
    for _ in range(4):
        finish(RequestTraffic(long, recorder))
    assert counts == {"dropped": 2}
    held = False
    recorder.close(30)
    assert counts == {"dropped": 2, "recorded": 3}
    assert len(lines(path)) == 3


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return load_tokenizer(tiny_checkpoint)


def test_distilling_reads_what_an_engine_recorded(
    tiny_checkpoint: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Oracle: the tokens that the clients got."""
    path = tmp_path / "traffic.jsonl"
    sampling = SamplingParams(temperature=1.0, max_tokens=12, n=2, seed=3, ignore_eos=True)
    prompt = tuple(tokenizer.encode("the quick brown fox"))
    open_one = request(prompt=prompt, sampling=sampling)
    salted = replace(open_one, request_id="salted", cache_salt="s")

    async def scenario() -> list[tuple[int, ...]]:
        recorder = TrafficRecorder(path, lambda _: None)
        engine = AsyncEngine(CONFIG, tiny_checkpoint, tokenizer, transport="thread", recorder=recorder)
        await engine.start()
        answers: list[tuple[int, ...]] = [(), ()]
        try:
            await engine.wait_ready()
            for each in (open_one, salted):
                async with engine.submit(each) as stream:
                    async for output in stream:
                        for part in output.deltas if each is open_one else ():
                            answers[part.index] += part.token_ids
        finally:
            await engine.stop()
            recorder.close(10)
        return answers

    answers = asyncio.run(scenario())
    found = list(TrafficFile(path, tokenizer, None, None, vocab_size=tokenizer.vocab_size))
    assert {each.answer for each in found} == set(answers)
    assert [(each.prompt, each.temperature, each.ended) for each in found] == [(prompt, 1.0, False)] * 2
