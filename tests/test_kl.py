"""KL estimators: known answers, unbiasedness on a distribution of three tokens, clamps, masks; KL in the reward."""

import json
import math
from typing import get_args

import pytest
import torch

from lib.algorithms.kl import KL_ESTIMATORS, KLController, KLRewardConfig, KLType, kl_in_words, penalized_rewards
from lib.dist import SINGLE
from lib.errors import UserError
from lib.types import Batch
from tests.test_advantages import random_step


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


@pytest.mark.parametrize("scale", [1e-6, 1e-4, 1e-2, 1.0])
def test_k3_of_nearly_equal_policies_is_never_negative_and_right_in_float32(scale):
    """200,000 tokens against the series in float64; by the exponential alone some are below 0."""
    draw = torch.Generator().manual_seed(0)
    log_probs = -3 * torch.rand(200_000, generator=draw)
    reference = log_probs - scale * torch.randn(200_000, generator=draw)
    estimate = KL_ESTIMATORS["k3"](log_probs, reference)
    d = (log_probs - reference).double()
    exact, term = torch.zeros_like(d), -d
    for power in range(2, 40):  # e^-d - 1 + d
        term = term * -d / power
        exact += term
    exact = exact.clamp(max=10)
    assert (estimate < 0).sum() == 0
    assert ((estimate - exact).abs() <= 3e-7 * d.abs() + 1e-6 * exact).all()


# ---- The value of one estimator, the gradient of k2 ----

STRAIGHT_THROUGH = [name for name in get_args(KLType) if name.endswith("+")]


@pytest.mark.parametrize("name", STRAIGHT_THROUGH)
def test_straight_through_has_the_estimators_value_and_k2s_slope_by_finite_differences(name):
    draw = torch.Generator().manual_seed(0)
    log_probs, reference = -3 * torch.rand(2, 40, generator=draw, dtype=torch.float64)
    log_probs[0] = -30.0  # where k3 is clamped
    log_probs.requires_grad_()
    estimate = KL_ESTIMATORS[name](log_probs, reference)
    assert torch.equal(estimate, KL_ESTIMATORS[name.removesuffix("+")](log_probs, reference))
    estimate.sum().backward()
    step = 1e-5
    with torch.no_grad():
        above, below = (KL_ESTIMATORS["k2"](log_probs + sign * step, reference) for sign in (1, -1))
    torch.testing.assert_close(log_probs.grad, (above - below) / (2 * step), rtol=1e-7, atol=1e-9)


def test_straight_through_has_the_gradient_of_the_kl_where_k1_has_none():
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, 0.2], dtype=torch.float64).log_softmax(-1)
    log_probs = logits.log_softmax(-1)
    (kl_gradient,) = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits, retain_graph=True)
    probs = log_probs.exp().detach()
    for name in STRAIGHT_THROUGH:
        expected = (probs * KL_ESTIMATORS[name](log_probs, reference)).sum()
        torch.testing.assert_close(torch.autograd.grad(expected, logits, retain_graph=True)[0], kl_gradient)
    (gradient,) = torch.autograd.grad((probs * KL_ESTIMATORS["k1"](log_probs, reference)).sum(), logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient))


# ---- The KL in the reward ----


def random_kl_step(seed, **options):
    batch = random_step(seed, **options)
    draw = torch.Generator().manual_seed(seed)
    log_probs = (torch.rand(batch.response_mask.shape, generator=draw) * 0.9 + 0.05).log()
    noise = torch.randn(batch.response_mask.shape, generator=draw)
    return batch.with_(old_log_probs=log_probs, ref_log_probs=log_probs + 0.3 * noise)


@pytest.mark.parametrize("kl_type", get_args(KLType))
@pytest.mark.parametrize("with_rewards", [False, True])
def test_the_penalty_and_the_steps_kl_are_their_slow_loops(kl_type, with_rewards):
    for seed in range(5):
        batch = random_kl_step(seed, with_kl=with_rewards)
        rewards, current_kl, count = penalized_rewards(batch, coef=0.25, kl_type=kl_type, world=SINGLE)
        means, expected = [], torch.zeros(rewards.shape, dtype=torch.float64)
        for i, chosen in enumerate(batch.response_mask):
            places = chosen.nonzero().flatten().tolist()
            estimates = [
                float(KL_ESTIMATORS[kl_type](batch.old_log_probs[i, t].double(), batch.ref_log_probs[i, t].double()))
                for t in places
            ]
            means += [sum(estimates) / len(places)] if places else []
            for t, estimate in zip(places, estimates, strict=True):
                score = float(batch.scores[i]) if t == places[-1] else 0.0
                before = float(batch.token_level_rewards[i, t]) if with_rewards else score
                expected[i, t] = before - 0.25 * estimate
        torch.testing.assert_close(rewards.double(), expected, rtol=1e-5, atol=1e-6)
        assert current_kl == pytest.approx(sum(means) / len(means), rel=1e-5)
        assert count == len(means) < len(batch)


