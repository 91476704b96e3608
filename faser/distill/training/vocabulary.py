"""The vocabulary of a head: the tokens that its target says most often. Knows no head."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from faser.distill.conversations.dataset import Dataset


def frequent_tokens(dataset: Dataset, vocab_size: int, size: int, always: Sequence[int]) -> Tensor:
    """[size] int64, ascending: the most frequent tokens of the answers.

    Of equally frequent ones the lower ids are taken. always: tokens that are taken in any case. size: at most
    vocab_size.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for shard in dataset.shards():
        first = 0
        for prompt, answer in zip(shard.prompts.tolist(), shard.answers.tolist(), strict=True):
            np.add.at(counts, shard.tokens[first + prompt : first + prompt + answer], 1)
            first += prompt + answer
    counts[list(always)] = counts.sum() + 1
    chosen = np.argsort(-counts, kind="stable")[:size]
    return torch.from_numpy(np.sort(chosen))
