"""Which prompt comes next with --data.curriculum: more of those that are mixed for the present policy.

Every prompt is in a pool, by the verdict on the last group of responses to it: unseen, mixed (kept: its responses
differ), all_right, all_wrong. A prompt is drawn with a probability proportional to its pool's weight, none twice in a
step while others are left.

The signal of a group's gradient falls with p(1 - p), p the policy's rate of success on the prompt, and is 0 where all
responses are right or all are wrong (SPEED, arXiv:2506.09016, theorem 3.1; arXiv:2504.03380, section 3; the weight of
arXiv:2502.12272). So a mixed prompt weighs most; an unseen one about the half of that, since it may be any; the others
an eighth, so that each comes back some time: the policy changes, and what is said of them grows old (as in Prioritized
Level Replay, arXiv:2010.03934). The weights are ours.

Draws are a function of (seed, uid, pools): integers alone, so the same on all machines, and for any number of ranks.
"""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from lib.algorithms.group_filter import Verdict
from lib.errors import DamagedCheckpoint

WEIGHTS = {"unseen": 4, "mixed": 8, "all_right": 1, "all_wrong": 1}
POOLS = tuple(WEIGHTS)
POOL_OF: dict[Verdict, str] = {"kept": "mixed", "all_right": "all_right", "all_wrong": "all_wrong"}
"""A group with fewer than two scores says nothing: its prompt stays where it is."""
DRAWS = 1  # tells these random numbers from those of an epoch's order


class Curriculum:
    """The pools of a run's prompts, and the draws from them. The same on all ranks, which all call the same."""

    def __init__(self, num_prompts: int, *, seed: int) -> None:
        self.seed = seed
        self.pools = np.zeros(num_prompts, dtype=np.uint8)
        """Of each prompt, by its place, the index in POOLS."""
        self._of_step: set[int] = set()  # places drawn since the last `record`
        self._drawn: Counter[str] = Counter()  # since then, by pool

    def draw(self, uid: int, count: int) -> list[int]:
        """The places of the next prompts, whose uids are `uid` and those after it."""
        numbers = np.random.PCG64([self.seed, uid, DRAWS]).random_raw(count).tolist()
        places, left = [], self._left()
        for number in numbers:
            if not any(left.values()):
                self._of_step.clear()  # the step has had them all
                left = self._left()
            ticket = number % sum(WEIGHTS[pool] * len(members) for pool, members in left.items())
            for pool, members in left.items():
                if ticket < WEIGHTS[pool] * len(members):
                    break
                ticket -= WEIGHTS[pool] * len(members)
            places.append(members.pop(ticket // WEIGHTS[pool]))
            self._of_step.add(places[-1])
            self._drawn[pool] += 1
        return places

    def record(self, verdicts: Iterable[tuple[int, int, Verdict]]) -> dict[str, float]:
        """Ends a step: (uid, place, verdict) of all ranks' groups that ended in it; the later uid of a place counts.

        The step's metrics: of each pool the prompts drawn from it, and those that are in it now.
        """
        for _, place, verdict in sorted(verdicts):
            if verdict in POOL_OF:
                self.pools[place] = POOLS.index(POOL_OF[verdict])
        sizes = np.bincount(self.pools, minlength=len(POOLS)).tolist()
        metrics = {f"curriculum/drawn_{pool}": self._drawn[pool] for pool in POOLS}
        metrics |= {f"curriculum/{pool}": size for pool, size in zip(POOLS, sizes, strict=True)}
        self._begin_step()
        return metrics

    def state(self) -> str:
        """A digit a prompt, at the end of a step."""
        return "".join(map(str, self.pools.tolist()))

    def restore(self, state: str) -> None:
        """Goes on from a `state` of as many prompts, as a step begins. Raises DamagedCheckpoint for anything else."""
        if len(state) != len(self.pools) or not set(state) <= set("0123"):
            raise DamagedCheckpoint(
                f"the curriculum's pools are not what a run writes; trainer.json; found {len(state)} characters, "
                f"{state[:20]!r}..., expected a digit from 0 to 3 for each of {len(self.pools)} prompts; restore the "
                "checkpoint from a copy, or use another one of the run"
            )
        self.pools[:] = [int(digit) for digit in state]
        self._begin_step()

    def _begin_step(self) -> None:
        self._of_step.clear()
        self._drawn.clear()

    def _left(self) -> dict[str, list[int]]:
        """By pool, the places that this step has not had, ascending."""
        free = np.ones(len(self.pools), dtype=bool)
        free[list(self._of_step)] = False
        return {pool: np.flatnonzero(free & (self.pools == i)).tolist() for i, pool in enumerate(POOLS)}
