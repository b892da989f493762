"""The direction of dependencies: recipes -> scripts -> lib, and inside lib only upwards in this list."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = [
    *("errors", "regular_files"),
    *(
        "verl_keys",
        "secret_values",
        "config",
        "dist",
        "messages",
        "peers",
        "stopping",
        "types",
        "ops",
        "step_rows",
        "shaping",
        "advantages",
    ),
    *("aggregation", "selection", "losses", "critic_loss", "groups", "curriculum", "batching", "checkpoint_files"),
    *("weight_files", "beside_weights", "model_files", "whole_tensors", "verl_shards", "export", "model_source"),
    *(
        "schema",
        "parquet",
        "custom_dataset",
        "chat_template",
        "data",
        "prompt_stream",
        "rewards",
        "scoring",
        "reward_trial",
        "metrics",
    ),
    *("kl", "correction", "cudnn_attention", "attention", "host_memory", "model", "fsdp", "forward", "optim", "critic"),
    *("console", "run_folder", "terminal", "tracking", "gumbel", "engine_patches", "rollout", "weight_sync"),
    *("evaluate", "sampling", "tensor_files", "trainer_file", "checkpoint"),
    *("train_config", "rollout_files", "branch", "resume", "launch"),
    *("passk", "eval_files", "eval_model", "eval_scores", "eval_report"),
]
"""A lib module imports only modules named before it."""
HEAVY = {"vllm": {"rollout", "engine_patches"}, "wandb": {"tracking"}, "peft": set(), "math_verify": {"rewards"}}
"""Package -> the only lib modules that may import it, and only inside functions."""
LIB = sorted((ROOT / "lib").rglob("[!_]*.py"))


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    """The modules that a file imports, inside functions too unless told otherwise."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "lib").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", LIB, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_lib_module_imports_only_modules_before_it(path):
    name = name_of(path)
    assert name in ORDER, f"{path.name} has no place: add it to ORDER"
    for module in imported(path):
        top, *rest = module.split(".")
        assert top not in ("recipes", "tests") and not top.startswith("train_"), f"{path.name} imports {module}"
        if top == "lib":
            assert rest[0] in ORDER[: ORDER.index(name)] or rest[0] == name == "rewards", f"{name} imports {module}"
        if top in HEAVY:
            assert name in HEAVY[top], f"{name} imports {module}"


def test_every_module_in_the_order_exists():
    assert set(ORDER) == {name_of(path) for path in LIB}


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("[!_]*.py")), ids=lambda p: p.name)
def test_recipes_do_not_import_recipes(path):
    assert not any(module.startswith("recipes") for module in imported(path))


@pytest.mark.parametrize("script", ["train_grpo", "eval"])
def test_a_script_starts_without_heavy_packages(script):
    heavy = ["transformers", "vllm", "pyarrow", "matplotlib", "tensorboard", "peft", "math_verify", "wandb"]
    code = f"import sys, {script}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_library_file_stays_readable():
    """500 lines is the alarm at which a file is split by subject."""
    long = {str(path.relative_to(ROOT)): n for path in LIB if (n := len(path.read_text().splitlines())) > 500}
    assert not long
