"""Sampling kernels of a backend, and the parameters that they read; the generator of random words.

On the host the parameters of some rows are arrays (SamplingMetadata); on a device they are tensors
(DeviceSamplingMetadata). Temperature 0 takes the most likely token. Above 0, tokens are ordered by likelihood
(among equals the lower id comes first), and each truncation works on the tokens that the one before it has kept:

    min_p   keeps the tokens that are at least min_p times as likely as the most likely one    0 is off
    top_k   keeps the first top_k tokens                                                       0 is off
    top_p   keeps the fewest first tokens that have top_p of the remaining probability         1 is off

Logits are [R, V] float32, each row contiguous; rows are independent of each other, bit for bit. Every
implementation gives the same tokens and the same fixed-point probabilities, which
engine/execution/sampling/distribution.py defines. SamplingKernels takes arrays and returns arrays.
DeviceSamplingKernels takes and fills tensors at fixed addresses and never waits for the device, so that a CUDA
graph can contain its calls.

A token is drawn by a race (`arrivals` below): rounding of the logits hardly ever changes who wins it.

A truncation parameter that these kernels do not know is a logits processor: see engine/execution/sampling.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from faser.types.arrays import NO_TOKEN, Floats, Ints, Words

# (logits [R, V] edited in place, rows [M] ascending, words [M, W]): every token of these rows whose bit is 0
# gets a probability of 0. Token i is bit i % 64 of word i // 64, and W * 64 is at least V.
MaskKernel = Callable[[Tensor, Ints, Ints], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """Sampling parameters of N rows, [N] each.

    seeds: of the rows' requests.
    positions: of the tokens that are sampled.
    """

    temperature: NDArray[np.float32]
    min_p: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    seeds: NDArray[np.uint64]
    positions: NDArray[np.int64]

    @classmethod
    def greedy(cls, positions: NDArray[np.int64]) -> "SamplingMetadata":
        """Rows that all take their most likely token. positions: [N], kept and not copied."""
        count = len(positions)
        return cls(
            temperature=np.zeros(count, dtype=np.float32),
            min_p=np.zeros(count),
            top_k=np.zeros(count, dtype=np.int64),
            top_p=np.ones(count),
            seeds=np.zeros(count, dtype=np.uint64),
            positions=positions,
        )

    def __len__(self) -> int:
        return len(self.positions)

    def among(self, rows: NDArray[np.int64]) -> "SamplingMetadata":
        """The metadata of these rows only."""
        return SamplingMetadata(
            temperature=self.temperature[rows],
            min_p=self.min_p[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            seeds=self.seeds[rows],
            positions=self.positions[rows],
        )

    def at(self, positions: NDArray[np.int64]) -> "SamplingMetadata":
        """The same requests at other positions, [N]."""
        return SamplingMetadata(
            temperature=self.temperature,
            min_p=self.min_p,
            top_k=self.top_k,
            top_p=self.top_p,
            seeds=self.seeds,
            positions=positions,
        )

    @property
    def is_random(self) -> NDArray[np.bool_]:
        """Return whether each row's token is drawn at random: [N]."""
        random: NDArray[np.bool_] = self.temperature > 0
        return random

    @property
    def truncation_flags(self) -> "TruncationFlags":
        random = self.is_random
        if not random.any():
            return GREEDY
        return TruncationFlags(
            random=True,
            top_k=bool((random & (self.top_k > 0)).any()),
            top_p=bool((random & (self.top_p < 1)).any()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationFlags:
    """Features that at least one row of a batch asks for; kernels skip the others. Hashable."""

    random: bool
    top_k: bool
    top_p: bool


GREEDY = TruncationFlags(random=False, top_k=False, top_p=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSamplingMetadata:
    """SamplingMetadata of R rows as tensors [R] on the device of the logits.

    temperature: float32. log_min_p: float32, at most 0, the natural logarithm of min_p, computed in float64 and
    then rounded; -inf is off. top_k: int64. top_p: float64. seeds: int64, the bits of the requests' uint64 seeds.
    positions: int64.
    """

    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    positions: Tensor

    def part(self, first: int, count: int) -> "DeviceSamplingMetadata":
        """Return views of count rows from this one on."""
        rows = slice(first, first + count)
        return DeviceSamplingMetadata(
            temperature=self.temperature[rows],
            log_min_p=self.log_min_p[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            seeds=self.seeds[rows],
            positions=self.positions[rows],
        )


class SamplingKernels(Protocol):
    """Kernels for callers on the host.

    rows: [N], distinct rows of the logits. best: [N], what `best` returned for these rows, none of them NO_TOKEN.
    metadata, noise: [N], of these rows; the random words that decide are given as noise, so seeds and positions
    are not read.
    """

    def best(self, logits: Tensor) -> Ints:
        """Return the most likely token [R] of each row, in a tie the lowest id.

        NO_TOKEN where the row has a NaN or no finite maximum.
        """
        ...

    def best_and_margin(self, logits: Tensor) -> tuple[Ints, Floats]:
        """Return the result of `best`, and [R] its logit minus the largest other logit, a float32 difference.

        The margin is 0 in a tie and where there is no token, and infinite where no other token can be sampled.
        """
        ...

    def take(self, logits: Tensor, metadata: SamplingMetadata, noise: Words) -> Ints:
        """Return the token [R] of each row: `draw` where its temperature is above 0, else `best`.

        NO_TOKEN as in `best`. metadata, noise: [R], of all rows. May overwrite the logits.
        """
        ...

    def draw(self, logits: Tensor, rows: Ints, best: Ints, metadata: SamplingMetadata, noise: Words) -> Ints:
        """Draw a random token [N] of each of these rows. May overwrite the rows."""
        ...

    def predict(
        self,
        logits: Tensor,
        rows: Ints,
        best: Ints,
        metadata: SamplingMetadata,
        noise: Words,
        token_ids: Ints | None = None,
    ) -> tuple[Ints, Floats]:
        """Predict the columns [N] that `draw` takes, and their margins [N]: what similar logits most likely give.

        The margin is the column's scaled logit minus the largest other one, in float32 as in the probabilities:
        negative if another one is more likely, infinite if there is no other. token_ids: [V] ascending, the id of
        each column in a larger vocabulary, by which it races; None: columns are ids. Writes nothing.
        """
        ...

    def fixed_point_probs(self, logits: Tensor, rows: Ints, best: Ints, metadata: SamplingMetadata) -> None:
        """Overwrite these rows with what tokens are drawn from: whole numbers proportional to probabilities."""
        ...

    def philox(self, counters: Words, keys: Words) -> Words:
        """Return random words [4, N] of counters [4, N] and keys [2, N], all contiguous; `philox` defines them."""
        ...


def best_then_drawn(kernels: SamplingKernels, logits: Tensor, metadata: SamplingMetadata, noise: Words) -> Ints:
    """SamplingKernels.take by two calls, for kernels on the host, where two calls cost no more than one."""
    token_ids = kernels.best(logits)
    at = np.flatnonzero((metadata.temperature > 0) & (token_ids != NO_TOKEN))
    if 0 < len(at) == len(token_ids):
        token_ids = kernels.draw(logits, at, token_ids, metadata, noise)
    elif len(at):
        token_ids[at] = kernels.draw(logits, at, token_ids[at], metadata.among(at), noise[at])
    return token_ids


class DeviceSamplingKernels(Protocol):
    """Kernels for up to max_rows rows of one vocabulary, on one lane; results stay on the device.

    The tokens are, bit for bit, those of the same device's SamplingKernels with noise made from seeds and
    positions. random, top_k, top_p: at least one row has a temperature, a top_k or a top_p; where one is False,
    the rows' numbers for it are not read, and without `random` the most likely tokens are all that is computed.
    """

    def take(
        self,
        logits: Tensor,
        rows: DeviceSamplingMetadata,
        chosen: Tensor,
        *,
        top_k: bool,
        top_p: bool,
        random: bool = True,
    ) -> None:
        """Fill chosen [R] int64 with each row's token: drawn where it has a temperature, else the most likely one.

        NO_TOKEN where the row has a NaN or no finite maximum. logits: [R, V] float32; may be overwritten.
        """
        ...

    def draft(
        self,
        logits: Tensor,
        rows: DeviceSamplingMetadata,
        chosen: Tensor,
        margins: Tensor,
        *,
        top_k: bool,
        top_p: bool,
        random: bool = True,
    ) -> None:
        """Fill chosen [R] int64 with each row's draft token, and margins [R] float32 with its margin.

        Rows without a temperature get SamplingKernels.best_and_margin, the others SamplingKernels.predict.
        NO_TOKEN and a margin of 0 where logits are not numbers. logits: [R, V] float32, not written to.
        """
        ...


_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW_32 = np.uint64(0xFFFFFFFF)
_SHIFT_32 = np.uint64(32)


def philox(counters: Words, keys: Words) -> Words:
    """Philox4x32-10: [4, N] words of counters [4, N] and keys [2, N].

    Every entry is a 32-bit word held in a uint64. Neither argument is written to. What the counters mean is
    engine/execution/sampling/parameters.py's. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2,
    3", SC 2011, section 4.3.
    """
    multiplied, mixed = counters[0::2], counters[1::2]
    for _ in range(_ROUNDS):
        products = multiplied * _MULTIPLIERS
        multiplied = (products >> _SHIFT_32)[::-1] ^ mixed ^ keys
        mixed = (products & _LOW_32)[::-1]
        keys = (keys + _KEY_STEPS) & _LOW_32
    return np.stack((multiplied[0], mixed[0], multiplied[1], mixed[1]))


RACE_BLOCK = 256  # columns that race against each other, after their block has won against the other blocks
_RACE = 4  # in the third counter, after the purposes of engine/execution/sampling/parameters.py
_LN_2 = 0.6931471805599453
_HALF_ROOT_BITS = 0x3FE6A09E667F3BCD  # of the square root of 1/2
_MANTISSA_BITS = 52


def arrivals(noise: Words, width: int, generate: Callable[[Words, Words], Words] = philox) -> Floats:
    """Return exponential numbers [N, columns + blocks] of rows of `width` columns, from random words [N].

    What is twice as likely arrives in half the time; a block of 256 columns is as likely as all of them. The first
    block takes the row, and of its columns the first one:

        number of the block / its probability                 least of all blocks
        number of (column % 256) / its probability            least of that block

    So a token has its probability (Gumbel's trick, in two rounds), and logits that differ by d move arrivals by a
    factor of exp(d) at most: another token wins only if two were that close. generate: `philox`, or a faster one.

    The first numbers are those of a block's columns (of `width` if that is less), then come those of the blocks.
    Numbers 2i and 2i + 1 are made of the words of counter (i, 0, 4, 0), whose key is the row's word; those of
    blocks are counted from 256 on. They are -log of odd multiples of 2**-53, by single operations in this order,
    since the logarithms of libraries differ.
    """
    columns, blocks = min(width, RACE_BLOCK), -(-width // RACE_BLOCK)
    pairs = -(-columns // 2)
    calls = np.concatenate((np.arange(pairs), np.arange(-(-blocks // 2)) + RACE_BLOCK // 2))
    counters = np.zeros((4, len(noise), len(calls)), dtype=np.uint64)
    counters[0] = calls
    counters[2] = _RACE
    keys = np.empty((2, len(noise), len(calls)), dtype=np.uint64)
    keys[0], keys[1] = (noise & _LOW_32)[:, None], (noise >> _SHIFT_32)[:, None]
    words = generate(counters.reshape(4, -1), keys.reshape(2, -1)).reshape(counters.shape)
    whole = ((words[0::2] << _SHIFT_32) | words[1::2]) >> np.uint64(12)
    shares = (2 * np.moveaxis(whole, 0, -1) + np.uint64(1)).astype(np.float64) * 2.0**-53
    numbers = _minus_log(shares).reshape(len(noise), -1)
    return np.concatenate((numbers[:, :columns], numbers[:, 2 * pairs : 2 * pairs + blocks]), axis=1)


def _minus_log(shares: Floats) -> Floats:
    """Return -log of numbers in (0, 1): of the mantissa, in [.7, 1.4), by the series of the area tangent."""
    bits = shares.view(np.int64)
    exponent = (bits - _HALF_ROOT_BITS) >> _MANTISSA_BITS
    mantissa = (bits - (exponent << _MANTISSA_BITS)).view(np.float64)
    part = (mantissa - 1.0) / (mantissa + 1.0)
    square = part * part
    series = square * (1.0 / 17.0) + 1.0 / 15.0
    for divisor in (13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0):
        series = series * square + 1.0 / divisor
    found: Floats = exponent * -_LN_2 - (part + part) * series
    return found
