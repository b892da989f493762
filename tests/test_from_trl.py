"""docs/from_trl.md: the lines that it shows for TRL's example of tools train, word for word."""

import json
import re
import shlex

import pytest
from transformers.utils import get_json_schema

from lib.tracking.run_folder import read_metrics
from tests.ranks import ROOT, torchrun
from tests.tool_caller import make_caller

PAGE = (ROOT / "docs/from_trl.md").read_text()
QUESTION = "What is 3 times 4?"
REWARD = (
    "def reward(data_source, solution_str, ground_truth, extra_info):\n    return float(extra_info['tool_calls'])\n"
)
SMALL = (
    "--data.max-prompt-len", "1024", "--rollout.max-response-len", "128", "--rollout.n", "4", "--prompts-per-step", "2",
    "--mini-batch-size", "8", "--num-steps", "1", "--rollout.gpu-memory-utilization", "0.1",
    "--rollout.max-num-batched-tokens", "4096",
)  # fmt: skip


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_pages_lines_train_a_step_with_trls_tool(tmp_path):
    (tools,), (command,) = blocks("python"), blocks("sh")
    (tmp_path / "tools.py").write_text(tools)
    (tmp_path / "reward.py").write_text(REWARD)
    asked = [{"role": "user", "content": QUESTION}]
    rows = [{"prompt": asked, "ground_truth": "12", "data_source": "trl", "extra_info": {"index": i}} for i in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {}
    exec(tools, names)
    schema = get_json_schema(names["multiply"])
    model = make_caller(tmp_path / "model", QUESTION, schema, {"a": 3, "b": 4}, "12", template={})
    torch, ranks, script, *words = shlex.split(command.replace("\\\n", " "))
    assert (torch, ranks, script) == ("torchrun", "--nproc_per_node=1", "train_grpo.py")
    files = {"Qwen/Qwen3-1.7B": model, **{it: tmp_path / it for it in ("train.jsonl", "reward.py", "tools.py")}}
    words = [str(files.get(word, word)) for word in words]
    done = torchrun(1, script, *words, *SMALL, "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (step,) = [row for row in read_metrics(tmp_path / "run") if row["step"] == 1]
    assert step["turns/calls_per_episode"] > 0.5 and step["turns/tool_errors"] == 0
    assert "tool: 12" in done.stdout
