"""GRPO (https://arxiv.org/abs/2402.03300) on a game of several turns, a number to guess: minutes on 2 CPU cores.

    python -m recipes.prepare_turns --task guess --out data/tiny_guess
    python -m recipes.make_tiny_model --demonstrations data/tiny_guess/warm_up.jsonl \
        --out models/tiny-guess --batch-size 32
    torchrun --nproc_per_node=2 -m recipes.turns_tiny_guess

A number from 0 to 15, five guesses, after each "higher" or "lower". The model can write what is left of the range and
take the middle, but prefers any number, and starts at an accuracy of 0.3 to 0.4 at temperature 1. The reward, less
0.05 for each wrong guess, teaches it bisection. The control, hints of a coin: --turns.name RandomHints
(EXPERIMENTS.md).
"""

from pathlib import Path

from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import ModelConfig, OptimConfig
from lib.rollouts import EvalConfig
from lib.turns import TurnsConfig
from train_grpo import GRPOConfig, main

config = GRPOConfig(
    model=ModelConfig(path="models/tiny-guess"),
    data=DataConfig(
        train_files=("data/tiny_guess/train.parquet",), val_files=("data/tiny_guess/val.parquet",), max_prompt_len=32
    ),
    turns=TurnsConfig(
        path=str(Path(__file__).with_name("tiny_environments.py")),
        name=("Guess",),
        max_turns=5,
        max_turn_len=12,
        num_workers=1,
    ),
    rollout=RolloutConfig(n=8, max_response_len=96, max_num_batched_tokens=4096, gpu_memory_utilization=0.2),
    prompts_per_step=32,
    mini_batch_size=256,
    max_tokens_per_gpu=8192,
    num_steps=36,
    optim=OptimConfig(lr=3e-4, schedule="cosine", weight_decay=0.0),
    eval=EvalConfig(every=12, temperature=1.0),
    run_dir="runs/tiny_guess",
)

if __name__ == "__main__":
    main(parse_cli(config))
