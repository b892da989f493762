r"""The control of the smollm2_words recipes: rewards as often right as the real ones, but of other responses.

    torchrun --nproc_per_node=1 -m recipes.grpo_smollm2_words --run-dir runs/control \
      --reward.path recipes/permuted_words.py

Accuracy must stay where it began: what rises here does not come from the reward. Validation is scored truly.
"""

import random
from typing import Any

from lib.rewards.last_number import compute_score as real

BLOCK = 64
block: list[float] = []
before = [0.0, 1.0]
rng = random.Random(0)


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict) -> dict[str, Any]:
    """The real result, but in training the score is one of the BLOCK that this worker graded before.

    Of whole blocks: responses are scored in the order in which they end, so the latest scores say how long the present
    ones took.
    """
    result = real(data_source, solution_str, ground_truth, extra_info)
    if extra_info["split"] == "train":
        block.append(result["score"])
        result["score"] = rng.choice(before)
        if len(block) == BLOCK:
            before[:] = block
            block.clear()
    return result
