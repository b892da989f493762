"""Statistics that no order of rows and no padding changes by a bit; between processes see test_advantages.py."""

import itertools
import math

import torch

from lib.algorithms.step_rows import Groups, StepRows, ordered_sum
from lib.dist import SINGLE
from tests.test_advantages import batch_of


def test_an_ordered_sum_adds_in_order_and_padding_changes_no_bit():
    values = torch.randn(50, 333, generator=torch.Generator().manual_seed(0)).double() ** 3
    expected = [0.0] * 50
    for column in values.T.tolist():
        expected = [total + value for total, value in zip(expected, column, strict=True)]
    for padding in (0, 1, 7, 64, 500):
        assert ordered_sum(torch.nn.functional.pad(values, (0, padding))).tolist() == expected
    assert ordered_sum(values[0].float()).dtype == torch.float64
    assert ordered_sum(values[:, :0]).tolist() == [0.0] * 50


def test_a_groups_sum_is_the_same_to_the_bit_in_any_order_of_the_rows():
    scores = [1e16, 1.0, -1e16, 3.0]  # 3, 4 or 0 and more, by the order of addition
    assert len({(scores[a] + scores[b]) + scores[c] + scores[d] for a, b, c, d in itertools.permutations(range(4))}) > 1
    batch = batch_of(scores, [8] * 4)
    for order in itertools.permutations(range(4)):
        moved = batch.rows(torch.tensor(order))
        rows = StepRows(moved, SINGLE, moved.scores.double())
        assert rows.columns[0].tolist() == batch.scores.tolist()
        assert (
            rows.groups.sum(rows.columns[0]).tolist() == [(((0.0 + scores[0]) + scores[1]) + scores[2]) + scores[3]] * 4
        )
        assert rows.local(rows.columns[0]).tolist() == moved.scores.tolist()


def test_statistics_of_groups_are_those_of_loops():
    ids = torch.tensor([2, 0, 2, 2, 0, 3])  # group 1 is empty
    values = torch.tensor([1.0, 4.0, 2.0, 4.0, 4.0, -7.0], dtype=torch.float64)
    groups = Groups(ids, 4)
    assert groups.sum(values).tolist() == [7, 8, 7, 7, 8, -7]
    assert groups.sizes().tolist() == [3, 2, 3, 3, 2, 1]
    assert groups.constant(values).tolist() == [False, True, False, False, True, True]
    weights = torch.tensor([1.0, 1.0, 0.0, 2.0, 5.0, 0.0], dtype=torch.float64)
    assert groups.centred(values, weights).tolist() == [-2, 0, -1, 1, 0, 0]  # group 2 has the mean (1 + 8) / 3


def test_excluded_rows_are_not_among_the_steps_rows_and_get_0():
    batch = batch_of([1, 2, 3, 4], [5, 4, 5, 4], [True, False, True, True])
    rows = StepRows(batch, SINGLE, batch.scores)
    assert rows.columns[0].tolist() == [4, 1, 3] and rows.groups.ids.tolist() == [0, 1, 1]
    assert rows.num_rows == 4
    assert rows.local(torch.tensor([math.pi, 1.0, 2.0])).tolist() == [1, 0, 2, torch.tensor(math.pi).item()]
