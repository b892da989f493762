"""How far trainer and engine disagree on the tokens that the engine sampled: measured once per step, and bounded."""

from collections.abc import Mapping

from torch import Tensor

from lib.algorithms.step_metrics import mismatch_metrics
from lib.dist import World
from lib.errors import WeightSyncError
from lib.tracking.metrics import Metrics
from lib.types import Batch


class Mismatch:
    """A step's comparison. It takes log-probs until `close`, and nothing afterwards.

    A step with a pass for old log-probs closes it there. Else the first mini-batch's forward passes are compared, and
    it closes before the policy learns: from another policy's responses it must not.
    """

    def __init__(self, world: World, *, limit: float):
        """`limit`: --rollout.max-log-probs-diff, in nats."""
        self._open: Metrics | None = Metrics(world)
        self._limit = limit
        self.values: dict[str, float] = {}
        """training/rollout_*, over all ranks, once it is closed."""

    def add(self, log_probs: Tensor, batch: Batch) -> None:
        """Compares the trainer's log-probs (b, T) of a micro-batch with the engine's. Local to the rank."""
        if self._open is not None:
            mismatch_metrics(log_probs, batch, self._open)

    def close(self) -> None:
        """Raises WeightSyncError on all ranks when the two disagree by more than the limit. Executed by all ranks
        together; the second time it does nothing."""
        if self._open is not None:
            self.values, self._open = self._open.reduce(), None
            check_log_probs_diff(self.values, limit=self._limit)


def check_finite(num_nonfinite: int) -> None:
    """Raises WeightSyncError on all ranks where the trainer gave sampled tokens log-probs that are not finite.

    All ranks give the same number.
    """
    if num_nonfinite:
        raise WeightSyncError(
            f"the trainer gave log-probs that are not finite; {num_nonfinite} sampled tokens; expected finite ones; it "
            "computes NaN or infinity: try --model.dtype float32, and look for overflow in the model's weights"
        ).on_all_ranks()


def check_log_probs_diff(differences: Mapping[str, float], *, limit: float) -> None:
    """Raises WeightSyncError when engine and trainer disagree on the sampled tokens by more than `limit` nats.

    `differences` are the reduced training/rollout_log_probs_diff/*, the same on all ranks; absent without the
    engine's log-probs.
    """
    check_finite(round(differences.get("training/rollout_log_probs_nonfinite", 0.0)))
    if not differences.get("training/rollout_probs_diff_valid"):
        return  # nothing to compare: no log-probs, or no response with a score
    mean = differences["training/rollout_log_probs_diff/mean"]
    if not mean <= limit:  # also when NaN
        largest = differences["training/rollout_log_probs_diff/max"]
        raise WeightSyncError(
            f"engine and trainer disagree about the sampled tokens; mean |log-prob difference| {mean:.4g} (largest "
            f"{largest:.4g}) nats, expected at most {limit:g} (--rollout.max-log-probs-diff); the likely causes, in "
            "this order: a temperature or penalty that only one side applies; attention or rotary settings that "
            "differ between the two implementations of this model; low precision (try --model.dtype float32); if "
            "none of these, raise the limit"
        ).on_all_ranks()
