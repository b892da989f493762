"""What each room of lib/ offers, and where a file of the flat lib/ went.

A room's `__init__.py` names its public objects by the file that defines them. They are imported when they are asked
for: so a reward worker, which needs a file of `lib.rewards`, does not load torch.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from typing import Any

from lib.errors import UserError, error_line

MOVED = {
    "advantages": "algorithms.advantages",
    "aggregation": "algorithms.aggregation",
    "attention": "model.attention",
    "batching": "model.batching",
    "beside_weights": "storage.beside_weights",
    "branch": "launch.branch",
    "chat_template": "data.chat_template",
    "checkpoint": "checkpoints.checkpointer",
    "checkpoint_files": "storage.checkpoint_folder",
    "console": "tracking.console",
    "correction": "algorithms.correction",
    "critic": "model.critic_config",
    "critic_loss": "algorithms.losses",
    "cudnn_attention": "model.cudnn_attention",
    "curriculum": "data.curriculum",
    "custom_dataset": "data.custom_dataset",
    "engine.gumbel": "engine.fast.gumbel",
    "engine.patches": "engine.in_process",
    "engine_patches": "engine.in_process",
    "eval_files": "evaluation.inputs",
    "eval_model": "evaluation.any_model",
    "eval_report": "evaluation.report",
    "eval_scores": "evaluation.scores",
    "evaluate": "rollouts.validation",
    "export": "storage.export",
    "forward": "model.forward",
    "fsdp": "model.fsdp",
    "groups": "algorithms.group_filter",
    "gumbel": "engine.fast.gumbel",
    "host_memory": "model.host_memory",
    "kl": "algorithms.kl",
    "losses": "algorithms.losses",
    "metrics": "tracking.metrics",
    "model_files": "storage.model_folder",
    "model_source": "storage.model_source",
    "optim": "model.optim",
    "parquet": "data.parquet",
    "passk": "evaluation.passk",
    "prompt_stream": "data.prompt_stream",
    "resume": "launch.resume",
    "reward_trial": "rewards.trial",
    "rollout": "engine.engine",
    "rollout_files": "rollouts.saved_rollouts",
    "run_folder": "tracking.run_folder",
    "sampling": "rollouts.collector",
    "schema": "data.schema",
    "scoring": "rewards.scoring",
    "selection": "algorithms.selection",
    "shaping": "algorithms.shaping",
    "step_rows": "algorithms.step_rows",
    "tensor_files": "checkpoints.tensor_files",
    "terminal": "tracking.terminal",
    "train_config": "launch.train_config",
    "trainer_file": "checkpoints.trainer_file",
    "verl_keys": "config.verl_keys",
    "verl_shards": "storage.verl_shards",
    "weight_files": "storage.weight_headers",
    "weight_sync": "engine.weight_sync",
    "whole_tensors": "storage.whole_tensors",
}
"""A file of the flat lib/, or of a room -> where it is now."""
PATCHES = "TokenIds and the decode loop, one_pass_sampling, split_less and quick_start in lib.engine.fast"
ALSO = {
    "metrics": "what measures a step in lib.algorithms, perf_metrics in lib.model, a validation's metrics in "
    "lib.rollouts.validation_metrics",
    "critic_loss": "explained_variance in lib.algorithms.step_metrics",
    "engine.patches": PATCHES,
    "engine_patches": PATCHES,
    "evaluate": "decode in lib.data",
    "rollout": "RolloutConfig and Sampling in lib.engine.rollout_config",
    "weight_sync": "check_log_probs_diff in lib.engine.mismatch",
}
"""Where other names of a file went that was split."""


def exports(room: str, **files: str) -> tuple[list[str], Callable[[str], Any]]:
    """A room's `__all__` and `__getattr__`, from the names that each of its files offers, separated by spaces."""
    file_of = {name: file for file, names in files.items() for name in names.split()}

    def getattribute(name: str) -> Any:
        if name not in file_of:
            raise AttributeError(f"{room} offers no {name}")  # as torch's compiler expects, which asks for many names
        return getattr(import_module(f"{room}.{file_of[name]}"), name)

    return sorted(file_of), getattribute


class Moved(SystemExit):
    """Ends the process with the code of a UserError; its text is for what catches it, as a reward worker does."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = UserError.code


class OldPaths(MetaPathFinder):
    """Ends an import of a file that has moved with one line that names its new place."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Asked after all other finders: only for modules that do not exist."""
        name = fullname.removeprefix("lib.")
        where = MOVED.get(name) if fullname.startswith("lib.") else None
        if where is not None:
            others = f" ({ALSO[name]})" if name in ALSO else ""
            error = UserError(
                f"{fullname} has moved; an import in your code; it is lib.{where} now{others}; write "
                f"`from lib.{where.partition('.')[0]} import NAME`, or `from lib.{where} import NAME`"
            )
            print(error_line(error), file=sys.stderr)
            raise Moved(str(error))