def test_the_kl_in_the_reward_ignores_the_order_of_rows_and_padding():
    batch = random_kl_step(4)
    rewards, *rest = penalized_rewards(batch, coef=0.5, kl_type="k1", world=SINGLE)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    moved = {}
    for key, tensor in vars(batch).items():
        row = None if tensor is None else tensor[order]
        moved[key] = torch.nn.functional.pad(row, (0, 13)) if row is not None and row.dim() == 2 else row
    moved_rewards, *moved_rest = penalized_rewards(Batch(**moved), coef=0.5, kl_type="k1", world=SINGLE)
    assert moved_rest == rest
    assert torch.equal(moved_rewards[:, :-13], rewards[order])


def test_a_step_without_tokens_has_no_kl():
    batch = random_kl_step(0)
    nothing = batch.with_(valid=torch.zeros_like(batch.valid), response_mask=torch.zeros_like(batch.response_mask))
    rewards, current_kl, count = penalized_rewards(nothing, coef=0.5, kl_type="k1", world=SINGLE)
    assert not rewards.any() and math.isnan(current_kl) and count == 0


def test_known_answers_of_the_adaptive_weight():
    controller = KLController(KLRewardConfig(coef=0.5, target=2.0, horizon=1000))
    controller.update(2.2, 100)  # 10 % above, a tenth of the horizon: 1 % up
    assert controller.coef == pytest.approx(0.5 * 1.01)
    controller.update(90.0, 500)  # far above: counts as 20 %
    assert controller.coef == pytest.approx(0.5 * 1.01 * 1.1)
    controller.update(0.0, 500)
    assert controller.coef == pytest.approx(0.5 * 1.01 * 1.1 * 0.9)
    controller.update(2.0, 500)
    controller.update(math.nan, 500)
    assert controller.coef == pytest.approx(0.5 * 1.01 * 1.1 * 0.9)


def test_a_step_larger_than_the_horizon_never_makes_the_weight_negative():
    controller = KLController(KLRewardConfig(coef=1.0, target=2.0, horizon=100))
    controller.update(0.0, 10**6)
    assert controller.coef == pytest.approx(0.8)


def test_a_fixed_weight_stays_and_a_saved_one_comes_back_exactly():
    fixed = KLController(KLRewardConfig(coef=0.1))
    fixed.update(50.0, 10000)
    assert fixed.coef == 0.1
    adaptive = KLController(KLRewardConfig(coef=0.1, target=0.3))
    adaptive.update(1.0, 777)
    other = KLController(KLRewardConfig(coef=0.1, target=0.3))
    other.restore(json.loads(json.dumps(adaptive.state())))
    assert other.coef == adaptive.coef != 0.1


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"coef": -1.0}, "coef"), ({"coef": math.nan}, "coef"), ({"coef": math.inf}, "coef"),
        ({"coef": 0.1, "target": 0.0}, "target"), ({"coef": 0.1, "target": math.nan}, "target"),
        ({"target": 1.0}, "coef"), ({"horizon": 0}, "horizon"),
    ],
)  # fmt: skip
def test_an_impossible_kl_in_the_reward_is_refused(options, flag):
    with pytest.raises(UserError, match=rf"--kl-reward.{flag} is out of range.*found .*expected .*change"):
        KLRewardConfig(**options)


@pytest.mark.parametrize(
    ("loss_coef", "loss_type", "reward", "parts"),
    [
        (0.0, "k3", {}, []),
        (0.1, "k3", {}, ["0.1 x k3 in the loss"]),
        (0.0, "k3", {"coef": 0.2, "target": 0.5}, ["0.2 x k1 in the reward, the weight adapting to 0.5 nats a token"]),
        (0.1, "k2", {"coef": 0.2}, ["0.1 x k2 in the loss", "0.2 x k1 in the reward", "they add up"]),
        (0.1, "k1", {}, ["0.1 x k1 in the loss, whose gradient is 0 in expectation"]),
        (0.1, "kl", {}, ["gradient is 0 in expectation"]),
        (0.1, "k1+", {}, ["0.1 x k1+ in the loss"]),
        (0.0, "k2", {}, ["--kl-loss-type k2 without --kl-loss-coef does nothing"]),
        (0.0, "k3", {"type": "k2"}, ["--kl-reward.type k2 without --kl-reward.coef does nothing"]),
        (0.0, "k3", {"coef": 0.1, "type": "k3+"}, ["the + means nothing"]),
        (0.0, "k3", {"coef": 0.1, "horizon": 3}, ["0.1 x k1", "--kl-reward.horizon 3 without --kl-reward.target"]),
    ],
)
def test_a_run_says_which_kl_is_on_and_what_was_given_to_no_effect(loss_coef, loss_type, reward, parts):
    said = kl_in_words(loss_coef, loss_type, KLRewardConfig(**reward))
    assert len(said.split("; ")) == len(parts) if parts else said == ""
    assert [part for part in parts if part not in said] == []
    assert ("expectation" in said) == (loss_type in ("k1", "kl"))
