"""Chooses the verifier that fits how tokens are drafted and how they are to be judged; imports only that one."""

import logging

from faser.engine.sampler import Sampler
from faser.engine.spec.verify import Verifier
from faser.kernels.draft_verdicts import DraftVerdicts
from faser.speculation import SpeculationConfig

_log = logging.getLogger("faser")


def make_verifier(config: SpeculationConfig, sampler: Sampler, kernels: DraftVerdicts | None = None) -> Verifier:
    """The verifier of rejection_sample_method, for drafts made by draft_sample_method. kernels: for rejection.

    Greedy drafts are point masses. Block verification then accepts, in expectation, exactly what `coupled` does,
    and only the latter leaves the tokens untouched too, so both methods get it.
    """
    method, sampled = config.rejection_sample_method, config.draft_sample_method == "probabilistic"
    match method:
        case "synthetic":
            from faser.engine.spec.verifiers.synthetic import Synthetic

            _log.warning(
                "rejection_sample_method is synthetic: drafted tokens are accepted at rates %s whatever the model "
                "says, so the OUTPUT IS NOT THE MODEL'S; for benchmarks only",
                config.synthetic_acceptance_rates,
            )
            return Synthetic(sampler, config.synthetic_acceptance_rates)
        case "block" if sampled:
            from faser.engine.spec.verifiers.block import Block

            return Block(sampler)
        case "standard" if sampled:
            from faser.engine.spec.verifiers.rejection import Rejection

            rejection = Rejection(sampler)
            if kernels is None:
                return rejection
            from faser.engine.spec.verifiers.device_rejection import DeviceRejection

            return DeviceRejection(sampler, kernels, rejection)
        case "standard" | "block":
            from faser.engine.spec.verifiers.coupled import Coupled

            if method == "block":
                _log.info("drafts are greedy, so block verification accepts what the standard method accepts")
            return Coupled(sampler)
        case _:
            raise AssertionError(f"rejection_sample_method is {method}, which the configuration refuses")
