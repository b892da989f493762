"""Rollout correction: a slow loop for every preset and statistic, hand-worked numbers, masks, splits, ranks, errors."""

import math
import re
import statistics
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.advantages import GroupAdvantage
from lib.aggregation import loss_denominator
from lib.correction import CORRECTIONS, AutoCorrection, Correction, Statistic, log_bounds, statistic
from lib.dist import SINGLE
from lib.losses import ClipLoss, GPGLoss
from lib.metrics import Metrics
from lib.types import Batch
from tests.correction_worker import CASES, random_batch
from tests.prefork import prefork

NAN, INF = math.nan, math.inf
DECOUPLED = {name: make() for name, make in CORRECTIONS.items() if not make().bypass}
BYPASS = {name: make() for name, make in CORRECTIONS.items() if make().bypass}
STATISTICS = {
    "token_k1": [0.6, 1.9], "token_k2": 0.1, "token_k3": 0.12, "seq_sum_k1": [0.3, 4.0], "seq_sum_k2": 0.5,
    "seq_sum_k3": 0.6, "seq_mean_k1": [0.8, 1.3], "seq_mean_k2": 0.12, "seq_mean_k3": 0.13, "seq_max_k2": 0.4,
    "seq_max_k3": 0.5,
}  # fmt: skip
SINGLE_OPTIONS = {
    **{name: Correction(reject={name: bounds}) for name, bounds in STATISTICS.items()},
    "several": Correction(is_level="token", reject={"token_k1": [0.5, 3.0], "seq_max_k3": 0.5}),
    "one number": Correction(reject={"token_k1": 1.7}),
    "token mean 1": Correction(is_level="token", batch_normalize=True),
    "sequence mean 1": Correction(is_level="sequence", batch_normalize=True, is_threshold=3.0),
    "mean 1 and rejection": Correction(is_level="token", batch_normalize=True, reject={"seq_mean_k3": 0.1}),
    "sequence icepop": Correction(is_level="sequence", icepop_low=0.4, is_threshold=1.8),
    "icepop mean 1": Correction(is_level="token", icepop_low=0.7, is_threshold=1.5, batch_normalize=True),
}


def one_batch(old, rollout, mask=None, **tensors):
    """A batch of one group with these log-probs, lists of rows; all are tokens unless the mask says otherwise."""
    rollout = torch.tensor(rollout)
    mask = torch.ones_like(rollout, dtype=torch.bool) if mask is None else torch.tensor(mask)
    rows = torch.arange(len(rollout))
    defaults = dict(
        uids=0 * rows, indices=rows, mini_batch_ids=0 * rows, input_ids=torch.zeros(len(rows), rollout.shape[1] + 1),
        prompt_lens=1 + 0 * rows, response_lens=rollout.shape[1] + 0 * rows, response_mask=mask,
        truncated=rows < 0, valid=mask.any(-1), scores=rows.float(),
        old_log_probs=None if old is None else torch.tensor(old), rollout_log_probs=rollout,
    )  # fmt: skip
    return Batch(**{**defaults, **tensors})


def of_ratios(*rows, **tensors):
    """A batch whose ratios old / rollout are these."""
    ratios = torch.tensor(rows)
    return one_batch((ratios.log() - 2).tolist(), torch.full_like(ratios, -2).tolist(), **tensors)


def correct(cfg, batch):
    metrics = Metrics(SINGLE)
    return cfg.correct(batch, metrics), metrics


# ---- The slow reference: Python floats, one response at a time ----


def slow_statistic(name, ratios):
    """Of a response's ratios: per token for token_*, else the same number for all tokens. k1 as a ratio, not a log."""
    scope, estimator = name[:-3], name[-2:]
    if estimator == "k1":
        product = math.prod(ratios)
        value = {"token": ratios, "seq_sum": product, "seq_mean": product ** (1 / max(1, len(ratios)))}[scope]
    else:
        tokens = [0.5 * math.log(r) ** 2 if estimator == "k2" else r - 1 - math.log(r) for r in ratios]
        total = math.fsum(tokens)
        mean = total / max(1, len(ratios))
        value = {"token": tokens, "seq_sum": total, "seq_mean": mean, "seq_max": max(tokens, default=0.0)}[scope]
    return value if scope == "token" else [value] * len(ratios)


