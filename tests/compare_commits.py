"""Whether two commits train the same to the digit on a CPU: the metrics of every tiny recipe, step by step.

    python -m tests.compare_commits OLD NEW [RECIPE ...]

Each recipe runs a few steps on 2 ranks in a work tree of each commit. Seconds, memory and speed are left out. Prints a
row per recipe and exits with 1 where a number differs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORDS = ["--num-steps", "3", "--eval.every", "3", "--data.val-max-samples", "16"]
OF_PPO = ["--critic.warmup-steps", "1"]
NOT_COMPARED = ("timing", "perf/")


def run(tree: Path, module: str, *words: str, ranks: int = 0) -> None:
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}"] if ranks else []
    command = [sys.executable, *launcher, "-m", module, *words]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
        raise SystemExit(f"{tree.name}: {' '.join(command)} ended with {done.returncode}")


def metrics_of(tree: Path, recipe: str) -> list[dict[str, float]]:
    folder = tree / "runs" / recipe
    run(
        tree,
        f"recipes.{recipe}",
        *WORDS,
        *(OF_PPO if "ppo" in recipe else []),
        "--run-dir",
        str(folder),
        "--overwrite",
        ranks=2,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if not name.startswith(NOT_COMPARED)} for row in rows]


def main(old: str, new: str, *recipes: str) -> int:
    num_different = 0
    with tempfile.TemporaryDirectory() as folder:
        trees = [Path(folder) / name for name in ("old", "new")]
        for tree, commit in zip(trees, (old, new), strict=True):
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        run(trees[0], "recipes.prepare_arithmetic", "--out", "data/arithmetic")
        run(trees[0], "recipes.make_tiny_model", "--data", "data/arithmetic", "--out", "models/tiny-arithmetic")
        for name in ("data", "models"):  # of the old commit for both
            (trees[1] / name).symlink_to(trees[0] / name)
        for recipe in recipes or sorted(path.stem for path in (trees[1] / "recipes").glob("*_tiny_arithmetic.py")):
            one, other = (metrics_of(tree, recipe) for tree in trees)
            names = {name for rows in (one, other) for row in rows for name in row}
            different = [
                f"row {place}: {name} {a.get(name)} {b.get(name)}"
                for place, (a, b) in enumerate(zip(one, other, strict=True))
                for name in sorted(names)
                if a.get(name) != b.get(name) and not (a.get(name) != a.get(name) and b.get(name) != b.get(name))
            ]
            num_different += bool(different)
            print(f"{recipe:<40} {len(one)} rows of {len(names)} numbers: {different[:5] or 'equal'}", flush=True)
        for tree in trees:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
    return min(num_different, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
