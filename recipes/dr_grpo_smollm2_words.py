"""Dr. GRPO (https://arxiv.org/abs/2503.20783) on arithmetic in words with SmolLM2-135M-Instruct: minutes on a GPU.

    python -m recipes.smollm2_from_package && python -m recipes.prepare_arithmetic_words
    torchrun --nproc_per_node=1 -m recipes.dr_grpo_smollm2_words

Differs from grpo_smollm2_words: advantages are not divided by the group's standard deviation, and the loss divides
the sum over a response's tokens by a constant, the longest response allowed.
"""

from lib.algorithms import DrGRPOAdvantage
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
    advantage=DrGRPOAdvantage(),
    loss_agg_mode="seq-mean-token-sum-norm",
    prompts_per_step=64,
    mini_batch_size=512,
    max_tokens_per_gpu=32768,
    num_steps=200,
    optim=OptimConfig(lr=3e-5),
    eval=EvalConfig(every=20, n=4, temperature=1.0, with_greedy=True),
    run_dir="runs/dr_grpo_smollm2_words",
)

if __name__ == "__main__":
    main(parse_cli(config))
