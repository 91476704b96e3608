"""Makes a policy by name, and imports the chosen one alone."""

from faser.config.speculation import POLICIES, SpeculationConfig
from faser.engine.control.speculation.acceptance.estimator import Acceptance
from faser.engine.control.speculation.policies.policy import Policy
from faser.engine.control.step_cost import CostModel
from faser.errors import ConfigError


def make_policy(config: SpeculationConfig, costs: CostModel, acceptance: Acceptance) -> Policy:
    """The policy that config names. It reads costs and acceptance and writes neither.

    Raises ConfigError for a name that is not known here, and for `table` without a table.
    """
    match config.policy:
        case "off":
            from faser.engine.control.speculation.policies.off import Off

            return Off()
        case "fixed":
            from faser.engine.control.speculation.policies.fixed import Fixed

            return Fixed(config.cap)
        case "table":
            from faser.engine.control.speculation.policies.table import Table

            return Table(config.table)
        case "goodput":
            from faser.engine.control.speculation.policies.goodput import Goodput

            return Goodput(costs)
        case "survival":
            from faser.engine.control.speculation.policies.survival import Survival

            return Survival(costs)
        case "faser":
            from faser.engine.control.speculation.policies.faser import Faser

            method = config.pass_method or "draft_model"
            return Faser(costs, acceptance, method=method, has_text=config.drafts_from_text)
        case _:
            raise ConfigError(f"policy is {config.policy}; it must be one of {', '.join(POLICIES)}")
