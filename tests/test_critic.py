"""The critic against transformers' own model for token classification in float64, one unpacked sequence at a time."""

import json
import math
import statistics
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from lib.algorithms.losses import value_loss
from lib.dist import SINGLE
from lib.errors import UserError
from lib.model.batching import make_batch
from lib.model.critic_config import CriticConfig, CriticOptimConfig
from lib.model.forward import compute_values, forward_critic
from lib.model.fsdp import FSDPConfig, held_bytes
from lib.model.networks import build_critic, empty_, load_weights_
from lib.model.optim import build_optimizer, optimizer_step
from lib.ops import masked_mean
from lib.storage.model_folder import ModelFiles, check_critic_files
from tests.critic_worker import BUDGETS, CLIP, with_targets
from tests.prefork import prefork
from tests.tiny import make_model, make_rollouts

LAYOUTS = [(1, False), (2, False), (2, True)]


def make_value_model(folder, **options):
    """A saved AutoModelForTokenClassification with one label, whose head gives values of about 2."""
    model = AutoModelForTokenClassification.from_pretrained(make_model(folder / "policy", **options), num_labels=1)
    with torch.no_grad():
        model.score.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
        model.score.bias.fill_(0.3)
    model.save_pretrained(folder / "value")
    return folder / "value"


def load_unsharded(path, dtype=torch.float32):
    critic = build_critic(str(path), param_dtype=dtype)
    empty_(critic, torch.device("cpu"))
    load_weights_(critic, str(path), SINGLE)
    return critic


def reference(path):
    return AutoModelForTokenClassification.from_pretrained(
        path, num_labels=1, attn_implementation="eager", dtype=torch.float64
    )


def reference_values(model, rollout):
    """Before the first response token the model has seen the prompt, before the next one that token too."""
    ids, values = rollout.sample.prompt_ids + rollout.response_ids, []
    for t in range(len(rollout.response_ids)):
        state = len(rollout.sample.prompt_ids) + t
        values.append(model(torch.tensor([ids[:state]])).logits[0, -1, 0])
    return torch.stack(values)


def slow_loss(model, rollouts):
    """The clipped loss over all tokens of scored responses, and its terms [(value, return, old value, clipped)]."""
    total, terms = 0.0, []
    for rollout in rollouts:
        if rollout.score.score is None:
            continue
        for value, reported in zip(reference_values(model, rollout), rollout.rollout_log_probs, strict=True):
            old, target = 2 * reported, rollout.score.score - 3 * reported
            free, moved = (value - target) ** 2, (min(max(value.item(), old - CLIP), old + CLIP) - target) ** 2
            clipped = moved > free.item()  # then the value has left the clip, and the loss is constant
            total = total + (moved if clipped else free) / 2
            terms.append((value.item(), target, old, clipped))
    return total / len(terms), terms


def error(ours, expected):
    difference = sum(float((ours[name].double() - expected[name].double()).square().sum()) for name in expected)
    return math.sqrt(difference / sum(float(t.double().square().sum()) for t in expected.values()))


# ---- One process ----


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral"])
def test_values_and_gradients_are_those_of_unpacked_hugging_face(tmp_path, kind):
    path = make_value_model(tmp_path, kind=kind)
    critic, model = load_unsharded(path, torch.float64), reference(path)
    rollouts = make_rollouts()
    batch = with_targets(make_batch(rollouts, SINGLE, mini_batch_size=len(rollouts)))
    values = forward_critic(critic, batch)
    for row, rollout in enumerate(rollouts):
        size = len(rollout.response_ids) if rollout.score.score is not None else 0
        expected = reference_values(model, rollout)[:size]
        torch.testing.assert_close(values[row, :size], expected, atol=5e-6, rtol=0)  # eager: a softmax in float32
        assert (values[row, size:] == 0).all()
    token_loss, _ = value_loss(values, batch, clip=CLIP)
    masked_mean(token_loss, batch.response_mask).backward()
    slow_loss(model, rollouts)[0].backward()
    gradients = {name: parameter.grad for name, parameter in critic.named_parameters()}
    assert error(gradients, {name: parameter.grad for name, parameter in model.named_parameters()}) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_without_a_head_in_the_folder_all_values_start_at_zero(tmp_path, tied):
    critic = load_unsharded(make_model(tmp_path, tied=tied))
    batch = make_batch(make_rollouts(), SINGLE, mini_batch_size=12)
    assert not compute_values(critic, batch, max_tokens_per_gpu=60, world=SINGLE).any()
    assert not critic.score.weight.any() and not critic.score.bias.any()
    forward_critic(critic, batch).sum().backward()
    assert critic.score.weight.grad.any()  # so it learns at once, and the decoder from the second update on


