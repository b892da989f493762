"""PiSSA (https://arxiv.org/abs/2404.02948) with GRPO on the sum of two two-digit numbers: minutes on 2 CPU cores.

    python -m recipes.prepare_arithmetic && python -m recipes.make_tiny_model
    torchrun --nproc_per_node=2 -m recipes.pissa_tiny_arithmetic

recipes/lora_tiny_arithmetic.py with adapters that begin at the largest singular directions of each weight. A toy says
little: published results of PiSSA with verifiable rewards are bad (https://arxiv.org/abs/2512.23165).
"""

from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import LoRAConfig, ModelConfig, OptimConfig
from lib.rewards import RewardConfig
from lib.rollouts import EvalConfig
from train_grpo import GRPOConfig, main

config = GRPOConfig(
    model=ModelConfig(path="models/tiny-arithmetic"),
    lora=LoRAConfig(rank=8, alpha=16, init="pissa"),
    data=DataConfig(
        train_files=("data/arithmetic/train.parquet",), val_files=("data/arithmetic/val.parquet",), max_prompt_len=32
    ),
    reward=RewardConfig(num_workers=1),
    rollout=RolloutConfig(n=8, max_response_len=12, max_num_batched_tokens=4096, gpu_memory_utilization=0.2),
    prompts_per_step=32,
    mini_batch_size=256,
    max_tokens_per_gpu=8192,
    num_steps=60,
    optim=OptimConfig(lr=5e-4, schedule="cosine", weight_decay=0.0),
    eval=EvalConfig(every=10),
    run_dir="runs/pissa",
)

if __name__ == "__main__":
    main(parse_cli(config))
