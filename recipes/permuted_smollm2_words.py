"""The control of grpo_smollm2_words (GRPO, https://arxiv.org/abs/2402.03300): every reward of a step goes to a response
drawn at random.

    python -m recipes.smollm2_from_package && python -m recipes.prepare_arithmetic_words
    torchrun --nproc_per_node=1 -m recipes.permuted_smollm2_words

Accuracy must not rise: what rises here does not come from the reward. The rewards that are shown are true ones.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lib.algorithms import GroupAdvantage
from lib.algorithms.step_rows import StepRows
from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import ModelConfig, OptimConfig
from lib.rollouts import EvalConfig
from train_grpo import GRPOConfig, main


@dataclass(frozen=True, kw_only=True)
class PermutedAdvantage(GroupAdvantage):
    """GRPO's advantage of rewards that have been permuted among all responses of the step."""

    def of_responses(self, rows: StepRows, rewards: Tensor, lens: Tensor) -> Tensor:
        """(R,) from the rewards and the lengths (R,) of all responses of the step; the same on every rank."""
        generator = torch.Generator().manual_seed(int(lens.sum()))  # no rank and no resume draws another one
        return super().of_responses(rows, rewards[torch.randperm(len(rewards), generator=generator)], lens)


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
    advantage=PermutedAdvantage(),
    prompts_per_step=64,
    mini_batch_size=512,
    max_tokens_per_gpu=32768,
    num_steps=200,
    optim=OptimConfig(lr=3e-5),
    eval=EvalConfig(every=20, n=4, temperature=1.0, with_greedy=True),
    run_dir="runs/permuted_smollm2_words",
)

if __name__ == "__main__":
    main(parse_cli(config))
