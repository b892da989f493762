"""LoRA (https://arxiv.org/abs/2106.09685) with GRPO on the sum of two two-digit numbers: minutes on 2 CPU cores.

    python -m recipes.prepare_arithmetic && python -m recipes.make_tiny_model
    torchrun --nproc_per_node=2 -m recipes.lora_tiny_arithmetic

The quickstart with adapters: a twentieth of its parameters learn, at ten times its learning rate, which adapters need.
`python merge.py --local-dir runs/lora/global_step_60/actor --target-dir out` writes the merged model, with --adapter
the adapter alone.
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
    lora=LoRAConfig(rank=8, alpha=16),
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
    run_dir="runs/lora",
)

if __name__ == "__main__":
    main(parse_cli(config))
