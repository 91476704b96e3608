"""Training batches: rows of whole conversations with what a head takes and shall say. Knows no weights.

    tokens of a conversation   0 … P - 1 prompt | P … n - 1 answer
    rows                       1 … n - 1         row p takes token p and the target's states of p - 1
    drafting rows              P … n - 2         row p predicts p + 1, and p + s + 1 in step s; or every second one

A row before P only gives keys and values. What is predicted is always a token of the answer. SampleStore gives the
recorded conversations, and batches_of_epoch the order in which they are learned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from faser.distill.states import ShardStates

_POOL = 256  # conversations that are sorted by length together, so that batches have little padding


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One conversation, ready to learn from. n tokens, of which the first prompt_tokens are the prompt's.

    token_ids: [n] int64. states: [n - 1, K * H] bfloat16, of tokens 0 … n - 2. top_ids: [n - 1 - P, k] int64,
    top_probs: [n - 1 - P, k] float32: the target's distribution after tokens P … n - 2, over the rows of the
    head's vocabulary; tokens without a row have probability 0. greedy: the answer has temperature 0.
    """

    token_ids: Tensor
    prompt_tokens: int
    states: Tensor
    top_ids: Tensor
    top_probs: Tensor
    greedy: bool

    @property
    def drafting_rows(self) -> int:
        return len(self.token_ids) - 1 - self.prompt_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """R rows of C conversations, N of them drafting; S steps.

    states: [R, K * H]. token_ids, positions: [R] int64. drafting: [N] int64, which rows draft.
    next_ids: [S, N] int64, the token that step s takes. wanted_ids: [S, N, k] int64 and wanted_probs: [S, N, k]
    float32, the target's distribution over what step s predicts. valid: [S, N] bool: the step predicts a token
    of the answer. said: [S, N] int64, that token, as a target's id; -1 where invalid.
    greedy: [N] bool, rows of answers of temperature 0. starts: [C + 1] int64, drafting rows of each conversation.
    padded_rows: [C, L] and padded_drafting: [C, Q] int64, rows of each conversation, 0 in the padding. unpadded:
    [N] int64, places of the drafting rows in padded_drafting, flattened. mask: [C, Q, L] float32, 0 or -inf.
    """

    states: Tensor
    token_ids: Tensor
    positions: Tensor
    drafting: Tensor
    next_ids: Tensor
    wanted_ids: Tensor
    wanted_probs: Tensor
    valid: Tensor
    said: Tensor
    greedy: Tensor
    starts: Tensor
    padded_rows: Tensor
    padded_drafting: Tensor
    unpadded: Tensor
    mask: Tensor

    def to(self, device: torch.device) -> "TrainingBatch":
        return TrainingBatch(**{name: getattr(self, name).to(device) for name in self.__slots__})


def make_batch(samples: Sequence[TrainingSample], steps: int, *, every: int = 1) -> TrainingBatch:
    """Return a batch of all rows. every: of the rows that can draft, how far those that do are apart."""
    rows = np.array([len(each.token_ids) - 1 for each in samples])
    prompts = np.array([each.prompt_tokens for each in samples])
    learnable = np.array([each.drafting_rows for each in samples])
    assert learnable.min() > 0, "a conversation without a row to draft from"
    drafting = -(-learnable // every)
    first_row, first_drafting, first_wanted = _starts(rows), _starts(drafting), _starts(learnable)
    positions = np.concatenate([np.arange(1, count + 1) for count in rows])
    # Row p of a conversation has index p - 1; those that can draft are P … n - 2, at places 0, 1, …
    place = np.concatenate([np.arange(0, count, every) for count in learnable])
    last = np.repeat(learnable, drafting) - 1
    first_index = np.repeat(first_row[:-1] + prompts - 1, drafting)  # of the row at place 0
    token_ids = torch.cat([each.token_ids[1:] for each in samples])
    top_ids, top_probs = (
        torch.cat([getattr(each, name) for each in samples]) for name in ("top_ids", "top_probs")
    )
    ahead = place[None, :] + np.arange(steps)[:, None]  # [S, N]: place of the row that step s stands for
    valid = torch.from_numpy(ahead <= last[None, :])
    clipped = np.minimum(ahead, last[None, :])
    sources = torch.from_numpy(clipped + np.repeat(first_wanted[:-1], drafting))  # the distribution that is wanted
    next_rows = torch.from_numpy(clipped + first_index)
    padded_rows, _ = _padded(rows, first_row)
    padded_drafting, unpadded = _padded(drafting, first_drafting)
    return TrainingBatch(
        states=torch.cat([each.states for each in samples]),
        token_ids=token_ids,
        positions=torch.from_numpy(positions),
        drafting=torch.from_numpy(place + first_index),
        next_ids=token_ids[next_rows],
        wanted_ids=top_ids[sources],
        wanted_probs=top_probs[sources] * valid[..., None],
        valid=valid,
        said=torch.where(valid, token_ids[next_rows + valid.long()], -1),
        greedy=torch.from_numpy(np.repeat([each.greedy for each in samples], drafting)),
        starts=torch.from_numpy(first_drafting),
        padded_rows=torch.from_numpy(padded_rows),
        padded_drafting=torch.from_numpy(padded_drafting),
        unpadded=torch.from_numpy(unpadded),
        mask=_mask(rows, prompts, drafting, every),
    )


def _starts(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], counts.cumsum()))