def slow_rows(cfg, batch):
    """Per response: [(place, ratio, weight before normalisation, kept)]."""
    rows = []
    old_log_probs, rollout_log_probs = batch.old_log_probs.tolist(), batch.rollout_log_probs.tolist()
    for mask, old, rollout in zip(batch.response_mask.tolist(), old_log_probs, rollout_log_probs, strict=True):
        places = [t for t, chosen in enumerate(mask) if chosen]
        ratios = [math.exp(old[t] - rollout[t]) for t in places]
        raw = [math.prod(ratios)] * len(ratios) if cfg.is_level == "sequence" else ratios
        kept = [True] * len(ratios)
        for name, bounds in cfg.reject.items():
            if isinstance(bounds, float):
                bounds = [1 / bounds, bounds] if name.endswith("k1") else [-INF, bounds]
            inside = [bounds[0] <= value <= bounds[1] for value in slow_statistic(name, ratios)]
            kept = [a and b for a, b in zip(kept, inside, strict=True)]
        if cfg.icepop_low is None:
            weights = [min(w, cfg.is_threshold) for w in raw]
        else:
            weights = [w if cfg.icepop_low <= w <= cfg.is_threshold else 0.0 for w in raw]
        rows.append(list(zip(places, raw, weights, kept, strict=True)))
    return rows


def slow_correct(cfg, batch):
    """(weights, mask, valid) as nested lists; weights None without any."""
    rows = slow_rows(cfg, batch)
    left = [[w for _, _, w, kept in row if kept] for row in rows]
    mean = 1.0
    if cfg.batch_normalize:
        units = [w for row in left for w in row] if cfg.is_level == "token" else [row[0] for row in left if row]
        mean = statistics.fmean(units) if any(units) else 1.0
    weights = [[0.0] * batch.response_mask.shape[1] for _ in rows]
    mask = [[False] * batch.response_mask.shape[1] for _ in rows]
    for i, row in enumerate(rows):
        for t, _, w, kept in row:
            weights[i][t], mask[i][t] = w / mean if kept else 0.0, kept
    valid = [ok and (any(m) or not row) for ok, m, row in zip(batch.valid.tolist(), mask, rows, strict=True)]
    return None if cfg.is_level == "none" else weights, mask, valid


@pytest.mark.parametrize("name", [*DECOUPLED, *SINGLE_OPTIONS])
def test_every_preset_and_option_equals_a_slow_loop(name):
    cfg, left, total = (DECOUPLED | SINGLE_OPTIONS)[name], 0, 0
    for seed in range(6):
        # Presets with bounds of a thousandth reject all of a noisy batch: for them the engine is near.
        batch = random_batch(seed, noise=0.006 if "geo" in name else 0.3 if "k3_rs" in name else 0.9)
        weights, mask, valid = slow_correct(cfg, batch)
        result, _ = correct(cfg, batch)
        assert result.response_mask.tolist() == mask
        assert result.valid.tolist() == valid
        assert result.scores.tolist() == torch.where(torch.tensor(valid), batch.scores, 0).tolist()
        left, total = left + int(result.response_mask.sum()), total + int(batch.response_mask.sum())
        if weights is None:
            assert result.is_weights is None
        else:
            assert result.is_weights.dtype == torch.float32
            torch.testing.assert_close(result.is_weights.double(), torch.tensor(weights, dtype=torch.float64))
    assert 0.2 < left / total < 0.98 if cfg.reject else left == total, "the bounds tell something apart"


