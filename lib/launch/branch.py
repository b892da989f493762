"""Two runs' options compared: which may differ where a run goes on, and what a branch of it leaves behind.

A branch is a new run that begins with another run's checkpoint. Every option may change; the model's shape may not.
Weights, moments and the step go on. What depends on an option that changed begins anew.
"""

import json
from collections.abc import Mapping
from fnmatch import fnmatch
from typing import Any

from lib.config.as_json import to_json
from lib.launch.train_config import TrainConfig
from lib.secret_values import equal_but_for_blanks

DATA_MAY_MOVE = ("data.*_files", "data.*_max_samples", "data.chat_template_kwargs*", "data.control_tokens")
"""What comes of these is compared by the fingerprint of the prompts; the date may be a template's variable now."""
MAY_DIFFER = (
    *("run_dir", "overwrite", "debug", "num_steps", "total_epochs", "max_minutes", "tracking.*", "eval.*"),
    *("checkpoint.*", "*fsdp.*", "*max_tokens_per_gpu", "*model.gradient_checkpointing", *DATA_MAY_MOVE),
    *("reward.num_workers", "reward.batch_size", "reward.timeout_s", "reward.max_error_rate", "reward.max_memory_gib"),
    *("reward.env", "turns.num_workers", "turns.concurrency", "turns.timeout_s", "turns.env"),
    "rollout.max_log_probs_diff",
    *("rollout.tensor_model_parallel_size", "rollout.gpu_memory_utilization", "rollout.max_num_*"),
    *("rollout.max_cudagraph_capture_size", "rollout.enforce_eager", "rollout.enable_prefix_caching"),
    *("rollout.sleep", "rollout.cpu_kv_cache_gib", "rollout.fast_paths"),
)
"""Options that a continued run may give anew: they change what it shows, keeps or needs, not what it learns."""
OF_RESPONSES = (
    *("seed", "model.path", "model.dtype", "data.*", "rollout.*", "turns.*", "reward.*", "filter_groups.*"),
    *("overlong.*", "advantage.*"),
)
"""Options that left-over responses were sampled, scored or chosen by."""
NOTHING_LEFT_OVER = {"collectors": [], "constant_groups": []}
"""Of trainer.json, what earlier steps' responses have left."""


def changed_options(
    saved: Mapping[str, Any], cfg: TrainConfig, *, data_may_move: bool = True
) -> dict[str, tuple[Any, Any]]:
    """{"optim.lr": (there, here), ...}: what differs from a saved config, as JSON has it, but for MAY_DIFFER.

    An option that the saved one does not have is newer than it: its default is what was done before.
    """
    here, defaults = (flat(json.loads(json.dumps(to_json(it)))) for it in (cfg, type(cfg)()))
    there = {name: value for name, value in defaults.items() if name in here} | flat(saved)
    free = MAY_DIFFER if data_may_move else tuple(name for name in MAY_DIFFER if name not in DATA_MAY_MOVE)
    names = (name for name in dict.fromkeys((*there, *here)) if not _is_one(name, free))
    pairs = {name: (there.get(name), here.get(name)) for name in names}
    return {
        name: (there, here)
        for name, (there, here) in pairs.items()
        # The other way round too: an older checkpoint has the values of secret keys, which are blanked here.
        if not (equal_but_for_blanks(there, here) or equal_but_for_blanks(here, there))
    }


def in_words(changes: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """`optim.lr was 1e-06 and is 2e-06` of each."""
    return [f"{name} was {json.dumps(there)} and is {json.dumps(here)}" for name, (there, here) in changes.items()]


def in_short(changes: Mapping[str, tuple[Any, Any]]) -> str:
    """The first 8 in words, for the one line of an error."""
    words = in_words(changes)
    return "; ".join(words[:8]) + (f"; and {len(words) - 8} more" if len(words) > 8 else "")


def begin_branch(
    trainer: Mapping[str, Any], changes: Mapping[str, tuple[Any, Any]], cfg: TrainConfig
) -> tuple[dict[str, Any], list[str]]:
    """trainer.json as a branch with these changes begins with it, and lines about what begins anew."""
    begun, notes = {**trainer, "best": {}}, []  # the best one lies in the other run's folder
    if any(_is_one(name, ("kl_reward.*",)) for name in changes):
        begun["kl_controller"] = {"coef": cfg.kl_reward.coef}
    if {"model.path", "model.reference_path"} & changes.keys():
        begun["began_from"] = {}
    if any(_is_one(name, OF_RESPONSES) for name in changes):
        begun |= NOTHING_LEFT_OVER
        if count := num_left_over(trainer):
            notes.append(f"{count} responses that the run had left over are dropped: other options sampled them")
    return begun, notes


def num_left_over(trainer: Mapping[str, Any]) -> int:
    """Responses that the checkpoint's next step would have taken over, of all ranks."""
    states = trainer["collectors"]
    groups = [group for state in states for group in (*state["carried"], *state["open_groups"])]
    return sum(map(len, groups)) + sum(len(state["unfinished"]) for state in states)


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"optim.lr": 1e-06, ...} of nested dicts."""
    names: dict[str, Any] = {}
    for name, value in config.items():
        names |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return names


def _is_one(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
