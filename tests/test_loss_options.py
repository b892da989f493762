"""The losses' names, defaults, aggregation and knobs, as the command line offers them."""

import math
from typing import get_args

import pytest

from lib.algorithms.aggregation import LossAggMode
from lib.algorithms.losses import (
    LOSSES,
    CISPOLoss,
    ClipCovLoss,
    DPPOKLLoss,
    DPPOTVLoss,
    DROLoss,
    GeoMeanLoss,
    GSPOLoss,
    KLCovLoss,
    SAPOLoss,
)
from lib.config.flags import parse_args
from lib.errors import UserError
from train_grpo import GRPOConfig


def test_the_table_offers_verls_names_with_their_defaults():
    by_ratio = ["vanilla", "gspo", "cispo", "sapo", "geo_mean", "clip_cov", "kl_cov"]
    assert list(LOSSES) == [*by_ratio, "gpg", "dppo_tv", "dppo_kl", "dro"]
    assert LOSSES["gspo"]() == GSPOLoss(clip_low=3e-4, clip_high=4e-4)
    assert LOSSES["cispo"]() == CISPOLoss(clip_low=1.0, clip_high=0.2)
    assert LOSSES["sapo"]() == SAPOLoss(tau_pos=1.0, tau_neg=1.05)
    assert LOSSES["geo_mean"]() == GeoMeanLoss(clip_low=0.4, clip_high=0.4)
    cov = ClipCovLoss(clip_low=0.2, clip_high=0.2, clip_cov_ratio=2e-4, clip_cov_lb=1.0, clip_cov_ub=5.0)
    assert LOSSES["clip_cov"]() == cov
    assert LOSSES["kl_cov"]() == KLCovLoss(kl_cov_ratio=2e-4, ppo_kl_coef=0.1)
    assert LOSSES["dppo_tv"]() == DPPOTVLoss(clip_low=0.15, clip_high=0.15, max_ratio=20.0)
    assert LOSSES["dppo_kl"]() == DPPOKLLoss(clip_low=0.05, clip_high=0.05, max_ratio=20.0)
    assert LOSSES["dro"]() == DROLoss(dro_beta=0.1)
    assert {name for name, kind in LOSSES.items() if not kind.has_ratio} == {"gpg"}


def test_the_aggregation_is_the_losss_own_unless_it_is_given():
    own = {name: parse_args(GRPOConfig(), ["--loss", name]).agg_mode for name in LOSSES}
    by_sequence = {name for name, mode in own.items() if mode == "seq-mean-token-mean"}
    assert by_sequence == {"gspo", "sapo", "geo_mean"}
    assert {own[name] for name in set(LOSSES) - by_sequence} == {"token-mean"}
    for mode in get_args(LossAggMode):
        assert parse_args(GRPOConfig(), ["--loss", "gspo", "--loss-agg-mode", mode]).agg_mode == mode
    assert {name for name, kind in LOSSES.items() if kind.needs_old_log_probs} == {"clip_cov", "kl_cov"}


@pytest.mark.parametrize(
    ("name", "field", "value", "rule"),
    [
        ("gspo", "clip_low", 1.0, "above 0 and below 1"),
        ("gspo", "clip_high", 0.0, "a finite number above 0"),
        ("cispo", "clip_low", 0.0, "a finite number above 0"),
        ("cispo", "clip_high", math.inf, "a finite number above 0"),
        ("sapo", "tau_pos", 0.0, "a finite number above 0"),
        ("sapo", "tau_neg", math.nan, "a finite number above 0"),
        ("geo_mean", "clip_low", -0.4, "a finite number above 0"),
        ("geo_mean", "clip_high", 0.0, "a finite number above 0"),
        ("clip_cov", "clip_cov_ratio", 1.0, "above 0 and below 1"),
        ("clip_cov", "clip_cov_lb", math.inf, "a finite number"),
        ("clip_cov", "clip_cov_ub", 1.0, "a finite number above 1.0"),
        ("kl_cov", "kl_cov_ratio", 0.0, "above 0 and below 1"),
        ("kl_cov", "ppo_kl_coef", 0.0, "a finite number above 0"),
        ("dppo_tv", "clip_low", 0.0, "a finite number above 0"),
        ("dppo_kl", "clip_high", math.nan, "a finite number above 0"),
        ("dppo_kl", "max_ratio", 1.0, "a finite number above 1"),
        ("dro", "dro_beta", 0.0, "a finite number above 0"),
    ],
)
def test_a_knob_out_of_range_is_refused_with_its_flag_value_and_rule(name, field, value, rule):
    with pytest.raises(UserError) as raised:
        LOSSES[name](**{field: value})
    parts = str(raised.value).split("; ")
    assert len(parts) == 4
    assert f"--loss.{field.replace('_', '-')}" in parts[0]
    assert f"found {value}" in parts[2] and parts[2].endswith(rule)


def test_the_constant_of_a_norm_is_the_longest_response_unless_another_is_given():
    assert parse_args(GRPOConfig(), ["--rollout.max-response-len", "300"]).loss_scale == 300
    assert (
        parse_args(
            GRPOConfig(), ["--loss-agg-mode", "seq-mean-token-sum-norm", "--loss-scale-factor", "120.5"]
        ).loss_scale
        == 120.5
    )