def slow_metrics(cfg, batch):
    """Every rollout_corr/* number from lists of numbers."""
    rows, mean = [row for row in slow_rows(cfg, batch) if row], statistics.fmean
    logs = [
        [(batch.old_log_probs[i, t].item(), batch.rollout_log_probs[i, t].item()) for t in torch.where(m)[0].tolist()]
        for i, m in enumerate(batch.response_mask)
        if m.any()
    ]
    ratios = [math.exp(a - b) for row in logs for a, b in row]
    ours, theirs = ([-mean(pair[side] for pair in row) for row in logs] for side in (0, 1))
    apart = [a - b for a, b in zip(ours, theirs, strict=True)]
    found = {
        "kl": mean(-math.log(r) for r in ratios),
        "k3_kl": mean(r - 1 - math.log(r) for r in ratios),
        "chi2_token": mean(r * r for r in ratios) - 1,
        "chi2_seq": mean(math.prod(math.exp(a - b) for a, b in row) ** 2 for row in logs) - 1,
        "training_ppl": mean(map(math.exp, ours)), "rollout_ppl": mean(map(math.exp, theirs)),
        "training_log_ppl": mean(ours), "rollout_log_ppl": mean(theirs), "ppl_ratio": mean(map(math.exp, apart)),
        "log_ppl_diff": mean(apart), "log_ppl_diff_max": max(apart), "log_ppl_diff_min": min(apart),
        "log_ppl_abs_diff": mean(map(abs, apart)),
    }  # fmt: skip
    if cfg.is_level != "none":
        per_row = [(mean(r for _, r, _, _ in row), mean(w for _, _, w, _ in row)) for row in rows]
        units = per_row if cfg.is_level == "sequence" else [(r, w) for row in rows for _, r, w, _ in row]
        low, high = cfg.icepop_low or 1 / cfg.is_threshold, cfg.is_threshold
        for name, fraction, values in (("", "ratio_", units), ("seq_", "seq_", per_row)):
            raw, bounded = zip(*values, strict=True)
            found |= {
                f"rollout_is_{name}mean": mean(bounded), f"rollout_is_{name}std": statistics.stdev(bounded),
                f"rollout_is_{name}max": max(raw), f"rollout_is_{name}min": min(raw),
                f"rollout_is_{fraction}fraction_high": mean(r > high for r in raw),
                f"rollout_is_{fraction}fraction_low": mean(r < low for r in raw),
            }  # fmt: skip
        bounded = [w for _, w in units]
        found["rollout_is_eff_sample_size"] = sum(bounded) ** 2 / len(units) / sum(w * w for w in bounded)
        found["rollout_is_seq_max_deviation"] = max(abs(w - 1) for _, w in per_row)
        if cfg.icepop_low is not None:
            found["rollout_is_oob_ratio"] = mean(not low <= r <= high for r, _ in units)
    for name in cfg.reject:
        of_rows = [slow_statistic(name, [math.exp(a - b) for a, b in row]) for row in logs]
        values = [v for row in of_rows for v in (row if name.startswith("token") else row[:1])]
        values = [math.log(v) for v in values] if name.endswith("k1") else values
        found |= {f"rollout_rs_{name}_{kind.__name__}": kind(values) for kind in (max, min)}
        found[f"rollout_rs_{name}_mean"] = mean(values)
    for name in [f"rollout_rs_{name}" for name in cfg.reject] + ["rollout_rs"] * bool(cfg.reject):
        alone = replace(cfg, reject={key: cfg.reject[key] for key in cfg.reject if name.endswith((key, "rs"))})
        kept = [[k for _, _, _, k in row] for row in slow_rows(alone, batch) if row]
        found[f"{name}_masked_fraction"] = mean(not k for row in kept for k in row)
        found[f"{name}_seq_masked_fraction"] = mean(not all(row) for row in kept)
    return {f"rollout_corr/{name}": value for name, value in found.items()}


@pytest.mark.parametrize("name", [*DECOUPLED, *SINGLE_OPTIONS])
def test_metrics_equal_a_slow_loop_and_are_documented(name):
    cfg, batch = (DECOUPLED | SINGLE_OPTIONS)[name], random_batch(7, noise=0.4)
    found = correct(cfg, batch)[1].reduce()
    documented = (Path(__file__).parents[1] / "docs/metrics.md").read_text()
    for key in found:
        assert f"`{re.sub('_rs_(token|seq)_([a-z]*_)?k[123]', '_rs_STATISTIC', key)}`" in documented
    factor = found.pop("rollout_corr/rollout_is_batch_norm_factor", None)
    assert (factor is not None) == cfg.batch_normalize
    expected = slow_metrics(cfg, batch)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)


