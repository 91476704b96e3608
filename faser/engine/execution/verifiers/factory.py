"""Chooses the verifier by how tokens are drafted and which method judges them; imports only the chosen one."""

import logging

from faser.config.speculation import SpeculationConfig
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.verifiers.verifier import Verifier

_log = logging.getLogger("faser")


def make_verifier(config: SpeculationConfig, sampler: Sampler) -> Verifier:
    """The verifier of rejection_sample_method, for drafts made by draft_sample_method.

    Drafts that are not probabilistic are point masses. Of those, block verification accepts in expectation exactly
    what SampleAndMatch accepts, and only SampleAndMatch leaves the tokens untouched too, so both methods get it.
    """
    method, sampled = config.rejection_sample_method, config.draft_sample_method == "probabilistic"
    match method:
        case "synthetic":
            from faser.engine.execution.verifiers.synthetic import Synthetic

            _log.warning(
                "rejection_sample_method is synthetic: drafted tokens are accepted at rates %s whatever the model "
                "says, so the OUTPUT IS NOT THE MODEL'S; for benchmarks only",
                config.synthetic_acceptance_rates,
            )
            return Synthetic(sampler, config.synthetic_acceptance_rates)
        case "block" if sampled:
            from faser.engine.execution.verifiers.block import Block

            return Block(sampler)
        case "standard" if sampled:
            from faser.engine.execution.verifiers.rejection import Rejection

            return Rejection(sampler)
        case "standard" | "block":
            from faser.engine.execution.verifiers.sample_and_match import SampleAndMatch

            if method == "block":
                _log.info("drafts are greedy, so block verification accepts what the standard method accepts")
            return SampleAndMatch(sampler)
        case _:
            raise AssertionError(f"rejection_sample_method is {method}, which the configuration refuses")
