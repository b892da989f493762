"""Every policy loss by name: hand-worked numbers, slow loops, finite differences, and what all have in common."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.algorithms.aggregation import aggregate
from lib.algorithms.losses import (
    LOSSES,
    CISPOLoss,
    ClipCovLoss,
    ClipLoss,
    DPPOKLLoss,
    DPPOTVLoss,
    DROLoss,
    GeoMeanLoss,
    GPGLoss,
    GSPOLoss,
    KLCovLoss,
    SAPOLoss,
)
from lib.algorithms.step_metrics import update_metrics
from lib.dist import SINGLE
from lib.tracking.metrics import Metrics
from tests.test_losses import MODES, batch_of, denominator_of, one_token, random_batch, slow_loss

VARIED = [
    ClipLoss(clip_low=0.1, clip_high=0.5, clip_dual=1.5),
    GSPOLoss(clip_low=0.3, clip_high=0.5),
    CISPOLoss(clip_low=0.4, clip_high=0.3),
    SAPOLoss(tau_pos=0.7, tau_neg=2.0),
    GeoMeanLoss(clip_low=0.2, clip_high=0.9),
    ClipCovLoss(clip_low=0.5, clip_high=0.9, clip_cov_ratio=0.3, clip_cov_lb=-0.5, clip_cov_ub=2.0),
    KLCovLoss(kl_cov_ratio=0.4, ppo_kl_coef=0.7),
    GPGLoss(),
    DPPOTVLoss(clip_low=0.05, clip_high=0.1, max_ratio=1.5),
    DPPOKLLoss(clip_low=0.02, clip_high=0.1, max_ratio=1.5),
    DROLoss(dro_beta=0.8),
]
ALL = [*(kind() for kind in LOSSES.values()), *VARIED]
NAMES = [*LOSSES, *(f"{name}_varied" for name in LOSSES)]
every_loss = pytest.mark.parametrize("loss", ALL, ids=NAMES)


def family_batch(seed, **sizes):
    """`random_batch` with log-probs below 0 and importance weights, as of a real policy. float64."""
    log_probs, batch = random_batch(seed, **sizes)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = 2 * torch.rand(log_probs.shape, generator=generator, dtype=torch.float64)
    shift = max(0.0, float(log_probs.max().detach()), float(batch.old_log_probs.max())) + 0.01
    batch = batch.with_(old_log_probs=batch.old_log_probs - shift, is_weights=weights)
    return (log_probs.detach() - shift).requires_grad_(), batch


def mini_batch_loss(loss, log_probs, batch, mode, denominator):
    token_loss, _ = loss(log_probs, batch)
    return aggregate(loss.weigh(token_loss, batch), batch.response_mask, mode) / denominator


# ---- Hand-worked numbers ----

E = math.exp


@pytest.mark.parametrize(
    ("loss", "ratio", "advantage", "expected", "gradient", "metrics"),
    [
        (CISPOLoss(), 2.0, 1.0, -1.2 * (math.log(2) - 1), -1.2, {"pg_clipfrac": 1}),
        (CISPOLoss(), 0.5, -1.0, 0.5 * (math.log(0.5) - 1), 0.5, {"pg_clipfrac": 0}),
        (CISPOLoss(clip_low=0.2), 0.5, -1.0, 0.8 * (math.log(0.5) - 1), 0.8, {"pg_clipfrac": 1}),
        (SAPOLoss(), 1.0, 2.0, -4.0, -2.0, {}),
        (SAPOLoss(), 3.0, -1.0, 3.393918, 1.166336, {}),
        (GPGLoss(), 1.0, 2.0, 2.0, -2.0, {}),
        (GPGLoss(), 2.0, 2.0, -2 * (math.log(2) - 1), -2.0, {}),
        # p_old = 0.3679. TV: 0.184 is outside 0.15, 0.110 inside. KL: 0.0682 is outside 0.05, 0.0248 inside.
        *(
            row
            for loss in (DPPOTVLoss(), DPPOKLLoss())
            for row in (
                (loss, 1.5, 1.0, 0.0, 0.0, {"pg_clipfrac": 1}),
                (loss, 1.5, -1.0, 1.5 * (math.log(1.5) - 1), 1.5, {"pg_clipfrac": 0}),
                (loss, 1.3, 1.0, -1.3 * (math.log(1.3) - 1), -1.3, {"pg_clipfrac": 0}),
                (loss, 0.5, -1.0, 0.0, 0.0, {"pg_clipfrac": 1}),
                (loss, 0.5, 1.0, -0.5 * (math.log(0.5) - 1), -0.5, {"pg_clipfrac": 0}),
            )
        ),
        (DPPOKLLoss(clip_high=0.0682), 1.5, 1.0, 0.0, 0.0, {"pg_clipfrac": 1}),
        (DPPOKLLoss(clip_high=0.0683), 1.5, 1.0, -1.5 * (math.log(1.5) - 1), -1.5, {"pg_clipfrac": 0}),
        (DPPOTVLoss(max_ratio=1.1), 1.3, 1.0, -1.1 * (math.log(1.3) - 1), -1.1, {"pg_clipfrac_lower": 1}),
        (DPPOTVLoss(max_ratio=1.1), 1.5, 1.0, 0.0, 0.0, {"pg_clipfrac": 1, "pg_clipfrac_lower": 0}),
        (DROLoss(), 1.5, 1.0, 0.602755, -0.959453, {}),
        (DROLoss(), 1.0, 1.0, 1.0, -1.0, {}),
        (DROLoss(), E(30), 1.0, 45.0 - 29.0, 2.0, {}),
        (GSPOLoss(), E(30), -1.0, E(10), 0.0, {"pg_clipfrac": 0}),
    ],
)
def test_known_answers_of_one_token(loss, ratio, advantage, expected, gradient, metrics):
    log_probs, batch = one_token(ratio, advantage)
    token_loss, found = loss(log_probs, batch)
    token_loss.sum().backward()
    assert token_loss.item() == pytest.approx(expected, rel=2e-6)
    assert log_probs.grad.item() == pytest.approx(gradient, rel=2e-6)
    assert found["ppo_kl"].item() == pytest.approx(-math.log(ratio))
    assert {name: found[name].item() for name in metrics} == metrics


@pytest.mark.parametrize(
    ("loss", "ratio", "selected", "expected", "gradient", "cov_frac"),
    [
        (ClipCovLoss(), 1.1, False, -1.1, -1.1, 0),
        (ClipCovLoss(), 1.1, True, 0.0, 0.0, 1),
        (ClipCovLoss(), 1.3, True, -1.2, 0.0, 0),  # the ratio's clip was there first
        (KLCovLoss(), 1.5, False, -1.5, -1.5, 0),
        (KLCovLoss(), 1.5, True, -1.459453, -1.4, 1),
        (KLCovLoss(), 0.5, True, -0.430685, -0.6, 1),
    ],
)
def test_known_answers_of_a_selected_token(loss, ratio, selected, expected, gradient, cov_frac):
    log_probs, batch = one_token(ratio, 1.0)
    token_loss, metrics = loss(log_probs, batch.with_(selected=torch.tensor([[selected]])))
    token_loss.sum().backward()
    assert token_loss.item() == pytest.approx(expected, rel=2e-6)
    assert log_probs.grad.item() == pytest.approx(gradient, rel=2e-6)
    assert metrics["cov_frac"].item() == cov_frac
    assert metrics["ppo_kl"].item() == pytest.approx(-math.log(ratio))


@pytest.mark.parametrize(
    ("loss", "ratios", "advantage", "expected", "gradient", "clipped"),
    [
        (GSPOLoss(clip_low=0.01, clip_high=0.02), (1.2, 0.9), 1.0, -1.02, (0, 0), (1, 1)),
        (GSPOLoss(clip_low=0.01, clip_high=0.02), (1.2, 0.9), -1.0, 1.0392305, (0.51961524, 0.51961524), (0, 0)),
        (GeoMeanLoss(), (2.0, E(-0.1)), 2.0, -2 * E(0.15), (0, -E(0.15)), (1, 0)),
        (GeoMeanLoss(), (2.0, E(-0.1)), -1.0, 1.3452403, (0.67262014, 0.67262014), (0, 0)),
        (GeoMeanLoss(), (0.5, 1.0), -1.0, E(-0.2), (0, E(-0.2) / 2), (0, 0)),
    ],
)
def test_known_answers_of_a_response_of_two_tokens(loss, ratios, advantage, expected, gradient, clipped):
    mask = torch.tensor([[True, True, False]])
    old = torch.tensor([[-1.0, -2.0, math.nan]], dtype=torch.float64)
    batch = batch_of(mask, advantages=torch.full((1, 3), advantage, dtype=torch.float64), old_log_probs=old)
    log_probs = (old + torch.tensor([[*ratios, 1.0]], dtype=torch.float64).log()).requires_grad_()
    token_loss, metrics = loss(log_probs, batch)
    aggregate(token_loss, mask, "seq-mean-token-mean").backward()
    assert token_loss[0, :2].tolist() == pytest.approx([expected] * 2)
    assert log_probs.grad[0].tolist() == pytest.approx([*gradient, 0.0])
    assert metrics["pg_clipfrac"][0, :2].tolist() == list(clipped)
    if isinstance(loss, GeoMeanLoss):
        assert metrics["pg_clipfrac_lower"][0, :2].tolist() == [float(r < E(-0.4)) for r in ratios]


# ---- Slow loops ----


def clip(value, low, high):
    return min(max(value, low), high)


def slow_row(loss, row, frozen):
    """Loss and metrics per token of one response [(log_prob, old, advantage, selected)]; `frozen` are its log-probs in
    every place that carries no gradient."""
    xs = [clip(lp - old, -20.0, 20.0) for lp, old, _, _ in row]
    frozen_xs = [clip(lp - old, -20.0, 20.0) for lp, (_, old, _, _) in zip(frozen, row, strict=True)]
    if isinstance(loss, GeoMeanLoss):
        sign = [math.copysign(1, a) if a else 0 for _, _, a, _ in row]
        cut = [
            s * min(s * x, s * clip(x, -loss.clip_low, loss.clip_high)) if s else 0.0
            for s, x in zip(sign, xs, strict=True)
        ]
        mean_advantage = sum(a for _, _, a, _ in row) / len(row)
        value = -mean_advantage * math.exp(sum(cut) / len(row))
        return [
            (value, {"pg_clipfrac": s > 0 and c != x, "pg_clipfrac_lower": s < 0 and c != x, "ppo_kl": -x})
            for s, c, x in zip(sign, cut, xs, strict=True)
        ]
    mean = sum(lp - old for lp, (_, old, _, _) in zip(frozen, row, strict=True)) / len(row)
    return [
        slow_token(loss, *token, frozen=lp0, x=x, frozen_x=x0, mean=mean)
        for token, lp0, x, x0 in zip(row, frozen, xs, frozen_xs, strict=True)
    ]


def slow_token(loss, lp, old, a, selected, *, frozen, x, frozen_x, mean):
    metrics = {"ppo_kl": -x}
    ratio, frozen_ratio = math.exp(x), math.exp(frozen_x)
    if isinstance(loss, ClipLoss | ClipCovLoss | GSPOLoss):
        if isinstance(loss, GSPOLoss):
            ratio, metrics["ppo_kl"] = math.exp(min(lp - frozen + mean, 10.0)), -(lp - old)
        free, held = -a * ratio, -a * clip(ratio, 1 - loss.clip_low, 1 + loss.clip_high)
        value, metrics["pg_clipfrac"] = max(free, held), held > free
        if isinstance(loss, ClipLoss):
            metrics["pg_clipfrac_lower"] = a < 0 and value > -a * loss.clip_dual
            value = min(value, -a * loss.clip_dual) if a < 0 else value
        if isinstance(loss, ClipCovLoss):
            metrics["cov_frac"] = selected and not held > free
            value = 0.0 if metrics["cov_frac"] else value
        return value, metrics
    if isinstance(loss, CISPOLoss):
        weight = clip(frozen_ratio, 1 - loss.clip_low, 1 + loss.clip_high)
        return -weight * a * lp, metrics | {"pg_clipfrac": weight != frozen_ratio}
    if isinstance(loss, SAPOLoss):
        tau = loss.tau_pos if a > 0 else loss.tau_neg
        return -a * 4 / tau / (1 + math.exp(-tau * (ratio - 1))), metrics
    if isinstance(loss, KLCovLoss):
        penalty = loss.ppo_kl_coef * abs(x) if selected else 0.0
        return -a * ratio + penalty, metrics | {"cov_frac": selected, "ppo_kl_abs": abs(x)}
    if isinstance(loss, GPGLoss):
        return -a * lp, metrics
    if isinstance(loss, DROLoss):
        return -(a * lp - loss.dro_beta / 2 * (lp - old) ** 2), metrics | {"ppo_kl": old - lp}
    q, p = math.exp(frozen), math.exp(old)
    if isinstance(loss, DPPOTVLoss):
        distance = abs(q - p)
    else:
        distance = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    outside = (a > 0 and q > p and distance > loss.clip_high) or (a < 0 and q < p and distance > loss.clip_low)
    metrics |= {"pg_clipfrac": outside, "pg_clipfrac_lower": not outside and frozen_ratio > loss.max_ratio}
    return (0.0 if outside else -a * min(frozen_ratio, loss.max_ratio) * lp), metrics


def slow_family(loss, log_probs, batch, frozen):
    """[[loss]], [[metrics]] of all response tokens, 0 and None elsewhere."""
    losses, metrics = torch.zeros(log_probs.shape, dtype=torch.float64).tolist(), {}
    for row, mask in enumerate(batch.response_mask.tolist()):
        places = [step for step, ok in enumerate(mask) if ok]
        tensors = (log_probs, batch.old_log_probs, batch.advantages, batch.selected)
        tokens = [tuple(t[row, step].item() for t in tensors) for step in places]
        if not tokens:
            continue
        results = slow_row(loss, tokens, [frozen[row, step].item() for step in places])
        for step, (value, of_token) in zip(places, results, strict=True):
            losses[row][step], metrics[row, step] = value, of_token
    return losses, metrics


def selected_at_random(batch, seed):
    generator = torch.Generator().manual_seed(seed + 2)
    return batch.with_(selected=torch.rand(batch.response_mask.shape, generator=generator) < 0.5)


@every_loss
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_metrics_match_a_slow_loop(loss, seed):
    log_probs, batch = family_batch(seed)
    batch = selected_at_random(batch, seed)
    token_loss, metrics = loss(log_probs, batch)
    expected, expected_metrics = slow_family(loss, log_probs, batch, log_probs)
    assert not any(metric.requires_grad for metric in metrics.values())
    for (row, step), of_token in expected_metrics.items():
        assert token_loss[row, step].item() == pytest.approx(expected[row][step], rel=1e-11, abs=1e-13)
        assert {name: metric[row, step].item() for name, metric in metrics.items()} == pytest.approx(
            {name: float(value) for name, value in of_token.items()}
        )


@every_loss
@pytest.mark.parametrize("mode", MODES)
def test_gradients_match_finite_differences_of_the_slow_loop(loss, mode):
    log_probs, batch = family_batch(seed=5, rows=4, steps=4)
    batch = selected_at_random(batch, seed=5).with_(is_weights=None)
    whole = mini_batch_loss(loss, log_probs, batch, mode, denominator_of(batch, mode))
    (gradient,) = torch.autograd.grad(whole, log_probs)
    frozen, eps = log_probs.detach(), 1e-6
    for row in range(4):
        for step in range(4):
            sides = []
            for sign in (1, -1):
                moved = frozen.clone()
                moved[row, step] += sign * eps
                sides.append(slow_loss(slow_family(loss, moved, batch, frozen)[0], batch.response_mask.tolist(), mode))
            assert gradient[row, step].item() == pytest.approx((sides[0] - sides[1]) / (2 * eps), abs=1e-7, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_has_the_gradient_of_its_sequence_form(seed):
    log_probs, batch = family_batch(seed)
    batch = batch.with_(advantages=batch.advantages[:, :1].expand_as(log_probs))
    loss = GSPOLoss(clip_low=0.3, clip_high=0.5)
    mask = batch.response_mask
    means = torch.where(mask, log_probs - batch.old_log_probs, 0).sum(-1) / mask.sum(-1).clamp(min=1)
    ratio, advantages = means.exp(), batch.advantages[:, 0]
    sequence_form = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.7, 1.5))[mask.any(-1)].sum()
    (expected,) = torch.autograd.grad(sequence_form, log_probs)
    ours = aggregate(loss(log_probs, batch)[0], mask, "seq-mean-token-mean")
    (gradient,) = torch.autograd.grad(ours, log_probs)
    torch.testing.assert_close(ours, sequence_form)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("seed", range(3))
def test_dro_is_a_regression_of_the_log_ratio_on_the_advantage_whoever_sampled(seed):
    log_probs, batch = family_batch(seed)
    mask, beta = batch.response_mask, 0.8
    residual = batch.advantages - beta * (log_probs - batch.old_log_probs)
    (expected,) = torch.autograd.grad((residual[mask].square() / (2 * beta)).sum(), log_probs)
    (gradient,) = torch.autograd.grad(DROLoss(dro_beta=beta)(log_probs, batch)[0][mask].sum(), log_probs)
    torch.testing.assert_close(gradient, expected)


# ---- What all losses have in common ----


@every_loss
def test_at_ratio_one_every_loss_has_the_policy_gradient(loss):
    log_probs, batch = family_batch(seed=1)
    advantages = batch.advantages[:, :1].expand_as(log_probs)
    nobody = torch.zeros_like(batch.response_mask)
    old = log_probs.detach() if loss.needs_old_log_probs else None
    batch = batch.with_(old_log_probs=old, advantages=advantages, selected=nobody)
    token_loss, metrics = loss(log_probs, batch)
    aggregate(token_loss, batch.response_mask, "seq-mean-token-mean").backward()
    lens = batch.response_mask.sum(-1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(log_probs.grad, torch.where(batch.response_mask, -advantages / lens, 0))
    assert all((metric == 0).all() for metric in metrics.values())


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.integers(0, 2**20),
    st.sampled_from(range(len(ALL))),
    st.sampled_from(MODES),
    st.lists(st.integers(0, 4), min_size=8, max_size=8),
)
def test_loss_and_gradient_are_invariant_to_the_micro_batch_split_and_to_the_order_of_rows(seed, which, mode, homes):
    loss, rows = ALL[which], len(homes)
    log_probs, batch = family_batch(seed, rows=rows)
    batch = loss.prepare(batch, SINGLE)
    denominator = denominator_of(batch, mode)
    whole = mini_batch_loss(loss, log_probs, batch, mode, denominator)
    (gradient,) = torch.autograd.grad(whole, log_probs)
    total = torch.zeros((), dtype=torch.float64)
    for home in range(5):
        members = torch.tensor([row for row in reversed(range(rows)) if homes[row] == home], dtype=torch.int64)
        micro_batch = batch.rows(members)
        of_rows = log_probs[members, : micro_batch.response_mask.shape[1]]
        total = total + mini_batch_loss(loss, of_rows, micro_batch, mode, denominator)
    (split_gradient,) = torch.autograd.grad(total, log_probs)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(split_gradient, gradient, rtol=1e-12, atol=1e-12)


@every_loss
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 0)])
def test_a_fully_masked_batch_has_zero_loss_and_zero_gradient(loss, shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    names = ("advantages", "old_log_probs", "is_weights")
    batch = loss.prepare(batch_of(mask, **{name: torch.full(shape, math.nan) for name in names}), SINGLE)
    log_probs = torch.full(shape, math.nan, requires_grad=True)
    whole = mini_batch_loss(loss, log_probs, batch, loss.agg_mode, 1.0)
    whole.backward()
    assert whole == 0
    assert torch.equal(log_probs.grad, torch.zeros(shape))


@every_loss
def test_extreme_log_probs_of_chosen_tokens_give_finite_losses_and_gradients_in_float32(loss):
    values = torch.tensor([0.0, 1e-7, -1e-9, -1e-6, -0.7, -30.0, -150.0, -1000.0])
    log_probs, old, advantages = torch.cartesian_prod(values, values, torch.tensor([2.0, -2.0, 0.0])).unbind(-1)
    mask = torch.ones(len(old), 1, dtype=torch.bool)
    batch = batch_of(mask, advantages=advantages[:, None], old_log_probs=old[:, None], selected=mask)
    log_probs = log_probs[:, None].clone().requires_grad_()
    token_loss, metrics = loss(log_probs, batch)
    token_loss.sum().backward()
    for tensor in (token_loss, log_probs.grad, *metrics.values()):
        assert tensor.dtype == torch.float32 and tensor.isfinite().all()


def test_a_probability_that_rounds_to_one_is_not_far_from_one_just_below():
    """In float32 log-probs near 0 are noise: -1e-7 and 0 are the same policy, inside any trust region."""
    old, new = torch.tensor([[-1e-7, 0.0, -1e-7]]), torch.tensor([[0.0, -1e-7, 1e-7]])
    batch = batch_of(torch.ones(1, 3, dtype=torch.bool), advantages=torch.tensor([[1.0, -1.0, 1.0]]), old_log_probs=old)
    _, metrics = DPPOKLLoss(clip_low=1e-5, clip_high=1e-5)(new, batch)
    assert metrics["pg_clipfrac"].tolist() == [[0, 0, 0]]


@pytest.mark.parametrize(("old", "new", "advantage"), [(-0.1, -50.0, -1.0), (-0.7, 0.0, 1.0)])
def test_a_token_that_lost_or_won_all_probability_is_outside_the_trust_region(old, new, advantage):
    """The first one's log-ratio is beyond the clamp of the ratio, which must not stand in for its old probability."""
    batch = batch_of(
        torch.ones(1, 1, dtype=torch.bool), advantages=torch.tensor([[advantage]]), old_log_probs=torch.tensor([[old]])
    )
    for loss in (DPPOTVLoss(), DPPOKLLoss()):
        assert loss(torch.tensor([[new]]), batch)[1]["pg_clipfrac"].item() == 1