def test_a_saved_critic_is_a_token_classification_model_of_transformers(tmp_path):
    critic = load_unsharded(make_model(tmp_path / "policy", tied=False))
    torch.nn.init.normal_(critic.score.weight)
    saved = tmp_path / "saved"
    critic.config.save_pretrained(saved)
    save_file({n: p.detach() for n, p in critic.named_parameters()}, saved / "model.safetensors", {"format": "pt"})
    model, found = AutoModelForTokenClassification.from_pretrained(saved, output_loading_info=True)
    assert not any(found.values()) and model.num_labels == 1
    assert type(model).__name__ == json.loads((saved / "config.json").read_text())["architectures"][0]
    assert torch.equal(model.score.weight, critic.score.weight)
    policy = ModelFiles(folder=tmp_path, config={"vocab_size": 200})
    files = check_critic_files(str(saved), policy, max_prompt_len=8, max_response_len=8)
    assert files.num_parameters == sum(p.numel() for p in critic.parameters())
    assert files.shapes == {name: tuple(p.shape) for name, p in critic.named_parameters()}
    again = load_unsharded(saved)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), critic.parameters(), strict=True))


def test_a_head_without_bias_gets_a_bias_of_zero_and_one_with_nan_is_refused(tmp_path):
    path = make_value_model(tmp_path)
    tensors = load_file(path / "model.safetensors")
    bias = tensors.pop("score.bias")
    save_file(tensors, path / "model.safetensors")
    critic = load_unsharded(path)
    assert critic.score.bias.item() == 0 and torch.equal(critic.score.weight, tensors["score.weight"])
    save_file(tensors | {"score.bias": bias * math.nan}, path / "model.safetensors")
    with pytest.raises(UserError, match=r"NaN or infinity; score\.bias"):
        load_unsharded(path)
    save_file(tensors | {"score.weight": torch.ones(2, tensors["score.weight"].shape[1])}, path / "model.safetensors")
    with pytest.raises(UserError, match=r"a weight's shape differs from config\.json; score\.weight .* expected \(1, "):
        load_unsharded(path)


def test_a_critic_fits_the_returns_of_a_fixed_batch(tmp_path):
    critic = load_unsharded(make_model(tmp_path))
    batch = make_batch(make_rollouts(num_groups=8, n=1), SINGLE, mini_batch_size=8)  # no state occurs twice
    returns = torch.randn(batch.response_mask.shape, generator=torch.Generator().manual_seed(0))  # (B, T)
    optimizer = build_optimizer(critic, CriticOptimConfig(lr=3e-3))
    losses = []
    for _ in range(30):
        values = compute_values(critic, batch, max_tokens_per_gpu=10_000, world=SINGLE)
        step = batch.with_(values=values, returns=returns)
        for epoch in range(2):
            token_loss, _ = value_loss(forward_critic(critic, step), step, clip=CLIP)
            loss = masked_mean(token_loss, batch.response_mask)
            loss.backward()
            optimizer_step(critic, optimizer, clip_grad=1.0)
            if epoch == 0:  # nothing is clipped yet: half the mean squared error
                losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(float(returns[batch.response_mask].square().mean()) / 2)
    assert losses[-1] < losses[0] / 10


@pytest.mark.parametrize(
    ("option", "value"),
    [("value_clip", 0), ("value_clip", math.nan), ("warmup_steps", -1), ("update_epochs", 0),
     ("max_tokens_per_gpu", -5)],
)  # fmt: skip
def test_options_out_of_range_name_themselves(option, value):
    with pytest.raises(UserError, match=f"--critic.{option.replace('_', '-')} is out of range; found {value}"):
        CriticConfig(**{option: value})
    with pytest.raises(UserError, match=r"--critic\.optim\.lr is out of range"):
        CriticOptimConfig(lr=0)
    assert CriticConfig(value_clip=math.inf).optim.lr == 1e-5


