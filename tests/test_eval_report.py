"""What an evaluation says in the end: its summary, the terminal's table, the page."""

from dataclasses import replace

import pytest

from lib.evaluation.episodes import Episode
from lib.evaluation.inputs import EvalGroup
from lib.evaluation.report import render_page, summarise, summary_table
from lib.pages.page import SCRIPT
from lib.pages.samples import conversation_box
from lib.types import Sample, Score
from tests.test_eval_files import group


def scored(uid, *scores):
    reasons, lengths = ["length", *["stop"] * (len(scores) - 1)], list(range(1, len(scores) + 1))
    return EvalGroup(uid=uid, responses=["x"] * len(scores), finish_reasons=reasons, response_lengths=lengths,
                 scores=[score if isinstance(score, Score) else Score(score=score) for score in scores])  # fmt: skip


def test_the_table_of_many_data_sources_is_no_wider_than_the_terminal():
    sources = [f"arithmetic_words/source_{i}" for i in range(5)]
    summaries = summarise([scored(uid, 1.0, 0.0) for uid in range(5)], sources)
    narrow, wide = (summary_table(summaries, width=width) for width in (80, 400))
    assert max(map(len, narrow.splitlines())) <= 80 < len(wide.splitlines()[0])
    assert "\n\n" not in wide and len(narrow.split("\n\n")) == 3  # five and overall, two side by side
    assert sorted(narrow.split()) == sorted(wide.split() + 2 * [line.split()[0] for line in wide.splitlines()[1:]])
    assert all(line.startswith("  mean@2 ") for line in narrow.splitlines() if "mean@2" in line)
    assert summary_table(summaries, width=1).count("mean@2") == 6  # one at least


