"""The gradient of a mini-batch depends on the mini-batch alone; see tests/update_worker.py for what each rank runs."""

import math
from typing import get_args

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from lib.advantages import GroupAdvantage
from lib.aggregation import LossAggMode
from lib.batching import make_batch
from lib.dist import SINGLE
from lib.losses import LOSSES
from lib.optim import OptimConfig, build_optimizer, moments_to_come, optimizer_step
from tests.prefork import prefork
from tests.test_forward import reference_log_probs
from tests.tiny import make_model, make_rollouts
from tests.update_worker import BUDGETS, CASE_BUDGETS, CASES, MAX_RESPONSE_LEN, near_policies


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{(ranks, recompute): what the worker wrote}, and the model's folder."""
    folder = tmp_path_factory.mktemp("update")
    path = make_model(folder / "model")
    found = {}
    for num_ranks, flags in ((1, ()), (2, ()), (2, ("recompute",)), (3, ())):
        out = folder / f"{num_ranks}{len(flags)}.pt"
        done = prefork(num_ranks, "-m", "tests.update_worker", str(path), str(out), *flags)
        assert done.returncode == 0, done.stderr[-3000:]
        found[num_ranks, bool(flags)] = torch.load(out)
    return path, found


def error(ours, expected):
    difference = sum(float((ours[name].double() - expected[name].double()).square().sum()) for name in expected)
    return math.sqrt(difference / sum(float(t.double().square().sum()) for t in expected.values()))


def test_gradient_equals_a_slow_loop_over_unpacked_sequences_in_float64(results):
    path, found = results
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float64)
    rollouts = make_rollouts(num_groups=6)
    batch = make_batch(rollouts, SINGLE, mini_batch_size=18)
    advantages, _ = GroupAdvantage()(batch, SINGLE)
    num_valid = sum(r.score.score is not None for r in rollouts)
    loss = 0.0
    for row, rollout in enumerate(rollouts):
        if rollout.score.score is None:
            continue
        log_probs, entropy = reference_log_probs(model, rollout, 0.9)
        reported = torch.tensor(rollout.rollout_log_probs, dtype=torch.float64)
        old, ref = reported * 4 - 3, reported * 4 - 2
        for t in range(len(rollout.response_ids)):
            x = (log_probs[t] - old[t]).clamp(-20, 20)
            advantage, ratio = float(advantages[row, t]), x.exp()
            surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            if advantage < 0:
                surrogate = torch.minimum(surrogate, torch.tensor(-advantage * 3.0, dtype=torch.float64))
            y = (ref[t] - log_probs[t]).clamp(-20, 20)
            k3 = (y.exp() - y - 1).clamp(-10, 10)
            loss = loss + (surrogate - 0.01 * entropy[t] + 0.1 * k3) / len(rollout.response_ids) / num_valid
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert error(found[1, False]["gradient/10000"], expected) < 2e-5


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("layout", [(1, False), (2, False), (2, True), (3, False)])
def test_gradient_is_invariant_to_ranks_token_budget_and_recompute(results, layout, budget):
    _, found = results
    expected = found[1, False][f"gradient/{BUDGETS[-1]}"]
    assert error(found[layout][f"gradient/{budget}"], expected) < 1e-5


