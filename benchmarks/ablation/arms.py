"""The arms of the ablation, and the order in which they take turns.

Each of ARMS is the one before with one thing more. DEFAULT is what a server without flags does, with drafts from
text.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from faser.errors import ConfigError

OFF, _AUTO, _ON = "off", "auto", "on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One setting of the engine: Engine.use_policy, and EarlyPruning.use. gamma: of fixed."""

    name: str
    policy: str
    gamma: int | None = None
    early_prune: str = OFF
    overlap: str = OFF


FLOOR, BASE = "off", "fixed:3"
ARMS = (
    Arm(name=FLOOR, policy="off"),
    Arm(name=BASE, policy="fixed", gamma=3),
    Arm(name="+lengths", policy="faser"),
    Arm(name="+pruning", policy="faser", early_prune=_AUTO),
    Arm(name="+pruning:on", policy="faser", early_prune=_ON),
    Arm(name="+overlap", policy="faser", early_prune=_AUTO, overlap=_AUTO),
)


DEFAULT = Arm(name="default", policy="faser")
KNOWN = (*ARMS, DEFAULT)


def arms_named(names: Sequence[str]) -> tuple[Arm, ...]:
    """In the order of KNOWN. Raises ConfigError for a name that no arm has."""
    known = [arm.name for arm in KNOWN]
    for name in names:
        if name not in known:
            raise ConfigError(f"--arms names {name!r}; the arms are {', '.join(known)}")
    return tuple(arm for arm in KNOWN if arm.name in names)


def orders(arms: Sequence[Arm], repeats: int, *, seed: int) -> list[tuple[Arm, ...]]:
    """Every arm once in every repeat, each repeat in an order of its own: no arm always follows the same one."""
    shuffler = random.Random(seed)
    return [tuple(shuffler.sample(arms, len(arms))) for _ in range(repeats)]
