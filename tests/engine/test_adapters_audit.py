"""Answers of adapters are replayed with their adapters, though others have had the slots meanwhile."""

from dataclasses import replace
from pathlib import Path

import pytest

from faser.engine.checkpoints.adapter import read_adapter
from faser.engine.engine import Engine
from faser.types.adapter import Adapter
from faser.types.request import Request
from tests.engine.checkpoints.adapter_files import write_adapter
from tests.engine.losslessness.equality import requests
from tests.engine.test_audit import Checkpoints, audited, idle
from tests.engine.test_audit import checkpoints as checkpoints  # a fixture


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    return [read_adapter(name, write_adapter(tmp_path / name, seed=ord(name)), max_rank=64) for name in "xyz"]


def answers(engine: Engine, asked: list[Request]) -> None:
    for each in asked:
        engine.add(each)
    while engine.has_work():
        engine.step()


def asking(adapters: list[Adapter]) -> list[Request]:
    turns = [None, *adapters]
    return [
        replace(each, adapter=turns[number % len(turns)])
        for number, each in enumerate(requests(temperature=0.0, max_tokens=24)[:12])
    ]


def test_replays_have_the_adapters_of_their_answers(checkpoints: Checkpoints, adapters: list[Adapter]) -> None:
    engine = audited(checkpoints, enable_lora=True, max_loras=2)
    for each in adapters:
        engine.load_adapter(each)
    answers(engine, asking(adapters))
    engine.step()
    stats = idle(engine)
    assert stats.checks >= 8
    assert stats.divergences == 0
    answers(engine, asking(adapters))
    engine.drop_adapter(adapters[0].digest)
    after = idle(engine)
    assert after.skipped > stats.skipped
    assert after.divergences == 0
