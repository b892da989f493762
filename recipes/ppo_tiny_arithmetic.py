"""PPO (Schulman et al., https://arxiv.org/abs/1707.06347) on the quickstart's task: minutes on 2 CPU cores.

    python -m recipes.prepare_arithmetic && python -m recipes.make_tiny_model
    torchrun --nproc_per_node=2 -m recipes.ppo_tiny_arithmetic

Differs from grpo_tiny_arithmetic: advantages come from a critic instead of from groups (GAE, gamma and lambda 1). The
critic starts from the same model with a value head of zeros, and learns alone in the first steps.
"""

from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import CriticConfig, CriticOptimConfig, ModelConfig, OptimConfig
from lib.rewards import RewardConfig
from lib.rollouts import EvalConfig
from train_ppo import PPOConfig, main

config = PPOConfig(
    model=ModelConfig(path="models/tiny-arithmetic"),
    data=DataConfig(
        train_files=("data/arithmetic/train.parquet",), val_files=("data/arithmetic/val.parquet",), max_prompt_len=32
    ),
    reward=RewardConfig(num_workers=1),
    rollout=RolloutConfig(n=8, max_response_len=12, max_num_batched_tokens=4096, gpu_memory_utilization=0.2),
    critic=CriticConfig(optim=CriticOptimConfig(lr=1e-3, weight_decay=0.0), warmup_steps=5, update_epochs=2),
    prompts_per_step=32,
    mini_batch_size=256,
    max_tokens_per_gpu=8192,
    num_steps=60,
    optim=OptimConfig(lr=5e-5, schedule="cosine", weight_decay=0.0),
    eval=EvalConfig(every=10),
    run_dir="runs/ppo_tiny",
)

if __name__ == "__main__":
    main(parse_cli(config))
