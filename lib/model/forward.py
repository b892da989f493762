"""Padding-free passes over policy and critic: a micro-batch goes in as one packed row, numbers per response token come
out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lib.dist import World
from lib.model.batching import micro_batch_rows
from lib.model.head import Statistic
from lib.model.networks import CausalPolicy, Critic
from lib.types import Batch, to_device

CPU = torch.device("cpu")
SEQUENCES = 16


@dataclass(frozen=True)
class Packed:
    """A micro-batch without padding. M is the number of response tokens that the policy chose."""

    input_ids: Tensor  # (1, N) int64
    position_ids: Tensor  # (1, N) int64, restarting at 0 in every sequence
    cu_seq_lens: Tensor  # (S + 1,) int32, the sequences' borders; S is b rounded up, by empty sequences at the end
    max_len: int
    positions: Tensor  # (M,) int64, where in the packed row each chosen token is predicted
    labels: Tensor  # (M,) int64, the chosen tokens
    places: tuple[Tensor, Tensor]  # row and column of each chosen token in the (b, t) response matrix


def pack(batch: Batch, device: torch.device = CPU) -> Packed:
    """The batch's sequences end to end, and where its response tokens are predicted; from the CPU to `device`.

    A prompt [5, 6] with response [7, 8] and a prompt [9] with response [4] give
        input_ids    [5, 6, 7, 8, 9, 4]      position_ids [0, 1, 2, 3, 0, 1]      cu_seq_lens [0, 4, 6, 6, ...]
        positions    [1, 2, 4]               labels       [7, 8, 4]               places ([0, 0, 1], [0, 1, 0])
    The token at position p + 1 is predicted at p, so the first response token is predicted at the prompt's last.
    """
    lens = batch.total_lens  # (b,)
    columns = torch.arange(batch.input_ids.shape[1])  # (L,)
    real = columns < lens[:, None]  # (b, L)
    borders = torch.nn.functional.pad(lens.cumsum(0), (1, 0))  # (b + 1,)
    rows, steps = batch.response_mask.nonzero(as_tuple=True)  # (M,), (M,)
    targets = batch.prompt_lens[rows] + steps  # (M,) column of each chosen token in input_ids
    move = partial(to_device, device=device)
    return Packed(
        input_ids=move(batch.input_ids[real].unsqueeze(0)),
        position_ids=move(columns.expand_as(real)[real].unsqueeze(0)),
        cu_seq_lens=move(_rounded_up(borders).to(torch.int32)),
        max_len=int(lens.max()),
        positions=move(borders[rows] + targets - 1),
        labels=move(batch.input_ids[rows, targets]),
        places=(move(rows), move(steps)),
    )


def _rounded_up(borders: Tensor) -> Tensor:
    """With empty sequences up to a multiple of SEQUENCES: attention is prepared for few numbers of them."""
    return torch.nn.functional.pad(borders, (0, -(len(borders) - 1) % SEQUENCES), value=int(borders[-1]))


def forward_policy(
    policy: CausalPolicy, micro_batch: Batch, *, temperature: float, statistic: Statistic = "entropy"
) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens and entropy where they were drawn, both (b, t) float32, 0 outside the mask.

    The batch is on the CPU; the results are on the policy's device. Executed by all ranks together (FSDP gathers).
    """
    packed = pack(micro_batch, next(policy.parameters()).device)
    log_probs, entropy = policy(
        packed.input_ids,
        packed.position_ids,
        packed.cu_seq_lens,
        packed.max_len,
        packed.positions,
        packed.labels,
        temperature,
        statistic,
    )
    return _unpack(log_probs, packed, micro_batch), _unpack(entropy, packed, micro_batch)


def forward_critic(critic: Critic, micro_batch: Batch) -> Tensor:
    """Value of the state before each response token, (b, t) float32, 0 outside the mask.

    The first token's state is the prompt. The batch is on the CPU; the result is on the critic's device. Executed by
    all ranks together (FSDP gathers).
    """
    packed = pack(micro_batch, next(critic.parameters()).device)
    values = critic(packed.input_ids, packed.position_ids, packed.cu_seq_lens, packed.max_len, packed.positions)
    return _unpack(values.squeeze(-1), packed, micro_batch)  # outside the critic: FSDP warns of results that are views


def compute_log_probs(
    policy: CausalPolicy, batch: Batch, *, max_tokens_per_gpu: int, temperature: float, world: World,
    statistic: Statistic = "none",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Log-probs of all response tokens under the policy as it is, and the statistic where they were drawn.

    Both (B, T) float32 on the CPU, 0 outside the mask.
    """
    forward = partial(forward_policy, policy, temperature=temperature, statistic=statistic)
    results = torch.zeros(2, *batch.response_mask.shape)  # (2, B, T)
    _fill_(results, forward, batch, max_tokens_per_gpu, world)
    return results[0], results[1]


def with_old_log_probs(
    policy: CausalPolicy, batch: Batch, *, max_tokens_per_gpu: int, temperature: float, world: World,
    with_logit_grad_squared: bool = False,
) -> Batch:  # fmt: skip
    """The batch with old_log_probs and, if asked for, logit_grad_squared, under the policy as it is before the update.

    Tokens that an older policy sampled keep that policy's log-probs, as the engine reported them; logit_grad_squared is
    the present policy's for them too.
    """
    log_probs, squares = compute_log_probs(
        policy, batch, max_tokens_per_gpu=max_tokens_per_gpu, temperature=temperature, world=world,
        statistic="logit_grad_squared" if with_logit_grad_squared else "none",
    )  # fmt: skip
    if batch.rollout_log_probs is not None:
        log_probs = torch.where(batch.stale & batch.response_mask, batch.rollout_log_probs, log_probs)
    return batch.with_(old_log_probs=log_probs, logit_grad_squared=squares if with_logit_grad_squared else None)


def compute_values(critic: Critic, batch: Batch, *, max_tokens_per_gpu: int, world: World) -> Tensor:
    """Values of the states before all response tokens, by the critic as it is: (B, T) float32 on the CPU, 0 outside the
    mask."""
    result = torch.zeros(1, *batch.response_mask.shape)  # (1, B, T)
    _fill_(result, lambda micro_batch: (forward_critic(critic, micro_batch),), batch, max_tokens_per_gpu, world)
    return result[0]


@torch.no_grad()
def _fill_(
    results: Tensor, forward: Callable[[Batch], tuple[Tensor, ...]], batch: Batch, max_tokens_per_gpu: int, world: World
) -> None:
    """Writes the (b, t) tensors that `forward` makes of each micro-batch over results (k, B, T)."""
    for rows, micro_batch in micro_batch_rows(batch, max_tokens_per_gpu, world):
        for result, numbers in zip(results, forward(micro_batch), strict=True):
            if len(rows):
                result[rows, : numbers.shape[1]] = numbers.cpu()


def _unpack(numbers: Tensor, packed: Packed, batch: Batch) -> Tensor:
    """The numbers (M,) of the chosen tokens at their places in the response matrix, 0 elsewhere: (b, t)."""
    blank = torch.zeros(batch.response_mask.shape, dtype=numbers.dtype, device=numbers.device)  # (b, t)
    return blank.index_put(packed.places, numbers)
