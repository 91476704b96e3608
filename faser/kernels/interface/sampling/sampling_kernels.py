"""The contract of the kernels that sample tokens from logits, for callers on the host and for CUDA graphs.

Logits are [R, V] float32, each row contiguous; rows are independent of each other, bit for bit. Every
implementation gives the same tokens and the same fixed-point probabilities, which
engine/execution/sampling/distribution.py defines. SamplingKernels takes arrays and returns arrays.
DeviceSamplingKernels takes and fills tensors at fixed addresses and never waits for the device, so that a CUDA
graph can contain its calls.

A truncation parameter that these kernels do not know is a logits processor: see engine/execution/sampling.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from faser.kernels.interface.sampling.sampling_metadata import DeviceSamplingMetadata, SamplingMetadata

Ints = NDArray[np.int64]
Reals = NDArray[np.float64]
Words = NDArray[np.uint64]

NO_TOKEN = -1


class SamplingKernels(Protocol):
    """Kernels for callers on the host.

    rows: [N], distinct rows of the logits. best: [N], what `best` returned for these rows, none of them NO_TOKEN.
    metadata, uniforms: [N], of these rows; the numbers in [0, 1) that decide are given as uniforms, so seeds and
    positions are not read.
    """

    def best(self, logits: Tensor) -> Ints:
        """[R] the most likely token, in a tie the lowest id.

        NO_TOKEN where the row has a NaN or no finite maximum.
        """
        ...

    def best_and_margin(self, logits: Tensor) -> tuple[Ints, Reals]:
        """[R] the result of `best`, and [R] its logit minus the largest other logit, a float32 difference.

        The margin is 0 in a tie and where there is no token, and infinite where no other token can be sampled.
        """
        ...

    def take(self, logits: Tensor, metadata: SamplingMetadata, uniforms: Reals) -> Ints:
        """[R] the token of each row: `draw` where its temperature is above 0, else `best`.

        NO_TOKEN as in `best`. metadata, uniforms: [R], of all rows. May overwrite the logits.
        """
        ...

    def draw(self, logits: Tensor, rows: Ints, best: Ints, metadata: SamplingMetadata, uniforms: Reals) -> Ints:
        """[N] a random token of each of these rows. May overwrite the rows."""
        ...

    def nearest(
        self, logits: Tensor, rows: Ints, best: Ints, metadata: SamplingMetadata, uniforms: Reals, window: float
    ) -> tuple[Ints, Reals]:
        """[N] a prediction of what `draw` takes from similar logits with these uniforms, and [N] its margin.

        The probabilities fill [0, 1] in the order of token ids. The prediction is the token with the most
        probability within `window` of the uniform number, in a tie the lowest id. A window of 0 gives the token
        that `draw` takes; other windows are from 2**-20 to 1, so that rounding cannot leave one empty. The margin
        is the token's scaled logit minus the largest other one, in float32 as in the probabilities: negative if
        another token is more likely, infinite if there is no other. Writes nothing.
        """
        ...

    def fixed_point_probs(self, logits: Tensor, rows: Ints, best: Ints, metadata: SamplingMetadata) -> None:
        """Overwrite these rows with what tokens are drawn from: whole numbers proportional to probabilities."""
        ...

    def philox(self, counters: Words, keys: Words) -> Words:
        """[4, N] random words of counters [4, N] and keys [2, N], all contiguous; `philox.py` defines them."""
        ...


def best_then_drawn(kernels: SamplingKernels, logits: Tensor, metadata: SamplingMetadata, uniforms: Reals) -> Ints:
    """SamplingKernels.take by two calls, for kernels on the host, where two calls cost no more than one."""
    token_ids = kernels.best(logits)
    at = np.flatnonzero((metadata.temperature > 0) & (token_ids != NO_TOKEN))
    if 0 < len(at) == len(token_ids):
        token_ids = kernels.draw(logits, at, token_ids, metadata, uniforms)
    elif len(at):
        token_ids[at] = kernels.draw(logits, at, token_ids[at], metadata.among(at), uniforms[at])
    return token_ids


class DeviceSamplingKernels(Protocol):
    """Kernels for up to max_rows rows of one vocabulary, on one lane; results stay on the device.

    The tokens are, bit for bit, those of the same device's SamplingKernels with uniforms made from seeds and
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
        window: float,
        chosen: Tensor,
        margins: Tensor,
        *,
        top_k: bool,
        top_p: bool,
        random: bool = True,
    ) -> None:
        """Fill chosen [R] int64 with each row's draft token, and margins [R] float32 with its margin.

        Rows without a temperature get SamplingKernels.best_and_margin, the others SamplingKernels.nearest.
        NO_TOKEN and a margin of 0 where logits are not numbers. logits: [R, V] float32, not written to.
        """
        ...
