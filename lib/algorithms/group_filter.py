"""Dynamic sampling's decisions: which groups have a signal, whether to go on sampling, what the step trains on.

Dynamic sampling (DAPO, arXiv:2503.14476, section 3.2) samples new prompts until enough groups have responses of
different scores. Everything here is pure: every rank decides from the same gathered numbers, and so alike.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

from lib.errors import UserError, check_fields
from lib.types import Rollout

Verdict = Literal["kept", "all_right", "all_wrong", "out_of_band", "failed"]
"""kept: has a signal. all_right, all_wrong: one value throughout, above 0 or not. out_of_band: the mean is out of the
bounds. failed: fewer than two responses with a value."""


@dataclass(frozen=True, kw_only=True)
class GroupFilterConfig:
    """Dynamic sampling: go on sampling until enough groups have a signal (DAPO)."""

    enable: bool = False
    """Sample until --prompts-per-step groups have responses that differ in the metric; the other groups are dropped."""
    metric: str = "score"
    """What must differ in a group: score, or a number that the reward function returns beside it, such as acc."""
    low: float = -math.inf
    """Groups whose mean of the metric is below this are dropped as well: too hard."""
    high: float = math.inf
    """Groups whose mean of the metric is above this are dropped as well: too easy."""
    max_rounds: int = 10
    """Most rounds of sampling in a step, at least 1; after the last the step trains on the groups that there are."""
    keep_surplus: bool = True
    """Train on groups beyond those needed in the next step, though older weights sampled them; otherwise drop them."""

    def __post_init__(self) -> None:
        least = max(self.low, -sys.float_info.max)
        check_fields(
            self,
            "filter-groups.",
            metric=(bool(self.metric), "a name"),
            low=(self.low < math.inf, "a number below infinity"),  # also refuses NaN
            high=(self.high >= least, f"a number of at least --filter-groups.low, which is {self.low}"),
            max_rounds=(self.max_rounds >= 1, "at least 1"),
        )

    def in_words(self, target: int) -> str:
        """What a step of `target` groups samples, in a line."""
        bounded = (self.low, self.high) != (-math.inf, math.inf)
        band = f", their mean from {self.low:g} to {self.high:g}" if bounded else ""
        surplus = "train in the next step" if self.keep_surplus else "are dropped"
        rounds = f"rounds of sampling, {self.max_rounds} at most"
        return f"{rounds}, until {target} groups differ in {self.metric}{band}; groups beyond those {surplus}"


@dataclass(frozen=True, kw_only=True)
class StepGroups:
    """What a step trains on, the same on all ranks."""

    uids: tuple[int, ...]
    """The groups that train, ascending; none: the step is skipped."""
    surplus: tuple[int, ...]
    """The groups with a signal that are left over, ascending."""
    mini_batch_size: int
    """Responses per optimizer step, over all ranks; 0 when the step is skipped."""


def metric_values(group: Sequence[Rollout], metric: str) -> list[float | None]:
    """The metric of each scored response of a group; None where the reward failed, or is no finite number.

    Raises UserError when the reward function did not return the metric, or returned a text; not on all ranks alike.
    """
    values: list[float | None] = []
    for rollout in group:
        assert rollout.score is not None, "rollouts are scored before they are judged"
        score, extras = rollout.score.score, rollout.score.extras
        value = score if metric == "score" or score is None else extras.get(metric, "nothing of that name")
        if isinstance(value, str):
            numbers = ["score", *(name for name, number in extras.items() if not isinstance(number, str))]
            raise UserError(
                f"the reward function returns no number {metric!r}; --filter-groups.metric; found {value!r:.80}, "
                f"expected one of {', '.join(numbers[:20])}; change one of the two"
            )
        values.append(None if value is None or not math.isfinite(value) else float(value))
    return values


def judge(values: Sequence[float | None], cfg: GroupFilterConfig) -> Verdict:
    """Whether a group has a signal, from the metric of its responses; None for those that failed.

    Equal values are compared as they are: the std of equal numbers may be rounding noise.
    """
    valid = [value for value in values if value is not None]
    if len(valid) < 2:
        return "failed"
    if min(valid) == max(valid):
        return "all_right" if valid[0] > 0 else "all_wrong"
    return "kept" if cfg.low <= math.fsum(valid) / len(valid) <= cfg.high else "out_of_band"


def goes_on(num_kept_by_rank: Sequence[int], *, target: int, rounds: int, cfg: GroupFilterConfig) -> bool:
    """Whether another round is sampled after `rounds` of them, from the groups kept so far on every rank.

    `target` groups make a step. Ranks without any go on as long as the others: the sum decides.
    """
    return sum(num_kept_by_rank) < target and rounds < cfg.max_rounds


def step_groups(
    kept_by_rank: Sequence[Sequence[int]], *, target: int, n: int, mini_batch_size: int, num_ranks: int
) -> StepGroups:
    """The groups of a step out of those with a signal, by uid on every rank; the oldest (smallest) uids come first.

    target groups of n responses, cut into mini-batches of mini_batch_size, make a full step. With fewer groups the
    mini-batches keep their number and shrink, all to the same size; groups that would make them unequal are left over.
    Where that leaves less than a response for each of num_ranks, there are fewer mini-batches; at fewer responses than
    ranks the step is skipped.
    """
    uids = sorted(chain.from_iterable(kept_by_rank))
    assert len(set(uids)) == len(uids), "a group occurs twice"
    for num_mini_batches in range(target * n // mini_batch_size, 0, -1):
        unit = num_mini_batches // math.gcd(num_mini_batches, n)  # groups that fill equal mini-batches
        num_groups = min(len(uids), target) // unit * unit
        size = num_groups * n // num_mini_batches
        if size >= num_ranks:
            return StepGroups(uids=tuple(uids[:num_groups]), surplus=tuple(uids[num_groups:]), mini_batch_size=size)
    return StepGroups(uids=(), surplus=tuple(uids), mini_batch_size=0)


def shortage(
    groups: StepGroups, *, target: int, rounds: int, counts: Mapping[Verdict, int], keep_surplus: bool
) -> str | None:
    """A line about a step with fewer than `target` groups, None for a full one. `counts`: groups by verdict."""
    if len(groups.uids) == target:
        return None
    why_dropped = [(why, counts[why]) for why in get_args(Verdict) if why != "kept" and counts[why]]
    dropped = ", ".join(f"{count} {why.replace('_', ' ')}" for why, count in why_dropped)
    outcome = f"it trains on {len(groups.uids)}" if groups.uids else "it is skipped"
    if groups.surplus:  # they do not fill equal mini-batches
        outcome += f", {len(groups.surplus)} {'left for the next step' if keep_surplus else 'dropped'}"
    return (
        f"dynamic sampling found {len(groups.uids) + len(groups.surplus)} of {target} groups with a signal in {rounds} "
        f"round(s) (dropped: {dropped or 'none'}): {outcome}; easier or harder prompts, more responses per prompt "
        "(--rollout.n) or --filter-groups.max-rounds give more"
    )
