"""RLOO (https://arxiv.org/abs/2402.14740) on the sum of two two-digit numbers: minutes on 2 CPU cores.

    python -m recipes.prepare_arithmetic && python -m recipes.make_tiny_model
    torchrun --nproc_per_node=2 -m recipes.rloo_tiny_arithmetic

What differs from grpo_tiny_arithmetic: a response is compared with the mean of the three others, nothing is divided by
a standard deviation, and the KL to the initial model is part of the reward.
"""

from lib.algorithms import KLRewardConfig, RLOOAdvantage
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
    rollout=RolloutConfig(n=4, max_response_len=12, max_num_batched_tokens=4096, gpu_memory_utilization=0.2),
    advantage=RLOOAdvantage(),
    kl_reward=KLRewardConfig(coef=1e-3),
    prompts_per_step=64,
    mini_batch_size=256,
    max_tokens_per_gpu=8192,
    num_steps=30,
    optim=OptimConfig(lr=5e-5, schedule="cosine", weight_decay=0.0),
    eval=EvalConfig(every=5),
    run_dir="runs/rloo_tiny",
)

if __name__ == "__main__":
    main(parse_cli(config))