# ---- Worked by hand ----


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"is_level": "token"}, [[2, 0.25, 1], [2, 1, 1]]),
        ({"is_level": "sequence"}, [[1, 1, 1], [2, 2, 2]]),
        ({"is_level": "token", "icepop_low": 0.5, "is_threshold": 5.0}, [[4, 0, 1], [0, 1, 1]]),
        ({"is_level": "sequence", "icepop_low": 0.5, "is_threshold": 5.0}, [[1, 1, 1], [0, 0, 0]]),
        ({"is_level": "token", "batch_normalize": True}, [[48 / 29, 6 / 29, 24 / 29], [48 / 29, 24 / 29, 24 / 29]]),
        ({"is_level": "sequence", "batch_normalize": True}, [[2 / 3] * 3, [4 / 3] * 3]),
    ],
)  # fmt: skip
def test_weights_of_known_ratios(options, expected):
    weights = correct(Correction(**options), of_ratios([4.0, 0.25, 1.0], [8.0, 1.0, 1.0]))[0].is_weights
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize("options", [{}, {"icepop_low": 1.0}])
def test_equal_probabilities_are_within_thresholds_of_exactly_1(options):
    cfg = Correction(is_level="token", is_threshold=1.0, reject={"token_k1": [1.0, 4.0]}, **options)
    found, metrics = correct(cfg, of_ratios([1.0, 1.0, 2.0, 0.5]))
    assert found.response_mask.tolist() == [[True, True, True, False]]
    torch.testing.assert_close(found.is_weights, torch.tensor([[1.0, 1.0, 0.0 if options else 1.0, 0.0]]))
    numbers = metrics.reduce()
    for name, expected in (("rollout_is_ratio_fraction_high", 1), ("rollout_is_ratio_fraction_low", 1),
                           ("rollout_rs_masked_fraction", 1), ("rollout_rs_token_k1_masked_fraction", 1)):  # fmt: skip
        assert numbers[f"rollout_corr/{name}"] == expected / 4, name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_k1", math.log(3)), ("token_k2", math.log(3) ** 2 / 2), ("token_k3", 2 - math.log(3)),
        ("seq_sum_k1", math.log(1.5)), ("seq_sum_k2", (math.log(3) ** 2 + math.log(0.5) ** 2) / 2),
        ("seq_sum_k3", 2 - math.log(3) - 0.5 + math.log(2)), ("seq_mean_k1", math.log(1.5) / 2),
        ("seq_mean_k2", (math.log(3) ** 2 + math.log(0.5) ** 2) / 4),
        ("seq_mean_k3", (1.5 - math.log(3) + math.log(2)) / 2), ("seq_max_k2", math.log(3) ** 2 / 2),
        ("seq_max_k3", 2 - math.log(3)),
    ],
)  # fmt: skip
def test_statistics_of_ratios_three_and_a_half_beside_a_tool_token(name, expected):
    log_ratio = torch.tensor([[3.0, 1.0, 0.5]], dtype=torch.float64).log()
    values = statistic(log_ratio, torch.tensor([[True, False, True]]), name)
    assert values[0, 0].item() == pytest.approx(expected, rel=1e-12)
    assert values.shape == (1, 3)


def test_every_statistic_is_tested():
    assert set(STATISTICS) == set(get_args(Statistic))


