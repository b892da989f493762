"""The direction of dependencies: recipes -> scripts -> lib, and in lib from room to room as ORDER says."""

import ast
import graphlib
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from lib.rooms import MOVED

ROOT = Path(__file__).resolve().parents[1]
ORDER = [
    *("errors", "rooms", "regular_files", "secret_values", "torchrun", "config", "dist", "messages", "peers"),
    *("stopping", "types", "ops", "families", "storage", "pages", "tracking", "algorithms", "data", "model", "engine"),
    *("workers", "rewards", "turns", "rollouts", "checkpoints", "launch", "evaluation"),
]
"""A room of lib/, or a file beside the rooms, imports only itself and those named before it."""
HEAVY = {"vllm": {"engine"}, "wandb": {"tracking"}, "peft": set(), "math_verify": {"rewards"}}
"""Package -> the only rooms that may import it, and only inside functions."""
LIB = sorted((ROOT / "lib").rglob("[!_]*.py"))
ROOMS = [name for name in ORDER if (ROOT / "lib" / name).is_dir()]


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
def test_a_room_imports_only_rooms_before_it(path):
    name = name_of(path)
    assert name in ORDER, f"{path.name} has no place: add it to ORDER"
    for module in imported(path):
        top, *rest = module.split(".")
        assert top not in ("recipes", "tests") and not top.startswith("train_"), f"{path.name} imports {module}"
        if top == "lib":
            assert rest[0] in ORDER[: ORDER.index(name) + 1], f"{name} imports {module}"
            assert len(rest) > 1 or not (ROOT / "lib" / rest[0]).is_dir(), f"{path.name}: name the file of {module}"
        if top in HEAVY:
            assert name in HEAVY[top], f"{name} imports {module}"


def test_every_room_in_the_order_exists():
    assert set(ORDER) == {name_of(path) for path in LIB}


def test_no_two_files_import_each_other_however_far_around():
    imports = {".".join(path.relative_to(ROOT).with_suffix("").parts): imported(path) for path in LIB}
    tuple(graphlib.TopologicalSorter(imports).static_order())  # raises CycleError, which names them


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_offers_what_its_files_define_and_contributing_lists_it(room):
    offered = import_module(f"lib.{room}")
    for name in offered.__all__:
        assert getattr(offered, name) is not None
        assert not (ROOT / "lib" / room / f"{name}.py").exists(), "a file hides what has its name"
    (line,) = re.findall(rf"^    {room}/ +(.*(?:\n {{8,}}.*)*)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted(line.split()) == offered.__all__
    assert not hasattr(offered, "torch")
    with pytest.raises(ImportError):
        exec(f"from lib.{room} import nothing_of_this_name")


def test_an_import_of_a_file_that_has_moved_ends_with_one_line_that_names_its_place(tmp_path):
    assert all((ROOT / "lib" / f"{place.replace('.', '/')}.py").is_file() for place in MOVED.values())
    recipe = tmp_path / "recipe.py"
    recipe.write_text("from lib.losses import ClipLoss\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(recipe)], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error[2]") and done.stderr.count("\n") == 1
    assert "`from lib.algorithms import NAME`" in done.stderr
    recipe.write_text("from lib.metrics import data_metrics\n")
    done = subprocess.run([sys.executable, str(recipe)], capture_output=True, text=True, env=env)
    assert "what measures a step in lib.algorithms" in done.stderr
    recipe.write_text("import lib.no_such_file\n")
    done = subprocess.run([sys.executable, str(recipe)], capture_output=True, text=True, env=env)
    assert "ModuleNotFoundError" in done.stderr


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
