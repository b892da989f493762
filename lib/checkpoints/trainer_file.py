"""trainer.json of a checkpoint: what of a run is not a tensor, read, and checked before anything uses it."""

import json
from pathlib import Path
from typing import Any

from lib.errors import DamagedCheckpoint

TRAINER = "trainer.json"
NUMBER = (int, float)
RESPONSE = {
    "uid": int, "place?": int, "index": int, "response_ids": [int], "rollout_log_probs": ([NUMBER], None),
    "finish_reason": str, "score": (None, {"score": (*NUMBER, None), "extras": dict, "error": (str, None)}),
    "num_stale": int, "num_continued": int, "greedy_score": (*NUMBER, None),
}  # fmt: skip
SHAPE = {
    "step": int, "num_steps": int, "config": dict, "versions": dict, "constant_groups": [NUMBER], "reward?": str,
    "best": {"metric?": str, "value?": NUMBER, "step?": int}, "began_from?": {"model?": str, "reference?": str},
    "prompts": {"epoch": int, "place": int, "rows": int, "fingerprint": str, "seed": int, "shuffle": bool,
                "curriculum?": str},
    "kl_controller": {"coef": NUMBER},
    "collectors": [
        {"replica": int, "share_kept": NUMBER, "carried": [[RESPONSE, ...]], "unfinished": [RESPONSE],
         "open_groups": [[RESPONSE, ...]]}
    ],
}  # fmt: skip
"""A type; None; a tuple of alternatives; a list of one kind of entry (...: and not empty); the keys that an object must
have, or (?) may."""


def read_trainer(checkpoint: Path) -> dict[str, Any]:
    """trainer.json. Raises DamagedCheckpoint, naming the entry, when it is not what a run writes."""
    path = checkpoint / TRAINER
    try:
        trainer = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        problem = f"found {error}, expected a JSON object"
    else:
        problem = _mismatch(trainer, SHAPE, "")
    if problem is not None:
        raise DamagedCheckpoint(
            f"a checkpoint's state is not what a run writes; {path}; {problem}; restore it from a copy, or use another "
            "checkpoint of the run"
        )
    return trainer


def _mismatch(value: Any, shape: Any, place: str) -> str | None:
    """Why the value is not of this shape; None: it is."""
    if isinstance(shape, tuple):
        reasons = [_mismatch(value, one, place) for one in shape]
        return None if None in reasons else reasons[0]
    if isinstance(shape, dict) and isinstance(value, dict):
        missing = [name for name in shape if name not in value and not name.endswith("?")]
        if missing:
            return f"found no {place}{missing[0]}"
        found = {name.rstrip("?"): inner for name, inner in shape.items()}
        inside = ((value[name], inner, f"{place}{name}.") for name, inner in found.items() if name in value)
    elif isinstance(shape, list) and isinstance(value, list) and (value or ... not in shape):
        inside = ((entry, shape[0], f"{place}{number}.") for number, entry in enumerate(value))
    elif value is None if shape is None else isinstance(shape, type) and type(value) is shape:
        return None
    else:
        kind = shape.__name__ if isinstance(shape, type) else "null" if shape is None else type(shape).__name__
        kind = "a list with entries" if value == [] and kind == "list" else kind
        return f"found {json.dumps(value)[:60]} as {place.rstrip('.') or 'all of it'}, expected {kind}"
    return next((problem for problem in (_mismatch(*each) for each in inside) if problem), None)
