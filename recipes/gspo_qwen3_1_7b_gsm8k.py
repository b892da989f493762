"""GSPO on GSM8K with Qwen3-1.7B ("Group Sequence Policy Optimization", https://arxiv.org/abs/2507.18071).

    python -m recipes.prepare_gsm8k --out data/gsm8k
    torchrun --nproc_per_node=8 -m recipes.gspo_qwen3_1_7b_gsm8k

What differs from GRPO: the ratio is one number per response, the geometric mean of its tokens' ratios, and the clip
takes or leaves whole responses. That mean stays close to 1, hence bounds of 3e-4 and 4e-4 and a clipped share far above
GRPO's. No KL. Bounds and four updates a step are the paper's; n = 16 is verl's example. Meant for 8 GPUs of 80 GB. It
has not been run at full size here: no score is claimed.
"""

from lib.algorithms import GSPOLoss
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
    loss=GSPOLoss(clip_low=3e-4, clip_high=4e-4),  # brings seq-mean-token-mean along
    prompts_per_step=128,
    mini_batch_size=512,
    optim=OptimConfig(lr=1e-6, warmup_steps=5),
    total_epochs=5,
    run_dir="runs/gspo_qwen3_1_7b_gsm8k",
)

if __name__ == "__main__":
    main(parse_cli(config))
