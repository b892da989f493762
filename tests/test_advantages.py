"""Advantages: hand-worked numbers, slow loops over random steps, exact zeros, masks; ranks: test_advantage_ranks.py."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.algorithms.advantages import (
    ADVANTAGES,
    DrGRPOAdvantage,
    GAEAdvantage,
    GDPOAdvantage,
    GroupAdvantage,
    PassKAdvantage,
    ReinforcePlusPlusAdvantage,
    gae,
    whiten,
)
from lib.algorithms.shaping import make_token_level_rewards
from lib.dist import SINGLE
from lib.errors import UserError
from lib.types import Batch

VARIANTS = {name: kind() for name, kind in ADVANTAGES.items()} | {
    "gdpo": GDPOAdvantage(reward_keys=("format", "score", "brevity"), reward_weights=(1.0, 0.5, -2.0)),
    "passk_without_std": PassKAdvantage(norm_by_std=False),
    "gae_discounted": GAEAdvantage(gamma=0.9, lam=0.8),
    "reinforce_plus_plus_discounted": ReinforcePlusPlusAdvantage(gamma=0.9),
}
OF_RESPONSES = ("grpo", "dr_grpo", "grpo_passk", "passk_without_std", "rloo", "opo", "gpg")
quick = settings(deadline=None, derandomize=True, max_examples=100)


def batch_of(scores, uids, valid=None, response_lens=None, **tensors):
    """One row per score; tokens as many as response_lens says, one each by default."""
    valid = [True] * len(scores) if valid is None else valid
    lens = torch.tensor([1] * len(scores) if response_lens is None else response_lens)
    mask = (torch.arange(int(lens.max())) < lens[:, None]) & torch.tensor(valid)[:, None]
    return make_batch(
        torch.tensor(scores, dtype=torch.float32), torch.tensor(uids), torch.tensor(valid), mask, **tensors
    )


def make_batch(scores, uids, valid, mask, **tensors):
    rows, steps = mask.shape
    lens = torch.full((rows,), steps)
    defaults = dict(
        uids=uids, indices=torch.arange(rows), mini_batch_ids=torch.zeros(rows).long(),
        input_ids=torch.zeros(rows, 1 + steps).long(), prompt_lens=torch.ones(rows).long(), response_lens=lens,
        response_mask=mask, truncated=torch.zeros(rows, dtype=torch.bool), valid=valid, scores=scores,
    )  # fmt: skip
    return Batch(**(defaults | tensors))


def random_step(seed, groups=5, steps=6, *, with_kl=True):
    """Ragged rows with holes in their masks; a constant group, a singleton, excluded rows, a row without tokens."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [4, 1, *torch.randint(2, 6, (groups - 2,), generator=draw).tolist()]
    uids = torch.cat([torch.full((size,), 3 * uid) for uid, size in enumerate(sizes)])
    rows = len(uids)
    indices = torch.cat([torch.randperm(9, generator=draw)[:size] for size in sizes])
    scores = torch.randint(0, 8, (rows,), generator=draw) / 4 - 0.5
    scores[:4] = 0.1
    valid = torch.rand(rows, generator=draw) < 0.85
    valid[:5], valid[-1] = True, False
    lens = torch.randint(0, steps + 1, (rows, 1), generator=draw)
    mask = (torch.arange(steps) < lens) & (torch.rand(rows, steps, generator=draw) < 0.8) & valid[:, None]
    probs = torch.rand(rows, steps, generator=draw) * 0.9 + 0.05
    noise = torch.randn(rows, steps, generator=draw)
    batch = make_batch(
        torch.where(valid, scores, 0), uids, valid, mask, indices=indices,
        greedy_scores=torch.randint(0, 3, (rows,), generator=draw) / 2.0, values=noise,
        logit_grad_squared=(1 - probs) ** 2 * (1 + torch.rand(rows, steps, generator=draw)),
        named_rewards=torch.randint(0, 3, (rows, 3), generator=draw) / 2.0,
    )  # fmt: skip
    if with_kl:
        kl = torch.where(mask, 0.1 * torch.randn(rows, steps, generator=draw), 0)
        kl[:4] = 0  # the constant group stays one
        batch = batch.with_(token_level_rewards=make_token_level_rewards(batch) - kl)
    shuffled = torch.randperm(rows, generator=draw)
    return Batch(**{k: None if v is None else v[shuffled] for k, v in vars(batch).items()})


# ---- Slow references: plain loops over plain numbers ----


