"""Policies: one file each, made by name, the chosen one alone imported."""

from faser.engine.cost_model import CostModel
from faser.engine.spec.acceptance import Acceptance
from faser.engine.spec.policy import Policy
from faser.errors import ConfigError
from faser.speculation import POLICIES, SpeculationConfig


def make_policy(config: SpeculationConfig, costs: CostModel, acceptance: Acceptance) -> Policy:
    """The policy that config names. It reads costs and acceptance and writes neither.

    Raises ConfigError for a name that is not known here, and for `table` without a table.
    """
    match config.policy:
        case "off":
            from faser.engine.spec.policies.off import Off

            return Off()
        case "fixed":
            from faser.engine.spec.policies.fixed import Fixed

            return Fixed(config.cap)
        case "table":
            from faser.engine.spec.policies.table import Table

            return Table(config.table)
        case "goodput":
            from faser.engine.spec.policies.goodput import Goodput

            return Goodput(costs)
        case "survival":
            from faser.engine.spec.policies.survival import Survival

            return Survival(costs)
        case "faser":
            from faser.engine.spec.policies.faser import Faser

            method = "layer_skip" if config.method == "layer_skip" else "draft_model"
            return Faser(costs, acceptance, method=method)
        case _:
            raise ConfigError(f"policy is {config.policy}; it must be one of {', '.join(POLICIES)}")
