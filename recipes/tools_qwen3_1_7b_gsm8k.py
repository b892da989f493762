"""GRPO on GSM8K with Qwen3-1.7B and a calculator as its tool (DeepSeekMath, https://arxiv.org/abs/2402.03300). 2 to 8
GPUs of 80 GB.

    python -m recipes.prepare_gsm8k --out data/gsm8k
    torchrun --nproc_per_node=8 -m recipes.tools_qwen3_1_7b_gsm8k
    torchrun --nproc_per_node=1 -m recipes.tools_qwen3_1_7b_gsm8k --model.path DIR --num-steps 5      # try it

The chat template tells the model of the tool; the reward is that of the other recipes, on what the model itself wrote.
For a tool of your own: copy this file and `recipes/calculator.py`, and name it in TurnsConfig (docs/conversations.md).
It has not been run on a GPU, and the accuracy has not been measured: no score is claimed.
"""

from pathlib import Path

from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import ModelConfig, OptimConfig
from lib.turns.config import TurnsConfig
from train_grpo import GRPOConfig, main

config = GRPOConfig(
    model=ModelConfig(path="Qwen/Qwen3-1.7B"),
    data=DataConfig(
        train_files=("data/gsm8k/train.parquet",),
        val_files=("data/gsm8k/test.parquet",),
        max_prompt_len=768,  # the tool's description is part of the prompt
        filter_overlong_prompts=True,
        chat_template_kwargs={"enable_thinking": False},
    ),
    turns=TurnsConfig(
        path=str(Path(__file__).with_name("calculator.py")), name=("calculate",), max_turns=6, max_observation_len=64
    ),
    rollout=RolloutConfig(n=8, max_response_len=1024),
    prompts_per_step=128,
    mini_batch_size=1024,
    optim=OptimConfig(lr=1e-6, warmup_steps=5),
    total_epochs=5,
    run_dir="runs/tools_qwen3_1_7b_gsm8k",
)

if __name__ == "__main__":
    main(parse_cli(config))
