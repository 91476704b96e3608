"""Dataset: a folder of shards, and dataset.json with how they were made.

A shard counts from the moment dataset.json lists it: what a killed writer leaves is written anew. Knows no engine.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from faser.distill.conversations.shard import Shard, unwritable
from faser.errors import ConfigError
from faser.files import write_atomically

_INDEX = "dataset.json"
_HELD_OUT_EVERY = 33  # conversations; one is for measuring, and never learned from. Odd: temperatures alternate


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord:
    """One shard, in numbers. asked: questions sampled for it. dropped: of these, by reason."""

    file: str
    conversations: int
    prompt_tokens: int
    answer_tokens: int
    asked: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class Dataset:
    """The conversations in a folder. settings: how they are made, as JSON; equal ones give equal conversations.

    Raises ConfigError for a folder whose conversations were made with other settings, or that cannot be read.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.folder = folder
        self.records: list[ShardRecord] = []
        index = folder / _INDEX
        if index.exists():
            stored = _read(index)
            _refuse_other_settings(index, stored["settings"], settings)
            self.settings = stored["settings"]
            self.records = [ShardRecord(**each) for each in stored["shards"]]
        elif settings is None:
            raise ConfigError(f"{index} is missing; there are no conversations to learn from")
        else:
            self.settings = dict(settings)

    @property
    def answer_tokens(self) -> int:
        return sum(each.answer_tokens for each in self.records)

    @property
    def conversations(self) -> int:
        return sum(each.conversations for each in self.records)

    @property
    def asked(self) -> int:
        """Questions sampled for all shards."""
        return sum(each.asked for each in self.records)

    def add(self, shard: Shard, **about: Any) -> ShardRecord:
        """Write a shard, then list it. about: asked, dropped and seconds of its record."""
        name = f"{len(self.records):05d}.npz"
        record = ShardRecord(
            file=name,
            conversations=len(shard),
            prompt_tokens=int(shard.prompts.sum()),
            answer_tokens=int(shard.answers.sum()),
            **about,
        )
        index = self.folder / _INDEX
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shard.write(self.folder / name)
            shards = [asdict(each) for each in (*self.records, record)]
            write_atomically(index, json.dumps({"settings": self.settings, "shards": shards}, indent=1) + "\n")
        except OSError as error:
            raise unwritable(index, error) from None
        self.records.append(record)
        return record

    def shard(self, index: int) -> Shard:
        return Shard.read(self.folder / self.records[index].file)

    def shards(self) -> Iterator[Shard]:
        for index in range(len(self.records)):
            yield self.shard(index)


def held_out(place: int) -> bool:
    """Whether the conversation at this place of a dataset is held out. More shards change that of none."""
    return place % _HELD_OUT_EVERY == 0


def _read(index: Path) -> dict[str, Any]:
    try:
        stored = json.loads(index.read_text(encoding="utf-8"))
        return {"settings": dict(stored["settings"]), "shards": list(stored["shards"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{index} cannot be read: {error}") from None


def _refuse_other_settings(index: Path, stored: Mapping[str, Any], settings: Mapping[str, Any] | None) -> None:
    for name, value in (settings or {}).items():
        if stored.get(name) != value:
            raise ConfigError(
                f"{index} was made with {name} {json.dumps(stored.get(name))}, not {json.dumps(value)}: "
                "give another folder with -o, or the same flags"
            )
