"""ReMax (https://arxiv.org/abs/2310.10505) on the sum of two two-digit numbers: minutes on 2 CPU cores.

    python -m recipes.prepare_arithmetic && python -m recipes.make_tiny_model
    torchrun --nproc_per_node=2 -m recipes.remax_tiny_arithmetic

What differs from grpo_tiny_arithmetic: one response to each of 256 prompts, compared with the score of a greedy
response to the same prompt, and the KL to the initial model in the reward.
"""

from lib.algorithms import KLRewardConfig, ReMaxAdvantage
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
    rollout=RolloutConfig(n=1, max_response_len=12, max_num_batched_tokens=4096, gpu_memory_utilization=0.2),
    advantage=ReMaxAdvantage(),
    kl_reward=KLRewardConfig(coef=1e-3),
    prompts_per_step=256,
    mini_batch_size=256,
    max_tokens_per_gpu=8192,
    num_steps=40,
    optim=OptimConfig(lr=5e-5, schedule="cosine", weight_decay=0.0),
    eval=EvalConfig(every=5),
    run_dir="runs/remax_tiny",
)

if __name__ == "__main__":
    main(parse_cli(config))
