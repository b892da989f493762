"""The critic's loss: hand-worked numbers, a slow loop, finite differences, masks; and the explained variance."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.algorithms.losses import value_loss
from lib.algorithms.step_metrics import explained_variance
from lib.dist import SINGLE
from tests.test_advantages import random_step

quick = settings(deadline=None, derandomize=True, max_examples=100)


def random_values(seed, spread=1.0):
    """New values with gradient and a ragged batch with holes in its mask, float64."""
    batch = random_step(seed)
    old, noise, returns = torch.randn(
        3, *batch.response_mask.shape, generator=torch.Generator().manual_seed(seed)
    ).double()
    return (old + spread * noise).requires_grad_(), batch.with_(values=old, returns=returns)


def one_value(value, old, target):
    batch = random_step(0).rows(torch.tensor([0]))
    mask = torch.tensor([[True]])
    batch = batch.with_(response_mask=mask, values=torch.tensor([[old]]), returns=torch.tensor([[target]]))
    return torch.tensor([[value]], requires_grad=True), batch


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped", "slope"),
    [
        (1.25, 1.0, 3.0, 0.5 * 1.75**2, 0, -1.75),  # within the clip
        (2.0, 1.0, 3.0, 0.5 * 1.5**2, 1, 0),  # went further than 0.5 towards the target: worth no more than 1.5
        (2.0, 1.0, 0.0, 0.5 * 2.0**2, 0, 2),  # went away from the target: the whole error counts
    ],
)
def test_known_answers(value, old, target, loss, clipped, slope):
    values, batch = one_value(value, old, target)
    result, metrics = value_loss(values, batch, clip=0.5)
    result.sum().backward()
    assert (result.item(), metrics["vf_clipfrac"].item(), metrics["vpred_mean"].item()) == (loss, clipped, value)
    assert values.grad.item() == slope
    assert not metrics["vpred_mean"].requires_grad and not metrics["vf_clipfrac"].requires_grad


@pytest.mark.parametrize("seed", range(6))
def test_the_loss_is_its_slow_loop(seed):
    values, batch = random_values(seed)
    loss, metrics = value_loss(values, batch, clip=0.5)
    for i, t in batch.response_mask.nonzero().tolist():
        new, old, target = (float(it[i, t]) for it in (values.detach(), batch.values, batch.returns))
        moved = min(max(new, old - 0.5), old + 0.5)
        assert float(loss.detach()[i, t]) == pytest.approx(max((new - target) ** 2, (moved - target) ** 2) / 2)
        assert bool(metrics["vf_clipfrac"][i, t]) == ((moved - target) ** 2 > (new - target) ** 2)
    assert 0 < float(metrics["vf_clipfrac"][batch.response_mask].mean()) < 1


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_finite_differences(seed):
    values, batch = random_values(seed)
    assert torch.autograd.gradcheck(lambda it: value_loss(it, batch, clip=0.5)[0], (values,))


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_what_stands_outside_the_mask_reaches_neither_loss_nor_gradient(poison):
    values, batch = random_values(1)
    value_loss(values, batch, clip=0.5)[0].sum().backward()
    poisoned = batch.with_(
        **{k: torch.where(batch.response_mask, getattr(batch, k), poison) for k in ("values", "returns")}
    )
    dirty = torch.where(batch.response_mask, values.detach(), poison).requires_grad_()
    loss, metrics = value_loss(dirty, poisoned, clip=0.5)
    loss.sum().backward()
    assert torch.equal(dirty.grad, values.grad)
    assert not loss[~batch.response_mask].any()
    assert metrics["vpred_mean"].isfinite().all()


@quick
@given(st.lists(st.tuples(*[st.floats(-100, 100)] * 2, st.booleans()), max_size=20))
def test_explained_variance_is_its_definition(rows):
    values, returns, mask = (
        torch.tensor(column)[None] for column in (zip(*rows, strict=True) if rows else ([0.0], [0.0], [False]))
    )
    used = [(v, r) for v, r in zip(values[mask].double().tolist(), returns[mask].double().tolist(), strict=True)]
    spread = statistics.pvariance([r for _, r in used]) if used else 0.0
    result = explained_variance(values, torch.where(mask, returns, math.nan), mask, SINGLE)
    if spread < 1e-12:
        assert math.isnan(result) or spread > 0
    else:
        expected = 1 - statistics.pvariance([r - v for v, r in used]) / spread
        assert result == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_explained_variance_of_perfect_shifted_and_useless_values():
    returns, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3, dtype=torch.bool)
    assert explained_variance(returns, returns, mask, SINGLE) == 1
    assert explained_variance(returns + 7, returns, mask, SINGLE) == 1
    assert explained_variance(torch.zeros(1, 3), returns, mask, SINGLE) == 0
    assert explained_variance(-returns, returns, mask, SINGLE) == pytest.approx(-3)
    assert math.isnan(explained_variance(returns, torch.ones(1, 3), mask, SINGLE))
