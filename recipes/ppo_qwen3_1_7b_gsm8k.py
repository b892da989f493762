"""PPO on GSM8K with Qwen3-1.7B (Schulman et al., https://arxiv.org/abs/1707.06347). 4 to 8 GPUs of 80 GB.

    python -m recipes.prepare_gsm8k --out data/gsm8k
    torchrun --nproc_per_node=8 -m recipes.ppo_qwen3_1_7b_gsm8k

Differs from the GRPO recipe: one response to each of more prompts, and advantages from a critic of the same size, which
starts from the same weights and learns alone in the first ten steps. The accuracy has not been measured yet: no score
is claimed.
"""

from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import CriticConfig, ModelConfig, OptimConfig
from train_ppo import PPOConfig, main

config = PPOConfig(
    model=ModelConfig(path="Qwen/Qwen3-1.7B"),
    data=DataConfig(
        train_files=("data/gsm8k/train.parquet",),
        val_files=("data/gsm8k/test.parquet",),
        max_prompt_len=512,
        filter_overlong_prompts=True,
        chat_template_kwargs={"enable_thinking": False},
    ),
    rollout=RolloutConfig(n=1, max_response_len=1024),
    critic=CriticConfig(warmup_steps=10),
    prompts_per_step=1024,
    mini_batch_size=256,
    optim=OptimConfig(lr=1e-6, warmup_steps=5),
    total_epochs=15,
    run_dir="runs/ppo_qwen3_1_7b_gsm8k",
)

if __name__ == "__main__":
    main(parse_cli(config))