# ---- Weights, metrics ----


@every_loss
def test_importance_weights_scale_the_loss_of_a_token_or_by_their_geometric_mean_of_a_response(loss):
    log_probs, batch = family_batch(seed=4)
    token_loss, _ = loss(log_probs, selected_at_random(batch, seed=4))
    assert loss.weigh(token_loss, batch.with_(is_weights=None)) is token_loss
    weights = batch.is_weights.masked_fill(torch.arange(6)[:, None] == 3, 0.0)  # a response rejected altogether
    weighed = loss.weigh(token_loss, batch.with_(is_weights=weights))
    for row, mask in enumerate(batch.response_mask):
        chosen = weights[row][mask].tolist()
        if isinstance(loss, GeoMeanLoss):
            positive = [w for w in chosen if w > 0]
            chosen = [math.prod(positive) ** (1 / len(positive)) if positive else 0.0] * len(chosen)
        expected = [x * w for x, w in zip(token_loss[row][mask].tolist(), chosen, strict=True)]
        assert weighed[row][mask].tolist() == pytest.approx(expected, rel=1e-9)


def slow_geo_mean(loss, row):
    """GMPO's loss of a response [(log_prob, old, advantage, weight)], of its tokens of weight above 0; a float."""
    row = [token for token in row if token[3] > 0]
    if not row:
        return 0.0
    total = 0.0
    for log_prob, old, advantage, weight in row:
        x = log_prob - old
        x = min(x, loss.clip_high) if advantage > 0 else max(x, -loss.clip_low) if advantage < 0 else 0.0
        total += x + math.log(weight)
    return -sum(advantage for _, _, advantage, _ in row) / len(row) * math.exp(total / len(row))


