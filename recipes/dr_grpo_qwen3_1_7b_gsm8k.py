"""Dr. GRPO on GSM8K with Qwen3-1.7B ("Understanding R1-Zero-Like Training", https://arxiv.org/abs/2503.20783).

    python -m recipes.prepare_gsm8k --out data/gsm8k
    torchrun --nproc_per_node=8 -m recipes.dr_grpo_qwen3_1_7b_gsm8k

What differs from GRPO: the advantage is the reward less the group's mean, not divided by the group's standard
deviation, so that prompts which are nearly always or nearly never solved weigh no more than others. The loss sums over
the tokens of a response and divides by a constant, the longest response allowed, instead of by its own length, so that
long wrong answers cost as much per token as short ones. No KL. Meant for 8 GPUs of 80 GB. It has not been run at full
size here: no score is claimed.
"""

from lib.algorithms import DrGRPOAdvantage
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
    rollout=RolloutConfig(n=8, max_response_len=1024),
    advantage=DrGRPOAdvantage(),
    loss_agg_mode="seq-mean-token-sum-norm",
    prompts_per_step=128,
    mini_batch_size=1024,
    optim=OptimConfig(lr=1e-6, warmup_steps=5),
    total_epochs=5,
    run_dir="runs/dr_grpo_qwen3_1_7b_gsm8k",
)

if __name__ == "__main__":
    main(parse_cli(config))