def test_the_summary_counts_what_it_says():
    groups = [scored(0, 1.0, 0.0), scored(1, 0.0, 0.0), scored(2, 1.0, None), scored(3, None, None)]
    summaries = summarise(groups, ["a", "b", "a", "b"])
    assert list(summaries) == ["a", "b", "overall"]
    overall = summaries["overall"]
    assert (overall["num_prompts"], overall["num_responses"], overall["n"], overall["num_unscored"]) == (4, 8, 2, 3)
    assert overall["mean@2"]["value"] == pytest.approx((0.5 + 0 + 1) / 3)  # prompts weigh alike
    assert overall["pass@1"]["value"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert overall["pass@2"]["value"] == pytest.approx((1 + 0) / 2)  # two responses are scored for two prompts only
    assert overall["score_mean"] == pytest.approx(2 / 5) and overall["truncation_rate"] == 0.5
    assert overall["response_length"]["mean"] == 1.5 and "maj@2" not in overall and "format_rate" not in overall
    assert summaries["a"]["pass@2"]["value"] == 1 and summaries["b"]["pass@2"]["value"] == 0


def test_acc_format_and_answers_are_read_and_other_scores_have_no_pass_at_k():
    right = Score(score=0.7, extras={"acc": True, "pred": "7", "format": 1.0})
    wrong = Score(score=-0.3, extras={"acc": False, "pred": "", "format": 0.0})
    overall = summarise([scored(0, right, right, wrong), scored(1, wrong, wrong, right)], ["a", "a"])["overall"]
    assert overall["variable"] == "acc" and overall["mean@3"]["value"] == overall["pass@1"]["value"] == 0.5
    assert overall["format_rate"] == 0.5 and overall["maj@3"]["value"] == 1.0  # without an answer there is no vote
    plain = summarise([scored(0, 0.7, -0.3)], ["a"])["overall"]
    assert plain["variable"] == "score" and "pass@1" not in plain and plain["mean@2"]["value"] == pytest.approx(0.2)
    unscored = summarise([scored(0, None)], ["a"])["overall"]
    assert unscored["num_unscored"] == 1 and "mean@1" not in unscored


def test_a_conversation_is_shown_and_counted_turn_by_turn():
    evil = "<script>alert(1)</script>"
    told = [{"role": "user", "content": evil}, {"role": "tool", "content": evil, "name": evil}]
    turns = [{"role": "assistant", "content": "first"}, *told, {"role": "assistant", "content": "second"}]
    played = Episode(turns=turns, turn_rewards=[0.5], metrics={"calls": 3.0, "moves": 4.0})
    failed = Episode(turns=turns[:1], turn_rewards=[], metrics={"calls": 1.0})
    ends = dict(finish_reasons=["turns", "error"], response_lengths=[9, 3], episodes=[played, failed])
    groups = [replace(scored(0, 1.0, None), **ends)]
    overall = summarise(groups, ["a"])["overall"]
    assert (overall["turns/excluded"], overall["num_unscored"], overall["truncation_rate"]) == (1, 1, 0.5)
    assert (overall["turns/per_episode"], overall["turns/calls_per_episode"], overall["turns/moves"]) == (1.5, 2, 2)
    assert "turns/excluded" in summary_table(summarise(groups, ["a"]), width=80)
    sample = Sample(uid=0, prompt_ids=[], data_source="a", ground_truth="4", extra_info={})
    page = render_page("t", {}, summarise(groups, ["a"]), groups, [sample], lambda _: [])
    assert page.count("<script") == 1 and ".observed {" in page
    of_each = (
        "<b>turn 1</b> assistant",
        "<pre>first",
        "observed, user<",
        "observed, tool &lt;script&gt;",
        "<b>turn 2</b>",
    )
    places = [page.index(text) for text in (*of_each, "<pre>second")]
    assert places == sorted(places)


def test_of_a_long_conversation_a_page_shows_both_ends():
    turn = [{"role": "assistant", "content": "guess"}, {"role": "user", "content": "higher", "name": None}]
    box = conversation_box(20 * turn)
    assert box.count("guess") == box.count("higher") == 12 and "... 16 messages left out ..." in box
    assert "<b>turn 6</b>" in box and "<b>turn 7</b>" not in box and "<b>turn 20</b>" in box


def test_the_page_escapes_every_text_and_needs_no_other_file():
    evil = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
    groups = [group(uid, responses=[evil, "b" * 9000], scores=[Score(score=float(uid), extras={"pred": evil}),
              Score(score=None, error=evil)]) for uid in range(12)]  # fmt: skip
    samples = [Sample(uid=uid, prompt_ids=[], data_source=evil, ground_truth=evil, extra_info={}) for uid in range(12)]
    page = render_page(
        evil, {evil: evil}, summarise(groups, [evil] * 12), groups, samples,
        lambda _: [{"role": evil, "content": evil}],
    )  # fmt: skip
    assert page.count("<script") == page.count(f"<script>{SCRIPT}</script>") == 1 and "<img" not in page
    assert page.count("&lt;script&gt;") > 40 and "://" not in page and "src=x" in page
    plain = render_page(
        "t", {"seed": 7}, summarise([scored(0, 1.0, 0.0)], ["a"]), [scored(0, 1.0, 0.0)], samples, lambda _: []
    )
    assert "<dt>seed</dt><dd>7</dd>" in plain and "<td>right in at least one of 2 (pass@2)</td><td>1.0000 [" in plain
    assert "<td>mean of 2 responses (mean@2)</td><td>0.5000 [" in plain and "<td>score, mean (score_mean)</td>" in plain
    worst, best = page.split("Best prompts")
    assert "prompt 0 |" in worst and "prompt 11 |" in best and "prompt 11 |" not in worst
    assert "characters left out" not in page  # the long response is nobody's worst or best
    mixed = [scored(0, 0.25, 0.5, 0.75)]
    worst, best = render_page("t", {}, summarise(mixed, ["a"]), mixed, samples, lambda _: []).split("Best prompts")
    assert "response 0; 1 tokens" in worst and "response 2; 3 tokens" in best
    assert "First prompts" in render_page("t", {}, {}, [group(0)], samples, lambda _: [])
