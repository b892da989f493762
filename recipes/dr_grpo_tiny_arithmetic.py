"""Dr. GRPO (https://arxiv.org/abs/2503.20783) on the sum of two two-digit numbers: minutes on 2 CPU cores.

    python -m recipes.prepare_arithmetic && python -m recipes.make_tiny_model
    torchrun --nproc_per_node=2 -m recipes.dr_grpo_tiny_arithmetic

What differs from grpo_tiny_arithmetic: advantages are not divided by the group's standard deviation, and a response's
loss is its sum over tokens by the constant 12 instead of a mean over tokens.
"""

from lib.algorithms import DrGRPOAdvantage
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
    advantage=DrGRPOAdvantage(),
    loss_agg_mode="seq-mean-token-sum-norm",
    prompts_per_step=32,
    mini_batch_size=256,
    max_tokens_per_gpu=8192,
    num_steps=30,
    optim=OptimConfig(lr=5e-5, schedule="cosine", weight_decay=0.0),
    eval=EvalConfig(every=5),
    run_dir="runs/dr_grpo_tiny",
)

if __name__ == "__main__":
    main(parse_cli(config))
