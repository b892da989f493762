"""pass@k, majority votes and confidence intervals against every subset, closed forms, and simulated evaluations."""

import math
from collections import Counter
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lib.evaluation.passk import SUBSETS, confidence_interval, majority_at_k, pass_at_k, powers_up_to


@pytest.mark.parametrize("num", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_response(num):
    for num_correct in range(num + 1):
        correct = [place < num_correct for place in range(num)]
        for k in range(1, num + 1):
            subsets = list(combinations(correct, k))
            expected = Fraction(sum(map(any, subsets)), len(subsets))
            assert pass_at_k(num, num_correct, k) == pytest.approx(float(expected), abs=1e-15)


def test_pass_at_k_is_exact_for_large_groups():
    # 1 - C(n-c, k) / C(n, k) as the product that Chen et al. 2021 compute
    product = 1 - math.prod(1 - 512 / i for i in range(2048 - 3 + 1, 2049))
    assert pass_at_k(2048, 3, 512) == pytest.approx(product, rel=1e-12)
    assert (pass_at_k(2048, 0, 512), pass_at_k(2048, 2048, 1)) == (0, 1)


def vote(values, answers):
    """The value of one vote: the mean over the most frequent answers, each worth the mean over all that give it."""
    counts = Counter(answer for answer in answers if answer is not None)
    return [answer for answer, count in counts.items() if count == max(counts.values())]


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c", None]), st.booleans()), min_size=1, max_size=7), st.data())
def test_majority_at_k_is_the_mean_over_all_subsets(responses, data):
    k = data.draw(st.integers(1, len(responses)))
    answers, values = [answer for answer, _ in responses], [float(correct) for _, correct in responses]
    worth = {name: np.mean([v for a, v in zip(answers, values, strict=True) if a == name]) for name in set(answers)}
    outcomes = []
    for places in combinations(range(len(answers)), k):
        winners = vote(values, [answers[place] for place in places])
        outcomes.append(np.mean([worth[name] for name in winners]) if winners else 0.0)
    assert majority_at_k(values, answers, k) == pytest.approx(np.mean(outcomes), abs=1e-12)


def test_majority_of_many_responses_is_estimated_from_the_same_subsets_every_time():
    answers = ["right"] * 18 + ["wrong"] * 14
    values = [1.0] * 18 + [0.0] * 14
    assert math.comb(32, 8) > SUBSETS
    found = majority_at_k(values, answers, 8)
    weights = {right: math.comb(18, right) * math.comb(14, 8 - right) / math.comb(32, 8) for right in range(9)}
    exact = sum(weight * (1 if right > 4 else 0.5 if right == 4 else 0) for right, weight in weights.items())
    assert found == pytest.approx(0.6395, abs=1e-12) and found == pytest.approx(exact, abs=0.05)
    assert majority_at_k(values, answers, 32) == 1.0


def test_k_doubles_up_to_n():
    assert [powers_up_to(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize(("num", "num_right"), [(20, 0), (20, 20), (7, 3), (1319, 1000)])
def test_the_interval_of_yes_or_no_prompts_is_wilsons(num, num_right):
    low, high = confidence_interval([1.0] * num_right + [0.0] * (num - num_right))
    share, z = num_right / num, 1.959964
    for bound in (low, high):  # where the mean is 1.96 standard errors of the bound away from it
        if 0 < bound < 1:
            assert abs(share - bound) == pytest.approx(z * math.sqrt(bound * (1 - bound) / num), rel=1e-9)
    assert 0 <= low <= share <= high <= 1 and low < high


def test_other_values_have_the_normal_interval_and_never_a_nan():
    values = [-1.0, 1.0, 3.0, 5.0]
    half = 1.959964 * np.std(values, ddof=1) / 2
    assert confidence_interval(values) == pytest.approx((2 - half, 2 + half))
    assert all(map(math.isfinite, confidence_interval([7.0]) + confidence_interval([0.5]) + confidence_interval([1.0])))
    low, high = confidence_interval([0.5] * 20, most=160)  # alike by chance: never surer than 160 responses can be
    assert 0.05 < high - low < 0.2


@pytest.mark.parametrize(("num_prompts", "n", "k"), [(20, 1, 1), (20, 8, 1), (100, 8, 1), (100, 8, 4), (100, 8, 8)])
@pytest.mark.parametrize("hardness", [(1, 1), (0.3, 0.3), (5, 1), (0.2, 2)])
def test_nineteen_of_twenty_intervals_hold_the_true_value(hardness, num_prompts, n, k):
    generator = np.random.default_rng(0)
    truth = np.mean(1 - (1 - generator.beta(*hardness, 500_000)) ** k)
    table = [pass_at_k(n, right, k) for right in range(n + 1)]
    held = 0
    for _ in range(400):
        rights = generator.binomial(n, generator.beta(*hardness, num_prompts))
        low, high = confidence_interval([table[right] for right in rights], most=num_prompts * n)
        held += low <= truth <= high
    assert 0.90 <= held / 400 <= 0.995
