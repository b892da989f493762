"""The correction's options: verl's presets, the command line, what contradicts itself, and a run told in words."""

import math

import pytest

from lib.algorithms.correction import CORRECTIONS, AutoCorrection, Correction
from lib.config.flags import parse_args
from lib.engine.rollout_config import RolloutConfig
from lib.errors import UserError
from tests.test_correction import BYPASS, DECOUPLED, SINGLE_OPTIONS
from train_grpo import GRPOConfig

NAN = math.nan


def test_the_presets_are_verls_by_name_and_value():
    geo, k3 = {"seq_mean_k1": [0.999, 1.001]}, {"seq_mean_k3": 0.01}
    pg = {"bypass": True, "loss_type": "reinforce"}
    icepop = {"is_level": "token", "icepop_low": 0.5, "is_threshold": 5.0}
    token, sequence = {"is_level": "token"}, {"is_level": "sequence"}
    expected = {
        "none": {}, "disabled": {}, "decoupled_token_is": token, "decoupled_seq_is": sequence,
        "decoupled_token_icepop": icepop,
        "decoupled_seq_is_rs": {**sequence, "reject": {"seq_sum_k1": [0.5, 2.0]}},
        "decoupled_geo_rs": {"reject": geo}, "decoupled_geo_rs_seq_tis": {**sequence, "reject": geo},
        "decoupled_geo_rs_token_tis": {**token, "reject": geo}, "decoupled_k3_rs": {"reject": k3},
        "decoupled_k3_rs_seq_tis": {**sequence, "reject": k3}, "decoupled_k3_rs_token_tis": {**token, "reject": k3},
        "bypass_ppo_clip": {"bypass": True}, "bypass_ppo_clip_geo_rs": {"bypass": True, "reject": geo},
        "bypass_ppo_clip_k3_rs": {"bypass": True, "reject": k3}, "bypass_pg_is": {**sequence, **pg},
        "bypass_pg_token_icepop": {**icepop, **pg}, "bypass_pg_geo_rs": {"reject": geo, **pg},
        "bypass_pg_geo_rs_seq_tis": {**sequence, "reject": geo, **pg},
        "bypass_pg_geo_rs_token_tis": {**token, "reject": geo, **pg},
    }  # fmt: skip
    found = {name: make() for name, make in CORRECTIONS.items() if name != "auto"}
    assert found == {name: Correction(**options) for name, options in expected.items()}
    assert CORRECTIONS["auto"]().is_level == "token" and CORRECTIONS["auto"]().is_threshold == 2.0


def test_the_old_log_prob_pass_is_needed_where_numbers_over_all_rows_are():
    needing = {name for name, cfg in (DECOUPLED | SINGLE_OPTIONS | BYPASS).items() if cfg.needs_old_log_probs}
    with_rejection = {name for name in DECOUPLED if "_rs" in name}
    assert needing == set(SINGLE_OPTIONS) - {"sequence icepop"} | with_rejection


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"is_level": "token", "is_threshold": 0.5}, ("--correction.is-threshold", "0.5", "at least 1")),
        ({"is_level": "token", "is_threshold": NAN}, ("--correction.is-threshold", "nan")),
        ({"is_level": "token", "icepop_low": 1.5}, ("--correction.icepop-low", "1.5", "0 to 1")),
        ({"icepop_low": 0.5}, ("icepop-low", "no weights", "is-level token")),
        ({"batch_normalize": True}, ("batch-normalize", "no weights")),
        ({"loss_type": "reinforce"}, ("loss-type reinforce", "bypass True")),
        ({"is_level": "token", "bypass": True}, ("is-level token", "twice", "loss-type reinforce")),
        ({"is_level": "token", "bypass": True, "loss_type": "reinforce", "batch_normalize": True}, ("leave one",)),
        ({"reject": {"geometric": 2.0}}, ("geometric", "seq_mean_k1")),
        ({"reject": {"seq_max_k1": 2.0}}, ("seq_max_k1",)),
        ({"reject": {"token_k1": [1.1, 2.0]}}, ("token_k1", "[1.1, 2.0]", "around 1")),
        ({"reject": {"token_k1": [0.5, 0.9]}}, ("around 1",)),
        ({"reject": {"token_k1": 0.5}}, ("0.5", "around 1")),
        ({"reject": {"token_k1": [0.0, 2.0]}}, ("around 1",)),
        ({"reject": {"token_k1": []}}, ("around 1",)),
        ({"reject": {"token_k3": [0.1, 0.2]}}, ("token_k3", "one number above 0")),
        ({"reject": {"token_k3": 0.0}}, ("one number above 0",)),
        ({"reject": {"seq_sum_k2": NAN}}, ("nan", "one number above 0")),
        ({"reject": {"seq_sum_k2": "0.1"}}, ("0.1", "one number above 0")),
        ({"reject": {"seq_sum_k2": True}}, ("True", "one number above 0")),
        ({"reject": {"seq_sum_k1": 10**400}}, ("around 1",)),
    ],
)
def test_contradictory_options_are_refused_with_a_remedy(options, parts):
    with pytest.raises(UserError) as caught:
        Correction(**options)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_preset_and_single_options_from_the_command_line():
    def parse(*words):
        return parse_args(
            GRPOConfig(), ["--model.path", "m", "--data.train-files", "a", "--data.val-files", "b", *words]
        )

    assert parse().correction == AutoCorrection()
    geo = parse("--correction", "decoupled_geo_rs_token_tis", "--correction.is-threshold", "3").correction
    assert geo == Correction(is_level="token", is_threshold=3.0, reject={"seq_mean_k1": [0.999, 1.001]})
    given_bounds = parse("--correction", "none", "--correction.reject", '{"token_k3": 0.5, "seq_sum_k1": [0.5, 4]}')
    assert given_bounds.correction == Correction(reject={"token_k3": 0.5, "seq_sum_k1": [0.5, 4]})
    for words in (("--correction", "decoupled_token_is"), ("--correction.is-threshold", "3"), ("--correction.bypass",)):
        with pytest.raises(UserError):
            parse(*words, "--rollout.log-probs", "False", "--correction.is-level", "token")
    off = parse("--rollout.log-probs", "False")
    assert "--rollout.log-probs False" in off.correction.in_words(log_probs=off.rollout.log_probs)
    assert parse("--rollout.log-probs", "False", "--correction", "none").correction == Correction()


def test_a_recipes_preset_is_replaced_by_the_one_that_the_command_line_names():
    config = GRPOConfig(correction=Correction(is_level="sequence", is_threshold=9.0))
    words = ["--model.path", "m", "--data.train-files", "a", "--data.val-files", "b"]
    assert parse_args(config, words).correction.is_threshold == 9.0
    assert parse_args(config, [*words, "--correction", "decoupled_seq_is"]).correction.is_threshold == 2.0


def test_a_correction_is_told_in_words():
    for name, cfg in (DECOUPLED | SINGLE_OPTIONS | BYPASS).items():
        words = cfg.in_words(log_probs=True)
        assert ("REINFORCE" in words) == ("_pg_" in name)
        assert all(statistic in words for statistic in cfg.reject)
        assert ("importance weights" in words) == (cfg.is_level != "none")
    assert "none" in Correction().in_words(log_probs=True)


def test_an_explicit_correction_without_the_engines_log_probs_is_an_error():
    with pytest.raises(UserError, match="leave it out, or give --correction none"):
        GRPOConfig(correction=CORRECTIONS["decoupled_token_is"](), rollout=RolloutConfig(log_probs=False))
