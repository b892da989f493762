"""RUN/report.html: what a run is, did and wrote, on one page; and several runs on one (`eval.py --compare`).

The page is small however long the run: lib/pages/charts.py thins the curves, and of the samples those of six steps are
shown, the first, the last, and evenly between. RUN/tokens/ keeps at most 60 steps, and thins them in the same way.
"""

import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.errors import UserError, printable
from lib.pages.charts import MOST_LINES, Series, line_chart, number, stacked_chart
from lib.pages.page import escape, facts, render, table
from lib.pages.samples import prompt_box, read_rows, response_box, side_by_side, style_of
from lib.secret_values import blank, blank_message
from lib.torchrun import command_words
from lib.tracking.console import VALIDATION_NAME, validation_values
from lib.tracking.run_folder import read_metrics, read_object, read_status, step_files

PAGE = "report.html"
TOKENS = "tokens"
STEPS_SHOWN = 6  # of samples
STEPS_KEPT = 60  # of tokens/
KINDS = ("validation", "training")

History = Sequence[Mapping[str, float]]

CHARTS = (
    ("Reward", "score of a response, mean of the step", ["critic/score/mean"]),
    ("Response length", "tokens, mean of the step", ["response_length/mean"]),
    ("Cut off at the limit", "share of the step's responses", ["response_length/clip_ratio"]),
    ("Groups without signal", "share of groups whose rewards are all equal", ["reward/constant_group_ratio"]),
    ("Entropy", "nats per token", ["actor/entropy"]),
    ("KL to the reference", "nats", ["actor/kl_loss", "actor/reward_kl_penalty"]),
    ("KL of the update", "old minus new log-prob, nats per token", ["actor/ppo_kl"]),
    (
        "Mismatch of engine and trainer",
        "mean difference of log-probs, nats per token",
        ["training/rollout_log_probs_diff/mean"],
    ),
    ("Gradient norm", "before clipping", ["actor/grad_norm", "critic/grad_norm"]),
    ("Throughput", "tokens per second and rank", ["perf/throughput"]),
    ("Messages", "of an episode: prompt, turns, observations", ["num_turns/mean", "num_turns/max", "num_turns/min"]),
    ("Turns and calls", "of an episode, mean of the step", ["turns/per_episode", "turns/calls_per_episode"]),
    (
        "Calls that failed",
        "of the step: not to be made, raised, too slow",
        ["turns/bad_calls", "turns/tool_errors", "turns/tool_timeouts"],
    ),
    (
        "Episodes in trouble",
        "of the step: the environment failed, its worker was lost, an observation was cut",
        ["turns/excluded", "turns/replayed", "turns/truncated_observations"],
    ),
    ("Cut off by the number of turns", "share of the step's episodes", ["turns/max_turns_ratio"]),
    ("Time of an answer", "seconds", [f"turns/tool_latency_s/{name}" for name in ("p50", "p99", "max")]),
    ("Waiting for answers", "share of the sampling", ["turns/waiting_share"]),
    ("Prompts found in the cache", "share of the tokens before a further turn", ["turns/cached_prompt_ratio"]),
)
"""Title, unit and metrics of each chart of training; docs/metrics.md defines them."""
PHASES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "update_weights",
          "sleep")  # fmt: skip
"""The phases of timing_s/step, which do not overlap."""
TEXTS = (
    ("repetition", "Repetition", "share of 4-grams that repeat"),
    ("garbled", "Garbled text", "share of characters"),
)


@dataclass(frozen=True, kw_only=True)
class RunView:
    """What a page says of a run."""

    name: str
    history: History
    config: Mapping[str, Any]
    status: Mapping[str, Any]
    samples: Mapping[int, Sequence[Mapping[str, Any]]]
    """Step -> rows of tokens/step_N.jsonl, of the steps that are shown."""


