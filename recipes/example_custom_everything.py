"""Your own advantage, loss, reward and dataset in one file; no line of lib/ changes. Minutes on 2 CPU cores.

    python -m recipes.prepare_arithmetic && python -m recipes.make_tiny_model
    torchrun --nproc_per_node=2 -m recipes.example_custom_everything
    torchrun --nproc_per_node=2 -m recipes.example_custom_everything --loss.pull 3 --advantage.bonus 0.5

Fields of the classes become flags (`--help` lists them). Each part works alone too: pass only what is yours to the
config of any recipe. The task is the quickstart's, with only those sums that need a carry.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lib.algorithms import PolicyLoss, ResponseAdvantage
from lib.algorithms.losses import masked_log_ratio
from lib.algorithms.step_rows import StepRows
from lib.config import parse_cli
from lib.data import DataConfig
from lib.engine import RolloutConfig
from lib.model import ModelConfig, OptimConfig
from lib.rewards import RewardConfig
from lib.rewards.arithmetic import needs_carry
from lib.rollouts import EvalConfig
from lib.types import Batch
from train_grpo import GRPOConfig, main


class CarryProblems:
    """The rows of parquet files whose sum needs a carry. Made once per split, with these three keywords."""

    def __init__(self, *, data_files: Sequence[str], tokenizer: Any, config: DataConfig) -> None:
        from pyarrow import parquet  # heavy packages are imported where they are needed

        rows = [row for file in data_files for row in parquet.read_table(file).to_pylist()]
        self.rows = [row for row in rows if needs_carry(row["extra_info"]["a"], row["extra_info"]["b"])]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


def partial_credit(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]
) -> dict[str, float]:
    """1 for the right sum, 0.2 for the right last digit. `score` trains; every other key is a validation metric."""
    answer = solution_str.rpartition(",")[2]
    acc = float(answer == ground_truth)
    return {"score": max(acc, 0.2 * answer.endswith(ground_truth[-1])), "acc": acc}


@dataclass(frozen=True, kw_only=True)
class SignAdvantage(ResponseAdvantage):
    """+1 for a response above the mean of its group, -1 for one below it, and a bonus for the best of the step."""

    bonus: float = 0.0
    """Added to the advantage of the responses with the step's highest reward, 0 or more."""

    def of_responses(self, rows: StepRows, rewards: Tensor, lens: Tensor) -> Tensor:
        """(R,) from the rewards and the lengths (R,) of all responses of the step; the same on every rank."""
        above = rows.groups.centred(rewards, torch.ones_like(rewards))  # exactly 0 in groups of equal rewards
        return above.sign() + self.bonus * ((rewards == rewards.max()) & (above > 0))


@dataclass(frozen=True, kw_only=True)
class PullLoss(PolicyLoss):
    """-A x r + pull x |A| / 2 x (r - 1)^2: a ratio r away from 1 is pulled back instead of clipped."""

    pull: float = 1.0
    """Strength of the pull, above 0: the loss of a token is least at a ratio of 1 + 1 / pull, or 1 - 1 / pull."""

    def __call__(self, log_probs: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (b, t) and metrics; masked_log_ratio has taken what is outside response_mask out of both."""
        log_ratio, advantages = masked_log_ratio(log_probs, batch)  # (b, t), (b, t)
        ratio = log_ratio.exp()
        loss = -advantages * ratio + self.pull * advantages.abs() / 2 * (ratio - 1).square()
        return loss, {"ppo_kl": -log_ratio.detach()}


config = GRPOConfig(
    model=ModelConfig(path="models/tiny-arithmetic"),
    data=DataConfig(
        train_files=("data/arithmetic/train.parquet",),
        val_files=("data/arithmetic/val.parquet",),
        max_prompt_len=32,
        dataset_path=__file__,
        dataset_name="CarryProblems",
    ),
    reward=RewardConfig(path=__file__, name="partial_credit", num_workers=1),
    rollout=RolloutConfig(n=8, max_response_len=12, max_num_batched_tokens=4096, gpu_memory_utilization=0.2),
    advantage=SignAdvantage(),
    loss=PullLoss(),
    prompts_per_step=32,
    mini_batch_size=128,
    max_tokens_per_gpu=8192,
    num_steps=40,
    optim=OptimConfig(lr=5e-5, schedule="cosine", weight_decay=0.0),
    eval=EvalConfig(every=5),
    run_dir="runs/custom_everything",
)

if __name__ == "__main__":
    main(parse_cli(config))
