"""Draws the validation accuracy of several runs over their steps in one picture, from their metrics.jsonl.

python -m recipes.plot_algorithms --runs runs/grpo_tiny runs/dapo_tiny --out docs/algorithms.png
"""

from dataclasses import dataclass
from pathlib import Path

from lib.config import parse_cli, reporting_errors
from lib.errors import UserError
from lib.tracking import read_metrics
from lib.tracking.console import validation_values

MARKERS = "os^vDP*X<>"  # colours alone do not tell curves apart for everyone


@dataclass(frozen=True, kw_only=True)
class PlotConfig:
    """Which runs to draw, and where to."""

    runs: tuple[str, ...] = ()
    """Run folders; a curve is labelled with its folder's name."""
    metric: str = "val-core/arithmetic/acc/mean@1"
    """Name of the metric to draw."""
    out: str = "docs/algorithms.png"
    """File to write the picture to."""


def read_curve(run_dir: str, metric: str) -> list[tuple[int, float]]:
    """The steps and values of a run's metric. Raises UserError for a run without it."""
    history = read_metrics(Path(run_dir))
    curve = [(row["step"], row[metric]) for row in history if metric in row]
    if not curve:
        known = ", ".join(validation_values(history)) or "no validation"
        raise UserError(
            f"nothing to draw; --runs {run_dir}; found {known}, expected {metric} in its metrics.jsonl; name another "
            "folder or --metric"
        )
    return curve


def main(cfg: PlotConfig) -> None:
    """Writes the picture and prints every curve's values."""
    if not cfg.runs:
        raise UserError("nothing to draw; --runs; found no folder, expected at least 1; name run folders")
    curves = {Path(run).name: read_curve(run, cfg.metric) for run in cfg.runs}

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True}
    with pyplot.rc_context({**style, "grid.alpha": 0.25, "legend.frameon": False}):
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="tight")
        for place, (name, curve) in enumerate(curves.items()):
            marker = MARKERS[place % len(MARKERS)]
            axes.plot(*zip(*curve, strict=True), marker=marker, markersize=5, linewidth=1.5, label=name)
            print(f"{name}: " + " ".join(f"{value:.3f}" for _, value in curve))
        axes.set(xlabel="step", ylabel=cfg.metric, title="One task, one model, one seed")
        axes.legend(loc="best")
        Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(cfg.out, dpi=120)
        pyplot.close(figure)
    print(f"wrote {cfg.out}")


if __name__ == "__main__":
    with reporting_errors():
        main(parse_cli(PlotConfig()))
