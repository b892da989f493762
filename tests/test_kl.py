"""KL estimators: known answers, unbiasedness on a distribution of three tokens, clamps, masks."""

import math
from typing import get_args

import pytest
import torch

from lib.kl import KL_ESTIMATORS, KLType, kl_to_reference
from lib.types import Batch


@pytest.mark.parametrize(
    ("name", "expected"), [("k1", 0.1), ("abs", 0.1), ("k2", 0.005), ("k3", math.exp(-0.1) - 1 + 0.1)]
)
def test_known_answers_at_a_difference_of_a_tenth(name, expected):
    log_probs = torch.tensor([-1.0, -1.1], dtype=torch.float64)
    estimate = KL_ESTIMATORS[name](log_probs, log_probs - 0.1)
    torch.testing.assert_close(estimate, torch.full_like(estimate, expected), rtol=1e-9, atol=0)
    assert name != "k3" or round(float(estimate[0]), 7) == 0.0048374


def test_equal_policies_have_no_divergence():
    log_probs = torch.tensor([-0.5, -3.0])
    for estimator in KL_ESTIMATORS.values():
        assert estimator(log_probs, log_probs).tolist() == [0, 0]


def test_verl_names_are_the_same_estimators_and_the_type_lists_all():
    assert KL_ESTIMATORS["kl"] is KL_ESTIMATORS["k1"]
    assert KL_ESTIMATORS["mse"] is KL_ESTIMATORS["k2"]
    assert KL_ESTIMATORS["low_var_kl"] is KL_ESTIMATORS["k3"]
    assert set(get_args(KLType)) == set(KL_ESTIMATORS)


def test_k1_and_k3_are_unbiased_and_k2_has_the_gradient_of_the_kl():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.2], dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    kl = (log_probs.exp() * (log_probs - reference)).sum()
    (kl_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    probs = log_probs.exp().detach()  # what sampling weights the estimates with
    for name in ("k1", "k3"):
        torch.testing.assert_close((probs * KL_ESTIMATORS[name](log_probs, reference)).sum(), kl)
    (gradient,) = torch.autograd.grad((probs * KL_ESTIMATORS["k2"](log_probs, reference)).sum(), logits)
    torch.testing.assert_close(gradient, kl_gradient)


@pytest.mark.parametrize(
    ("difference", "expected"), [(-1000.0, 10.0), (-30.0, 10.0), (30.0, 10.0), (5.0, 4 + math.exp(-5))]
)
def test_k3_is_clamped(difference, expected):
    log_probs = torch.tensor([difference], dtype=torch.float64, requires_grad=True)
    estimate = KL_ESTIMATORS["k3"](log_probs, torch.zeros(1, dtype=torch.float64))
    estimate.sum().backward()
    assert estimate.item() == pytest.approx(expected)
    assert log_probs.grad.item() == pytest.approx(0 if expected == 10 else 1 - math.exp(-5))


@pytest.mark.parametrize("kl_type", get_args(KLType))
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_places_give_zero_and_no_gradient(kl_type, poison):
    ones = torch.ones(1, dtype=torch.int64)
    batch = Batch(
        uids=ones, indices=ones, mini_batch_ids=ones, input_ids=torch.ones(1, 4, dtype=torch.int64), prompt_lens=ones,
        response_lens=3 * ones, response_mask=torch.tensor([[True, False, False]]), truncated=ones.bool(),
        valid=ones.bool(), scores=ones.float(), ref_log_probs=torch.tensor([[-2.0, poison, -1.0]]),
    )  # fmt: skip
    log_probs = torch.tensor([[-1.0, -1.0, poison]], requires_grad=True)
    estimate = kl_to_reference(log_probs, batch, kl_type=kl_type)
    estimate.sum().backward()
    expected = KL_ESTIMATORS[kl_type](torch.tensor(-1.0), torch.tensor(-2.0))
    assert estimate.tolist() == [[float(expected), 0, 0]]
    assert math.isfinite(log_probs.grad[0, 0])
    assert log_probs.grad[0, 0] != 0
    assert log_probs.grad[0, 1:].tolist() == [0, 0]
