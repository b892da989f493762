"""Episodes as people are shown them: in samples, on the terminal, and on the page."""

import json
import math

import pytest
import torch

from lib.dist import SINGLE
from lib.model.batching import make_batch
from lib.pages.page import render
from lib.pages.samples import TURNS_STYLE, response_box, style_of
from lib.rollouts.episode_turns import turns_of
from lib.rollouts.shown_samples import ENTRIES, training_rows, validation_rows
from lib.rollouts.validation import sample_row
from lib.tracking.console import sample_lines
from lib.types import Rollout, Sample, Score
from tests.test_pages import EVIL, check_markup
from tests.test_run_report import row, step_metrics, write_run


class Words:
    """A tokenizer for which the id 7 is the text w7, so that every place is known by its text."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join(f"w{token} " for token in ids)


def answer(*messages, calls=(), seconds=0.25):
    return {"calls": list(calls), "seconds": seconds, "messages": [dict(it) for it in messages]}


CALL = {"name": "calc", "arguments": {"expression": "2*3"}}
TOLD = {"role": "tool", "name": "calc", "content": "6"}
HIGHER = {"role": "user", "content": "higher"}


def episode(spans, answers, *, turn_rewards=(), score=1.0):
    """`answers`: of each turn; what they say is appended where the spans have it."""
    length = sum(spans)
    answers = [dict(it) for it in answers]
    told = [(turn, message) for turn, it in enumerate(answers, 1) for message in it.pop("messages")]
    sample = Sample(uid=4, prompt_ids=[900], data_source="test", ground_truth="6", extra_info={})
    return Rollout(
        sample=sample, index=0, response_ids=list(range(length)), finish_reason="stop",
        rollout_log_probs=[-0.01 * it for it in range(length)],
        score=Score(score=score), spans=list(spans), answers=list(answers),
        turn_rewards=list(turn_rewards), observed=[it for it in told if it[0] <= len(spans) // 2],
    )  # fmt: skip


WHOLE = episode(
    [2, 3, 1, 2, 1], [answer(TOLD, TOLD, calls=[CALL]), answer(HIGHER, seconds=2.5), answer()],
    turn_rewards=[(1, -0.5), (8, 0.25)],
)  # fmt: skip


def test_sampled_and_observed_text_stand_apart_with_what_came_of_each_turn():
    expected = [
        {"role": "assistant", "content": "w0 w1 ", "num_tokens": 2, "answer_s": 0.25, "calls": [CALL], "reward": -0.5},
        {"role": "tool", "name": "calc", "content": "6"},
        {"role": "tool", "name": "calc", "content": "6"},
        {"role": "assistant", "content": "w5 ", "num_tokens": 1, "answer_s": 2.5, "calls": []},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "w8 ", "num_tokens": 1, "answer_s": 0.25, "calls": [], "reward": 0.25},
    ]
    assert turns_of(WHOLE, Words()) == expected
    shown = sample_row(WHOLE, Words())
    assert shown["turns"] == expected and shown["num_turns"] == 6


def test_an_answer_that_was_not_appended_and_a_turn_that_nobody_answered_are_shown_as_such():
    without_room = turns_of(episode([3], [answer(TOLD)]), Words())
    assert [it["role"] for it in without_room] == ["assistant"] and without_room[0]["answer_s"] == 0.25
    cut_off = turns_of(episode([1, 1, 2], [answer(TOLD)]), Words())
    assert [it["role"] for it in cut_off] == ["assistant", "tool", "assistant"] and "answer_s" not in cut_off[-1]


def test_a_response_of_a_run_without_turns_is_what_it_was():
    single = episode([], [])
    assert turns_of(single, Words()) == [] and not {"turns", "num_turns"} & sample_row(single, Words()).keys()
    (kept,) = validation_rows([single], {4}, Words(), temperature=0.0)
    assert not {"turns", "num_turns"} & kept.keys() and style_of([kept]) == ""


def test_the_page_keeps_each_turns_tokens_with_their_log_probs_and_advantages():
    batch = make_batch([WHOLE], SINGLE, mini_batch_size=1)
    batch = batch.with_(advantages=torch.arange(9.0)[None] * batch.response_mask)
    (kept,) = training_rows([WHOLE], batch, Words(), SINGLE)
    assert kept["texts"] == [] and kept["num_turns"] == 6 and kept["num_tokens"] == 9
    first, _, _, second, _, third = kept["turns"]
    assert (first["first"], first["texts"], first["log_probs"]) == (0, ["w0 ", "w1 "], [0.0, -0.01])
    assert [it["advantages"] for it in (first, second, third)] == [[0.0, 1.0], [5.0], [8.0]]
    assert (third["first"], third["log_probs"], third["reward"]) == (8, [-0.08], 0.25)


def test_of_many_turns_the_first_and_the_last_are_kept_and_numbered():
    many = episode([1, 1] * 50 + [1], [answer(HIGHER)] * 51)
    (kept,) = validation_rows([many], {4}, Words(), temperature=0.0)
    assert len(kept["turns"]) == ENTRIES + 1
    box = response_box("step 1", kept)
    for name in ("turn 1<", "turn 6<", "turn 46<", "turn 51<", "77 messages left out", "51 turns"):
        assert name in box, name
    assert "turn 7<" not in box and "turn 45<" not in box


def test_a_secret_that_a_tool_or_a_model_says_is_on_no_page(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "sesame-open")
    told = answer({**TOLD, "content": "key sesame-open"}, calls=[{"name": "f", "arguments": {"x": ["sesame-open"]}}])
    text = json.dumps(validation_rows([episode([1, 1, 1], [told])], {4}, Words(), temperature=0.0))
    assert "sesame" not in text and text.count("[MY_API_KEY]") == 2
    monkeypatch.setenv("MY_API_KEY", "w0 w1 w2")
    text = json.dumps(validation_rows([episode([3, 1, 1], [told])], {4}, Words(), temperature=0.0))
    assert "w1" not in text and "[MY_API_KEY]" in text


def shown(rollout):
    (kept,) = validation_rows([rollout], {4}, Words(), temperature=0.0)
    return kept


def test_the_page_tells_calls_their_errors_slow_answers_and_observations_apart():
    wrong = {"name": "calc", "arguments": {}, "error": "the call is not JSON"}
    failed = {"role": "tool", "name": "calc", "content": "error: calc: OSError: gone"}
    rollout = episode([1, 1, 1, 1, 1], [answer(TOLD, calls=[CALL, wrong]), answer(failed, seconds=3.0), answer()])
    box = response_box("step 2", shown(rollout))
    assert "calls calc(expression=&quot;2*3&quot;)</p>" in box
    assert 'calls calc() <span class="bad">not made: the call is not JSON</span>' in box
    assert box.count('<div class="turn">') == 3 and box.count('<div class="observed">') == 2
    assert "observed, tool calc</small><pre>6</pre>" in box and '<pre class="bad">error: calc: OSError: gone' in box
    assert '<span class="bad">assistant, 1 token, answered in 3 s</span>' in box and "answered in 0.25 s" in box
    assert "3 turns, 5 tokens, stop" in box and style_of([shown(rollout)]) == TURNS_STYLE


def test_what_a_tool_or_a_model_says_is_neither_markup_nor_script():
    told = answer(
        {"role": "tool", "name": EVIL, "content": EVIL}, {"role": "user", "content": EVIL},
        calls=[{"name": EVIL, "arguments": {EVIL: [EVIL]}, "error": EVIL}],
    )  # fmt: skip
    kept = shown(episode([1, 1, 1], [told]))
    kept["turns"][0]["texts"] = [EVIL]
    page = render("r", [response_box("step 1", kept)], style=style_of([kept]))
    assert check_markup(page).text.count("<script>alert(1)</script>") == 8


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_has_a_line_for_each_turn_call_and_observation(width):
    wrong = {"name": "calc", "arguments": {}, "error": "the call is not JSON " * 9}
    rollout = episode([2, 1, 1], [answer({**TOLD, "content": "a\nb\x1b[2J"}, calls=[CALL, wrong]), answer()])
    lines = sample_lines(sample_row(rollout, Words()), width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[1] == "    -> w0 w1 " and lines[2] == '       calls calc(expression="2*3")'
    assert lines[3].startswith("       calls calc(): the call is not JS")
    assert lines[4] == r"       tool: a\nb\x1b[2J" and lines[5] == "    -> w3 "
    assert lines[6] == "    = 2 turns  (score 1.0, expected 6, stop)"
    many = sample_row(episode([1, 1] * 50 + [1], [answer(HIGHER)] * 51), Words())
    assert len(sample_lines(many, width=width).splitlines()) == 11


def test_the_report_charts_turns_where_a_run_has_them_and_only_there(tmp_path):
    names = ("num_turns/mean", "turns/bad_calls", "turns/tool_latency_s/p99", "turns/waiting_share", "turns/hints")
    page = write_run(tmp_path / "single")
    assert not any(name in page for name in names) and "observed" not in page
    metrics = dict.fromkeys(names, 0.5) | {"turns/excluded": math.nan}
    more = lambda step: step_metrics(step) | metrics  # noqa: E731
    page = write_run(tmp_path / "turns", samples=lambda step: [row(), shown(WHOLE)], metrics=more)
    found = check_markup(page)
    for name in names:
        assert f'data-name="{name}"' in page, name
    assert "hints" in found.text and "Calls that failed" in found.text and page.count(TURNS_STYLE) == 1
