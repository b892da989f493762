"""Claims about the scripts that repeat a run of ours with another system: same settings, told when they cannot."""

import dataclasses

import pytest

from lib.config.as_json import to_json
from lib.errors import UserError
from recipes import dr_grpo_smollm2_words, grpo_smollm2_words
from recipes.peers.trl_smollm2_words import PeerConfig, reward, settings_of

CFG = PeerConfig(like="ours", out="theirs")


def test_trl_is_told_what_our_run_does():
    config = grpo_smollm2_words.config
    words = settings_of(to_json(config), CFG)
    responses = words["per_device_train_batch_size"] * words["gradient_accumulation_steps"]
    assert responses == config.mini_batch_size == config.prompts_per_step * words["num_generations"]
    assert words["vllm_max_model_length"] == config.data.max_prompt_len + words["max_completion_length"]
    assert (words["max_steps"], words["seed"], words["learning_rate"]) == (config.num_steps, 0, config.optim.lr)
    assert config.agg_mode == "token-mean" and config.optim.schedule == "constant" and config.optim.warmup_steps == 0
    shorter = settings_of(to_json(config), dataclasses.replace(CFG, num_steps=7, seed=3, micro_batch_size=64))
    assert (shorter["max_steps"], shorter["seed"], shorter["gradient_accumulation_steps"]) == (7, 3, 8)


def test_trl_knows_every_setting():
    trl = pytest.importorskip("trl", reason="trl is not installed: recipes/peers/trl_smollm2_words.py needs 1.16.0")
    known = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert settings_of(to_json(grpo_smollm2_words.config), CFG).keys() <= known


def test_another_algorithm_or_order_of_prompts_is_refused():
    with pytest.raises(UserError, match="a run that this script does not repeat"):
        settings_of(to_json(dr_grpo_smollm2_words.config), CFG)
    ours = to_json(grpo_smollm2_words.config)
    with pytest.raises(UserError, match="or a curriculum"):
        settings_of(ours | {"data": ours["data"] | {"curriculum": True}}, CFG)


def test_our_grader_is_trls():
    assert reward(["3 + 4 = 7", "7 is 3 + 4", ""], ["7"] * 3, prompts=[], trainer_state=None) == [1.0, 0.0, 0.0]
