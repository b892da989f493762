"""The clipped loss and its aggregation: hand-worked numbers, slow loops in float64, masks, and any split of a batch."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.algorithms.aggregation import LossAggMode, aggregate, loss_denominator
from lib.algorithms.losses import LOSSES, ClipLoss
from lib.dist import SINGLE
from lib.errors import UserError
from lib.types import Batch

MODES = get_args(LossAggMode)
MAX_RESPONSE_LEN = 9


def batch_of(mask, **tensors):
    """A batch in which only the mask and the given (b, t) tensors matter."""
    rows, steps = mask.shape
    ones = torch.ones(rows, dtype=torch.int64)
    ends = torch.where(mask, torch.arange(1, steps + 1), 0)
    lens = ends.amax(-1) if steps else ends.sum(-1)
    return Batch(
        uids=ones, indices=torch.arange(rows), mini_batch_ids=ones, input_ids=torch.ones(rows, 1 + steps).long(),
        prompt_lens=ones, response_lens=lens, response_mask=mask, truncated=ones.bool(), valid=mask.any(-1),
        scores=ones.float(), **tensors,
    )  # fmt: skip


def one_token(ratio, advantage):
    batch = batch_of(
        torch.tensor([[True]]),
        advantages=torch.tensor([[advantage]], dtype=torch.float64),
        old_log_probs=torch.tensor([[-1.0]], dtype=torch.float64),
    )
    return (batch.old_log_probs + math.log(ratio)).requires_grad_(), batch


def random_batch(seed, rows=6, steps=5, spread=1.0):
    """Log-probs with gradient and a ragged batch with holes in its mask; row 1 is fully masked. float64."""
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, steps + 1, (rows, 1), generator=generator)
    mask = (torch.arange(steps) < lens) & (torch.rand(rows, steps, generator=generator) < 0.8)
    mask[1] = False
    old, noise, advantages = torch.randn(3, rows, steps, generator=generator, dtype=torch.float64)
    log_probs = (old + spread * noise).requires_grad_()
    return log_probs, batch_of(mask, advantages=advantages, old_log_probs=old)


def slow_token_loss(log_prob, old_log_prob, advantage, loss):
    log_ratio = min(max(log_prob - old_log_prob, -20.0), 20.0)
    ratio = math.exp(log_ratio)
    unclipped = -advantage * ratio
    clipped = -advantage * min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
    worst = max(unclipped, clipped)
    bounded = advantage < 0 and worst > -advantage * loss.clip_dual
    value = -advantage * loss.clip_dual if bounded else worst
    return value, {"pg_clipfrac": float(clipped > unclipped), "pg_clipfrac_lower": float(bounded), "ppo_kl": -log_ratio}


def slow_loss(token_loss, mask, mode):
    """The whole mini-batch's loss, from its definition."""
    rows = [[x for x, m in zip(xs, ms, strict=True) if m] for xs, ms in zip(token_loss, mask, strict=True)]
    rows = [row for row in rows if row]
    if mode == "token-sum":
        return sum(map(sum, rows))
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    mean_of_sums = sum(map(sum, rows)) / len(rows)
    return mean_of_sums / MAX_RESPONSE_LEN if mode == "seq-mean-token-sum-norm" else mean_of_sums


def denominator_of(batch, mode):
    return loss_denominator(batch, mode, SINGLE, scale=MAX_RESPONSE_LEN)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "gradient", "clipped", "bounded"),
    [
        (1.3, 1.0, -1.2, 0.0, 1, 0),  # good token already likelier: clipped
        (1.3, -1.0, 1.3, 1.3, 0, 0),  # bad token became likelier: pushed down in full
        (0.7, 1.0, -0.7, -0.7, 0, 0),
        (0.7, -1.0, 0.8, 0.0, 1, 0),
        (4.0, -1.0, 3.0, 0.0, 0, 1),  # the second clip
        (4.0, -0.5, 1.5, 0.0, 0, 1),
        (1.0, 2.0, -2.0, -2.0, 0, 0),
        (4.0, 0.0, 0.0, 0.0, 0, 0),
    ],
)
def test_known_answers_of_the_clipped_loss(ratio, advantage, expected, gradient, clipped, bounded):
    log_probs, batch = one_token(ratio, advantage)
    loss, metrics = ClipLoss()(log_probs, batch)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected)
    assert log_probs.grad.item() == pytest.approx(gradient)
    assert metrics["pg_clipfrac"].item() == clipped
    assert metrics["pg_clipfrac_lower"].item() == bounded
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(ratio))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", [ClipLoss(), ClipLoss(clip_low=0.1, clip_high=0.5, clip_dual=1.5)])
def test_clipped_loss_and_metrics_match_a_slow_loop(seed, loss):
    log_probs, batch = random_batch(seed)
    token_loss, metrics = loss(log_probs, batch)
    assert not any(metric.requires_grad for metric in metrics.values())
    for row, step in batch.response_mask.nonzero().tolist():
        numbers = (tensor[row, step].item() for tensor in (log_probs, batch.old_log_probs, batch.advantages))
        expected, expected_metrics = slow_token_loss(*numbers, loss)
        assert token_loss[row, step].item() == pytest.approx(expected, rel=1e-12)
        assert {name: metric[row, step].item() for name, metric in metrics.items()} == pytest.approx(expected_metrics)


