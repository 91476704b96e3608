"""The seam between runners and the kernels that choose tokens where the logits are, without a wait for the device.

The same tokens, bit for bit, as the TokenChoice of the same device gives; see engine/execution/sampling/distribution.py. Numbers of the
rows' requests come in arrays at fixed places, so that recordings can read them.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSamplingMetadata:
    """How tokens are chosen, [R] each, all on the device of the logits.

    temperature: float32; 0 is the most likely token. log_min_p: float32, at most 0, natural logarithm, rounded
    from float64; -inf is off. top_k: int64; 0 is off. top_p: float64; 1 is off. seeds: int64, the bits of the
    requests' uint64 seeds. positions: int64, of the tokens that are chosen.
    """

    temperature: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    positions: Tensor


class DeviceSamplingKernels(Protocol):
    """For up to max_rows rows of one vocabulary, on one lane; results are on the device.

    random, top_k, top_p: some row may have a temperature, or ask for these. The caller knows from its requests;
    where it says no, the rows' own numbers are not looked at. Without `random` they are all as good as greedy, and
    little is launched.
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
        """chosen: [R] int64, each row's token: the most likely one, or drawn with its request's own number.

        NO_TOKEN where a NaN is or no finite maximum. logits: [R, V] float32, rows in line; may be overwritten.
        """
        ...

    def guess(
        self,
        logits: Tensor,
        rows: DeviceSamplingMetadata,
        window: float,
        chosen: Tensor,
        leads: Tensor,
        *,
        top_k: bool,
        top_p: bool,
        random: bool = True,
    ) -> None:
        """chosen: [R] int64, each row's drafted token; leads: [R] float32, its lead over the best other one.

        What TokenChoice.best_and_lead says of rows without a temperature, and `nearest` of the others. NO_TOKEN
        and a lead of 0 where logits are no numbers. logits: [R, V] float32, not written to.
        """
        ...
