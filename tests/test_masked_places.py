"""What stands where nobody chose a token changes neither a result nor a gradient, whatever the formula."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.algorithms.aggregation import aggregate
from lib.algorithms.kl import KL_ESTIMATORS, kl_to_reference, penalized_rewards
from lib.algorithms.losses import ClipLoss
from lib.dist import SINGLE
from lib.tracking.metrics import Metrics
from tests.test_advantages import VARIANTS, make_batch
from tests.test_correction import BYPASS, DECOUPLED, SINGLE_OPTIONS
from tests.test_loss_family import ALL, NAMES
from tests.test_losses import MODES, denominator_of

TENSORS = (
    "log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "token_level_rewards", "values",
    "logit_grad_squared", "is_weights", "advantages",
)  # fmt: skip


@st.composite
def steps_and_poisoned_ones(draw):
    """Tensors of a step by name, and the same ones of which some are no numbers in places that the mask leaves out.

    Ragged rows with holes; a row without a token may count (a reward alone) or not.
    """
    rows, steps = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    lens = torch.tensor(draw(st.lists(st.integers(0, steps), min_size=rows, max_size=rows)), dtype=torch.int64)
    names = draw(st.lists(st.sampled_from(TENSORS), min_size=1, unique=True))
    poison, everywhere = draw(st.sampled_from([math.nan, math.inf, -math.inf])), draw(st.booleans())
    random = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def uniform():
        return torch.rand(rows, steps, generator=random)

    mask = (torch.arange(steps) < lens[:, None]) & (uniform() < 0.8)  # (B, T)
    log_probs = -3 * uniform()
    clean = dict(
        log_probs=log_probs, old_log_probs=log_probs - uniform(), rollout_log_probs=log_probs - uniform(),
        ref_log_probs=log_probs - uniform(), token_level_rewards=torch.where(mask, uniform(), 0), values=uniform(),
        logit_grad_squared=uniform(), is_weights=2 * uniform(), advantages=uniform() - 0.5, response_mask=mask,
        valid=mask.any(-1) | (torch.rand(rows, generator=random) < 0.5),
        scores=torch.rand(rows, generator=random), greedy_scores=torch.rand(rows, generator=random),
        named_rewards=torch.rand(rows, 3, generator=random),
    )  # fmt: skip
    places = ~mask if everywhere else ~mask & (uniform() < 0.5)
    return clean, clean | {name: torch.where(places, poison, clean[name]) for name in names}


def same(ours, theirs):
    """Whether two tensors, numbers or dicts of numbers are equal; NaN is equal to itself."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs)
    return ours.shape == theirs.shape and bool(((ours == theirs) | (ours != ours) & (theirs != theirs)).all())


def gradient(loss, log_probs, mask):
    (found,) = torch.autograd.grad(loss, log_probs, retain_graph=True)
    assert not found[~mask].any()
    return found


def of_advantage(advantage, log_probs, batch):
    return [*advantage(batch, SINGLE), *advantage(batch.with_(token_level_rewards=None, is_weights=None), SINGLE)]


def of_loss(loss, log_probs, batch):
    batch, mask = loss.prepare(batch, SINGLE), batch.response_mask
    token_loss, metrics = loss(log_probs, batch)
    weighed = loss.weigh(token_loss, batch)
    totals = [aggregate(weighed, mask, mode) / denominator_of(batch, mode) for mode in MODES]
    selected = [] if batch.selected is None else [batch.selected]
    metrics = [torch.where(mask, metric, 0) for metric in metrics.values()]
    return [token_loss, weighed, *totals, *(gradient(total, log_probs, mask) for total in totals), *selected, *metrics]


def of_kl(kl_type, log_probs, batch):
    estimate, mask = kl_to_reference(log_probs, batch, kl_type=kl_type), batch.response_mask
    assert torch.equal(estimate[mask], KL_ESTIMATORS[kl_type](log_probs[mask], batch.ref_log_probs[mask]))
    assert not estimate[~mask].any()
    reward = penalized_rewards(batch, coef=0.5, kl_type=kl_type, world=SINGLE)
    return [estimate, gradient(estimate.sum(), log_probs, mask), *reward]


def of_correction(cfg, log_probs, batch):
    """Through `correct`, `weigh` and a loss, with a pass for old log-probs and, where it may be left out, without."""
    found, loss = [], cfg.policy_loss(ClipLoss())
    for old in (batch.old_log_probs,) if cfg.needs_old_log_probs else (batch.old_log_probs, None):
        metrics = Metrics(SINGLE)
        corrected = cfg.correct(batch.with_(old_log_probs=old, is_weights=None), metrics)
        corrected = cfg.weigh(log_probs, corrected, metrics)
        token_loss = loss.weigh(loss(log_probs, corrected)[0], corrected)
        total = aggregate(token_loss, corrected.response_mask, "seq-mean-token-mean")
        found += [total, gradient(total, log_probs, corrected.response_mask), corrected.response_mask, corrected.valid]
        found += [corrected.scores, *([] if corrected.is_weights is None else [corrected.is_weights]), metrics.reduce()]
    return found


FORMULAS = {
    **{f"advantage {name}": (of_advantage, advantage) for name, advantage in VARIANTS.items()},
    **{f"loss {name}": (of_loss, loss) for name, loss in zip(NAMES, ALL, strict=True)},
    **{f"kl {name}": (of_kl, name) for name in KL_ESTIMATORS},
    **{f"correction {name}": (of_correction, cfg) for name, cfg in (DECOUPLED | SINGLE_OPTIONS | BYPASS).items()},
}


@pytest.mark.parametrize(("results_of", "formula"), FORMULAS.values(), ids=FORMULAS)
@settings(deadline=None, derandomize=True, max_examples=20)
@given(steps_and_poisoned_ones())
def test_masked_places_reach_neither_result_nor_gradient_and_inputs_are_left_alone(results_of, formula, steps):
    results = []
    for tensors in steps:
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        others = dict(copies)
        log_probs = others.pop("log_probs").requires_grad_()
        scores, valid, mask = (others.pop(name) for name in ("scores", "valid", "response_mask"))
        batch = make_batch(scores, torch.arange(len(scores)) // 3, valid, mask, **others)
        results.append(results_of(formula, log_probs, batch))
        for name, tensor in tensors.items():
            assert same(copies[name], tensor), name
    for clean, poisoned in zip(*results, strict=True):
        assert same(clean, poisoned)
