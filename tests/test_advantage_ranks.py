"""Every advantage on 1, 2 and 3 real processes, groups torn apart between them."""

import torch
import torch.multiprocessing as mp

from lib.dist import SINGLE
from lib.types import Batch
from tests.ranks import save_of_rank
from tests.test_advantages import VARIANTS, random_step


def results_of(world):
    """Every advantage's numbers by uid and index; rows are spread over ranks so that groups are torn apart."""
    results = {}
    for seed in range(3):
        batch = random_step(seed, groups=9, steps=40)
        owners = (torch.arange(len(batch)) * 7 // 3 + seed) % world.size
        mine = (owners == world.rank).nonzero().flatten()
        if world.size == 3 and seed == 2:  # a rank without rows
            mine = (owners.clamp(max=1) == world.rank).nonzero().flatten()
        part = {k: None if v is None else v[mine] for k, v in vars(batch).items()}
        width = int(part["response_mask"].any(0).nonzero().max()) + 1 if len(mine) else 0
        has_steps = [k for k, v in part.items() if v is not None and v.dim() == 2 and k != "named_rewards"]
        part |= {k: part[k][:, :width] for k in has_steps}
        for name, advantage in VARIANTS.items():
            for kind, tensor in zip(("advantages", "returns"), advantage(Batch(**part), world), strict=True):
                for uid, index, row in zip(part["uids"].tolist(), part["indices"].tolist(), tensor, strict=True):
                    padded = torch.nn.functional.pad(row, (0, 40 - width))
                    results[seed, name, kind, uid, index] = padded.tolist()
    return results


def test_advantages_are_the_same_to_the_bit_on_1_2_and_3_ranks(tmp_path):
    launched = [
        mp.start_processes(save_of_rank, (results_of, size, tmp_path), size, join=False, start_method="spawn")
        for size in (2, 3)
    ]
    alone = results_of(SINGLE)
    for size, context in zip((2, 3), launched, strict=True):
        while not context.join():
            pass
        together = {}
        for rank in range(size):
            together |= torch.load(f"{tmp_path}/{size}_{rank}.pt")
        assert together == alone