@pytest.mark.parametrize("name", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_bounds_of_k1_are_on_old_over_rollout_and_not_on_its_inverse(name):
    batch = of_ratios([3.0], [0.4], [2.0])
    assert correct(Correction(reject={name: [0.3, 2.5]}), batch)[0].valid.tolist() == [False, True, True]
    assert log_bounds(name, 4) == pytest.approx((-math.log(4), math.log(4)))


def test_a_rejected_token_leaves_the_mask_and_the_weights_and_a_response_without_any_is_excluded():
    cfg = Correction(is_level="token", is_threshold=5.0, reject={"token_k1": 2.0})
    batch = of_ratios([3.0, 1.5, 0.1], [3.0, 0.2, 9.0], [1.0, 1.0, 1.0], mask=[[True] * 3, [True] * 3, [False] * 3],
                      valid=torch.ones(3).bool())  # fmt: skip
    result, _ = correct(cfg, batch)
    assert result.response_mask.tolist() == [[False, True, False], [False] * 3, [False] * 3]
    torch.testing.assert_close(result.is_weights, torch.tensor([[0, 1.5, 0], [0] * 3, [0] * 3]))
    assert result.valid.tolist() == [True, False, True], "a response without tokens has nothing to lose"
    assert result.scores.tolist() == [0, 0, 2]


def test_an_excluded_response_leaves_group_statistics_and_denominators():
    scores = torch.tensor([1.0, 0.0, 7.0])
    batch = of_ratios([1.0, 1.0], [1.0, 1.1], [9.0, 1.0], scores=scores)
    result, _ = correct(Correction(reject={"seq_sum_k1": 2.0}), batch)
    advantages, _ = GroupAdvantage(norm_by_std=False)(result, SINGLE)
    assert advantages.tolist() == [[0.5, 0.5], [-0.5, -0.5], [0, 0]]
    modes = {"token-mean": 4, "seq-mean-token-sum": 2, "seq-mean-token-mean": 2, "seq-mean-token-sum-norm": 20}
    modes["token-sum"] = 1
    for mode, expected in modes.items():
        assert loss_denominator(result, mode, SINGLE, scale=10) == expected


def test_a_batch_of_which_everything_is_rejected_stays_finite():
    cfg = Correction(is_level="token", batch_normalize=True, reject={"token_k3": 0.1})
    result, metrics = correct(cfg, of_ratios([9.0, 8.0]))
    assert result.is_weights.tolist() == [[0, 0]] and result.valid.tolist() == [False]
    assert metrics.reduce()["rollout_corr/rollout_is_batch_norm_factor"] == 1


# ---- Extremes ----


@pytest.mark.parametrize("far", [1e3, 1e30])
@pytest.mark.parametrize("name", [*DECOUPLED, *SINGLE_OPTIONS])
def test_extreme_ratios_stay_finite(name, far):
    batch = one_batch([[-1.0, -far], [-far, -1.0], [-1.0, -1.0]], [[-far, -1.0], [-1.0, -1.0], [-1.0, -2.0]])
    result, metrics = correct((DECOUPLED | SINGLE_OPTIONS)[name], batch)
    assert result.is_weights is None or result.is_weights.isfinite().all()
    numbers = metrics.reduce()
    assert all(math.isfinite(value) for value in numbers.values()), numbers


def test_a_token_that_is_not_finite_on_either_side_trains_as_without_a_correction():
    batch = one_batch([[-1.0, NAN, -2.0, -1.0]], [[NAN, -1.0, -INF, -1.0]])
    cfg = Correction(is_level="token", reject={"seq_mean_k1": 1.1})
    result, metrics = correct(cfg, batch)
    assert result.is_weights.tolist() == [[1] * 4] and result.response_mask.all()
    assert metrics.reduce()["rollout_corr/kl"] == 0


def test_inputs_are_left_alone_and_no_gradient_flows_through_a_weight():
    batch = random_batch(0, noise=0.5)
    before = {f.name: t.clone() for f in fields(batch) if (t := getattr(batch, f.name)) is not None}
    log_probs = batch.old_log_probs.clone().requires_grad_()
    for cfg in (DECOUPLED | SINGLE_OPTIONS | BYPASS).values():
        correct(cfg, batch)
        weighed = cfg.weigh(log_probs, batch.with_(old_log_probs=None), Metrics(SINGLE))
        assert weighed.is_weights is None or not weighed.is_weights.requires_grad
    for name, tensor in before.items():
        torch.testing.assert_close(getattr(batch, name), tensor, rtol=0, atol=0, equal_nan=True)


# ---- Inside the update ----


@settings(deadline=None, derandomize=True, max_examples=40)
@given(
    st.lists(st.integers(0, 3), min_size=12, max_size=12), st.integers(0, 99), st.sampled_from(["token", "sequence"])
)
def test_weights_of_any_split_into_micro_batches_are_those_of_the_step(parts, seed, level):
    """Without a pass for old log-probs, the current ones before a single update are the old ones."""
    cfg, batch = Correction(is_level=level, icepop_low=0.6, is_threshold=1.5), random_batch(seed, noise=0.5)
    expected, metrics = correct(cfg, batch)
    parts, numbers = torch.tensor(parts), Metrics(SINGLE)
    for part in range(4):
        rows = (parts == part).nonzero().flatten()
        micro_batch = batch.with_(old_log_probs=None).rows(rows)
        weighed = cfg.weigh(batch.rows(rows).old_log_probs, micro_batch, numbers)
        torch.testing.assert_close(weighed.is_weights, expected.rows(rows).is_weights, rtol=1e-6, atol=0)
        assert torch.equal(weighed.response_mask, micro_batch.response_mask)
    assert numbers.reduce() == pytest.approx(metrics.reduce(), rel=1e-9, abs=1e-12)


def test_what_the_step_corrected_is_not_corrected_again():
    for cfg in (DECOUPLED | SINGLE_OPTIONS).values():
        corrected, _ = correct(cfg, random_batch(0, noise=0.5))
        metrics = Metrics(SINGLE)
        assert cfg.weigh(corrected.old_log_probs - 1, corrected, metrics) is corrected
        assert metrics.reduce() == {}


def test_the_mismatch_is_logged_without_any_correction():
    batch, cfg = random_batch(0, noise=0.5), Correction()
    expected = correct(cfg, batch)[1].reduce()
    for corrected in (cfg, replace(cfg, bypass=True)):
        metrics = Metrics(SINGLE)
        assert corrected.weigh(batch.old_log_probs, batch.with_(old_log_probs=None), metrics).is_weights is None
        assert metrics.reduce() == expected and len(expected) == 13


def test_without_the_engines_log_probs_nothing_is_done():
    batch, metrics = random_batch(0, noise=0.5).with_(rollout_log_probs=None), Metrics(SINGLE)
    for cfg in (AutoCorrection(), Correction()):
        assert cfg.correct(batch, metrics) is batch
        assert cfg.weigh(batch.old_log_probs, batch.with_(old_log_probs=None), metrics).is_weights is None
    assert metrics.reduce() == {}


@pytest.mark.parametrize("name", BYPASS)
def test_with_bypass_the_engine_is_the_old_policy_and_the_current_one_corrects(name):
    """Rejection is a weight of 0 there: it follows the current policy, so no group or denominator may depend on it."""
    cfg, batch = BYPASS[name], random_batch(4, noise=0.002 if "geo" in name else 0.5)
    current = batch.old_log_probs
    for old in (current, None):  # a pass that only compared, or none
        stepped, metrics = correct(cfg, batch.with_(old_log_probs=old))
        assert stepped.old_log_probs is batch.rollout_log_probs and stepped.is_weights is None
        assert torch.equal(stepped.response_mask, batch.response_mask) and metrics.reduce() == {}
    weighed = cfg.weigh(current, stepped, Metrics(SINGLE))
    assert torch.equal(weighed.response_mask, batch.response_mask)
    if name == "bypass_ppo_clip":
        assert weighed.is_weights is None
        return
    weights = [[0.0] * batch.response_mask.shape[1] for _ in range(len(batch))]
    for i, row in enumerate(slow_rows(cfg, batch)):
        for t, _, weight, kept in row:
            weights[i][t] = (1.0 if cfg.is_level == "none" else weight) * kept
    torch.testing.assert_close(weighed.is_weights.double(), torch.tensor(weights, dtype=torch.float64))


def test_reinforce_has_the_gradient_of_minus_weighed_advantage():
    cfg = CORRECTIONS["bypass_pg_token_icepop"]()
    loss = cfg.policy_loss(ClipLoss())
    assert loss == GPGLoss() and CORRECTIONS["bypass_ppo_clip"]().policy_loss(ClipLoss(clip_low=0.1)) == ClipLoss(
        clip_low=0.1
    )
    batch = of_ratios([4.0, 1.0, 0.2, 1.0], mask=[[True, True, True, False]])
    log_probs = torch.where(batch.response_mask, batch.old_log_probs, NAN).requires_grad_()
    batch = cfg.correct(batch, Metrics(SINGLE)).with_(advantages=torch.tensor([[2.0, -3.0, 5.0, NAN]]))
    batch = cfg.weigh(log_probs, batch, Metrics(SINGLE))
    token_loss, stats = loss(log_probs, batch)
    (token_loss * batch.is_weights).sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-8.0, 3.0, 0.0, 0.0]]))
    torch.testing.assert_close(stats["ppo_kl"], torch.tensor([[-math.log(4), 0, math.log(5), 0]]))


# ---- Ranks ----


def test_the_correction_does_not_depend_on_who_has_which_rows(tmp_path):
    done = prefork(2, "-m", "tests.correction_worker", str(tmp_path / "out.pt"))
    assert done.returncode == 0, done.stderr[-3000:]
    batch = random_batch(3, noise=0.5)
    for key, (tensors, numbers) in torch.load(tmp_path / "out.pt").items():
        expected, metrics = correct(CASES[key.split("/")[0]], batch)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, getattr(expected, name).float(), rtol=1e-6, atol=0)
        assert numbers == pytest.approx(metrics.reduce(), rel=1e-9, abs=1e-12)
