"""Short messages between ranks through the store where they met: any process that reaches its port reads and writes it.

So a message carries an HMAC of the launch's attempt, its name, its rank, a counter and its text. The key comes through
a collective, and never is in the store. What is foreign, broken, or copied from elsewhere is as good as nothing.
"""

import hashlib
import hmac
import json
import os
from typing import Any

from lib.torchrun import ATTEMPT

NOTHING = "-"
"""What stands for a name that has no value."""


class Messages:
    """One text under each name: the last that any rank has posted. Both methods raise RuntimeError when the store has
    ended, with whoever held it."""

    def __init__(self, store: Any, key: bytes, *, rank: int) -> None:
        """`store`: torch's. `key`: the same secret on all ranks, another one for each attempt."""
        self._store, self._key, self.rank = store, key, rank
        self._attempt = os.environ.get(ATTEMPT, "0")
        self._num_posted = 0
        self._newest: dict[tuple[str, int], int] = {}  # (name, rank) -> the highest counter seen
        self.refused: bytes | None = None
        """What was read last that no rank of this attempt has written for its place; None: nothing so far."""

    def post(self, name: str, text: str) -> None:
        """Puts a text under a name, whatever is there."""
        self._num_posted += 1
        content = json.dumps([self._attempt, name, self.rank, self._num_posted, text])
        self._store.set(name, f"{self._code(content.encode())} {content}")

    def read(self, name: str) -> str | None:
        """The text under a name; None where there is none of ours. Never waits, and takes every string of bytes."""
        found = self._store.compare_set(name, NOTHING, NOTHING)  # a `get` waits for what has just been deleted
        if found == NOTHING.encode():
            return None
        code, _, content = found.partition(b" ")
        if hmac.compare_digest(code, self._code(content).encode()):  # only then is it looked at
            attempt, place, rank, counter, text = json.loads(content)
            newest = self._newest.get((name, rank), 0)
            if (attempt, place) == (self._attempt, name) and counter >= newest:
                self._newest[name, rank] = counter
                return text
        self.refused = found
        return None

    def _code(self, content: bytes) -> str:
        return hmac.new(self._key, content, hashlib.sha256).hexdigest()
