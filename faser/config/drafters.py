"""The drafters of FASER: one row each, with everything that other modules need to know of them. Loads no torch.

To add a drafter, write its class, add its row here and its row in engine/execution/drafting/registry.py,
and describe it in docs/speculation.md. The order of the rows is the order of methods in arrays and metrics:
drafters that run a model come first.
"""

from dataclasses import dataclass
from enum import StrEnum


class Confidence(StrEnum):
    """What the confidence of a drafted token is. The acceptance model chooses its feature by it."""

    MARGIN = "nats between the two largest logits"
    PROBABILITY = "estimated probability"
    MATCH_LENGTH = "tokens of the match"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInfo:
    """One drafter.

    needs_passes: each drafted token costs a forward pass of a model, and there is a draft whenever one is asked
    for. Otherwise drafts are copied from text. needs_draft_model: a second model is loaded. needs_head: a head is
    loaded, a small model that reads the target's hidden states.
    prior_acceptance: share of drafted tokens that are expected to be accepted before any was verified.
    prior_slope, prior_centre: of the logistic curve from confidence to acceptance: its slope before any token was
    verified, and the feature of the confidence at which it predicts prior_acceptance.
    """

    name: str
    confidence: Confidence
    prior_acceptance: float
    prior_slope: float
    prior_centre: float
    needs_passes: bool = False
    needs_draft_model: bool = False
    needs_head: bool = False


DRAFTERS = {
    each.name: each
    for each in (
        DrafterInfo(
            name="draft_model",
            confidence=Confidence.MARGIN,
            prior_acceptance=0.7,
            prior_slope=0.5,
            prior_centre=2.5,
            needs_passes=True,
            needs_draft_model=True,
        ),
        DrafterInfo(
            name="eagle3",
            confidence=Confidence.MARGIN,
            prior_acceptance=0.6,
            prior_slope=0.5,
            prior_centre=2.5,
            needs_passes=True,
            needs_head=True,
        ),
        DrafterInfo(
            name="suffix",
            confidence=Confidence.PROBABILITY,
            prior_acceptance=0.6,
            prior_slope=0.7,
            prior_centre=0.5,
        ),
        DrafterInfo(
            name="ngram",
            confidence=Confidence.MATCH_LENGTH,
            prior_acceptance=0.55,
            prior_slope=1.4,
            prior_centre=1.1,
        ),
        DrafterInfo(
            name="ngram_model",
            confidence=Confidence.PROBABILITY,
            prior_acceptance=0.23,
            prior_slope=0.75,
            prior_centre=0.0,
        ),
        DrafterInfo(
            name="grammar",
            confidence=Confidence.PROBABILITY,
            prior_acceptance=0.97,
            prior_slope=0.7,
            prior_centre=4.6,
        ),
    )
}
DRAFT_METHODS = tuple(DRAFTERS)
PASS_METHODS = tuple(each.name for each in DRAFTERS.values() if each.needs_passes)
HEAD_METHODS = tuple(each.name for each in DRAFTERS.values() if each.needs_head)
MOST_STATES_READ = 1024  # positions: a head that has paused reads the states of the latest ones, and no others
TEXT_METHODS = tuple(each.name for each in DRAFTERS.values() if not each.needs_passes)
assert DRAFT_METHODS == PASS_METHODS + TEXT_METHODS, "drafters that run a model come first"
