"""Charts as inline SVG: lines over steps, and phases stacked over steps. Each is a figure with caption and legend.

A line has at most 200 points, however long the run: each is then the mean of as many neighbouring steps, before a pale
band from their smallest to their largest value. Values that are not finite leave a gap and are counted in the legend.
Lines differ by colour and by dashes, so that one shows through the other where they are equal.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lib.pages.page import escape

MOST_POINTS = 200
MOST_LINES = 8  # colours and dashes of page.STYLE
WIDTH, HEIGHT = 440, 200
LEFT, RIGHT, TOP, BOTTOM = 48, 432, 8, 178  # of the plot, in the viewBox's units
Y_LINES = 4


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line's name in the legend, and its values by step, ascending."""

    name: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True, kw_only=True)
class Point:
    """The mean of neighbouring steps, drawn at the last of them; NaN: none is finite."""

    step: int
    value: float
    low: float
    high: float


def thin(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> list[Point]:
    """At most that many points, each the mean of equally many neighbouring steps (the last of fewer)."""
    size = max(1, math.ceil(len(points) / most))
    found = []
    for start in range(0, len(points), size):
        steps = points[start : start + size]
        values = [value for _, value in steps if math.isfinite(value)] or [math.nan]
        mean = math.fsum(values) / len(values)
        found.append(Point(step=steps[-1][0], value=mean, low=min(values), high=max(values)))
    return found


def line_chart(title: str, note: str, series: Sequence[Series]) -> str:
    """Lines over steps; of the first 8 series, since more could not be told apart."""
    series, left_out = series[:MOST_LINES], len(series) - MOST_LINES
    lines = [thin(each.points) for each in series]
    values = [v for line in lines for p in line for v in (p.low, p.value, p.high) if math.isfinite(v)]
    frame = _Frame([p.step for line in lines for p in line], values)
    drawn = []
    for place, (each, line) in enumerate(zip(series, lines, strict=True)):
        parts = [_line_parts(run, frame) for run in _finite_runs(line)]
        if len(line) <= 40:
            parts += [
                f'<circle class="dot" cx="{frame.x(p.step)}" cy="{frame.y(p.value)}" r="2.5"/>'
                for p in line
                if math.isfinite(p.value)
            ]
        drawn.append(_group(place, each.name, [(p.step, p.value) for p in line], "".join(parts)))
    legend = [_legend_text(place, series) for place in range(len(series))]
    size = max((math.ceil(len(each.points) / MOST_POINTS) for each in series), default=1)
    if size > 1:
        note += f"; a point is the mean of up to {size} steps, the band their range"
    if left_out > 0:
        note += f"; {left_out} more lines are left out"
    return _figure(title, note, frame, drawn, legend)


def stacked_chart(title: str, note: str, series: Sequence[Series]) -> str:
    """The series on top of one another, which must have the same steps; a value that is not finite counts as 0."""
    if len(series) > MOST_LINES:
        rest = [points for each in series[MOST_LINES - 1 :] for points in [each.points]]
        summed = [(of_step[0][0], math.fsum(value for _, value in of_step)) for of_step in zip(*rest, strict=True)]
        series = [*series[: MOST_LINES - 1], Series(name="others", points=summed)]
    lines = [thin(each.points) for each in series]
    steps = [p.step for p in lines[0]] if lines else []
    floor = [0.0] * len(steps)
    tops: list[list[float]] = []
    for line in lines:
        tops.append([low + (p.value if math.isfinite(p.value) else 0.0) for low, p in zip(floor, line, strict=True)])
        floor = tops[-1]
    frame = _Frame(steps, [0.0, *floor])
    drawn = []
    floor = [0.0] * len(steps)
    for place, (each, line, top) in enumerate(zip(series, lines, tops, strict=True)):
        if len(steps) == 1:  # an area needs a width
            x, y = frame.x(steps[0]), frame.y(top[0])
            shape = f'<rect class="area" x="{x - 12}" y="{y}" width="24" height="{frame.y(floor[0]) - y:.1f}"/>'
        else:
            outline = [*zip(steps, top, strict=True), *reversed(list(zip(steps, floor, strict=True)))]
            shape = f'<polygon class="area" points="{frame.path(outline)}"/>'
        drawn.append(_group(place, each.name, [(p.step, p.value) for p in line], shape))
        floor = top
    legend = [escape(each.name) for each in series]
    return _figure(title, note, frame, drawn, legend, swatch='<rect width="28" height="8" class="area"/>')


def histogram(title: str, note: str, counts: Sequence[int], edges: Sequence[int]) -> str:
    """Bars of counts; bar i is from edges[i] to below edges[i + 1], and says so under a mouse."""
    step = (RIGHT - LEFT) / len(counts)
    bars = "".join(
        f'<rect class="bar" x="{LEFT + place * step:.1f}" y="{BOTTOM - (BOTTOM - TOP) * count / max(counts):.1f}" '
        f'width="{max(step - 1, 0.5):.1f}" height="{(BOTTOM - TOP) * count / max(counts):.1f}"><title>{edges[place]} '
        f"to {edges[place + 1] - 1}: {count}</title></rect>"
        for place, count in enumerate(counts)
    )
    axis = (
        f'<text x="{LEFT}" y="{HEIGHT - 6}">{edges[0]}</text><text x="{RIGHT}" y="{HEIGHT - 6}" '
        f'text-anchor="end">{edges[-1] - 1}</text><text x="{LEFT - 6}" y="{TOP + 9}" text-anchor="end">{max(counts)}'
        f'</text><line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{BOTTOM}" y2="{BOTTOM}"/>'
    )
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{bars}{axis}</svg>'
    return f"<figure><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>{svg}</figure>"


def number(value: float) -> str:
    """Four significant digits; thousands with commas."""
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


class _Frame:
    """The plot's scales: steps to x, values to y, with lines at round values."""

    def __init__(self, steps: Sequence[int], values: Sequence[float]) -> None:
        self.first, self.last = (min(steps), max(steps)) if steps else (0, 0)
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if high - low <= 1e-9 * max(abs(low), abs(high)):  # a line that is flat, up to rounding
            low, high = low - abs(low) / 10, high + (abs(high) / 10 or 1.0)
        rough = (high - low) / Y_LINES
        unit = 10.0 ** math.floor(math.log10(rough))
        gap = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        self.y_lines = [gap * place for place in range(math.floor(low / gap), math.ceil(high / gap) + 1)]
        self.low, self.high = self.y_lines[0], self.y_lines[-1]

    def x(self, step: float) -> float:
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return round(LEFT + share * (RIGHT - LEFT), 1)

    def y(self, value: float) -> float:
        return round(BOTTOM - (value - self.low) / (self.high - self.low) * (BOTTOM - TOP), 1)

    def path(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(step):g},{self.y(value):g}" for step, value in points)

    def axes(self) -> str:
        lines = "".join(
            f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{self.y(at)}" y2="{self.y(at)}"/>'
            f'<text x="{LEFT - 6}" y="{self.y(at) + 4:.1f}" text-anchor="end">{number(round(at, 12))}</text>'
            for at in self.y_lines
        )
        steps = sorted({self.first, (self.first + self.last) // 2, self.last})
        anchors = ["start", *["middle"] * (len(steps) - 2), "end"] if len(steps) > 1 else ["middle"]
        return lines + "".join(
            f'<text x="{self.x(step)}" y="{HEIGHT - 6}" text-anchor="{anchor}">{step}</text>'
            for step, anchor in zip(steps, anchors, strict=True)
        )


def _finite_runs(line: Sequence[Point]) -> list[list[Point]]:
    """The line's pieces between values that are not finite."""
    runs: list[list[Point]] = [[]]
    for point in line:
        if math.isfinite(point.value):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _line_parts(run: Sequence[Point], frame: _Frame) -> str:
    line = f'<polyline class="line" points="{frame.path([(p.step, p.value) for p in run])}"/>'
    if all(p.low == p.high for p in run):
        return line
    outline = [(p.step, p.high) for p in run] + [(p.step, p.low) for p in reversed(run)]
    return f'<polygon class="range" points="{frame.path(outline)}"/>{line}'


def _group(place: int, name: str, points: Sequence[tuple[int, float]], shapes: str) -> str:
    """A series' shapes, with the numbers that its hover shows."""
    steps, values = ",".join(f"{step}" for step, _ in points), ",".join(f"{value:.4g}" for _, value in points)
    return f'<g class="s{place}" data-name="{escape(name)}" data-steps="{steps}" data-values="{values}">{shapes}</g>'


def _legend_text(place: int, series: Sequence[Series]) -> str:
    """The name, its last finite value, the steps without one, and which earlier series has the same points."""
    each = series[place]
    finite = [value for _, value in each.points if math.isfinite(value)]
    text = escape(each.name) + (f" <b>{number(finite[-1])}</b>" if finite else "")
    told = [f"not finite in {len(each.points) - len(finite)} steps"] * (len(finite) < len(each.points))
    same = [other.name for other in series[:place] if str(list(other.points)) == str(list(each.points))]
    told += [f"equal to {escape(name)}" for name in same[:1]]
    return f"{text} <small>{'; '.join(told)}</small>" if told else text


def _figure(
    title: str, note: str, frame: _Frame, drawn: Sequence[str], legend: Sequence[str],
    swatch: str = '<line x2="28" y1="4" y2="4" class="line"/>',
) -> str:  # fmt: skip
    keys = "".join(
        f'<li><svg class="s{place}" viewBox="0 0 28 8" aria-hidden="true"><g class="s{place}">{swatch}</g></svg>{text}'
        "</li>"
        for place, text in enumerate(legend)
    )
    return (
        f"<figure><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" data-first="{frame.first}" '
        f'data-last="{frame.last}" data-left="{LEFT}" data-right="{RIGHT}">{frame.axes()}{"".join(drawn)}'
        f'<line class="cursor" x1="-9" x2="-9" y1="{TOP}" y2="{BOTTOM}"/></svg><ul class="legend">{keys}</ul></figure>'
    )
