"""GRPO (https://arxiv.org/abs/2402.03300) on sums with a second try, which counts half: minutes on 2 CPU cores.

    python -m recipes.prepare_turns --task retry --out data/tiny_retry
    python -m recipes.make_tiny_model --demonstrations data/tiny_retry/warm_up.jsonl --out models/tiny-retry
    torchrun --nproc_per_node=2 -m recipes.turns_tiny_retry

The quickstart's task. The environment says "wrong" after a first try that is, and the model, which prefers to forget
the carry, works the second one out every other time: at temperature 1 it starts at a score of about 0.55. It learns to
work out the second try, and the first one so that none is needed. The control, verdicts of a coin: --turns.name
CoinRetry (EXPERIMENTS.md).
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
    model=ModelConfig(path="models/tiny-retry"),
    data=DataConfig(
        train_files=("data/tiny_retry/train.parquet",), val_files=("data/tiny_retry/val.parquet",), max_prompt_len=32
    ),
    turns=TurnsConfig(
        path=str(Path(__file__).with_name("tiny_environments.py")),
        name=("Retry",),
        max_turns=2,
        max_turn_len=12,
        num_workers=1,
    ),
    rollout=RolloutConfig(n=8, max_response_len=40, max_num_batched_tokens=4096, gpu_memory_utilization=0.2),
    prompts_per_step=32,
    mini_batch_size=256,
    max_tokens_per_gpu=8192,
    num_steps=60,
    optim=OptimConfig(lr=3e-4, schedule="cosine", weight_decay=0.0),
    eval=EvalConfig(every=10, temperature=1.0),
    run_dir="runs/tiny_retry",
)

if __name__ == "__main__":
    main(parse_cli(config))
