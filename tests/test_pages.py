"""What every page is made of: charts whose points are the numbers, text that stays text, one file without a network."""

import base64
import hashlib
import math
import random
import re
from html.parser import HTMLParser

import pytest

from lib.pages.charts import BOTTOM, LEFT, MOST_POINTS, RIGHT, TOP, Series, histogram, line_chart, stacked_chart, thin
from lib.pages.page import cut, escape, facts, render, table

EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&</pre></svg>--><style>*{}</style>\x1b[2J\u202e\ud800"
TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "b", "small", "span", "i", "pre", "dl",
    "dt", "dd", "div", "table", "tr", "th", "td", "figure", "figcaption", "svg", "g", "line", "text", "polyline",
    "polygon", "circle", "rect", "ul", "li", "section", "script", "details", "summary",
}  # fmt: skip


class Markup(HTMLParser):
    """The tags of a page, the names of their attributes, and its text outside of style and script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text, self.inside = [], set(), "", []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.inside.append(tag)
        self.attributes |= {name for name, _ in attributes}

    def handle_endtag(self, tag):
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"style", "script"} & set(self.inside[-1:]):
            self.text += data


def check_markup(page: str) -> Markup:
    """The page has our tags alone, one script, and nothing that loads or runs."""
    found = Markup(page)
    assert set(found.tags) <= TAGS and found.tags.count("script") == found.tags.count("style") == 1
    assert not [name for name in found.attributes if name.startswith("on") or name in ("src", "href", "style")]
    assert "://" not in page and "url(" not in page and "@import" not in page
    return found


def test_a_strangers_text_stays_text_and_a_page_runs_and_loads_nothing_of_others():
    chart = line_chart(EVIL, EVIL, [Series(name=EVIL, points=[(1, 1.0), (2, math.nan)])])
    stacked = stacked_chart(EVIL, EVIL, [Series(name=EVIL, points=[(1, 1.0), (2, 2.0)])])
    page = render(
        EVIL, [facts({EVIL: EVIL}), table([EVIL], [[EVIL]]), chart, stacked, histogram(EVIL, EVIL, [3], [0, 2])]
    )
    found = check_markup(page)
    assert found.text.count("<script>alert(1)</script>") >= 10 and "\\x1b[2J\\u202e\\ud800" in found.text
    page.encode()  # no half of a surrogate pair is left
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'" in page


def test_what_cannot_be_seen_is_written_out_and_what_can_stays():
    assert (
        escape("a\tb\nc\x00\x7f\x9b\u202eé 字　\U0001f600\u200d")
        == "a\tb\nc\\x00\\x7f\\x9b\\u202eé 字　\U0001f600\u200d"
    )
    assert cut("abc", 3) == "abc" and cut("abcdefgh", 4) == "ab\n... 4 characters left out ...\ngh"


@pytest.mark.parametrize("count", [0, 1, 199, 200, 201, 1999, 12345])
def test_a_thinned_line_has_the_means_of_neighbouring_steps(count):
    draw = random.Random(count)
    points = [(step, draw.random() if step % 7 else math.inf) for step in range(count)]
    line = thin(points)
    assert len(line) <= MOST_POINTS and [p.step for p in line] == sorted({p.step for p in line})
    begin = 0
    for point in line:
        values = [value for step, value in points[begin:] if step <= point.step and value < math.inf]
        size = point.step + 1 - begin
        begin = point.step + 1
        if values:
            assert point.value == pytest.approx(sum(values) / len(values))
            assert (point.low, point.high) == (min(values), max(values))
        else:
            assert math.isnan(point.value)
        assert size == math.ceil(count / MOST_POINTS) or point is line[-1]
    assert begin == count


def test_a_lines_points_stand_at_their_steps_and_values():
    points = [(10, 0.0), (20, 5.0), (40, math.nan), (50, 10.0), (110, 2.5)]
    chart = line_chart("t", "n", [Series(name="a", points=points)])
    circles = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', chart)]
    labels = {float(text): float(y) - 4 for y, text in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', chart)}
    unit = (labels[0] - labels[10]) / 10
    assert labels[0] == BOTTOM and labels[10] >= TOP
    expected = [(LEFT + (step - 10) / 100 * (RIGHT - LEFT), BOTTOM - value * unit) for step, value in points]
    assert circles == [pytest.approx(place, abs=0.06) for place in expected if not math.isnan(place[1])]
    assert chart.count("<polyline") == 2 and "not finite in 1 steps" in chart  # a gap, and it is told
    assert 'data-steps="10,20,40,50,110" data-values="0,5,nan,10,2.5"' in chart


def test_equal_lines_are_told_apart():
    same = [(1, 0.5), (2, 0.75)]
    chart = line_chart("t", "n", [Series(name="a", points=same), Series(name="b", points=[(1, 0.5), (2, 0.7)]),
                                  Series(name="c", points=same)])  # fmt: skip
    assert re.findall(r"equal to (\w)", chart) == ["a"] and chart.index("c <b>0.75</b> <small>equal to a") > 0
    style = render("t", [chart])
    dashes = re.findall(r"\.s\d \.line \{ stroke-dasharray: ([\d ]+) \}", style)
    assert len(set(dashes)) == 7  # the first of eight is drawn through


def test_more_lines_than_colours_are_counted_and_phases_summed():
    many = [Series(name=f"n{place}", points=[(1, 1.0), (2, float(place))]) for place in range(10)]
    assert "2 more lines are left out" in line_chart("t", "n", many)
    chart = stacked_chart("t", "n", many)
    assert 'data-name="others" data-steps="1,2" data-values="3,24"' in chart and chart.count("<polygon") == 8


def test_stacked_phases_end_at_their_sum():
    chart = stacked_chart("t", "n", [Series(name="a", points=[(1, 3.0), (2, 1.0)]), Series(name="b", points=[(1, 5.0),
                                                                                         (2, math.nan)])])  # fmt: skip
    tops = [outline.split()[:2] for outline in re.findall(r'points="([^"]*)"', chart)]
    labels = {float(text): float(y) - 4 for y, text in re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', chart)}
    heights = [[float(point.split(",")[1]) for point in top] for top in tops]
    unit = (labels[0] - labels[8]) / 8
    assert heights == [[pytest.approx(BOTTOM - v * unit, abs=0.06) for v in top] for top in ((3, 1), (8, 1))]


@pytest.mark.parametrize("values", [[], [math.nan], [0.0], [1e-300, 2e-300], [5e8, 5e8], [-3.0, -3.0 - 1e-16]])
def test_any_values_have_a_chart(values):
    chart = line_chart("t", "n", [Series(name="a", points=list(enumerate(values)))])
    assert chart.startswith("<figure>") and 'cx="nan' not in chart
