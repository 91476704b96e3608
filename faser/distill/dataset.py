"""Conversations to learn from, as token ids on disk: shards of them, and dataset.json with how they were made.

A shard is one file of numpy's npz format. It counts from the moment dataset.json lists it: what a killed writer
leaves is written anew. Knows no engine and no torch.
"""

import errno
import json
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faser.errors import ConfigError
from faser.files import parse_json, replacing, write_atomically

_INDEX = "dataset.json"
_HELD_OUT_EVERY = 33  # conversations; one is for measuring, and never learned from. Odd: temperatures alternate


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedConversation:
    """A prompt, as the model's chat template renders it, and the model's answer to it.

    ended: the answer has its end token, which is the last of answer. temperature: with which it was sampled; NaN:
    unknown.
    """

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    ended: bool
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Conversations in a row.

    tokens     | prompt 0 | answer 0 | prompt 1 | answer 1 | …
    lengths      prompts[0]  answers[0]  prompts[1] …

    tokens: [T] int32. prompts, answers: [N] int32, lengths in tokens. ended: [N] bool. temperatures: [N] float32.
    """

    tokens: npt.NDArray[np.int32]
    prompts: npt.NDArray[np.int32]
    answers: npt.NDArray[np.int32]
    ended: npt.NDArray[np.bool_]
    temperatures: npt.NDArray[np.float32]

    @classmethod
    def of(cls, conversations: Sequence[RecordedConversation]) -> "Shard":
        flat = [token for each in conversations for token in (*each.prompt, *each.answer)]
        return cls(
            tokens=np.array(flat, dtype=np.int32),
            prompts=np.array([len(each.prompt) for each in conversations], dtype=np.int32),
            answers=np.array([len(each.answer) for each in conversations], dtype=np.int32),
            ended=np.array([each.ended for each in conversations], dtype=np.bool_),
            temperatures=np.array([each.temperature for each in conversations], dtype=np.float32),
        )

    def __len__(self) -> int:
        return len(self.prompts)

    def __iter__(self) -> Iterator[RecordedConversation]:
        first = 0
        for at in range(len(self)):
            middle = first + int(self.prompts[at])
            last = middle + int(self.answers[at])
            yield RecordedConversation(
                prompt=tuple(self.tokens[first:middle].tolist()),
                answer=tuple(self.tokens[middle:last].tolist()),
                ended=bool(self.ended[at]),
                temperature=float(self.temperatures[at]),
            )
            first = last

    def write(self, path: Path) -> None:
        """Raises ConfigError if there is no room for it, or the file cannot be written."""
        try:
            with replacing(path) as new, new.open("wb") as file:
                np.savez_compressed(
                    file,
                    tokens=self.tokens,
                    prompts=self.prompts,
                    answers=self.answers,
                    ended=self.ended,
                    temperatures=self.temperatures,
                )
        except OSError as error:
            raise unwritable(path, error) from None

    @classmethod
    def read(cls, path: Path) -> "Shard":
        """Raises ConfigError that names a file that is missing, damaged or of another form."""
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
                shard = cls(**{name: found[name] for name in cls.__slots__})
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{path} is not a file of conversations: {error}") from None
        total = int(shard.prompts.sum() + shard.answers.sum())
        if total != len(shard.tokens):
            raise ConfigError(f"{path} has {len(shard.tokens)} tokens; its conversations have {total}")
        return shard


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
    """Return whether the conversation at this place is held out. More shards do not change that."""
    return place % _HELD_OUT_EVERY == 0


def _read(index: Path) -> dict[str, Any]:
    try:
        stored = parse_json(index.read_text(encoding="utf-8"))
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


def unwritable(path: Path, error: OSError) -> ConfigError:
    """The error for a file that cannot be written; it says that nothing is lost where the disk is full."""
    if error.errno == errno.ENOSPC:
        return ConfigError(
            f"{path} cannot be written: no space is left on the disk; free some and run the command again, "
            "what is there is kept"
        )
    return ConfigError(f"{path} cannot be written: {error.strerror}")