@pytest.fixture(scope="module")
def slow_cases(results):
    """{case: gradients} of Hugging Face's model in float64, one unpacked response at a time.

    What all of them share is written out: weights, aggregation, denominators. The losses per token are lib's own, which
    test_loss_family.py compares with slow loops.
    """
    model = AutoModelForCausalLM.from_pretrained(results[0], attn_implementation="eager", dtype=torch.float64)
    rollouts = make_rollouts(num_groups=6)
    batch = make_batch(rollouts, SINGLE, mini_batch_size=18)
    batch = batch.with_(advantages=GroupAdvantage()(batch, SINGLE)[0], old_log_probs=batch.rollout_log_probs)
    rows = {}
    for row in batch.valid.nonzero().flatten().tolist():
        log_probs, entropy = reference_log_probs(model, rollouts[row], 0.9)
        reported = torch.tensor(rollouts[row].rollout_log_probs, dtype=torch.float64)
        old, engine = near_policies(log_probs.detach(), reported)
        batch.old_log_probs[row, : len(old)] = old.float()
        y = (reported * 4 - 2 - log_probs).clamp(-20, 20)
        rows[row] = (log_probs, old, engine, 0.1 * (y.exp() - y - 1).clamp(-10, 10) - 0.01 * entropy)
    num_tokens = sum(len(old) for _, old, _, _ in rows.values())
    mean_weight = sum(float((old - engine).exp().clamp(max=1.3).sum()) for _, old, engine, _ in rows.values())
    mean_weight /= num_tokens
    expected = {}
    for name, (loss, mode, correction) in CASES.items():
        total, prepared = 0.0, loss.prepare(batch, SINGLE)
        for row, (log_probs, old, engine, others) in rows.items():
            weights = (old - engine).exp().clamp(max=1.3) / mean_weight
            if correction.bypass:
                old, weights = engine, (log_probs.detach() - engine).sum().exp().clamp(max=2)
            if name == "geo_mean":
                weights = weights.log().mean().exp()
            token_loss, _ = loss(log_probs[None], prepared.rows(torch.tensor([row])).with_(old_log_probs=old[None]))
            of_row = (token_loss[0] * weights + others).sum()
            total = total + of_row / {
                "token-mean": num_tokens, "seq-mean-token-sum": len(rows), "seq-mean-token-mean": len(rows) * len(old),
                "seq-mean-token-sum-norm": len(rows) * MAX_RESPONSE_LEN, "token-sum": 1,
            }[mode]  # fmt: skip
        names, parameters = zip(*model.named_parameters(), strict=True)
        gradients = torch.autograd.grad(total, parameters, retain_graph=True)
        expected[name] = dict(zip(names, gradients, strict=True))
    return expected


@pytest.mark.parametrize("budget", CASE_BUDGETS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_gradient_of_every_loss_with_weights_is_invariant_and_equals_a_slow_loop(
    results, slow_cases, name, num_ranks, budget
):
    gradients = results[1][num_ranks, False][f"{name}/{budget}"]
    assert error(gradients, results[1][1, False][f"{name}/{CASE_BUDGETS[-1]}"]) < 1e-5
    assert error(gradients, slow_cases[name]) < 2e-5


def test_the_cases_have_every_loss_and_every_aggregation():
    assert CASES.keys() == LOSSES.keys() | {"reinforce"}
    assert {mode for _, mode, _ in CASES.values()} == set(get_args(LossAggMode))


def test_gradient_checkpointing_computes_every_layer_twice(results):
    _, found = results
    assert found[2, True]["num_forwards"] == 2 * found[2, False]["num_forwards"] > 0


@pytest.mark.parametrize("layout", [(2, False), (2, True), (3, False)])
def test_weights_after_optimizer_steps_are_invariant_to_ranks(results, layout):
    _, found = results
    assert error(found[layout]["weights"], found[1, False]["weights"]) < 1e-5
    for ours, single in zip(found[layout]["norms"], found[1, False]["norms"], strict=True):
        assert ours[0] == pytest.approx(single[0], rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("layout", [(1, False), (2, False), (2, True), (3, False)])
def test_whole_weights_are_gathered_in_buckets_of_a_size(results, layout):
    """The worker compares every bit on every rank."""
    found = results[1][layout]["gathered in buckets"]  # a tensor each, of 40 KiB, all in one
    assert found[0] == found[3] == 24 > found[1] > found[4] > found[2] == found[5] == 1
    assert found[6:] == [4, 1, 1, 4, 1, 1]


@pytest.mark.parametrize(("gradient", "taken"), [(1e-15, True), (0.0, False), (math.inf, False), (math.nan, False)])
def test_a_step_is_taken_for_a_finite_gradient_other_than_zero(gradient, taken):
    model = nn.Linear(2, 2)
    optimizer = build_optimizer(model, OptimConfig(lr=0.1))
    for step_gradient, expected in ((1.0, True), (gradient, taken)):  # momentum first
        before = model.weight.detach().clone()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step_gradient)
        assert optimizer_step(model, optimizer, clip_grad=1.0)[1] == expected
        assert torch.equal(model.weight, before) != expected and model.weight.grad is None


def test_moments_to_come_are_those_of_parameters_that_have_none_yet():
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, OptimConfig())
    assert moments_to_come([optimizer, optimizer]) == 2 * 8 * (3 * 2 + 2)
    model.bias.grad = torch.ones(2)
    optimizer.step()
    assert moments_to_come([optimizer]) == 8 * 3 * 2


def test_a_nan_on_one_rank_or_no_token_to_train_on_moves_no_weight_on_any_rank(results):
    for result in results[1].values():
        first, broken, empty, last = result["norms"]
        assert first[1:] == last[1:] == (True, False)
        assert math.isnan(broken[0]) and empty[0] == 0
        assert broken[1:] == empty[1:] == (False, True)  # in the second there is momentum already
