"""The policy's loss as a list of terms; when old log-probs need a pass; the one comparison with the engine per step."""

import pytest
import torch

from lib.algorithms.kl import KL_ESTIMATORS
from lib.algorithms.losses import LOSSES, ClipLoss
from lib.algorithms.terms import EntropyTerm, KLTerm, PolicyTerm
from lib.config.flags import parse_args
from lib.dist import SINGLE
from lib.engine.mismatch import Mismatch
from lib.errors import WeightSyncError
from lib.types import Batch
from train_grpo import GRPOConfig


def make_batch(rows, width):
    """A step's rows without prompts, whose last response lacks its last token."""
    lens = torch.full((rows,), width)
    lens[-1] -= 1
    return Batch(
        uids=torch.arange(rows), indices=torch.zeros(rows, dtype=torch.int64), prompt_lens=torch.zeros_like(lens),
        mini_batch_ids=torch.zeros_like(lens), response_lens=lens,
        input_ids=torch.zeros(rows, width, dtype=torch.int64),
        response_mask=torch.arange(width) < lens[:, None], truncated=torch.zeros(rows, dtype=torch.bool),
        valid=torch.ones(rows, dtype=torch.bool), scores=torch.zeros(rows),
        rollout_log_probs=-torch.rand(rows, width) - 1,
        old_log_probs=-torch.rand(rows, width) - 1, advantages=torch.randn(rows, width),
    )  # fmt: skip


def terms_of(*argv):
    return [(term.name, term.coef) for term in parse_args(GRPOConfig(), argv).loss_terms]


def test_the_terms_and_their_coefficients_are_those_of_the_config():
    assert terms_of() == [("pg_loss", 1.0), ("entropy_loss", 0.0)]
    assert terms_of("--entropy-coef", "0.01") == [("pg_loss", 1.0), ("entropy_loss", -0.01)]
    assert terms_of("--kl-loss-coef", "0.5") == [("pg_loss", 1.0), ("entropy_loss", 0.0), ("kl_loss", 0.5)]
    argv = ["--kl-loss-coef", "2", "--kl-loss-type", "k2", "--loss", "gspo"]
    policy, _, kl = parse_args(GRPOConfig(), argv).loss_terms
    assert policy.loss == LOSSES["gspo"]() and kl.kl_type == "k2" and kl.metrics() == {"actor/kl_coef": 2.0}
    assert policy.metrics() == {}


def test_each_term_gives_its_number_per_token():
    batch = make_batch(rows=3, width=4)
    log_probs, entropy = torch.randn(3, 4) - 2, torch.rand(3, 4)
    weights, reference = torch.rand(3, 4) + 0.5, torch.randn(3, 4) - 2
    batch = batch.with_(is_weights=weights, ref_log_probs=reference)
    loss = ClipLoss()
    plain, stats = loss(log_probs, batch)
    weighted, same_stats = PolicyTerm(loss=loss)(log_probs, entropy, batch)
    mask = batch.response_mask
    assert torch.equal(weighted[mask], (plain * weights)[mask]) and stats.keys() == same_stats.keys()
    assert EntropyTerm(coef=-1)(log_probs, entropy, batch)[0] is entropy
    kl, _ = KLTerm(coef=1, kl_type="k2")(log_probs, entropy, batch)
    assert torch.equal(kl[mask], KL_ESTIMATORS["k2"](log_probs, reference)[mask])


@pytest.mark.parametrize(
    ("argv", "num_updates", "any_stale", "expected"),
    [
        ([], 1, False, False),
        ([], 2, False, True),
        ([], 1, True, True),
        (["--kl-reward.coef", "0.1"], 1, False, True),
        (["--correction", "bypass_ppo_clip"], 2, True, False),
        (["--correction", "bypass_ppo_clip"], 0, False, True),
        ([], 0, False, True),
    ],
)
def test_old_log_probs_have_a_pass_where_the_ratio_needs_them_or_no_update_compares(
    argv, num_updates, any_stale, expected
):
    assert parse_args(GRPOConfig(), argv).has_old_log_prob_pass(num_updates, any_stale=any_stale) is expected


def test_a_step_is_compared_with_the_engine_until_the_comparison_closes():
    batch = make_batch(rows=2, width=3)
    engine = batch.rollout_log_probs
    mismatch = Mismatch(SINGLE, limit=0.1)
    mismatch.add(engine + 0.01, batch)
    mismatch.add(engine + 0.03, batch)
    assert mismatch.values == {}
    mismatch.close()
    mean = mismatch.values["training/rollout_log_probs_diff/mean"]
    assert mean == pytest.approx(0.02, rel=1e-5)
    mismatch.add(engine + 5, batch)  # the policy has learned meanwhile: not its responses any more
    mismatch.close()
    assert mismatch.values["training/rollout_log_probs_diff/mean"] == mean
    other = Mismatch(SINGLE, limit=0.1)
    other.add(engine + 0.2, batch)
    with pytest.raises(WeightSyncError, match=r"expected at most 0\.1"):
        other.close()
