"""A command of verl's with tools and an interaction, and rows as verl's preparations make them, to a trained step: what
is printed for the command is run, with a real engine and real workers."""

import json
import subprocess
import sys

import pytest
import yaml

from lib.data.parquet import write_rows
from lib.tracking.run_folder import read_metrics
from tests import test_interactions, test_tools
from tests.ranks import LIMIT_S, ROOT, torchrun
from tests.test_interactions import interaction_row
from tests.test_kinds import GSM8K, gsm8k_row
from tests.test_verl_command import ROLLOUT, converted

COMMAND = f"""algorithm.adv_estimator=grpo data.train_files=train.parquet data.val_files=test.parquet
data.train_batch_size=8 data.max_prompt_length=256 data.max_response_length=400 data.return_raw_chat=True
actor_rollout_ref.model.path=model actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.optim.lr=1e-5
{ROLLOUT}n=4 {ROLLOUT}name=vllm {ROLLOUT}mode=async {ROLLOUT}tensor_model_parallel_size=1
{ROLLOUT}gpu_memory_utilization=0.2 {ROLLOUT}multi_turn.enable=True {ROLLOUT}multi_turn.max_assistant_turns=3
{ROLLOUT}multi_turn.tool_config_path=tools.yaml {ROLLOUT}multi_turn.interaction_config_path=interaction.yaml
{ROLLOUT}agent.num_workers=1 trainer.total_training_steps=1 trainer.n_gpus_per_node=2 trainer.test_freq=1
custom_reward_function.path=reward.py custom_reward_function.name=compute_score
trainer.val_before_train=False trainer.save_freq=-1 trainer.default_local_dir=run trainer.logger=[console]"""


REWARD = """from lib.rewards import gsm8k


def compute_score(data_source, solution_str, ground_truth, extra_info):
    given = extra_info["tool_rewards"], extra_info["turn_scores"]
    score = gsm8k.compute_score(data_source, solution_str, ground_truth, extra_info)
    counted = {"num_turns": extra_info["num_turns"]}
    return score | counted | {"of_tools": len(given[0]), "of_turns": len(given[1])}
"""


def rows_of_verl(start):
    """With an interaction; and as gsm8k_multiturn_w_tool.py makes them, without agent_name."""
    with_tool = [gsm8k_row(i) for i in range(start, start + 8)]
    return [interaction_row(i) for i in range(start, start + 8)] + [
        {name: it for name, it in row.items() if name != "agent_name"} for row in with_tool
    ]


def demonstration(row, *, calls):
    """A call, its answer and a number; or a number at once, which is wrong."""
    answer = row["reward_model"]["ground_truth"]
    call = json.dumps({"name": "calc_gsm8k_reward", "arguments": {"answer": answer}})
    said = [f"<tool_call>{call}</tool_call>", f"#### {answer}"] if calls else ["#### 99"]
    turns = [{"role": "assistant", "content": it, "teaches_choice": True} for it in said]
    told = {"role": "tool", "content": f"Current parsed answer='{answer}' reward=1.0"}
    messages = [*row["prompt"], turns[0], *([told, turns[1]] if calls else [])]
    return json.dumps({"messages": messages, "tools": [GSM8K]}) + "\n"


@pytest.fixture
def folder(tmp_path):
    """Rows, classes and their YAML files of verl's shape, and a model that calls the tool or guesses."""
    write_rows(tmp_path / "train.parquet", rows_of_verl(10))
    write_rows(tmp_path / "test.parquet", rows_of_verl(20))
    (tmp_path / "gsm8k_tool.py").write_text(test_tools.FILE)
    (tmp_path / "gsm8k_interaction.py").write_text(test_interactions.FILE)
    (tmp_path / "reward.py").write_text(REWARD)
    tool = {"class_name": "gsm8k_tool.Gsm8kTool", "config": {"type": "native"}, "tool_schema": GSM8K}
    user = {"name": "gsm8k", "class_name": "gsm8k_interaction.Gsm8kInteraction", "config": {}}
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump({"tools": [tool]}))
    (tmp_path / "interaction.yaml").write_text(yaml.safe_dump({"interaction": [user]}))
    lines = [demonstration(row, calls=calls) for row in rows_of_verl(30) for calls in (True, False)]
    (tmp_path / "warm_up.jsonl").write_text("".join(lines))
    words = ("--demonstrations", "warm_up.jsonl", "--out", "model", "--batch-size", "8", "--num-steps", "80")
    make = [sys.executable, "-m", "recipes.make_tiny_model", *words]
    subprocess.run(make, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True, timeout=LIMIT_S)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    return tmp_path


@pytest.mark.slow
def test_a_verl_command_trains_a_step_on_verls_rows(folder, monkeypatch):
    monkeypatch.chdir(folder)
    lines, conversion = converted(COMMAND.split())
    assert not conversion.refused, lines
    launcher = "torchrun() { printf '%s\\0' \"$@\"; }"
    ran = subprocess.run(["bash", "-c", "\n".join([launcher, *lines])], check=True, capture_output=True, text=True)
    ranks, script, *words = ran.stdout.split("\0")[:-1]
    assert ranks == "--nproc_per_node=2" and (folder / "verl_turns.py").exists()
    done = torchrun(2, str(ROOT / script), *words, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "turns: tools, gsm8k in verl_turns.py (sha256 " in done.stdout
    assert "; tools calc_gsm8k_reward, called as hermes" in done.stdout
    [step] = [row for row in read_metrics(folder / "run") if "turns/per_episode" in row]
    assert step["turns/excluded"] == 0 and step["training/rollout_log_probs_diff/max"] < 2e-5
    assert step["turns/calls_per_episode"] > 0 and "turns/tool_reward" in step and "turns/turn_score" in step
    assert 1 < step["turns/per_episode"] <= 3
    assert step["val-aux/openai/gsm8k/num_turns/mean@1"] == pytest.approx(step["val-aux/num_turns/mean"])
    told = {name.split("/")[-2]: value for name, value in step.items() if name.startswith("val-aux") and "/of_" in name}
    assert told.keys() == {"of_tools", "of_turns"} and min(told.values()) > 0
    samples = (folder / "run" / "samples" / "step_1.jsonl").read_text()
    rows = [json.loads(line) for line in samples.splitlines()]
    told = [row["response"] for row in rows if "<tool_response>Current parsed answer" in row["response"]]
    answered = [row["response"] for row in rows if "Your response is incorrect!<|im_end|>" in row["response"]]
    assert len(rows) == 16 and told and answered
