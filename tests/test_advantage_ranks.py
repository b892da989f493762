"""Every advantage on 1, 2 and 3 real processes, groups torn apart between them."""

from datetime import timedelta

import torch
import torch.distributed as torch_dist
import torch.multiprocessing as mp

from lib.dist import SINGLE, World
from lib.types import Batch
from tests.ranks import LIMIT_S
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


def run_rank(rank, size, folder):
    torch.set_num_threads(1)
    torch_dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{size}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=LIMIT_S),
    )
    world = World(rank=rank, size=size, device=torch.device("cpu"))
    torch.save(results_of(world), f"{folder}/{size}_{rank}.pt")
    torch_dist.destroy_process_group()


def test_advantages_are_the_same_to_the_bit_on_1_2_and_3_ranks(tmp_path):
    launched = [
        mp.start_processes(run_rank, (size, tmp_path), size, join=False, start_method="spawn") for size in (2, 3)
    ]
    alone = results_of(SINGLE)
    for size, context in zip((2, 3), launched, strict=True):
        while not context.join():
            pass
        together = {}
        for rank in range(size):
            together |= torch.load(f"{tmp_path}/{size}_{rank}.pt")
        assert together == alone
