"""LoRA (https://arxiv.org/abs/2106.09685) with GRPO on GSM8K and Qwen3-8B, for 1 GPU.

    python -m recipes.prepare_gsm8k --out data/gsm8k
    torchrun --nproc_per_node=1 -m recipes.lora_qwen3_8b_gsm8k
    torchrun --nproc_per_node=1 -m recipes.lora_qwen3_8b_gsm8k --model.path DIR --num-steps 5      # try it

The learning rate is ten times that of all weights. P6 of recipes/bench.py, 512 responses of 512 tokens of a model of
this shape with random weights, took 30.6 s per step on one H200, with all weights, whose moments lie on the host,
41.9 s; the trainer's peak was 45 GiB (EXPERIMENTS.md). This recipe's own step and its accuracy have not been measured:
no score is claimed.
"""

from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import LoRAConfig, ModelConfig, OptimConfig
from train_grpo import GRPOConfig, main

config = GRPOConfig(
    model=ModelConfig(path="Qwen/Qwen3-8B"),
    lora=LoRAConfig(rank=32),
    data=DataConfig(
        train_files=("data/gsm8k/train.parquet",),
        val_files=("data/gsm8k/test.parquet",),
        max_prompt_len=512,
        filter_overlong_prompts=True,
        chat_template_kwargs={"enable_thinking": False},
    ),
    rollout=RolloutConfig(n=8, max_response_len=1024),
    prompts_per_step=128,
    mini_batch_size=1024,
    optim=OptimConfig(lr=1e-5, warmup_steps=5, weight_decay=0.0),
    total_epochs=5,
    run_dir="runs/lora_qwen3_8b_gsm8k",
)

if __name__ == "__main__":
    main(parse_cli(config))
