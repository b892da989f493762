"""Claims about the scripts that repeat a run of ours with another system: same settings, told when they cannot."""

import dataclasses
import importlib
import json
import sys
import time

import pytest

from lib.config.as_json import to_json
from lib.config.flags import parse_args
from lib.errors import UserError
from lib.launch.train_config import TrainConfig
from lib.rewards.last_number import DIFFICULTIES, PREFIX
from recipes import dr_grpo_smollm2_words, grpo_smollm2_words, prepare_arithmetic_words
from recipes.peers import smollm2_runs
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


@pytest.mark.parametrize("what", ["search", "seeds", "siblings", "beside"])
def test_every_command_of_the_comparison_is_one_that_its_recipe_takes(what):
    names, taken = set(), set()
    for lot in smollm2_runs.commands(smollm2_runs.RunsConfig(what=what, num_steps=7, out="runs/x")):
        for name, command in lot:
            module = importlib.import_module(next(word for word in command if word.startswith("recipes.")))
            words = command[command.index(module.__name__) + 1 :]
            default = getattr(module, "config", CFG)
            parsed = parse_args(default, words)
            assert (parsed.run_dir if isinstance(parsed, TrainConfig) else parsed.out) == f"runs/x/{name}"
            assert parsed.num_steps in (7, None)
            assert name not in names
            names.add(name)
            taken.add(str(to_json(parsed)))
    assert len(taken) == len(names) > 1  # no two are the same run


def test_the_table_weighs_difficulties_as_the_mixture_does(tmp_path):
    assert {name: share for name, share in smollm2_runs.SHARES.items() if share} == prepare_arithmetic_words.SHARES
    accuracy = dict(zip(DIFFICULTIES, (0.5, 0.1, 0.2, 0.4, 0.9), strict=True))
    row = {f"val-core/{PREFIX}{name}/acc/mean@4": value for name, value in accuracy.items()}
    row |= {f"val-core/{PREFIX}{name}/acc/greedy": 1.0 for name in accuracy}
    steps = [{"step": 1, "timing_s/step": 2.0, "training/rollout_log_probs_diff/mean": 0.01}, {"step": 2, **row}]
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in steps))
    line = smollm2_runs.table(tmp_path).splitlines()[-1].split()
    mixture = 0.3 * 0.5 + 0.3 * 0.1 + 0.2 * 0.2 + 0.2 * 0.4
    assert line == [
        "one",
        "2",
        f"{mixture:.3f}",
        "1.000",
        "0.500",
        "0.100",
        "0.200",
        "0.400",
        "0.900",
        "2.00",
        "0.0100",
    ]


def test_a_run_starts_when_the_one_before_has_metrics_and_what_is_not_finished_in_time_is_stopped(tmp_path):
    (tmp_path / "a").mkdir()
    sleeping = f"import time; time.sleep(1); open({str(tmp_path / 'a/metrics.jsonl')!r}, 'w'); time.sleep(600)"
    looking = f"import os; print(os.path.exists({str(tmp_path / 'a/metrics.jsonl')!r}))"
    lot = [("a", [sys.executable, "-c", sleeping]), ("b", [sys.executable, "-c", looking])]
    start = time.monotonic()
    smollm2_runs.run_all(lot, tmp_path, start + 6)
    assert (tmp_path / "b.log").read_text() == "True\n" and time.monotonic() - start < 60
