"""GRPO (https://arxiv.org/abs/2402.03300) on products that a tiny model cannot do and its tool can: minutes on 2 CPU
cores.

    python -m recipes.prepare_turns --task calculator --out data/tiny_calculator
    python -m recipes.make_tiny_model --demonstrations data/tiny_calculator/warm_up.jsonl \
        --out models/tiny-calculator --batch-size 32 --num-steps 500
    torchrun --nproc_per_node=2 -m recipes.tools_tiny_calculator

The model can call `calc`, but prefers to estimate, which is right for one problem in ten: at temperature 1 it starts
at an accuracy of about 0.25. The reward alone teaches it to call. The control, a tool that answers anything, teaches
it not to: --turns.name garbage (EXPERIMENTS.md).
"""

from pathlib import Path

from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import ModelConfig, OptimConfig
from lib.rewards import RewardConfig
from lib.rollouts import EvalConfig
from lib.turns import TurnsConfig
from train_grpo import GRPOConfig, main

HERE = str(Path(__file__).with_name("tiny_environments.py"))
config = GRPOConfig(
    model=ModelConfig(path="models/tiny-calculator"),
    data=DataConfig(
        train_files=("data/tiny_calculator/train.parquet",),
        val_files=("data/tiny_calculator/val.parquet",),
        max_prompt_len=32,
    ),
    turns=TurnsConfig(path=HERE, name=("calc",), max_turns=3, max_observation_len=16, join="step", num_workers=1),
    reward=RewardConfig(path=HERE, name="score_product", num_workers=1),
    rollout=RolloutConfig(n=8, max_response_len=96, max_num_batched_tokens=4096, gpu_memory_utilization=0.2),
    prompts_per_step=32,
    mini_batch_size=256,
    max_tokens_per_gpu=8192,
    num_steps=40,
    optim=OptimConfig(lr=2e-4, schedule="cosine", weight_decay=0.0),
    eval=EvalConfig(every=10, temperature=1.0),
    run_dir="runs/tiny_calculator",
)

if __name__ == "__main__":
    main(parse_cli(config))
