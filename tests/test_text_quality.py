"""Repetition and garbled text of validation's responses, against slow obvious loops and closed forms."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from lib.rollouts.text_quality import garbled, quality_metrics, repetition, text_quality
from lib.types import Rollout, Sample


def test_repetition_is_the_share_of_4_grams_that_were_there_before():
    draw = random.Random(0)
    for length in [*range(12), 50]:
        ids = [draw.randrange(2) for _ in range(length)]
        grams = [ids[at : at + 4] for at in range(length - 3)] if length >= 4 else []
        repeated = sum(gram in grams[:at] for at, gram in enumerate(grams))
        assert repetition(ids) == pytest.approx(repeated / len(grams) if grams else 0.0)
    assert repetition([7] * 103) == pytest.approx(0.99) and repetition(list(range(100))) == 0.0


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("plain, é 字 \U0001f600\u200d\n\r\t", 0), ("\ufffd", 1), ("a\x00\x1b\x7f\x9b", 4), ("\ud800", 1),
     ("\ue000", 1), ("\u0378", 1), ("\ufffd" * 9, 9)],
)  # fmt: skip
def test_garbled_is_the_share_of_characters_that_nobody_means(text, count):
    assert garbled(text) == (count / len(text) if text else 0.0)


def test_the_metrics_are_means_over_prompts_of_means_over_responses():
    samples = [Sample(uid=uid, prompt_ids=[], data_source=source, ground_truth="", extra_info={})
               for uid, source in enumerate(("a", "a", "b/c"))]  # fmt: skip
    responses = [(samples[0], [1] * 7, "x\ufffd"), (samples[0], [1, 2, 3, 4, 5], "xy"), (samples[1], [1] * 5, "\ufffd"),
                 (samples[2], [1], "")]  # fmt: skip
    rollout = Rollout(sample=samples[0], index=0, response_ids=[], rollout_log_probs=None, finish_reason="stop")
    qualities = [text_quality(replace(rollout, sample=s, response_ids=ids), text) for s, ids, text in responses]
    found = quality_metrics(qualities, n=2)
    assert found == {
        "val-aux/a/repetition/mean@2": pytest.approx(((3 / 4 + 0) / 2 + 1 / 2) / 2),
        "val-aux/a/garbled/mean@2": pytest.approx(((1 / 2 + 0) / 2 + 1) / 2),
        "val-aux/b/c/repetition/mean@2": 0.0,
        "val-aux/b/c/garbled/mean@2": 0.0,
    }
    page = (Path(__file__).parents[1] / "docs/metrics.md").read_text()
    assert "`val-aux/SOURCE/repetition/mean@N`" in page and "`val-aux/SOURCE/garbled/mean@N`" in page
