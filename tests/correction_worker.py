"""Under torchrun: a correction of the same rows however they are spread over ranks.

    torchrun --nproc_per_node=N -m tests.correction_worker OUT

writes OUT on rank 0: {case/split: ({tensor: all rows in the order of the whole batch}, metrics)}.
"""

import sys

import torch

from lib.algorithms.correction import CORRECTIONS, Correction
from lib.dist import init_distributed, shutdown_distributed
from lib.tracking.metrics import Metrics
from lib.types import Batch

TENSORS = ("is_weights", "response_mask", "valid", "scores")
CASES = {
    "token": Correction(is_level="token", batch_normalize=True, is_threshold=1.5),
    "sequence": Correction(is_level="sequence", batch_normalize=True, reject={"seq_mean_k3": 0.1, "token_k1": 2.0}),
    "geo": CORRECTIONS["decoupled_geo_rs_token_tis"](),
}


def random_batch(seed, noise, rows=12, width=9):
    """Ragged rows with holes in their masks, some without a score or a token, NaN wherever nobody chose a token."""
    random = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, width + 1, (rows,), generator=random)
    lens[:3] = torch.tensor([width, 0, 1])
    mask = (torch.arange(width) < lens[:, None]) & (torch.rand(rows, width, generator=random) > 0.2)
    valid = torch.rand(rows, generator=random) > 0.15
    mask &= valid[:, None]
    rollout = -3 * torch.rand(rows, width, generator=random)
    of_row = noise * torch.rand(rows, 1, generator=random)  # rows differ in how far they are apart
    old = rollout + of_row * torch.randn(rows, width, generator=random)
    return Batch(
        uids=torch.arange(rows) // 4, indices=torch.arange(rows) % 4, mini_batch_ids=torch.zeros(rows).long(),
        input_ids=torch.zeros(rows, width + 1).long(), prompt_lens=torch.ones(rows).long(), response_lens=lens,
        response_mask=mask, truncated=torch.zeros(rows).bool(), valid=valid,
        scores=torch.where(valid, torch.rand(rows, generator=random), 0),
        old_log_probs=torch.where(mask, old, torch.nan), rollout_log_probs=torch.where(mask, rollout, torch.nan),
    )  # fmt: skip


def main(out):
    world = init_distributed()
    whole = random_batch(3, noise=0.5)
    splits = {
        "alternating": torch.arange(len(whole)) % world.size,
        "all on the last": torch.full((12,), world.size - 1),
    }
    result = {}
    for case, cfg in CASES.items():
        for split, ranks in splits.items():
            mine = (ranks == world.rank).nonzero().flatten()
            metrics = Metrics(world)
            batch = cfg.correct(whole.with_().rows(mine), metrics)
            tensors = {name: torch.zeros(*getattr(whole, of).shape) for name, of in zip(
                TENSORS, ("response_mask", "response_mask", "valid", "scores"), strict=True)}  # fmt: skip
            for name, full in tensors.items():
                rows = getattr(batch, name)
                full[mine, *([slice(rows.shape[1])] if rows.dim() > 1 else [])] = rows.float()
            tensors = {name: world.sum(full) for name, full in tensors.items()}
            result[f"{case}/{split}"] = (tensors, metrics.reduce())
    if world.rank == 0:
        torch.save(result, out)
    shutdown_distributed()


if __name__ == "__main__":
    main(sys.argv[1])