def test_tokens_of_weight_0_leave_the_geometric_mean_and_silence_nobody_else():
    """Value and gradient (by differences) of what IcePop and a rejection of tokens leave; whole responses of 0 too."""
    loss, step = GeoMeanLoss(clip_low=0.2, clip_high=0.9), 1e-6
    trains = 0
    for seed in range(6):
        log_probs, batch = family_batch(seed, rows=7, steps=6)
        weights = batch.is_weights * (torch.rand(7, 6, generator=torch.Generator().manual_seed(seed)) < 0.6)
        weights[3] = 0
        batch = batch.with_(is_weights=weights)
        token_loss, _ = loss(log_probs, batch)
        weighed = loss.weigh(token_loss, batch)
        aggregate(weighed, batch.response_mask, "seq-mean-token-mean").backward()
        for r, mask in enumerate(batch.response_mask):
            places = mask.nonzero().flatten().tolist()
            columns = (log_probs, batch.old_log_probs, batch.advantages, weights)
            row = [tuple(column[r, s].item() for column in columns) for s in places]
            assert weighed[r][mask].tolist() == pytest.approx([slow_geo_mean(loss, row)] * len(row), rel=1e-9)
            for i, s in enumerate(places):
                above, below = (
                    slow_geo_mean(loss, [*row[:i], (row[i][0] + move, *row[i][1:]), *row[i + 1 :]])
                    for move in (step, -step)
                )
                assert log_probs.grad[r, s].item() == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-8)
                trains += log_probs.grad[r, s].item() != 0
            assert not log_probs.grad[r][~mask].any()
    assert trains > 30