def as_rows(batch):
    """One dict of Python numbers per row; `t` are the places of its tokens, `r` their rewards."""
    rows = []
    for i in range(len(batch)):
        row = {"uid": int(batch.uids[i]), "valid": bool(batch.valid[i]), "score": float(batch.scores[i])}
        row["t"] = [t for t, chosen in enumerate(batch.response_mask[i].tolist()) if chosen]
        for name in ("token_level_rewards", "values", "logit_grad_squared", "is_weights"):
            tensor = getattr(batch, name)
            row[name] = None if tensor is None else [float(tensor[i, t]) for t in row["t"]]
        row["named_rewards"] = None if batch.named_rewards is None else batch.named_rewards[i].tolist()
        row["greedy"] = None if batch.greedy_scores is None else float(batch.greedy_scores[i])
        row["r"] = row["token_level_rewards"]
        if row["r"] is None:
            row["r"] = [0.0] * (len(row["t"]) - 1) + [row["score"]] if row["t"] else []
        row["reward"] = math.fsum(row["r"]) if row["t"] else row["score"]
        rows.append(row)
    return rows


def slow_of_response(name, row, rows):
    everyone = [other for other in rows if other["valid"]]
    group = [other for other in everyone if other["uid"] == row["uid"]]
    rewards = [other["reward"] for other in group]
    if not row["valid"] or len(group) < 2 or max(rewards) == min(rewards):
        return 0.0
    centred, std = row["reward"] - statistics.fmean(rewards), statistics.stdev(rewards) + 1e-6
    if name == "rloo":
        return row["reward"] - statistics.fmean(other["reward"] for other in group if other is not row)
    if name == "opo":
        total = sum(len(other["t"]) for other in group)
        return row["reward"] - sum(len(other["t"]) * other["reward"] for other in group) / max(total, 1)
    if name == "gpg":
        return centred * len(everyone) / sum(other["reward"] != 0 for other in everyone)
    if "passk" in name:
        lead = max(rewards) - sorted(rewards)[-2] if row["reward"] == max(rewards) else 0.0
        return lead / (1.0 if name == "passk_without_std" else std)
    return centred if name == "dr_grpo" else centred / std


def slow_returns(row, gamma):
    returns, following = [], 0.0
    for reward in reversed(row["r"]):
        following = reward + gamma * following
        returns.insert(0, following)
    return returns


def slow_gae(row, gamma, lam):
    """The definition: a sum over all later tokens (arXiv:1506.02438, eq. 16)."""
    values = [*row["values"], 0.0]
    surprises = [reward + gamma * values[k + 1] - values[k] for k, reward in enumerate(row["r"])]
    return [
        sum((gamma * lam) ** (j - k) * surprises[j] for j in range(k, len(surprises))) for k in range(len(surprises))
    ]


def slow_whitened(columns):
    numbers = [value for column in columns for value in column]
    if len(numbers) < 2:
        return [[0.0 for _ in column] for column in columns]
    mean, variance = statistics.fmean(numbers), statistics.variance(numbers)
    return [[(value - mean) / math.sqrt(variance + 1e-8) for value in column] for column in columns]


def slow_token_baseline(row, rows):
    advantages = []
    group = [other for other in rows if other["valid"] and other["uid"] == row["uid"]]
    for k, to_come in enumerate(slow_returns(row, 1.0)):
        there = [other for other in group if len(other["t"]) > k]
        pairs = []
        for other in there:
            weight = 0.0
            for j in range(k + 1):
                scale = 1.0 if other["is_weights"] is None else other["is_weights"][j]
                weight += other["logit_grad_squared"][j] * scale**2
            pairs.append((slow_returns(other, 1.0)[k], weight))
        baseline = sum(g * w for g, w in pairs) / (sum(w for _, w in pairs) + 1e-8) if len(there) > 1 else 0.0
        advantages.append(to_come - baseline if len(group) > 1 else 0.0)
    return advantages


