"""The rows of a step over all ranks, in an order that no rank decides: statistics that are the same to the bit.

Floating-point sums depend on the order of their terms. Here every rank sees all rows sorted by uid and index and adds
one term after the other, so neither the number of ranks, nor who holds a row, nor padding changes a result.
"""

import torch
from torch import Tensor

from lib.dist import World
from lib.types import Batch

TINY = torch.finfo(torch.float64).tiny


def ordered_sum(values: Tensor) -> Tensor:
    """The float64 sum over the last dimension, one term after the other: zeros at the end change no bit (on a CPU)."""
    return values.cumsum(-1, dtype=torch.float64)[..., -1:].sum(-1)


class Groups:
    """Statistics of the groups that rows belong to; each row gets its group's."""

    def __init__(self, ids: Tensor, num_groups: int) -> None:
        """ids (R,) int64 from 0 to num_groups - 1, the group of every row."""
        self.ids = ids
        self.num_groups = num_groups

    def sum(self, values: Tensor) -> Tensor:
        """(R,) the sum of the values (R,) over each row's group, in the order of the rows."""
        return values.new_zeros(self.num_groups).index_add_(0, self.ids, values)[self.ids]

    def sizes(self) -> Tensor:
        """(R,) int64, how many rows each row's group has."""
        return self.ids.bincount(minlength=self.num_groups)[self.ids]

    def constant(self, values: Tensor) -> Tensor:
        """(R,) bool, whether all values of the row's group are equal, as they are in a group of one row."""
        lowest, highest = (
            values.new_zeros(self.num_groups).scatter_reduce_(0, self.ids, values, kind, include_self=False)
            for kind in ("amin", "amax")
        )
        return (lowest == highest)[self.ids]

    def centred(self, values: Tensor, weights: Tensor, epsilon: float = TINY) -> Tensor:
        """(R,) values - sum(values x weights) / (sum(weights) + epsilon), sums over the group.

        Exactly 0, not rounding noise, where all values of the group are equal.
        """
        mean = self.sum(values * weights) / (self.sum(weights) + epsilon)
        return torch.where(self.constant(values), 0, values - mean)


class StepRows:
    """The valid rows of all ranks by uid and index, R in all, with their groups and the columns asked for."""

    def __init__(self, batch: Batch, world: World, *columns: Tensor) -> None:
        """Gathers columns: numbers (B,) of this rank's rows each. Executed by all ranks together."""
        mine = (batch.uids, batch.indices, batch.valid, *columns)
        gathered = world.gather(tuple(column.cpu() for column in mine))
        uids, indices, valid, *columns = (torch.cat(parts) for parts in zip(*gathered, strict=True))  # (all rows,)
        order = valid.nonzero().flatten()
        order = order[indices[order].argsort(stable=True)]
        self.order = order[uids[order].argsort(stable=True)]  # (R,)
        """Places of the valid rows among those of all ranks, one rank after the other."""
        self.columns = [column[self.order] for column in columns]  # (R,) each
        different, ids = uids[self.order].unique_consecutive(return_inverse=True)
        self.groups = Groups(ids, len(different))
        self.num_rows = len(uids)
        """Rows of all ranks, the excluded ones too."""
        self._start = sum(len(of_rank[0]) for of_rank in gathered[: world.rank])
        self._batch_size, self._device = len(batch), batch.valid.device

    def local(self, values: Tensor) -> Tensor:
        """(B,) this rank's part of the values (R,), 0 for rows that are not valid."""
        everything = values.new_zeros(self.num_rows)
        everything[self.order] = values
        return everything[self._start : self._start + self._batch_size].to(self._device)
