"""Weight rules: when the weights change, and which version of them a microbatch uses."""

from dataclasses import dataclass
from typing import Literal

Weights = Literal["flush", "stash", "stash+vertical-sync", "double-buffer"]
"""The rules by name, as the plan document has them; see `PipelinePlan`."""


@dataclass(frozen=True, slots=True)
class WeightRule:
    """The semantics of a weight update.

    Attributes
    ----------
    updates_every_round
        Whether weights change after every microbatch, or after every round of a round-robin stage;
        else once, at the end of the iteration. A version that a backward still needs is kept until
        it ends, next to the newest. The all-reduce and the update are parts of the backward.
    staleness
        By how many updates the weights of an iteration are older than the newest as it begins.
        That many versions are always held next to the newest.
    follows_first_stage
        Whether a microbatch uses on every stage the version that it used on the first.
    """

    name: Weights
    updates_every_round: bool = False
    staleness: int = 0
    follows_first_stage: bool = False

    @property
    def versions(self) -> int:
        """The number of versions of the weights that a stage always holds."""
        return 1 + self.staleness

    @property
    def may_overlap(self) -> bool:
        """Whether an iteration may begin before the previous iteration has ended."""
        return self.staleness > 0 or self.updates_every_round

    @property
    def keeps_versions(self) -> bool:
        """Whether a stage ever holds more than the newest version."""
        return self.may_overlap


FLUSH = WeightRule("flush")
STASH = WeightRule("stash", updates_every_round=True)
STASH_VERTICAL_SYNC = WeightRule(
    "stash+vertical-sync", updates_every_round=True, follows_first_stage=True
)
DOUBLE_BUFFER = WeightRule("double-buffer", staleness=1)

WEIGHT_RULES: dict[str, WeightRule] = {
    rule.name: rule for rule in (FLUSH, STASH, STASH_VERTICAL_SYNC, DOUBLE_BUFFER)
}