def slow(name, batch):
    """Advantages and returns as lists per row of its tokens' numbers."""
    rows = as_rows(batch)
    gamma, lam = (0.9, 0.8) if "discounted" in name else (1.0, 1.0)
    if name in OF_RESPONSES:
        result = [[slow_of_response(name, row, rows)] * len(row["t"]) for row in rows]
        return result, result
    if name == "reinforce_plus_plus_baseline":
        result = slow_whitened([[slow_of_response("dr_grpo", row, rows)] * len(row["t"]) for row in rows])
        return result, result
    if name == "gdpo":  # the column of the key `score` is not what is learned from: that is the shaped score
        format_reward, _, brevity = zip(*(row["named_rewards"] for row in rows), strict=True)
        summed = [0.0] * len(rows)
        for weight, rewards in ((1.0, format_reward), (0.5, [row["reward"] for row in rows]), (-2.0, brevity)):
            named = [row | {"reward": reward} for row, reward in zip(rows, rewards, strict=True)]
            relative = [slow_of_response("grpo", row, named) for row in named]
            summed = [so_far + weight * one for so_far, one in zip(summed, relative, strict=True)]
        result = slow_whitened([[one] * len(row["t"]) for one, row in zip(summed, rows, strict=True)])
        return result, result
    returns = [slow_returns(row, gamma) for row in rows]
    if name.startswith("reinforce_plus_plus"):
        return slow_whitened(returns), returns
    if name == "remax":
        return [[g - row["greedy"] for g in of_row] for of_row, row in zip(returns, rows, strict=True)], returns
    if name == "optimal_token_baseline":
        return [slow_token_baseline(row, rows) for row in rows], returns
    estimates = [slow_gae(row, gamma, lam) for row in rows]
    returns = [
        [a + v for a, v in zip(of_row, row["values"], strict=True)] for of_row, row in zip(estimates, rows, strict=True)
    ]
    return slow_whitened(estimates), returns


def assert_equals(tensor, batch, expected, *, tolerance=2e-5):
    assert tensor.dtype == torch.float32 and tensor.shape == batch.response_mask.shape
    assert not tensor[~batch.response_mask].any()
    for row, mask, numbers in zip(tensor, batch.response_mask, expected, strict=True):
        assert row[mask].tolist() == pytest.approx(numbers, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_every_advantage_is_its_slow_loop_over_random_steps(name, with_kl):
    for seed in range(12):
        batch = random_step(seed, with_kl=with_kl)
        expected, expected_returns = slow(name, batch)
        advantages, returns = VARIANTS[name](batch, SINGLE)
        assert_equals(advantages, batch, expected)
        assert_equals(returns, batch, expected_returns)
        assert advantages.any()


@pytest.mark.parametrize("name", VARIANTS)
def test_order_of_rows_and_padding_change_no_bit(name):
    batch = random_step(5, groups=12, steps=70)
    advantages, returns = VARIANTS[name](batch, SINGLE)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    wider = {}
    for key, tensor in vars(batch).items():
        moved = None if tensor is None else tensor[order]
        has_steps = moved is not None and moved.dim() == 2 and key != "named_rewards"
        wider[key] = torch.nn.functional.pad(moved, (0, 41)) if has_steps else moved
    moved_advantages, moved_returns = VARIANTS[name](Batch(**wider), SINGLE)
    assert torch.equal(moved_advantages[:, :70], advantages[order])
    assert torch.equal(moved_returns[:, :70], returns[order])
    assert not moved_advantages[:, 70:].any()


@pytest.mark.parametrize("name", VARIANTS)
def test_excluded_rows_change_nothing_for_the_others(name):
    batch = random_step(7)
    assert not batch.valid.all()
    kept = batch.valid.nonzero().flatten()
    alone = Batch(**{k: None if v is None else v[kept] for k, v in vars(batch).items()})
    for whole, part in zip(VARIANTS[name](batch, SINGLE), VARIANTS[name](alone, SINGLE), strict=True):
        assert torch.equal(whole[kept], part)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_score_on_the_last_token_is_the_same_as_the_score(name):
    batch = random_step(2, with_kl=False)
    explicit = batch.with_(token_level_rewards=make_token_level_rewards(batch))
    for ours, theirs in zip(VARIANTS[name](batch, SINGLE), VARIANTS[name](explicit, SINGLE), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_step_without_rows_or_without_valid_ones_gives_zeros(name):
    batch = random_step(0)
    nothing = batch.with_(valid=torch.zeros_like(batch.valid), response_mask=torch.zeros_like(batch.response_mask))
    assert not VARIANTS[name](nothing, SINGLE)[0].any()
    empty = batch.rows(torch.empty(0, dtype=torch.int64))
    assert VARIANTS[name](empty, SINGLE)[0].shape == (0, 0)


# ---- Known answers ----


def per_response(name, *args, **tensors):
    batch = batch_of(*args, **tensors)
    return VARIANTS[name](batch, SINGLE)[0][:, 0].tolist()


def test_known_answers_of_one_success_in_four():
    scores, uids = [1, 0, 0, 0], [5] * 4
    assert per_response("grpo", scores, uids) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)
    assert per_response("dr_grpo", scores, uids) == [0.75, -0.25, -0.25, -0.25]
    assert per_response("rloo", scores, uids) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert per_response("gpg", scores, uids) == [3, -1, -1, -1]  # one reward of four is not 0
    assert per_response("grpo_passk", scores, uids) == pytest.approx([2, 0, 0, 0], rel=1e-5)  # the std is 0.5
    assert per_response("passk_without_std", [1, 3, 7, 2], uids) == [0, 0, 4, 0]
    assert per_response("passk_without_std", [7, 3, 7, 2], uids) == [0, 0, 0, 0]
    # lengths 1, 1, 1, 5: the baseline is 1 / 8
    assert per_response("opo", scores, uids, None, [1, 1, 1, 5]) == [0.875, -0.125, -0.125, -0.125]
    assert per_response("reinforce_plus_plus_baseline", scores, uids) == pytest.approx(
        [1.5, -0.5, -0.5, -0.5], rel=1e-6
    )


def test_gdpo_tells_apart_what_a_sum_of_rewards_makes_equal():
    uids, named = [0] * 4, torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 1.0]])
    summed = per_response("grpo", named.sum(1).tolist(), uids)
    assert summed[0] == summed[1]
    batch = batch_of([0.0] * 4, uids, named_rewards=named)
    advantages = GDPOAdvantage(reward_keys=("right", "format"))(batch, SINGLE)[0][:, 0].tolist()
    # each reward alone: (1.5, -0.5, -0.5, -0.5) and (-1, 1, -1, 1) x sqrt(3) / 2, to 1e-6 of the std
    ours = [1.5 - 3**0.5 / 2, -0.5 + 3**0.5 / 2, -0.5 - 3**0.5 / 2, -0.5 + 3**0.5 / 2]
    assert advantages == pytest.approx([one / statistics.stdev(ours) for one in ours], abs=1e-5)
    assert advantages[0] != advantages[1]


