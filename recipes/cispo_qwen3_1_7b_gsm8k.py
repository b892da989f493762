"""CISPO on GSM8K with Qwen3-1.7B ("MiniMax-M1", https://arxiv.org/abs/2506.13585).

    python -m recipes.prepare_gsm8k --out data/gsm8k
    torchrun --nproc_per_node=8 -m recipes.cispo_qwen3_1_7b_gsm8k

What differs from GRPO: the clip bounds the weight of a token's log-prob instead of switching the token off, so every
token of every response goes on teaching, also the rare ones that a first update has moved far. There is no lower bound,
and no KL. n = 16 and the upper bound of 0.2 are choices, not the paper's numbers. The paper also samples dynamically
and penalises length as DAPO does: `--filter-groups.enable True --overlong.buffer-len 256`. Meant for 8 GPUs of 80 GB.
It has not been run at full size here: no score is claimed.
"""

from lib.algorithms import CISPOLoss
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
    rollout=RolloutConfig(n=16, max_response_len=1024),
    loss=CISPOLoss(clip_low=1.0, clip_high=0.2),  # 1 - 1.0: no lower bound
    loss_agg_mode="token-mean",
    prompts_per_step=128,
    mini_batch_size=512,
    optim=OptimConfig(lr=1e-6, warmup_steps=5),
    total_epochs=5,
    run_dir="runs/cispo_qwen3_1_7b_gsm8k",
)

if __name__ == "__main__":
    main(parse_cli(config))
