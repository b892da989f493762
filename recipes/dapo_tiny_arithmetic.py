"""DAPO (https://arxiv.org/abs/2503.14476), complete, on the sum of two two-digit numbers: minutes on 2 CPU cores.

    python -m recipes.prepare_arithmetic && python -m recipes.make_tiny_model
    torchrun --nproc_per_node=2 -m recipes.dapo_tiny_arithmetic

What differs from grpo_tiny_arithmetic: clip-higher, two updates a step, a penalty on the last two of twelve tokens, and
dynamic sampling. Once nearly all groups are solved, four rounds no longer find 32 with a signal: the step trains on
those there are, says so, and takes longer.
"""

from lib.algorithms import ClipLoss, GroupFilterConfig, OverlongConfig
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
    loss=ClipLoss(clip_low=0.2, clip_high=0.28, clip_dual=10.0),
    loss_agg_mode="token-mean",
    overlong=OverlongConfig(buffer_len=2, factor=1.0),
    filter_groups=GroupFilterConfig(enable=True, max_rounds=4),
    prompts_per_step=32,
    mini_batch_size=128,
    max_tokens_per_gpu=8192,
    num_steps=30,
    optim=OptimConfig(lr=5e-5, schedule="cosine", weight_decay=0.0),
    eval=EvalConfig(every=5),
    run_dir="runs/dapo_tiny",
)

if __name__ == "__main__":
    main(parse_cli(config))
