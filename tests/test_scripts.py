"""The scripts repeat one another word for word where they share a phase."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
EXTENDED = {"Setup: everything that can be wrong with the input, before a model is loaded",
            "Setup: the engine on the empty GPU, then the models"}  # fmt: skip
"""Phases in which train_ppo.py has lines of its own between the shared ones."""
PASSED = {
    "task.resume.in_words": {"reward=task.reward"},
    "loss_denominator": {"mini_batch", "cfg.agg_mode", "scale=cfg.loss_scale"},
    "aggregate": {"cfg.agg_mode"},
    "term": {"log_probs", "entropy", "micro_batch"},
}
"""What a call passes, where a short run on a CPU shows no wrong one."""
SET_UP = {
    "Checkpointer": {"reward=task.reward"},
    "Collector": {"mask_truncated=cfg.overlong.mask_truncated"},
}
"""The same of lib/launch/setup.py."""


def phases(script):
    """{banner: lines of its phase} of a script's `train`, with the config's name taken out."""
    text = (ROOT / script).read_text()
    body = text[text.index("def train(") :].replace("GRPOConfig", "Config").replace("PPOConfig", "Config")
    parts = re.split(r"\n *# ---- (.*) ----\n", body)
    return {name: lines.rstrip().splitlines() for name, lines in zip(parts[1::2], parts[2::2], strict=True)}


GRPO, PPO = phases("train_grpo.py"), phases("train_ppo.py")


def is_longer(line, than):
    """Whether a line is the other one, or the same call with one argument more."""
    return line == than or (than.endswith(")") and line.startswith(than[:-1] + ", "))


@pytest.mark.parametrize("name", GRPO)
def test_ppo_repeats_every_phase_of_grpo(name):
    if name in EXTENDED:
        rest = iter(PPO[name])
        assert all(any(is_longer(other, line) for other in rest) for line in GRPO[name])  # in the same order
    else:
        assert PPO[name] == GRPO[name]


def test_ppo_adds_values_and_the_critics_update_in_their_places():
    order = list(PPO)
    added = [name for name in order if name not in GRPO]
    assert [name.split()[0] for name in added] == ["Values", "Critic"]
    assert order.index(added[0]) < order.index(next(name for name in order if "advantages;" in name))
    assert order.index(added[1]) + 1 == next(place for place, name in enumerate(order) if name.startswith("Policy"))
    assert [name for name in order if name in GRPO] == list(GRPO)


@pytest.mark.parametrize(
    ("script", "expected_calls"), [("train_grpo.py", PASSED), ("train_ppo.py", PASSED), ("lib/launch/setup.py", SET_UP)]
)
def test_the_script_hands_on_what_the_config_says(script, expected_calls):
    nodes = ast.walk(ast.parse((ROOT / script).read_text()))
    calls = [(ast.unparse(node.func), {*map(ast.unparse, [*node.args, *node.keywords])})
             for node in nodes if isinstance(node, ast.Call)]  # fmt: skip
    for function, expected in expected_calls.items():
        found = [passed for called, passed in calls if called == function]
        assert found and all(expected <= passed for passed in found), function


WARNS = {
    "grpo": True, "dr_grpo": True, "gdpo": True, "grpo_passk": True, "rloo": True, "opo": True, "gpg": True,
    "reinforce_plus_plus": False, "reinforce_plus_plus_baseline": True, "remax": False, "gae": False,
    "optimal_token_baseline": True,
}  # fmt: skip
"""Whether groups of equal rewards leave an advantage nothing to learn from, which a run warns of."""


@pytest.mark.parametrize("script", ["train_grpo.py", "train_ppo.py"])
def test_a_run_warns_of_equal_rewards_where_its_advantage_compares_a_prompts_responses(script):
    from lib.algorithms.advantages import ADVANTAGES
    from lib.algorithms.step_metrics import constant_reward_warning

    assert WARNS.keys() == ADVANTAGES.keys()
    nodes = ast.walk(ast.parse((ROOT / script).read_text()))
    lines = [node for node in nodes if isinstance(node, ast.If) and "constant_groups" in ast.unparse(node.test)]
    at_once, at_end = (
        compile(ast.Module([line], []), script, "exec") for line in sorted(lines, key=lambda line: line.lineno)
    )
    found = {}
    for name, advantage in ADVANTAGES.items():
        said = []
        known = {"constant_reward_warning": constant_reward_warning, "run": SimpleNamespace(say=said.append)}
        for ratios, code in (([1.0, 0.9], at_once), ([1.0], at_once), ([1.0, 0.9], at_end)):
            progress = SimpleNamespace(constant_groups=ratios)
            exec(code, {**known, "cfg": SimpleNamespace(advantage=advantage), "progress": progress})
        places = [line.partition("had equal rewards ")[2].partition(",")[0] for line in said]
        assert places in ([], ["in this step", "in 1 of 2 steps"])
        found[name] = bool(said)
    assert found == WARNS


def test_the_policys_schedule_begins_when_it_begins_to_learn():
    from lib.model.critic_config import CriticConfig
    from lib.model.optim import OptimConfig, build_optimizer, set_lr_
    from train_grpo import GRPOConfig
    from train_ppo import PPOConfig

    cfg = PPOConfig(critic=CriticConfig(warmup_steps=3), optim=OptimConfig(lr=1.0, warmup_steps=2), update_epochs=2)
    assert [cfg.policy_epochs(step) for step in (1, 3, 4)] == [0, 0, 2]
    assert GRPOConfig().policy_epochs(1) == 1
    optimizer = build_optimizer(nn.Linear(2, 2), cfg.optim)
    rates = [set_lr_(optimizer, cfg.optim, step=step - cfg.frozen_steps, num_steps=7) for step in range(1, 8)]
    assert rates == [0.5, 0.5, 0.5, 0.5, 1, 1, 1] and optimizer.param_groups[0]["lr"] == 1
