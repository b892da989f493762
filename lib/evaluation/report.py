"""What an evaluation found: the summary as JSON, as a table for the terminal, and as a page with samples.

A response's value is the reward function's `acc` where it returns one, else its score. pass@k and maj@k need values
that are 0 or 1; for other scores they are left out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from lib.evaluation.inputs import EvalGroup, prediction_of
from lib.evaluation.passk import confidence_interval, majority_at_k, pass_at_k, powers_up_to
from lib.pages.charts import histogram
from lib.pages.page import cut, escape, facts, render, table
from lib.pages.samples import TURNS_STYLE, conversation_box
from lib.tracking.console import format_table
from lib.turns.conversations import of_episodes
from lib.types import Sample, Score

SHOWN = 5  # worst and best prompts on the page
BINS = 24

Summary = dict[str, Any]


def summarise(groups: Sequence[EvalGroup], data_sources: Sequence[str]) -> dict[str, Summary]:
    """{data source: its summary}, and "overall" over all prompts. `data_sources` has one entry a group.

    A summary has num_prompts, num_responses, n; mean@n and for k = 1, 2, 4, ... n pass@k and maj@k, each {value, low,
    high} with its 95 % confidence interval over prompts (passk.py); variable (acc or score), score_mean, score_std,
    num_unscored; truncation_rate, format_rate; response_length {mean, std, min, median, p90, p99, max} in tokens. What
    is not known is left out. Of conversations num_turns/* and turns/* too (docs/metrics.md). A response whose reward
    failed, or its environment, is in num_unscored and in no mean; a prompt counts for k if it has k scored responses.
    format_rate: the mean of `format` where the function returns it, else the share of responses in which it found an
    answer (`pred`).
    """
    assert groups and len(groups) == len(data_sources)
    result = {
        source: _summary([group for group, other in zip(groups, data_sources, strict=True) if other == source])
        for source in sorted(set(data_sources))
    }
    return {**result, "overall": _summary(groups)}


def _summary(groups: Sequence[EvalGroup]) -> Summary:
    num_responses = sum(len(group.responses) for group in groups)
    summary: Summary = {
        "num_prompts": len(groups),
        "num_responses": num_responses,
        "n": max(len(group.responses) for group in groups),
    }
    if groups[0].scores is not None:
        summary |= _score_summary([group.scores for group in groups], summary["n"])
    reasons = [reason for group in groups for reason in group.finish_reasons if reason is not None]
    if reasons:
        summary["truncation_rate"] = sum(reason in ("length", "turns") for reason in reasons) / len(reasons)
    lengths = [length for group in groups for length in group.response_lengths if length is not None]
    if lengths:
        p50, p90, p99 = np.percentile(lengths, (50, 90, 99), method="inverted_cdf").tolist()
        summary["response_length"] = {
            "mean": float(np.mean(lengths)), "std": float(np.std(lengths)), "min": min(lengths), "median": p50,
            "p90": p90, "p99": p99, "max": max(lengths),
        }  # fmt: skip
    episodes = [
        (episode.num_turns, reason or "unknown", episode.metrics)
        for group in groups
        for episode, reason in zip(group.episodes or (), group.finish_reasons, strict=False)
    ]
    return summary | of_episodes(episodes)


def _score_summary(scores: Sequence[Sequence[Score]], n: int) -> Summary:
    scored = [[score for score in of_prompt if score.score is not None] for of_prompt in scores]
    every = list(chain.from_iterable(scored))
    variable = variable_of(every)
    num_scored = len(every)
    summary: Summary = {"variable": variable, "num_unscored": sum(map(len, scores)) - num_scored}
    if not every:
        return summary
    values = [[value_of(score, variable) for score in of_prompt] for of_prompt in scored]

    is_binary = set(chain.from_iterable(values)) <= {0.0, 1.0}

    def estimate(per_prompt: list[float]) -> dict[str, float]:
        low, high = confidence_interval(per_prompt, most=num_scored if is_binary else None)
        return {"value": float(np.mean(per_prompt)), "low": low, "high": high}

    summary[f"mean@{n}"] = estimate([float(np.mean(of_prompt)) for of_prompt in values if of_prompt])
    has_answers = any(prediction_of(score) is not None for score in every)
    for k in powers_up_to(n) if is_binary else []:
        enough = [place for place, of_prompt in enumerate(values) if len(of_prompt) >= k]
        if not enough:
            continue
        counts = ((len(values[place]), int(sum(values[place]))) for place in enough)
        summary[f"pass@{k}"] = estimate([pass_at_k(num, num_correct, k) for num, num_correct in counts])
        if has_answers:
            answers = {place: [prediction_of(score) for score in scored[place]] for place in enough}
            summary[f"maj@{k}"] = estimate([majority_at_k(values[place], answers[place], k) for place in enough])
    numbers = [score.score for score in every]
    summary |= {"score_mean": float(np.mean(numbers)), "score_std": float(np.std(numbers))}
    formats = [float(score.extras["format"]) for score in every if not isinstance(score.extras.get("format", ""), str)]
    if formats:
        summary["format_rate"] = float(np.mean(formats))
    elif has_answers:
        summary["format_rate"] = sum(prediction_of(score) is not None for score in every) / num_scored
    return summary


def variable_of(scores: Sequence[Score]) -> str:
    """`acc` when the reward function returns such a number for every response, else `score`."""
    has_acc = all(not isinstance(score.extras.get("acc", ""), str) for score in scores)
    return "acc" if scores and has_acc else "score"


def value_of(score: Score, variable: str) -> float:
    """The variable's number of one scored response."""
    return float(score.extras["acc"] if variable == "acc" else score.score)


# ---- Terminal ----


def summary_table(summaries: Mapping[str, Summary], *, width: int) -> str:
    """The summaries in aligned columns, a row per metric and a column per data source.

    As many columns as `width` characters hold stand side by side, at least one; the others follow below.
    """
    header, rows = _table(summaries)

    def table(columns: Sequence[int]) -> str:
        names, *lines = ([line[0], *(line[column] for column in columns)] for line in (header, *rows))
        return format_table(names, lines)

    blocks: list[list[int]] = []
    for column in range(1, len(header)):
        if blocks and len(table([*blocks[-1], column]).splitlines()[1]) <= width:
            blocks[-1].append(column)
        else:
            blocks.append([column])
    return "\n\n".join(map(table, blocks))


def _table(summaries: Mapping[str, Summary]) -> tuple[list[str], list[list[str]]]:
    names = list(dict.fromkeys(name for summary in summaries.values() for name in summary))
    shown = {name: summary for name, summary in summaries.items() if name != "overall" or len(summaries) > 2}
    rows = [[name, *(_cell(summary.get(name)) for summary in shown.values())] for name in names]
    return ["", *shown], rows


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping) and "low" in value:
        return f"{value['value']:.4f} [{value['low']:.4f}, {value['high']:.4f}]"
    if isinstance(value, Mapping):
        return f"{value['mean']:.1f} ({value['min']} to {value['max']})"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


# ---- Page ----

PLAIN = {
    "num_prompts": "prompts", "num_responses": "responses", "n": "most responses of a prompt",
    "variable": "what is measured", "num_unscored": "responses without a score", "score_mean": "score, mean",
    "score_std": "score, standard deviation", "format_rate": "responses with an answer",
    "truncation_rate": "responses cut off at the limit", "response_length": "tokens of a response",
}  # fmt: skip
STATISTICS = {
    "mean": "mean of {k} responses", "pass": "right in at least one of {k}", "maj": "right by the majority of {k}",
}  # fmt: skip


def render_page(
    title: str, settings: Mapping[str, Any], summaries: Mapping[str, Summary], groups: Sequence[EvalGroup],
    samples: Sequence[Sample], messages: Callable[[int], Sequence[Mapping[str, str]]],
) -> str:  # fmt: skip
    """The page, in one file: how it was measured, the table, the lengths, the worst and the best prompts.

    `settings` say in plain names what the responses depend on. `samples` has one entry a group; `messages(place)` is
    the prompt of one. Every text is escaped: a model writes what it likes.
    """
    header, rows = _table(summaries)
    body = [
        facts(settings),
        "<h2>Results</h2>",
        table(header, [[_plain(row[0]), *row[1:]] for row in rows]),
        '<p class="note">In brackets the 95 % confidence interval over prompts, in parentheses the range.</p>',
    ]
    lengths = [length for group in groups for length in group.response_lengths if length is not None]
    if lengths:
        body += ["<h2>Response lengths</h2>", f'<div class="charts">{_histogram(lengths)}</div>']
    order = _by_value(groups)
    first = list(range(min(SHOWN, len(groups))))
    shown = {"Worst prompts": order[:SHOWN], "Best prompts": order[::-1][:SHOWN]} if order else {"First prompts": first}
    for name, places in shown.items():
        body.append(f"<h2>{name}</h2>")
        body += [_shown(groups[at], samples[at], messages(at), best=name.startswith("Best")) for at in places]
    return render(title, body, style=TURNS_STYLE if any(group.episodes for group in groups) else "")


def _plain(name: str) -> str:
    """A summary's name in words, with the name itself where out.json has it."""
    statistic, _, k = name.partition("@")
    words = STATISTICS[statistic].format(k=k) if k else PLAIN.get(name, name)
    if k == "1":
        words = "mean of one response" if statistic == "mean" else "right in one response"
    return words if words == name else f"{words} ({name})"


def _by_value(groups: Sequence[EvalGroup]) -> list[int]:
    """The places of the scored groups, those of the lowest mean value first."""
    scored = {
        place: [score for score in group.scores or () if score.score is not None] for place, group in enumerate(groups)
    }
    variable = variable_of([score for of_prompt in scored.values() for score in of_prompt])
    means = {place: np.mean([value_of(score, variable) for score in found]) for place, found in scored.items() if found}
    return sorted(means, key=lambda place: (means[place], place))


def _shown(group: EvalGroup, sample: Sample, messages: Sequence[Mapping[str, str]], *, best: bool) -> str:
    """One prompt with its best or worst response."""
    scores = [score.score for score in group.scores or ()]
    index = 0
    if any(score is not None for score in scores):
        sign = -1 if best else 1
        index = min(range(len(scores)), key=lambda i: (scores[i] is None, sign * (scores[i] or 0), i))
    told = [f"prompt {group.uid}", sample.data_source]
    if group.scores is not None:
        told.append("scores " + ", ".join("none" if score is None else f"{score:g}" for score in scores[:16]))
    known = [f"response {index}", f"{group.response_lengths[index]} tokens", str(group.finish_reasons[index])]
    if group.scores is not None:
        score = group.scores[index]
        known += [f"score {score.score}", f"answer {prediction_of(score)}", *([score.error] if score.error else [])]
    texts = [f"{message['role']}: {message['content']}" for message in messages]
    episode = group.episodes and group.episodes[index]
    response = conversation_box(episode.turns) if episode else f"<pre>{escape(cut(group.responses[index]))}</pre>"
    return (
        f"<details open><summary>{escape(' | '.join(told))}</summary>"
        f'<pre>{escape(cut(chr(10).join(texts)))}</pre><p class="note">expected '
        f"{escape(cut(str(sample.ground_truth)))}; {escape(cut('; '.join(known)))}</p>"
        f"{response}</details>"
    )


def _histogram(lengths: Sequence[int]) -> str:
    """How many responses have which length."""
    width = max(1, math.ceil((max(lengths) - min(lengths) + 1) / BINS))
    counts, edges = np.histogram(lengths, bins=np.arange(min(lengths), max(lengths) + 1 + width, width))
    return histogram(
        "Responses by length", f"number of responses; bars of {width} tokens", counts.tolist(), edges.tolist()
    )
