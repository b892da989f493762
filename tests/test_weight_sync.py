"""The run stops when engine and trainer disagree; that weights arrive is tested in test_rollout.py, with real ones."""

import math

import pytest
import torch

from lib.algorithms.step_metrics import mismatch_metrics
from lib.dist import SINGLE
from lib.engine.mismatch import check_log_probs_diff
from lib.errors import WeightSyncError
from lib.model.batching import make_batch
from lib.tracking.metrics import Metrics
from tests.tiny import make_rollouts

BATCH = make_batch(make_rollouts(), SINGLE, mini_batch_size=12)


def check(trainer, *, batch=BATCH, limit=0.1):
    """What a step does with the trainer's log-probs (B, T)."""
    metrics = Metrics(SINGLE)
    mismatch_metrics(trainer, batch, metrics)
    check_log_probs_diff(metrics.reduce(), limit=limit)


def test_a_difference_above_the_limit_stops_the_run_and_one_below_does_not():
    check(BATCH.rollout_log_probs + 0.099)
    with pytest.raises(WeightSyncError, match=r"difference\| 0\.101 .*at most 0\.1 "):
        check(BATCH.rollout_log_probs + 0.101)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_a_single_log_prob_that_is_not_finite_stops_the_run_whatever_the_limit(side, value):
    row, column = BATCH.response_mask.nonzero()[5].tolist()
    broken = BATCH.rollout_log_probs.clone()
    broken[row, column] = value
    engine = BATCH if side == "trainer" else BATCH.with_(rollout_log_probs=broken)
    trainer = broken if side == "trainer" else BATCH.rollout_log_probs
    with pytest.raises(WeightSyncError, match="not finite; 1 sampled tokens"):
        check(trainer, batch=engine, limit=1e9)


def test_nothing_to_compare_is_no_disagreement():
    check(BATCH.rollout_log_probs, batch=BATCH.with_(rollout_log_probs=None))
    check(BATCH.rollout_log_probs + 9, batch=BATCH.with_(response_mask=torch.zeros_like(BATCH.response_mask)))
    padding = torch.where(
        BATCH.response_mask, BATCH.rollout_log_probs, math.nan
    )  # outside responses: nobody's business
    check(padding)
