"""One step's numbers, reduced over ranks once.

Never an average of averages: every mean is a sum over a count, both taken over all micro-batches and all ranks.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from lib.dist import World

Number = float | Tensor
"""A number, or a tensor of one element on any device."""


class Metrics:
    """One step's numbers of this rank, until `reduce` makes them everyone's.

    Numbers on a GPU stay there, so adding one never waits for the GPU. NaN is kept: a mean, maximum or minimum that saw
    a NaN is NaN, and so is one over nothing on any rank.
    """

    def __init__(self, world: World):
        self.world = world
        self._parts: dict[str, tuple[str, list[tuple[Number, ...]]]] = {}  # name -> (kind, what was added)

    def add_mean(self, name: str, total: Number, count: Number) -> None:
        """Adds `count` elements that sum to `total` to a mean over everything added on all ranks."""
        self._add(name, "mean", total, count)

    def add_std(self, name: str, total: Number, squares: Number, *, count: Number) -> None:
        """Adds elements, by their sum and sum of squares, to a standard deviation over all ranks (divided by n - 1)."""
        self._add(name, "std", total, squares, count)

    def add_effective_share(self, name: str, total: Number, squares: Number, *, count: Number) -> None:
        """Adds weights, by their sum and sum of squares, to (sum w)^2 / (count x sum w^2) over all ranks."""
        self._add(name, "effective_share", total, squares, count)

    def add_sum(self, name: str, value: Number) -> None:
        """Adds to a sum over all ranks."""
        self._add(name, "sum", value)

    def add_max(self, name: str, value: Number, count: Number = 1) -> None:
        """Adds the maximum of `count` elements; ignored where count is 0."""
        self._add(name, "max", value, count)

    def add_min(self, name: str, value: Number, count: Number = 1) -> None:
        """Adds the minimum of `count` elements; ignored where count is 0."""
        self._add(name, "min", value, count)

    def add_stats(self, prefix: str, values: Tensor) -> None:
        """Adds a tensor's elements to prefix/mean, prefix/max and prefix/min; it may be empty."""
        values, count = values.detach(), values.numel()
        self.add_mean(f"{prefix}/mean", values.sum(dtype=torch.float64), count)
        self.add_max(f"{prefix}/max", values.max() if count else math.nan, count)
        self.add_min(f"{prefix}/min", values.min() if count else math.nan, count)

    def set(self, name: str, value: Number) -> None:
        """Sets a number that is the same on all ranks, such as the learning rate; the last call of a step counts."""
        self._parts.pop(name, None)
        self._add(name, "set", value)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Adds the wall seconds of its body to timing_s/NAME: the sum of a step's bodies, of the slowest rank."""
        self._wait_for_gpu()
        start = time.perf_counter()
        yield
        self._wait_for_gpu()
        self._add(f"timing_s/{name}", "time", time.perf_counter() - start)

    def reduce(self) -> dict[str, float]:
        """Every name of any rank with its value over all ranks, the same dict on every rank.

        Executed by all ranks, with one collective; a rank may lack names that others have.
        """
        parts = [(name, kind, row) for name, (kind, rows) in self._parts.items() for row in rows]
        numbers = iter(_read([number for _, _, row in parts for number in row]))
        rows: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
        for name, kind, row in parts:
            rows[name, kind].append(tuple(next(numbers) for _ in row))
        mine = {key: _merge(key[1], values) for key, values in rows.items()}
        gathered: dict[tuple[str, str], list[tuple[float, ...]]] = defaultdict(list)
        for of_rank in self.world.gather(mine):
            for (name, kind), row in of_rank.items():
                if kind == "time":  # a rank's own seconds are added up; the slowest rank holds up the others
                    kind, row = "max", (*row, 1.0)
                gathered[name, kind].append(row)
        assert len({name for name, _ in gathered}) == len(gathered), "ranks disagree about how to reduce a metric"
        return {name: _result(kind, _merge(kind, values)) for (name, kind), values in gathered.items()}

    def _add(self, name: str, kind: str, *row: Number) -> None:
        known, rows = self._parts.setdefault(name, (kind, []))
        assert known == kind, f"{name} is a {known}, not a {kind}"
        rows.append(tuple(number if _on_gpu(number) else float(number) for number in row))

    def _wait_for_gpu(self) -> None:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)


def _on_gpu(number: Number) -> bool:
    return isinstance(number, Tensor) and number.device.type != "cpu"


def _read(numbers: list[Number]) -> list[float]:
    """The numbers as floats; those on the GPU come over in one copy."""
    on_gpu = [number.detach().double().reshape(()) for number in numbers if _on_gpu(number)]
    read = iter(torch.stack(on_gpu).tolist() if on_gpu else [])
    return [next(read) if _on_gpu(number) else float(number) for number in numbers]


def _merge(kind: str, rows: list[tuple[float, ...]]) -> tuple[float, ...]:
    """One row for several: of a rank's own additions first, then of all ranks."""
    if kind == "set":
        return rows[0]
    if kind in ("max", "min"):
        seen = [value for value, count in rows if count > 0]
        pick = max if kind == "max" else min
        value = math.nan if not seen or any(map(math.isnan, seen)) else pick(seen)
        return value, sum(count for _, count in rows)
    return tuple(sum(column) for column in zip(*rows, strict=True))


def _result(kind: str, row: tuple[float, ...]) -> float:
    if kind == "mean":
        total, count = row
        return total / count if count else math.nan
    if kind == "std":
        total, squares, count = row
        variance = (squares - total * total / count) / (count - 1) if count > 1 else math.nan
        return 0.0 if variance < 0 else math.sqrt(variance)  # below 0 by rounding only; NaN stays NaN
    if kind == "effective_share":
        total, squares, count = row
        return total * total / (count * squares) if squares else math.nan
    return row[0]
