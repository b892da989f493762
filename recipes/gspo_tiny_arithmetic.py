"""GSPO (https://arxiv.org/abs/2507.18071) on the sum of two two-digit numbers: minutes on 2 CPU cores.

    python -m recipes.prepare_arithmetic && python -m recipes.make_tiny_model
    torchrun --nproc_per_node=2 -m recipes.gspo_tiny_arithmetic

What differs from grpo_tiny_arithmetic: the ratio and its clip are of whole responses, and a step has four updates,
without which every ratio would be exactly 1. The paper's bounds of 3e-4 and 4e-4 are for long responses, whose mean
ratio hardly moves; with ten tokens they stop about half of the responses after the first update.
"""

from lib.algorithms import GSPOLoss
from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import ModelConfig, OptimConfig
from lib.rewards import RewardConfig
from lib.rollouts import EvalConfig
from train_grpo import GRPOConfig, main

config = GRPOConfig(
    model=ModelConfig(path="models/tiny-arithmetic"),
    data=DataConfig(
        train_files=("data/arithmetic/train.parquet",), val_files=("data/arithmetic/val.parquet",), max_prompt_len=32
    ),
    reward=RewardConfig(num_workers=1),
    rollout=RolloutConfig(n=8, max_response_len=12, max_num_batched_tokens=4096, gpu_memory_utilization=0.2),
    loss=GSPOLoss(clip_low=3e-4, clip_high=4e-4),
    prompts_per_step=32,
    mini_batch_size=64,
    max_tokens_per_gpu=8192,
    num_steps=40,
    optim=OptimConfig(lr=5e-5, schedule="cosine", weight_decay=0.0),
    eval=EvalConfig(every=5),
    run_dir="runs/gspo_tiny",
)

if __name__ == "__main__":
    main(parse_cli(config))