@pytest.mark.parametrize(
    ("keys", "weights", "rule"),
    [
        ((), (), "reward-keys is out of range; .*at least one name"),
        (("acc", "acc"), (), "reward-keys is out of range; .*none twice"),
        (("acc", "format"), (1.0,), "reward-weights is out of range; .*expected 2 numbers"),
        (("acc",), (math.nan,), "reward-weights is out of range; .*expected 1 numbers"),
        (("acc",), (0.0,), "reward-weights is out of range; .*not all 0"),
        (("acc",), (1e300,), "reward-weights is out of range; .*below 1e9"),
        (("",), (), "reward-keys is out of range; .*at least one name"),
    ],
)
def test_gdpo_refuses_rewards_without_a_name_or_a_weight(keys, weights, rule):
    with pytest.raises(UserError, match=rule):
        GDPOAdvantage(reward_keys=keys, reward_weights=weights)


def test_known_answers_of_returns_around_a_hole():
    mask = torch.tensor([[True, False, True, True]])
    batch = make_batch(
        torch.tensor([1.0]), torch.tensor([0]), torch.tensor([True]), mask, greedy_scores=torch.tensor([0.25]),
        values=torch.tensor([[0.5, 9.0, 0.25, 0.75]]),
    )  # fmt: skip
    assert ReinforcePlusPlusAdvantage(gamma=0.5)(batch, SINGLE)[1].tolist() == [[0.25, 0, 0.5, 1]]
    advantages, returns = VARIANTS["remax"](batch, SINGLE)
    assert advantages.tolist() == [[0.75, 0, 0.75, 0.75]]
    assert returns.tolist() == [[1, 0, 1, 1]]
    # surprises from the end: 1 - 0.75 = 0.25; 0.5 x 0.75 - 0.25 = 0.125; 0.5 x 0.25 - 0.5 = -0.375
    rewards, values = make_token_level_rewards(batch).double(), torch.where(mask, batch.values, 0).double()
    assert gae(rewards, values, mask, gamma=0.5, lam=1.0).tolist() == [[-0.25, 0, 0.25, 0.25]]
    assert gae(rewards, values, mask, gamma=0.5, lam=0.0).tolist() == [[-0.375, 0, 0.125, 0.25]]
    assert GAEAdvantage()(batch, SINGLE)[1].tolist() == [[1, 0, 1, 1]]  # at lam 1 the critic learns the return itself


