"""ReMax on GSM8K with Qwen3-1.7B (https://arxiv.org/abs/2310.10505).

    python -m recipes.prepare_gsm8k --out data/gsm8k
    torchrun --nproc_per_node=8 -m recipes.remax_qwen3_1_7b_gsm8k

What differs from GRPO: a response is compared with the score of one greedy response to the same prompt, which is
sampled and scored along the way and never trained on. A prompt needs no group: `--rollout.n 1` works too, as in the
paper. The KL to the initial model is part of the reward. n = 4 and the KL's weight are verl's example. Meant for 8 GPUs
of 80 GB. It has not been run at full size here: no score is claimed.
"""

from lib.algorithms import KLRewardConfig, ReMaxAdvantage
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
    rollout=RolloutConfig(n=4, max_response_len=1024),
    advantage=ReMaxAdvantage(),
    kl_reward=KLRewardConfig(coef=1e-3),
    prompts_per_step=256,
    mini_batch_size=1024,
    optim=OptimConfig(lr=1e-6, warmup_steps=5),
    total_epochs=10,
    run_dir="runs/remax_qwen3_1_7b_gsm8k",
)

if __name__ == "__main__":
    main(parse_cli(config))
