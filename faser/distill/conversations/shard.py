"""Shard: some conversations as arrays, in one file of numpy's npz format. Knows no engine."""

import errno
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from faser.errors import ConfigError
from faser.files import replacing


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
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
    def of(cls, conversations: Sequence[Conversation]) -> "Shard":
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

    def __iter__(self) -> Iterator[Conversation]:
        first = 0
        for at in range(len(self)):
            middle = first + int(self.prompts[at])
            last = middle + int(self.answers[at])
            yield Conversation(
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


def unwritable(path: Path, error: OSError) -> ConfigError:
    """The error for a file that cannot be written; it says that nothing is lost where the disk is full."""
    if error.errno == errno.ENOSPC:
        return ConfigError(
            f"{path} cannot be written: no space is left on the disk; free some and run the command again, "
            "what is there is kept"
        )
    return ConfigError(f"{path} cannot be written: {error.strerror}")