def _padded(
    counts: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """([C, most] indices of each one's rows, [total] places of the rows in it, flattened)."""
    most = counts.max()
    columns = np.arange(most)
    inside = columns[None, :] < counts[:, None]
    return np.where(inside, starts[:-1, None] + columns[None, :], 0), np.flatnonzero(inside)


def _mask(
    rows: npt.NDArray[np.int64], prompts: npt.NDArray[np.int64], drafting: npt.NDArray[np.int64], every: int
) -> Tensor:
    """Return the mask [C, Q, L]: drafting row i is row P - 1 + i * every, and sees the rows up to itself."""
    place = np.minimum(np.arange(drafting.max())[None, :], drafting[:, None] - 1)
    own = prompts[:, None] - 1 + place * every
    seen = np.arange(rows.max())[None, None, :] <= own[:, :, None]
    return torch.zeros(seen.shape).masked_fill_(torch.from_numpy(~seen), float("-inf"))


class SampleStore:
    """The conversations of some shards that have rows to learn, in order.

    draft_ids: [Vd] int64, the target's token of each row of the head. keeps: chooses conversations by their place
    in the dataset.
    """

    def __init__(
        self, shards: Sequence[ShardStates], draft_ids: Tensor, vocab_size: int, keeps: Callable[[int], bool]
    ) -> None:
        self._rows = torch.full((vocab_size,), -1, dtype=torch.int64)
        self._rows[draft_ids] = torch.arange(len(draft_ids))
        self._found = [
            (shard, at)
            for shard in shards
            for at in range(len(shard))
            if keeps(int(shard.places[at])) and shard.tops[at + 1] > shard.tops[at]
        ]

    def __len__(self) -> int:
        return len(self._found)

    @property
    def drafting_rows(self) -> list[int]:
        """Rows to learn from, by conversation."""
        return [int(shard.tops[at + 1] - shard.tops[at]) for shard, at in self._found]

    def sample(self, index: int) -> TrainingSample:
        shard, at = self._found[index]
        first, last = int(shard.starts[at]), int(shard.starts[at + 1])
        return TrainingSample(
            token_ids=torch.from_numpy(shard.token_ids[first:last].astype(np.int64)),
            prompt_tokens=int(shard.prompts[at]),
            states=shard.states[first : last - 1],
            greedy=bool(shard.greedy[at]),
            **self._wanted(shard, at),
        )

    def _wanted(self, shard: ShardStates, at: int) -> dict[str, Tensor]:
        part = slice(int(shard.tops[at]), int(shard.tops[at + 1]))
        rows = self._rows[torch.from_numpy(shard.top_ids[part].astype(np.int64))]
        probs = torch.from_numpy(shard.top_probs[part].astype(np.float32))
        return {"top_ids": rows.clamp_min(0), "top_probs": probs * (rows >= 0)}


def batches_of_epoch(drafting_rows: Sequence[int], *, rows: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices of conversations, in batches of about `rows` drafting rows, in an order that seed and epoch fix."""
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(drafting_rows))
    found: list[list[int]] = []
    for first in range(0, len(order), _POOL):
        pool = sorted(order[first : first + _POOL].tolist(), key=lambda index: drafting_rows[index])
        batch: list[int] = []
        held = 0
        for index in pool:
            if batch and held + drafting_rows[index] > rows:
                found.append(batch)
                batch, held = [], 0
            batch.append(index)
            held += drafting_rows[index]
        found.append(batch)
    return [found[at] for at in rng.permutation(len(found))]