def test_weights_in_masked_places_reach_no_gradient_whatever_the_loss():
    """Not even that of a loss of somebody's own that leaves the masking to the aggregation."""
    mask = torch.tensor([[True, False, False]])
    token_loss = torch.ones(1, 3, requires_grad=True)
    batch = batch_of(mask, is_weights=torch.tensor([[2.0, math.nan, math.inf]]))
    aggregate(GPGLoss().weigh(token_loss, batch), mask, "token-mean").backward()
    assert token_loss.grad.tolist() == [[2, 0, 0]]


def test_metrics_are_logged_as_means_over_response_tokens():
    log_probs, batch = family_batch(seed=2)
    for loss in ALL:
        prepared, metrics = loss.prepare(batch, SINGLE), Metrics(SINGLE)
        for micro_batch in (prepared.rows(torch.tensor([0, 1, 2])), prepared.rows(torch.tensor([3, 4, 5]))):
            start = 0 if micro_batch.indices[0] == 0 else 3
            values = log_probs.detach()[start : start + 3, : micro_batch.response_mask.shape[1]]
            stats = loss(values, micro_batch)[1]
            update_metrics(metrics, micro_batch.response_mask, terms={}, stats=stats, num_updates=1)
        whole = loss(log_probs, prepared)[1]
        expected = {f"actor/{name}": metric[batch.response_mask].mean().item() for name, metric in whole.items()}
        assert metrics.reduce() == pytest.approx(expected, rel=1e-6)
