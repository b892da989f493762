"""DAPO (https://arxiv.org/abs/2503.14476) on arithmetic in words with SmolLM2-135M-Instruct: minutes on a GPU.

    python -m recipes.smollm2_from_package && python -m recipes.prepare_arithmetic_words
    torchrun --nproc_per_node=1 -m recipes.dapo_smollm2_words

Differs from grpo_smollm2_words: groups that are all right or all wrong are replaced by others (at most four rounds a
step), the ratio may rise further than it may fall, two updates a step, and a response that runs into the last
quarter of its length is penalised.
"""

from lib.algorithms import ClipLoss, GroupFilterConfig, OverlongConfig
from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import ModelConfig, OptimConfig
from lib.rollouts import EvalConfig
from train_grpo import GRPOConfig, main

config = GRPOConfig(
    model=ModelConfig(path="models/smollm2-135m"),
    data=DataConfig(
        train_files=("data/arithmetic_words/train.parquet",),
        val_files=("data/arithmetic_words/val.parquet",),
        max_prompt_len=96,
    ),
    rollout=RolloutConfig(
        n=8, max_response_len=128, max_num_seqs=1024, max_cudagraph_capture_size=1024, gpu_memory_utilization=0.2
    ),
    loss=ClipLoss(clip_low=0.2, clip_high=0.28, clip_dual=10.0),
    loss_agg_mode="token-mean",
    overlong=OverlongConfig(buffer_len=32, factor=1.0),
    filter_groups=GroupFilterConfig(enable=True, max_rounds=4),
    prompts_per_step=64,
    mini_batch_size=256,
    max_tokens_per_gpu=32768,
    num_steps=200,
    optim=OptimConfig(lr=3e-5),
    eval=EvalConfig(every=20, n=4, temperature=1.0, with_greedy=True),
    run_dir="runs/dapo_smollm2_words",
)

if __name__ == "__main__":
    main(parse_cli(config))
