"""Padding-free passes over the policy: a micro-batch goes in as one packed row, numbers per response token come out."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lib.batching import micro_batch_rows
from lib.dist import World
from lib.model import CausalPolicy
from lib.ops import Statistic
from lib.types import Batch


@dataclass(frozen=True)
class Packed:
    """A micro-batch without padding. M is the number of response tokens that the policy chose."""

    input_ids: Tensor  # (1, N) int64
    position_ids: Tensor  # (1, N) int64, restarting at 0 in every sequence
    cu_seq_lens: Tensor  # (b + 1,) int32, the sequences' borders
    max_len: int
    positions: Tensor  # (M,) int64, where in the packed row each chosen token is predicted
    labels: Tensor  # (M,) int64, the chosen tokens
    places: tuple[Tensor, Tensor]  # row and column of each chosen token in the (b, t) response matrix


def pack(batch: Batch) -> Packed:
    """The batch's sequences end to end, and where its response tokens are predicted.

    A prompt [5, 6] with response [7, 8] and a prompt [9] with response [4] give
        input_ids    [5, 6, 7, 8, 9, 4]      position_ids [0, 1, 2, 3, 0, 1]      cu_seq_lens [0, 4, 6]
        positions    [1, 2, 4]               labels       [7, 8, 4]               places ([0, 0, 1], [0, 1, 0])
    The token at position p + 1 is predicted at p, so the first response token is predicted at the prompt's last.
    """
    lens = batch.total_lens  # (b,)
    columns = torch.arange(batch.input_ids.shape[1])  # (L,)
    real = columns < lens[:, None]  # (b, L)
    borders = torch.nn.functional.pad(lens.cumsum(0), (1, 0))  # (b + 1,)
    rows, steps = batch.response_mask.nonzero(as_tuple=True)  # (M,), (M,)
    targets = batch.prompt_lens[rows] + steps  # (M,) column of each chosen token in input_ids
    return Packed(
        input_ids=batch.input_ids[real].unsqueeze(0),
        position_ids=columns.expand_as(real)[real].unsqueeze(0),
        cu_seq_lens=borders.to(torch.int32),
        max_len=int(lens.max()),
        positions=borders[rows] + targets - 1,
        labels=batch.input_ids[rows, targets],
        places=(rows, steps),
    )


def forward_policy(
    policy: CausalPolicy, micro_batch: Batch, *, temperature: float, statistic: Statistic = "entropy"
) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens and entropy where they were drawn, both (b, t) float32, 0 outside the mask.

    The batch is on the CPU; the results are on the policy's device. Executed by all ranks together (FSDP gathers).
    """
    device = next(policy.parameters()).device
    packed = pack(micro_batch)
    rows, steps = (place.to(device, non_blocking=True) for place in packed.places)
    log_probs, entropy = policy(
        packed.input_ids.to(device, non_blocking=True),
        packed.position_ids.to(device, non_blocking=True),
        packed.cu_seq_lens.to(device, non_blocking=True),
        packed.max_len,
        packed.positions.to(device, non_blocking=True),
        packed.labels.to(device, non_blocking=True),
        temperature,
        statistic,
    )
    blank = torch.zeros(micro_batch.response_mask.shape, dtype=log_probs.dtype, device=device)  # (b, t)
    return blank.index_put((rows, steps), log_probs), blank.index_put((rows, steps), entropy)


@torch.no_grad()
def compute_log_probs(
    policy: CausalPolicy, batch: Batch, *, max_tokens_per_gpu: int, temperature: float, world: World,
    statistic: Statistic = "none",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probs of all response tokens under the policy as it is, and the statistic where they were drawn.

    Both (B, T) float32 on the CPU, 0 outside the mask.
    """
    results = torch.zeros(2, *batch.response_mask.shape, dtype=torch.float32)  # (2, B, T)
    for rows, micro_batch in micro_batch_rows(batch, max_tokens_per_gpu, world):
        pair = torch.stack(forward_policy(policy, micro_batch, temperature=temperature, statistic=statistic))
        if len(rows):
            results[:, rows, : pair.shape[2]] = pair.cpu()
    return results[0], results[1]


def with_old_log_probs(
    policy: CausalPolicy, batch: Batch, *, max_tokens_per_gpu: int, temperature: float, world: World,
    with_sum_pi_squared: bool = False,
) -> Batch:  # fmt: skip
    """The batch with old_log_probs and, if asked for, sum_pi_squared, under the policy as it is before the update.

    Tokens that an older policy sampled keep that policy's log-probs, as the engine reported them.
    """
    log_probs, squares = compute_log_probs(
        policy, batch, max_tokens_per_gpu=max_tokens_per_gpu, temperature=temperature, world=world,
        statistic="sum_pi_squared" if with_sum_pi_squared else "none",
    )  # fmt: skip
    if batch.rollout_log_probs is not None:
        log_probs = torch.where(batch.stale & batch.response_mask, batch.rollout_log_probs, log_probs)
    return batch.with_(old_log_probs=log_probs, sum_pi_squared=squares if with_sum_pi_squared else None)