def test_known_answers_of_the_optimal_token_baseline():
    # Probabilities (0.5, 0.5) with the first one sampled, (0.25, 0.75) as well: 2 x 0.5^2 = 0.5, 2 x 0.75^2 = 1.125
    batch = batch_of([1, 0], [0, 0], None, [2, 1], logit_grad_squared=torch.tensor([[0.5, 0.5], [1.125, 0.0]]))
    # W at the first token is 0.5 and 1.125; the baseline is 0.5 / 1.625
    expected = [[1 - 0.5 / 1.625, 1], [-0.5 / 1.625, 0]]  # at the second token the first response is alone
    assert VARIANTS["optimal_token_baseline"](batch, SINGLE)[0].tolist() == [pytest.approx(row) for row in expected]
    weighted = batch.with_(is_weights=torch.tensor([[2.0, 7.0], [1.0, 1.0]]))  # 2 squared: W is 2 and 1.125
    first = VARIANTS["optimal_token_baseline"](weighted, SINGLE)[0][:, 0].tolist()
    assert first == pytest.approx([1 - 2 / 3.125, -2 / 3.125])


@pytest.mark.parametrize("seed", range(4))
def test_importance_weights_enter_the_optimal_token_baseline_squared(seed):
    batch = random_step(seed)
    draw = torch.Generator().manual_seed(seed)
    batch = batch.with_(is_weights=torch.rand(batch.response_mask.shape, generator=draw) * 2)
    assert_equals(VARIANTS["optimal_token_baseline"](batch, SINGLE)[0], batch, slow("optimal_token_baseline", batch)[0])


def test_a_certain_policy_keeps_its_baseline_finite():
    batch = batch_of([1, 0], [0, 0], logit_grad_squared=torch.zeros(2, 1))
    assert VARIANTS["optimal_token_baseline"](batch, SINGLE)[0].flatten().tolist() == [1, 0]


# ---- Exact zeros ----


@quick
@given(
    st.floats(-1e6, 1e6, width=32), st.integers(2, 64), st.sampled_from([*OF_RESPONSES, "reinforce_plus_plus_baseline"])
)
def test_a_group_of_equal_scores_gets_exactly_zero(score, n, name):
    assert per_response(name, [score] * n, [0] * n) == [0.0] * n


def test_seven_tenths_get_exactly_zero_though_their_float64_deviations_do_not():
    scores = torch.full((7,), 0.1, dtype=torch.float64)
    assert (scores - scores.sum() / 7).abs().max() > 0 or (scores - scores.mean()).abs().max() > 0  # the trap is real
    rewards = torch.full((7, 1), 0.1, dtype=torch.float64)
    batch = batch_of([0.1] * 7, [0] * 7).with_(token_level_rewards=rewards)
    for name in OF_RESPONSES:
        assert not VARIANTS[name](batch, SINGLE)[0].any(), name


def test_a_constant_group_under_the_optimal_token_baseline_gets_zero_where_two_can_be_compared():
    batch = batch_of([0.1] * 3, [0] * 3, None, [1, 2, 3], logit_grad_squared=torch.full((3, 3), 1e-10))
    result = VARIANTS["optimal_token_baseline"](batch, SINGLE)[0]
    assert result.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, pytest.approx(0.1)]]


@pytest.mark.parametrize("name", OF_RESPONSES)
def test_a_group_with_fewer_than_two_valid_rows_gets_zero(name):
    assert per_response(name, [1, 2, 3, 4], [0, 0, 0, 1], [True, False, False, True]) == [0, 0, 0, 0]


def test_equal_returns_are_whitened_to_exactly_zero():
    batch = batch_of([0.1] * 7, [0, 0, 1, 1, 2, 2, 3], None, [1, 2, 3, 4, 5, 6, 7])
    assert not VARIANTS["reinforce_plus_plus"](batch, SINGLE)[0].any()


# ---- Properties ----


def test_groups_are_keyed_by_uid_wherever_their_rows_are():
    assert per_response("dr_grpo", [1, 5, 0, 5, 0, 5, 0, 9], [7, 3, 7, 3, 7, 3, 7, 3]) == [
        0.75, -1, -0.25, -1, -0.25, -1, -0.25, 3,
    ]  # fmt: skip


