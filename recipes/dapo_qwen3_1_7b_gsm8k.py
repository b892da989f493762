"""DAPO, complete, on GSM8K with Qwen3-1.7B ("DAPO", https://arxiv.org/abs/2503.14476).

    python -m recipes.prepare_gsm8k --out data/gsm8k
    torchrun --nproc_per_node=8 -m recipes.dapo_qwen3_1_7b_gsm8k

What differs from GRPO: the ratio may rise further than it may fall (clip-higher, 0.28 and 0.2), which keeps rare tokens
alive; all tokens of a mini-batch weigh the same; prompts whose responses are all right or all wrong are replaced by
others (dynamic sampling); an answer that runs into the last fifth of its length is penalised, up to one point (the
paper's 4,096 of 20,480 tokens); no KL. Values are the paper's and its authors' script's, but for the step: their 512
prompts and 16 updates would use up GSM8K's 7,473 problems too fast and are cut to 128 and 4. Meant for 8 GPUs of 80 GB.
It has not been run at full size here: no score is claimed.
"""

from lib.algorithms import ClipLoss, GroupFilterConfig, OverlongConfig
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
    rollout=RolloutConfig(n=16, max_response_len=1280),
    loss=ClipLoss(clip_low=0.2, clip_high=0.28, clip_dual=10.0),
    loss_agg_mode="token-mean",
    overlong=OverlongConfig(buffer_len=256, factor=1.0),
    filter_groups=GroupFilterConfig(enable=True),
    prompts_per_step=128,
    mini_batch_size=512,
    optim=OptimConfig(lr=1e-6, warmup_steps=10, weight_decay=0.1),
    total_epochs=5,
    run_dir="runs/dapo_qwen3_1_7b_gsm8k",
)

if __name__ == "__main__":
    main(parse_cli(config))