def read_view(folder: Path, *, history: History | None = None) -> RunView:
    """A run's folder as its page needs it; `history` where not all of it is in metrics.jsonl yet. Raises UserError,
    OSError."""
    samples = {step: read_rows(path.read_bytes()) for step, path in step_files(folder / TOKENS, "jsonl")}
    shown: dict[int, list[Mapping[str, Any]]] = {}
    for kind in KINDS:
        of_kind = {step: [row for row in rows if row["kind"] == kind] for step, rows in samples.items()}
        for step in evenly([step for step, rows in of_kind.items() if rows], STEPS_SHOWN):
            shown.setdefault(step, []).extend(of_kind[step])
    return RunView(
        name=folder.name,
        history=read_metrics(folder) if history is None else history,
        config=read_object(folder / "config.json"),
        status=read_status(folder),
        samples=dict(sorted(shown.items())),
    )


def evenly(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of the steps: the first, the last, and those nearest to equal distances between."""
    if len(steps) <= most:
        return list(steps)
    gap = (steps[-1] - steps[0]) / (most - 1)
    return sorted({min(steps, key=lambda step: abs(step - steps[0] - place * gap)) for place in range(most)})


def surplus(files: Sequence[tuple[int, Path]]) -> list[Path]:
    """Which files of tokens/ go before another one comes: none, or of 60 those that are not among 20 of a kind."""
    if len(files) < STEPS_KEPT:
        return []
    texts = {step: path.read_text(encoding="utf-8", errors="replace") for step, path in files}
    kept = {
        step
        for kind in KINDS
        for step in evenly([step for step, text in texts.items() if f'"kind": "{kind}"' in text], STEPS_KEPT // 3)
    }
    return [path for step, path in files if step not in kept]


# ---- One run ----


def run_page(view: RunView, *, defaults: Mapping[str, Any], command: str) -> str:
    """The page of a run, without secrets. `defaults`: the config of a run that sets nothing."""
    last = view.history[-1]["step"] if view.history else 0
    seconds = sum(row.get("timing_s/step", 0.0) + row.get("timing_s/testing", 0.0) for row in view.history)
    told = {
        "state": f"{view.status.get('state', 'unknown')}, step {last:g}",
        **({"begun": view.status["date"]} if view.status.get("date") else {}),
        "this page": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "time in steps": f"{seconds / 60:.1f} minutes",
        "model": (view.config.get("model") or {}).get("path", "unknown"),
        **({"ended by": view.status["error"]} if view.status.get("error") else {}),
    }
    changed = options_that_differ([view.config, defaults])
    body = [
        facts(told),
        f"<h2>Command</h2><pre>{escape(command)}</pre>",
        "<h2>Validation</h2>",
        _charts(_validation_charts(view)),
        "<h2>Training</h2>",
        _charts([*_training_charts([view]), *_phases(view.history)]),
        *_samples_over_steps(view),
        "<h2>Options that are not the defaults</h2>",
        table(["option", "this run", "default"], [(name, *values) for name, values in changed.items()], words=True),
        '<p class="note">All others are the defaults; config.json beside this page has each.</p>',
    ]
    return blank(render(f"Run {view.name}", body, style=_style([view])))


def _style(views: Sequence[RunView]) -> str:
    return style_of(row for view in views for rows in view.samples.values() for row in rows)


def _charts(charts: Sequence[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>' if charts else '<p class="note">Nothing yet.</p>'


def _points(history: History, name: str) -> list[tuple[int, float]]:
    return [(int(row["step"]), row[name]) for row in history if name in row]


def _validation_charts(view: RunView) -> list[str]:
    """The core metrics of all sources, and what their texts look like."""
    values = {name: points for name, points in validation_values(view.history).items() if not name.endswith("/std")}
    series = [Series(name=_plain(name), points=points) for name, points in values.items()]
    note = "mean over a source's prompts"
    charts = [
        line_chart("Score by source", note, series[at : at + MOST_LINES]) for at in range(0, len(series), MOST_LINES)
    ]
    for variable, title, unit in TEXTS:
        found = {name.split("/", 1)[1].rsplit(f"/{variable}/", 1)[0]: name for name in _text_names([view], variable)}
        series = [Series(name=source, points=_points(view.history, name)) for source, name in found.items()]
        charts += [line_chart(title, f"{unit}, mean over a source's prompts", series)] * bool(series)
    return charts


def _plain(name: str) -> str:
    source, variable, metric = VALIDATION_NAME.fullmatch(name).groups()
    return f"{source}: {variable}/{metric}"


def _text_names(views: Sequence[RunView], variable: str) -> list[str]:
    """The metrics val-aux/SOURCE/VARIABLE/mean@N of these runs."""
    names = dict.fromkeys(name for view in views for row in view.history for name in row)
    return [name for name in names if name.startswith("val-aux/") and f"/{variable}/mean@" in name]


def _training_charts(views: Sequence[RunView]) -> list[str]:
    """A chart per entry of CHARTS: of one run a line per metric, of several a line per run and a chart per metric."""
    charts = []
    for title, note, names in (*CHARTS, *_measured_by_environments(views)):
        found = [name for name in names if any(_points(view.history, name) for view in views)]
        groups = [found] if len(views) == 1 else [[name] for name in found]
        for group in groups:
            series = [
                Series(name=name if len(views) == 1 else view.name, points=points)
                for view in views
                for name in group
                if (points := _points(view.history, name))
            ]
            more = f", {group[0]}" if len(groups) > 1 else ""
            charts += [line_chart(title, note + more, series)] * bool(series)
    return charts


def _measured_by_environments(views: Sequence[RunView]) -> list[tuple[str, str, list[str]]]:
    """An entry as those of CHARTS for each turns/NAME that an environment or a tool has given."""
    known = {name for _, _, names in CHARTS for name in names}
    found = dict.fromkeys(name for view in views for row in view.history for name in row if name.startswith("turns/"))
    return [
        (name.removeprefix("turns/"), "of an episode, mean of the step", [name]) for name in found if name not in known
    ]


def _phases(history: History) -> list[str]:
    """Where the seconds of the steps went."""
    rows = [row for row in history if "timing_s/step" in row]
    names = [name for name in PHASES if any(f"timing_s/{name}" in row for row in rows)]
    if not names:
        return []
    series = [
        Series(name=name, points=[(int(row["step"]), row.get(f"timing_s/{name}", 0.0)) for row in rows])
        for name in names
    ]
    total = dict(_points(rows, "timing_s/step"))
    known = [sum(values) for values in zip(*([v for _, v in each.points] for each in series), strict=True)]
    rest = [(step, max(0.0, total[step] - of_step)) for (step, of_step) in zip(total, known, strict=True)]
    if len(rest) == len(series[0].points):
        series.append(Series(name="rest of the step", points=rest))
    largest = sorted(series, key=lambda each: -sum(value for _, value in each.points))
    return [stacked_chart("Step time by phase", "seconds, slowest rank", largest)]


def _samples_over_steps(view: RunView) -> Iterator[str]:
    """The same validation prompts over steps; and of training, where prompts change, the worst and best responses."""
    yield "<h2>Samples</h2>"
    yield (
        '<p class="note">Tokens on a coloured ground had a probability below 1/2, 1/10 or 1/100. Point at one, '
        "or touch it, for its log-prob under the engine and its advantage. "
        f"At most {STEPS_SHOWN} steps are shown; samples/ and rollouts/ have more.</p>"
    )
    prompts: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for step, rows in view.samples.items():
        for row in rows:
            if row["kind"] == "validation":
                prompts.setdefault((row["uid"], row["temperature"]), {})[step] = row
    for (_, temperature), by_step in prompts.items():
        first = next(iter(by_step.values()))
        yield f"<h3>Validation, temperature {temperature:g}</h3>{prompt_box(first)}"
        yield side_by_side([response_box(f"step {step}", row) for step, row in by_step.items()])
    columns = [column for step, rows in view.samples.items() if (column := _training_column(step, rows))]
    if columns:
        yield f"<h3>Training: the worst and the best response to a step's first prompts</h3>{side_by_side(columns)}"


def _training_column(step: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """A step's training prompts, each with its responses below it; empty without any."""
    parts = []
    training = [row for row in rows if row["kind"] == "training"]
    for uid in dict.fromkeys(row["uid"] for row in training):
        group = sorted((row for row in training if row["uid"] == uid), key=lambda row: row["score"] or 0)
        parts += [prompt_box(group[0]), *(response_box(f"response {row['index']}", row) for row in group)]
    return "".join([f"<b>step {step}</b>", *parts]) if parts else ""


def options_that_differ(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """--option -> its value in each config, where they are not all equal; - where one does not know it."""
    flat = [dict(_flat(config)) for config in configs]
    names = dict.fromkeys(name for each in flat for name in each)
    told = {name: [_told(each.get(name, "-")) for each in flat] for name in names}
    return {name: values for name, values in told.items() if len(set(values)) > 1}


def _flat(config: Mapping[str, Any], prefix: str = "--") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        option = f"{prefix}{name.replace('_', '-')}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{option}.")
        else:
            yield option, value


def _told(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def launch_command() -> str:
    """What was typed to start this run, as a shell reads it, without secrets."""
    return printable(shlex.join(blank_message(word) for word in command_words()))


# ---- Several runs ----


def compare_page(folders: Sequence[Path]) -> str:
    """The curves of several runs on one page, and the options that tell them apart. Raises UserError, OSError."""
    if not 2 <= len(folders) <= MOST_LINES or len({folder.resolve() for folder in folders}) < len(folders):
        raise UserError(
            f"not the runs for one page; --compare {' '.join(map(str, folders))}; found {len(folders)}, expected from "
            f"2 to {MOST_LINES} different run folders; name each once"
        )
    for folder in folders:
        if not (folder / "config.json").is_file():
            raise UserError(
                f"not a run; --compare {folder}; found no config.json there, expected the folder of a run; give what "
                "the run had as --run-dir"
            )
    views = [_renamed(read_view(folder), folder, folders) for folder in folders]
    names = [view.name for view in views]
    rows = []
    for metric in dict.fromkeys(name for view in views for name in validation_values(view.history)):
        lasts = [_points(view.history, metric)[-1:] for view in views]
        rows.append([_plain(metric), *(f"{number(p[0][1])} (step {p[0][0]})" if p else "-" for p in lasts)])
    changed = options_that_differ([view.config for view in views])
    body = [
        table(["last validation", *names], rows),
        "<h2>Validation</h2>",
        _charts(_compared_validations(views)),
        "<h2>Training</h2>",
        _charts([*_training_charts(views), *_compared(views, "timing_s/step", "Step time", "seconds, slowest rank")]),
        *_last_samples(views),
        "<h2>Options that differ</h2>",
        table(["option", *names], [(name, *values) for name, values in changed.items()], words=True),
    ]
    return blank(render(f"Runs {', '.join(names)}", body, style=_style(views)))


def _renamed(view: RunView, folder: Path, folders: Sequence[Path]) -> RunView:
    """The view under its folder's name, or under the path as given where another run has that name too."""
    clashes = [other for other in folders if other.resolve().name == folder.resolve().name]
    name = str(folder) if len(clashes) > 1 else folder.resolve().name
    return RunView(**{**vars(view), "name": name})


def _compared(views: Sequence[RunView], metric: str, title: str, note: str) -> list[str]:
    series = [Series(name=view.name, points=points) for view in views if (points := _points(view.history, metric))]
    return [line_chart(title, note, series)] if series else []


def _compared_validations(views: Sequence[RunView]) -> list[str]:
    """A chart per core metric that any of the runs has, then those of the texts."""
    names = dict.fromkeys(name for view in views for name in validation_values(view.history))
    charts = [
        chart
        for name in names
        if not name.endswith("/std")
        for chart in _compared(views, name, _plain(name), "mean over the source's prompts")
    ]
    for variable, title, unit in TEXTS:
        for name in _text_names(views, variable):
            charts += _compared(views, name, title, f"{unit}, {name}")
    return charts


def _last_samples(views: Sequence[RunView]) -> Iterator[str]:
    """The runs' last responses to each validation prompt that the first of them shows."""
    last: list[dict[tuple[Any, ...], tuple[int, Mapping[str, Any]]]] = []
    for view in views:
        found = {}
        for step, rows in view.samples.items():
            found |= {(row["prompt"], row["temperature"]): (step, row) for row in rows if row["kind"] == "validation"}
        last.append(found)
    if last[0]:
        yield "<h2>Samples of the last validations</h2>"
    for key, (_, row) in last[0].items():
        columns = []
        for view, found in zip(views, last, strict=True):
            step, other = found.get(key, (None, None))
            columns.append(response_box(view.name if step is None else f"{view.name}, step {step}", other))
        yield f"<h3>Temperature {key[1]:g}</h3>{prompt_box(row)}{side_by_side(columns)}"