def test_excluded_rows_leave_the_statistics_and_get_zero():
    result = per_response("grpo", [1, 0, 99, 0, 0], [4] * 5, [True, True, False, True, True])
    assert result == pytest.approx([1.5, -0.5, 0, -0.5, -0.5], rel=1e-5)


rows_of_groups = st.lists(
    st.tuples(st.sampled_from([-1.0, 0.0, 0.125, 0.5, 1.0]), st.integers(0, 3), st.booleans()), min_size=1, max_size=24
)


@quick
@given(rows_of_groups, st.sampled_from(["grpo", "dr_grpo", "grpo_passk", "rloo", "opo"]))
def test_a_shift_of_all_scores_changes_no_advantage_of_a_group(rows, name):
    scores, uids, valid = zip(*rows, strict=True)
    lens = [1 + place % 3 for place in range(len(rows))]
    result = per_response(name, scores, uids, valid, lens)
    assert per_response(name, [score + 8 for score in scores], uids, valid, lens) == pytest.approx(result, abs=1e-6)
    if name in ("grpo", "dr_grpo", "rloo"):
        for uid in set(uids):
            assert math.fsum(a for a, u in zip(result, uids, strict=True) if u == uid) == pytest.approx(0, abs=1e-5)


@quick
@given(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 9)), min_size=1, max_size=20))
def test_whitened_values_have_mean_zero_and_variance_one(rows):
    values, lens = zip(*rows, strict=True)
    batch = batch_of([0.0] * len(rows), list(range(len(rows))), None, lens)
    spread = torch.tensor(values, dtype=torch.float64)[:, None] + torch.arange(int(max(lens)))
    tokens = whiten(spread, batch, SINGLE)[batch.response_mask].double()
    if len(tokens) > 1:
        assert float(tokens.mean()) == pytest.approx(0, abs=1e-5)
        variance = float(spread[batch.response_mask].var())
        assert float(tokens.var()) == pytest.approx(variance / (variance + 1e-8), rel=1e-5)
    else:
        assert not tokens.any()


def test_whitening_far_from_zero_keeps_its_digits():
    batch = batch_of([0.0] * 4, [0] * 4)
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    torch.testing.assert_close(whiten(values + 1e9, batch, SINGLE), whiten(values, batch, SINGLE))


def test_scores_far_from_zero_keep_their_differences():
    scores = torch.tensor([1000.1, 1000.2, 1000.3, 1000.7]).tolist()  # as float32 holds them
    scale = statistics.stdev(scores) + 1e-6
    expected = [(score - statistics.fmean(scores)) / scale for score in scores]
    assert per_response("grpo", scores, [0] * 4) == pytest.approx(expected, rel=2e-7)


# ---- Options ----


def test_the_table_has_every_name_and_says_what_each_needs():
    needs = {
        name: {flag for flag in ("group", "greedy", "logit_grad_squared", "critic") if getattr(kind, f"needs_{flag}")}
        for name, kind in ADVANTAGES.items()
    }
    assert needs == {
        "grpo": {"group"}, "dr_grpo": {"group"}, "gdpo": {"group"}, "grpo_passk": {"group"}, "rloo": {"group"},
        "opo": {"group"}, "gpg": {"group"}, "reinforce_plus_plus": set(), "reinforce_plus_plus_baseline": {"group"},
        "remax": {"greedy"}, "gae": {"critic"}, "optimal_token_baseline": {"group", "logit_grad_squared"},
    }  # fmt: skip
    assert GroupAdvantage().norm_by_std and not DrGRPOAdvantage().norm_by_std
    assert {name for name, kind in ADVANTAGES.items() if kind.reward_keys} == {"gdpo"}


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("remax", "greedy_scores"),
        ("gae", "values"),
        ("optimal_token_baseline", "logit_grad_squared"),
        ("gdpo", "named_rewards"),
    ],
)
def test_what_an_advantage_needs_and_lacks_is_our_bug(name, missing):
    with pytest.raises(AssertionError, match="before the advantages"):
        VARIANTS[name](random_step(0).with_(**{missing: None}), SINGLE)


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_a_discount_outside_0_to_1_is_refused(bad):
    for advantage, field in (
        (GAEAdvantage(), "gamma"),
        (GAEAdvantage(), "lam"),
        (ReinforcePlusPlusAdvantage(), "gamma"),
    ):
        with pytest.raises(UserError, match=rf"--advantage.{field} is out of range.*from 0 to 1"):
            replace(advantage, **{field: bad})
