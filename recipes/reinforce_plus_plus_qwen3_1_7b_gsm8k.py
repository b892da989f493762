"""REINFORCE++ on GSM8K with Qwen3-1.7B (https://arxiv.org/abs/2501.03262).

    python -m recipes.prepare_gsm8k --out data/gsm8k
    torchrun --nproc_per_node=8 -m recipes.reinforce_plus_plus_qwen3_1_7b_gsm8k

What differs from GRPO: no groups. One response to each of many prompts; the rewards to come are whitened over all
tokens of the step, on all ranks, which takes the place of the group's mean. The KL to the initial model is taken off
every token's reward, so it too is credited from its token backwards. The KL's weight is verl's default. Meant for 8
GPUs of 80 GB. It has not been run at full size here: no score is claimed.
"""

from lib.algorithms import KLRewardConfig, ReinforcePlusPlusAdvantage
from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import ModelConfig, OptimConfig
from train_grpo import GRPOConfig, main

config = GRPOConfig(
    model=ModelConfig(path="Qwen/Qwen3-1.7B"),
    data=DataConfig(
        train_files=("data/gsm8k/train.parquet",),
        val_files=("data/gsm8k/test.parquet",),
        max_prompt_len=512,
        filter_overlong_prompts=True,
        chat_template_kwargs={"enable_thinking": False},
    ),
    rollout=RolloutConfig(n=1, max_response_len=1024),
    advantage=ReinforcePlusPlusAdvantage(),
    kl_reward=KLRewardConfig(coef=1e-3),
    prompts_per_step=1024,
    mini_batch_size=256,
    optim=OptimConfig(lr=1e-6, warmup_steps=5),
    total_epochs=20,
    run_dir="runs/reinforce_plus_plus_qwen3_1_7b_gsm8k",
)

if __name__ == "__main__":
    main(parse_cli(config))