@pytest.mark.parametrize("mode", MODES)
def test_aggregation_matches_a_slow_loop_and_leaves_out_masked_responses(mode):
    token_loss, batch = random_batch(seed=3)
    ours = aggregate(token_loss, batch.response_mask, mode) / denominator_of(batch, mode)
    assert ours.item() == pytest.approx(slow_loss(token_loss.tolist(), batch.response_mask.tolist(), mode), rel=1e-12)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", (1 + 2 + 3 + 10) / 4),
        ("token-sum", 1 + 2 + 3 + 10),
        ("seq-mean-token-sum", (6 + 10) / 2),
        ("seq-mean-token-mean", (2 + 10) / 2),
        ("seq-mean-token-sum-norm", (6 + 10) / 2 / MAX_RESPONSE_LEN),
    ],
)
def test_known_answers_of_the_aggregation(mode, expected):
    mask = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    token_loss = torch.tensor([[1.0, 2.0, 3.0], [10.0, 50.0, 50.0], [50.0, 50.0, 50.0]])
    assert aggregate(token_loss, mask, mode) / denominator_of(batch_of(mask), mode) == pytest.approx(expected)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    st.integers(0, 2**20),
    st.sampled_from(MODES),
    st.integers(1, 8),
    st.lists(st.integers(0, 4), min_size=8, max_size=8),
)
def test_loss_and_gradient_are_invariant_to_the_micro_batch_split(seed, mode, rows, homes):
    rows = max(rows, 2)
    log_probs, batch = random_batch(seed, rows=rows)
    denominator = denominator_of(batch, mode)
    token_loss, _ = ClipLoss()(log_probs, batch)
    whole = aggregate(token_loss, batch.response_mask, mode) / denominator
    (gradient,) = torch.autograd.grad(whole, log_probs)
    total = torch.zeros((), dtype=torch.float64)
    for home in range(5):
        members = torch.tensor([row for row in range(rows) if homes[row] == home], dtype=torch.int64)
        micro_batch = batch.rows(members)
        token_loss, _ = ClipLoss()(log_probs[members, : micro_batch.response_mask.shape[1]], micro_batch)
        total = total + aggregate(token_loss, micro_batch.response_mask, mode) / denominator
    (split_gradient,) = torch.autograd.grad(total, log_probs)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_match_finite_differences_on_a_policy_of_three_tokens(mode):
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(3, (4, 5), generator=generator)
    _, batch = random_batch(seed=8, rows=4)
    old_logits = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
    old = old_logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
    batch = batch.with_(old_log_probs=old)
    logits = (old_logits + torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)).requires_grad_()

    def loss_of(logits):
        log_probs = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
        return aggregate(ClipLoss()(log_probs, batch)[0], batch.response_mask, mode) / denominator_of(batch, mode)

    assert torch.autograd.gradcheck(loss_of, logits, eps=1e-7, atol=1e-6, rtol=1e-4)


def test_without_old_log_probs_the_ratio_is_exactly_one():
    log_probs, batch = random_batch(seed=0)
    loss, metrics = ClipLoss()(log_probs, batch.with_(old_log_probs=None))
    loss.sum().backward()
    on_policy = torch.where(batch.response_mask, -batch.advantages, 0)
    assert torch.equal(loss, on_policy)
    assert torch.equal(log_probs.grad, on_policy)
    assert all((metric == 0).all() for metric in metrics.values())


@pytest.mark.parametrize("mode", MODES)
def test_infinite_old_log_probs_of_chosen_tokens_give_finite_loss_and_zero_gradient(mode):
    log_probs, batch = random_batch(seed=2)
    infinite = torch.where(torch.arange(5) % 2 == 0, math.inf, -math.inf).expand_as(log_probs)
    token_loss, _ = ClipLoss()(log_probs, batch.with_(old_log_probs=infinite))
    loss = aggregate(token_loss, batch.response_mask, mode)
    loss.backward()
    assert loss.isfinite()
    assert (log_probs.grad == 0).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(2, 3), (1, 1), (2, 0), (0, 0)])
def test_a_fully_masked_batch_has_zero_loss_zero_gradient_and_denominator_one(mode, shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    batch = batch_of(mask, advantages=torch.full(shape, math.nan), old_log_probs=torch.full(shape, -math.inf))
    log_probs = torch.full(shape, math.nan, requires_grad=True)
    loss = aggregate(ClipLoss()(log_probs, batch)[0], mask, mode)
    loss.backward()
    assert loss == 0
    assert torch.equal(log_probs.grad, torch.zeros(shape))
    assert denominator_of(batch, mode) == (MAX_RESPONSE_LEN if mode.endswith("norm") else 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("clip_low", value) for value in (0.0, -0.2, 1.0, math.nan, math.inf)),
        *(("clip_high", value) for value in (0.0, -0.2, math.nan, math.inf)),
        *(("clip_dual", value) for value in (1.0, 0.0, -3.0, math.nan, math.inf)),
    ],
)
def test_a_knob_out_of_range_is_refused_with_its_flag_and_value(field, value):
    with pytest.raises(UserError) as raised:
        ClipLoss(**{field: value})
    parts = str(raised.value).split("; ")
    assert len(parts) == 4
    assert f"--loss.{field.replace('_', '-')}" in parts[0]
    assert str(value) in parts[2]


def test_the_table_offers_the_clipped_loss_with_its_defaults():
    assert LOSSES["vanilla"]() == ClipLoss(clip_low=0.2, clip_high=0.2, clip_dual=3.0)