def test_an_infinite_clip_is_none():
    batch = with_targets(make_batch(make_rollouts(), SINGLE, mini_batch_size=12))
    values = torch.linspace(-9, 9, batch.response_mask.numel()).view_as(batch.response_mask.float())
    loss, stats = value_loss(values, batch, clip=math.inf)
    expected = torch.where(batch.response_mask, (values - batch.returns).square() / 2, 0)
    assert torch.equal(loss, expected) and not stats["vf_clipfrac"].any()


def test_what_a_model_holds_between_its_updates():
    assert held_bytes(10, FSDPConfig(), SINGLE) == 120
    assert held_bytes(10, FSDPConfig(optimizer_offload=True), SINGLE) == 40


# ---- Several ranks ----


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The value model's folder, and {(ranks, recompute): what the worker wrote}."""
    folder = tmp_path_factory.mktemp("critic")
    path, found = make_value_model(folder), {}
    for num_ranks, recompute in LAYOUTS:
        out = folder / f"{num_ranks}{recompute}.pt"
        done = prefork(num_ranks, "-m", "tests.critic_worker", str(path), str(out), *["recompute"] * recompute)
        assert done.returncode == 0, done.stderr[-3000:]
        found[num_ranks, recompute] = torch.load(out)
    return path, found


@pytest.fixture(scope="module")
def slow(results):
    """The float64 model after the backward pass of the slow loss, the loss and its terms."""
    model = reference(results[0])
    loss, terms = slow_loss(model, make_rollouts(num_groups=6))
    loss.backward()
    return model, loss, terms


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_that_of_the_slow_loop_for_any_ranks_token_budget_and_recompute(results, slow, layout, budget):
    found = results[1][layout]
    assert (found["recomputes"], found["keeps_gathered"]) == (layout[1], not layout[1])
    expected = {name: p.grad for name, p in slow[0].named_parameters()}
    assert error(found[f"gradient/{budget}"], expected) < 2e-5
    single = results[1][1, False][f"gradient/{BUDGETS[-1]}"]
    assert error(found[f"gradient/{budget}"], single) < 1e-5


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_are_those_of_the_slow_loop_for_any_ranks_and_token_budget(results, slow, layout, budget):
    found, (_, _, terms) = dict(results[1][layout][f"values/{budget}"]), slow
    expected = iter(terms)
    for rollout in make_rollouts(num_groups=6):
        row = found.pop((rollout.sample.uid, rollout.index))
        if rollout.score.score is not None:
            values = [next(expected)[0] for _ in rollout.response_ids]
            assert row[: len(values)] == pytest.approx(values, abs=2e-5)
            row = row[len(values) :]
        assert not any(row)
    assert not found and not list(expected)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_are_those_of_the_slow_loop(results, slow, layout, budget):
    found, (_, loss, terms) = results[1][layout][f"metrics/{budget}"], slow
    values, returns, old, clipped = zip(*terms, strict=True)
    unexplained = statistics.pvariance([r - v for r, v in zip(returns, old, strict=True)])
    expected = {
        "vf_loss": float(loss.detach()),
        "vf_clipfrac": statistics.mean(map(float, clipped)),
        "vpred_mean": statistics.mean(values),
        "values/mean": statistics.mean(old),
        "values/max": max(old),
        "values/min": min(old),
        "vf_explained_var": 1 - unexplained / statistics.pvariance(returns),
    }
    assert 0 < expected["vf_clipfrac"] < 1
    assert {name: found[f"critic/{name}"] for name in expected} == pytest.approx(expected, rel=1e-4)
    page = (Path(__file__).parents[1] / "docs/metrics.md").read_text()
    assert all(f"`critic/{name}`" in page for name in expected)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_weights_after_steps_of_smaller_mini_batches_do_not_depend_on_ranks(results, layout):
    assert error(results[1][layout]["weights"], results[1][1, False]["weights"]) < 1e-5


def test_no_token_to_train_on_moves_no_weight_of_the_critic(results):
    for found in results[1].values():
        assert found["without a token"] == (0, False) and found["unmoved"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_head_computes_in_float32_where_the_decoder_computes_in_bfloat16(results, layout):
    assert results[1][layout]["dtypes"] == [torch.bfloat16, *[torch.float32] * 4]
