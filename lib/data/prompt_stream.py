"""The endless seeded stream of training prompts. Every rank sees the same one; which rank generates what is decided
elsewhere."""

from typing import Any

import numpy as np

from lib.data.curriculum import Curriculum
from lib.data.prompts import Prompts
from lib.errors import UserError
from lib.types import Sample


class PromptStream:
    """The endless stream of training prompts: epoch after epoch, each row once an epoch, uid = epoch x rows + place.

    The order is a function of (seed, epoch) alone, so every rank has the same stream and no global generator is used.
    With a curriculum there are no epochs: what comes next also depends on what came of the prompts before.
    """

    def __init__(self, prompts: Prompts, *, seed: int, shuffle: bool = True, curriculum: bool = False) -> None:
        assert len(prompts) > 0 and seed >= 0
        self.prompts = prompts
        self.seed = seed
        self.shuffle = shuffle
        self.curriculum = Curriculum(len(prompts), seed=seed) if curriculum else None
        self._position = 0  # the next uid
        self._order = (-1, np.empty(0, dtype=np.int64))  # an epoch, and its places in file order

    def next(self, count: int) -> list[Sample]:
        """The next samples of the stream, across an epoch's end if need be."""
        uids = range(self._position, self._position + count)
        self._position += count
        if self.curriculum is None:
            return [self.sample(uid) for uid in uids]
        places = self.curriculum.draw(uids.start, count)
        return [self.prompts.sample(place, uid) for place, uid in zip(places, uids, strict=True)]

    def sample(self, uid: int) -> Sample:
        """The sample at a position of the stream, wherever the stream is now; not with a curriculum, where `place`
        alone tells which prompt it is."""
        assert self.curriculum is None
        return self.prompts.sample(self._place(uid), uid)

    @property
    def num_drawn(self) -> int:
        """How many prompts were taken since the first epoch began."""
        return self._position

    def state(self) -> dict[str, Any]:
        """The position, as JSON can hold it, and what it is a position in."""
        epoch, place = divmod(self._position, len(self.prompts))
        pools = {} if self.curriculum is None else {"curriculum": self.curriculum.state()}
        return {"epoch": epoch, "place": place, **self._identity(), **pools}

    def is_of(self, state: dict[str, Any]) -> bool:
        """Whether `state` is a position in this stream: the same prompts in the same order."""
        return all(state[name] == value for name, value in self._identity().items())

    def restore(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken. Raises UserError when the data, the seed or the shuffling differ."""
        for name, value in self._identity().items():
            if state[name] != value:
                raise UserError(
                    f"the prompts are not those of the checkpoint: another {name}; data stream; found {value}, "
                    f"expected {state[name]}; give the same data, tokenizer, options and --seed, or branch off: "
                    "--checkpoint.resume PATH and a new --run-dir"
                )
        self._position = state["epoch"] * len(self.prompts) + state["place"]
        if self.curriculum is not None and "curriculum" in state:  # not where a branch begins one
            self.curriculum.restore(state["curriculum"])

    def _identity(self) -> dict[str, Any]:
        fingerprint, rows = self.prompts.fingerprint, len(self.prompts)
        return {"rows": rows, "fingerprint": fingerprint, "seed": self.seed, "shuffle": self.shuffle}

    def _place(self, uid: int) -> int:
        """The row, in file order, of a position in the stream."""
        epoch, place = divmod(uid, len(self.prompts))
        if not self.shuffle:
            return place
        if self._order[0] != epoch:
            # Raw bits, sorted: NumPy promises them for all versions, but not the result of its `permutation`.
            keys = np.random.PCG64([self.seed, epoch]).random_raw(len(self.prompts))
            self._order = (epoch, np.argsort(keys, kind="stable"))
        return int(self._order[1][place])
