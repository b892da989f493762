"""Claims about metrics, against slow loops, hand-worked numbers and torch's own counters."""

import json
import math
import os
import re
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lib.algorithms.step_metrics import advantage_metrics, constant_reward_warning, data_metrics, mismatch_metrics
from lib.dist import SINGLE
from lib.model.batching import balance_stats
from lib.model.speed import flops_forward, flops_update, peak_flops, perf_metrics
from lib.rollouts.validation_metrics import MAX_VARIABLES, limit_variables, validation_metrics
from lib.tracking.metrics import Metrics
from lib.types import Batch
from tests.ranks import LIMIT_S, free_port

ROOT = Path(__file__).parent.parent
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 101,
}
MODEL = SimpleNamespace(full_config=QWEN3, block_parameters=32256, has_adapter=False)


def make_batch(uids, scores, *, prompt_lens, response_lens, valid=None, truncated=None) -> Batch:
    """A batch with random log-probs and advantages, and the given row statistics."""
    rows, longest = len(uids), max(response_lens)
    generator = torch.Generator().manual_seed(0)
    valid = torch.tensor(valid or [True] * rows)
    mask = (torch.arange(longest) < torch.tensor(response_lens)[:, None]) & valid[:, None]
    total = max(p + r for p, r in zip(prompt_lens, response_lens, strict=True))
    noise = torch.randn(3, rows, longest, generator=generator)
    return Batch(
        uids=torch.tensor(uids),
        indices=torch.arange(rows),
        mini_batch_ids=torch.zeros(rows, dtype=torch.int64),
        input_ids=torch.zeros(rows, total, dtype=torch.int64),
        prompt_lens=torch.tensor(prompt_lens),
        response_lens=torch.tensor(response_lens),
        response_mask=mask,
        truncated=torch.tensor(truncated or [False] * rows),
        valid=valid,
        scores=torch.tensor(scores),
        rollout_log_probs=-noise[0].abs(),
        advantages=torch.where(mask, noise[1], 0.0),
        returns=torch.where(mask, noise[2], 0.0),
    )


BATCH = make_batch(
    [7, 7, 8, 8, 9, 9],
    [1.0, 0.0, 0.5, 0.5, 1.0, 0.0],
    prompt_lens=[4, 4, 2, 2, 5, 5],
    response_lens=[3, 1, 6, 2, 0, 4],
    valid=[True, True, True, True, True, False],
    truncated=[False, False, True, False, False, False],
)


def run_two_ranks(body: str) -> list[dict]:
    """What each of two gloo processes put into `result`."""
    port = free_port()
    script = (
        "import json, torch\nfrom lib.dist import init_distributed, shutdown_distributed\n"
        "from lib.algorithms.step_metrics import *\nfrom lib.tracking.metrics import Metrics\n"
        "from tests.test_metrics import BATCH\nworld = init_distributed()\nresult = {}\n"
        f"{textwrap.dedent(body)}\nprint(json.dumps(result))\nshutdown_distributed()\n"
    )
    base = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            cwd=ROOT,
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]


def test_mean_is_over_elements_and_not_over_means():
    metrics = Metrics(SINGLE)
    metrics.add_mean("m", torch.tensor([1.0, 2.0, 3.0]).sum(), torch.tensor(3))
    metrics.add_mean("m", 10.0, 1)
    metrics.add_mean("m", torch.tensor(0.0), 0)
    assert metrics.reduce() == {"m": 4.0}


def test_std_equals_numpy_over_all_parts():
    values = np.random.default_rng(0).normal(3.0, 0.5, 50)
    metrics = Metrics(SINGLE)
    for part in np.split(values, [7, 20]):
        metrics.add_std("s", part.sum(), (part**2).sum(), count=len(part))
    assert metrics.reduce()["s"] == pytest.approx(values.std(ddof=1), rel=1e-10)


@pytest.mark.parametrize("order", [(1.0, math.nan), (math.nan, 1.0)])
def test_nan_is_never_dropped(order):
    metrics = Metrics(SINGLE)
    for value in order:
        metrics.add_max("max", value)
        metrics.add_min("min", value)
        metrics.add_mean("mean", value, 1)
        metrics.add_sum("sum", value)
        metrics.add_std("std", value, value, count=2)
    assert all(math.isnan(value) for value in metrics.reduce().values())


def test_statistics_of_nothing_are_nan_and_not_zero():
    metrics = Metrics(SINGLE)
    metrics.add_stats("x", torch.zeros(0))
    values = metrics.reduce()
    assert list(values) == ["x/mean", "x/max", "x/min"] and all(map(math.isnan, values.values()))


def test_a_name_cannot_change_its_reduction():
    metrics = Metrics(SINGLE)
    metrics.add_sum("x", 1)
    with pytest.raises(AssertionError, match="x is a sum"):
        metrics.add_max("x", 1)


def test_seconds_add_up_within_a_step(monkeypatch):
    metrics, clock = Metrics(SINGLE), iter([10.0, 11.5, 20.0, 22.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for _ in range(2):
        with metrics.time("gen"):
            pass
    assert metrics.reduce() == {"timing_s/gen": 3.5}


def test_two_ranks_reduce_to_one_dict_with_differing_names_and_split_groups():
    first, second = run_two_ranks(
        """
        metrics = Metrics(world)
        metrics.add_mean("mean", torch.tensor([1.0, 2.0, 3.0]).sum() if world.rank == 0 else 10.0, 3 - 2 * world.rank)
        metrics.add_max("max", -5.0 - world.rank)
        metrics.add_max("max_of_one", 3.0 if world.rank else 100.0, count=world.rank)
        metrics.add_min("min", -5.0 - world.rank)
        metrics.add_sum(f"only_{world.rank}", 1 + world.rank)
        metrics.add_sum("sum", 1 + world.rank)
        metrics.set("lr", 0.5)
        for seconds in (1.0, 2.0):
            metrics._add("timing_s/gen", "time", seconds * (1 + world.rank))
        result["plain"] = metrics.reduce()
        # every group is split over the ranks; rank 1 lists its rows backwards
        rows = torch.arange(world.rank, len(BATCH), 2)
        metrics = Metrics(world)
        data_metrics(BATCH.rows(rows.flip(0) if world.rank else rows), metrics, max_prompt_len=5)
        result["data"] = metrics.reduce()
        """
    )
    assert first == second
    assert first["plain"] == {
        "mean": 4.0,
        "max": -5.0,
        "max_of_one": 3.0,
        "min": -6.0,
        "only_0": 1.0,
        "only_1": 2.0,
        "sum": 3.0,
        "lr": 0.5,
        "timing_s/gen": 6.0,
    }
    metrics = Metrics(SINGLE)
    data_metrics(BATCH, metrics, max_prompt_len=5)
    assert first["data"] == pytest.approx(metrics.reduce(), rel=1e-12)


def test_data_metrics_equal_numbers_worked_by_hand():
    metrics = Metrics(SINGLE)
    data_metrics(BATCH, metrics, max_prompt_len=5)
    advantage_metrics(BATCH, metrics)
    values = metrics.reduce()
    assert values["critic/score/mean"] == values["critic/rewards/mean"] == 3.0 / 5  # the excluded row is not a 0
    assert (values["critic/score/max"], values["critic/score/min"]) == (1.0, 0.0)
    assert values["response_length/mean"] == pytest.approx(16 / 6)
    assert (values["response_length/max"], values["response_length/min"]) == (6, 0)
    assert values["response_length/clip_ratio"] == pytest.approx(1 / 6)  # the finish reason, not the tensor's width
    assert values["prompt_length/mean"] == pytest.approx(22 / 6)
    assert values["prompt_length/clip_ratio"] == pytest.approx(2 / 6)
    assert values["response/aborted_ratio"] == pytest.approx(1 / 6)
    assert values["reward/excluded_ratio"] == values["training/excluded_ratio"] == pytest.approx(1 / 6)
    assert values["training/stale_tokens_ratio"] == 0
    assert values["reward/constant_group_ratio"] == pytest.approx(2 / 3)  # 8: equal; 9: one valid row; 7 differs
    tokens = [
        BATCH.advantages[row, t].item()
        for row in range(len(BATCH))
        for t in range(BATCH.response_mask.shape[1])
        if BATCH.response_mask[row, t]
    ]
    assert len(tokens) == 12
    assert values["critic/advantages/mean"] == pytest.approx(sum(tokens) / 12)
    assert values["critic/advantages/max"] == max(tokens) and values["critic/advantages/min"] == min(tokens)


def test_a_group_without_any_score_has_no_signal():
    batch = make_batch([1, 1, 2, 2], [0.0, 0.0, 1.0, 0.0], prompt_lens=[1] * 4, response_lens=[1] * 4)
    metrics = Metrics(SINGLE)
    advantage_metrics(batch.with_(valid=torch.tensor([False, False, True, True])), metrics)
    assert metrics.reduce()["reward/constant_group_ratio"] == 0.5


def test_a_group_has_a_signal_in_any_of_the_rewards_that_train():
    batch = make_batch([1, 1, 2, 2], [1.0] * 4, prompt_lens=[1] * 4, response_lens=[1] * 4)
    metrics = Metrics(SINGLE)
    advantage_metrics(
        batch.with_(named_rewards=torch.tensor([[1.0, 0.5], [1.0, 0.0], [1.0, 0.5], [1.0, 0.5]])), metrics
    )
    assert metrics.reduce()["reward/constant_group_ratio"] == 0.5


def test_constant_rewards_are_reported_at_once_at_the_third_in_a_row_and_at_the_end():
    said = {}
    ratios = [0.2, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0, math.nan, 0.5, 1.0]
    for step in range(1, len(ratios) + 1):
        if warning := constant_reward_warning(ratios[:step]):
            said[step] = warning
    assert list(said) == [2, 6]
    assert "in this step" in said[2] and "last 3 steps" in said[6]
    assert "in 6 of 9 steps" in constant_reward_warning(ratios, at_end=True)
    assert constant_reward_warning([0.99, math.nan], at_end=True) is None
    assert constant_reward_warning([math.nan] * 3) is None  # no group has ended yet
    assert constant_reward_warning([1.0, math.nan]) is None  # said before


@pytest.mark.parametrize("model_type", ["qwen3", "llama", "starcoder2"])
def test_flops_equal_what_torch_counts(model_type):
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**QWEN3, "model_type": model_type, "attn_implementation": "eager"})
    model = AutoModelForCausalLM.from_config(config)
    lens, response_lens = [13, 29], [5, 17]
    counted = 0
    for length, response in zip(lens, response_lens, strict=True):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.zeros(1, length, dtype=torch.int64), logits_to_keep=response)
        counted += counter.get_total_flops()
    squares = sum(length**2 for length in lens)
    masked_half = 2 * 3 * 4 * 16 * squares  # torch counts the upper triangle too, which causal attention does not need
    rotary = sum(2 * (16 // 2) * length for length in lens)  # torch counts positions x frequencies as a product
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1)
    found = flops_forward(config.to_dict(), lens, response_lens, block_parameters=matrices)
    assert found == counted - masked_half - rotary


def test_an_update_under_an_adapter_has_no_gradients_of_weights():
    """Counted by torch, with attention's upper triangle; of the first layer's input a gradient is counted too."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**{**QWEN3, "model_type": "qwen3", "attn_implementation": "eager"})
    model = AutoModelForCausalLM.from_config(config).requires_grad_(False)
    embeddings = torch.zeros(1, 13, config.hidden_size, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(inputs_embeds=embeddings, logits_to_keep=5).logits.sum().backward()
    masked_half, rotary = 2 * 3 * 4 * 16 * 13**2, 2 * (16 // 2) * 13
    matrices = sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1)
    counts = dict(config=config.to_dict(), seq_lens=[13], response_lens=[5], block_parameters=matrices)
    assert flops_update(**counts, has_adapter=True) == counter.get_total_flops() - 3 * masked_half - rotary
    assert flops_update(**counts) == 3 * flops_forward(**counts)


def test_a_window_bounds_the_pairs_of_its_layers():
    config = QWEN3 | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    pairs = 2 * (3 * 3 / 2 + 4 * 10 - 4 * 4 / 2) + 3 * 3 / 2 + 10 * 10 / 2  # lengths 3 and 10
    head = 2 * 101 * 32 * 2
    assert flops_forward(config, [3, 10], [1, 1], block_parameters=7) == 2 * 7 * 13 + 4 * 4 * 16 * pairs + head


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_is_found_by_the_whole_name(name, peak):
    assert peak_flops(name) == peak


def test_throughput_and_times_per_token_are_sums_over_sums():
    timings = {"timing_s/step": 4.0, "timing_s/gen": 2.0, "timing_s/update_actor": 1.0, "timing_s/reward": 9.0}
    values = perf_metrics(BATCH, timings, SINGLE, model=MODEL)
    assert values["perf/total_num_tokens"] == 22 + 16
    assert values["perf/throughput"] == 38 / 4.0
    assert values["timing_per_token_ms/gen"] == pytest.approx(2000 / 16)
    assert values["timing_per_token_ms/update_actor"] == pytest.approx(1000 / 38)
    assert values["perf/cpu_memory_used_gb"] > 0
    assert not any(name.startswith(("perf/mfu", "timing_per_token_ms/reward")) for name in values)


def test_mfu_counts_three_forwards_for_an_update(monkeypatch):
    monkeypatch.setattr("lib.model.speed.torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("lib.model.speed.torch.cuda.max_memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr("lib.model.speed.torch.cuda.max_memory_reserved", lambda device: 4 * 2**30)
    world = type(SINGLE)(rank=0, size=1, device=torch.device("cuda", 0))
    timings = {"timing_s/step": 1.0, "timing_s/update_actor": 0.5, "timing_s/old_log_prob": 0.25}
    values = perf_metrics(BATCH, timings, world, model=MODEL, update_epochs=2)
    forward = flops_forward(
        QWEN3, BATCH.total_lens.tolist(), BATCH.response_lens.tolist(), block_parameters=MODEL.block_parameters
    )
    assert values["perf/mfu/actor"] == pytest.approx(2 * 3 * forward / (0.5 * 989e12))
    assert values["perf/mfu/actor_infer"] == pytest.approx(forward / (0.25 * 989e12))
    assert (values["perf/max_memory_allocated_gb"], values["perf/max_memory_reserved_gb"]) == (3, 4)


def test_mismatch_equals_a_loop_over_finite_response_tokens_of_all_micro_batches():
    log_probs = -torch.rand(BATCH.response_mask.shape, generator=torch.Generator().manual_seed(1))
    engine = BATCH.rollout_log_probs.clone()
    log_probs[~BATCH.response_mask], engine[~BATCH.response_mask] = math.nan, math.inf  # padding must not matter
    engine[2, 3] = -math.inf  # one response token that cannot be compared
    batch = BATCH.with_(rollout_log_probs=engine)
    metrics = Metrics(SINGLE)
    for rows in (torch.tensor([0, 1]), torch.tensor([2, 3, 4]), torch.tensor([5])):
        part = batch.rows(rows)
        mismatch_metrics(log_probs[rows, : part.response_mask.shape[1]], part, metrics)
    values = metrics.reduce()

    log_diffs, diffs = [], []
    for row, t in BATCH.response_mask.nonzero().tolist():
        if (row, t) != (2, 3):
            ours, theirs = log_probs[row, t].item(), engine[row, t].item()
            log_diffs.append(abs(ours - theirs))
            diffs.append(abs(math.exp(ours) - math.exp(theirs)))
    assert values == pytest.approx(
        {
            "training/rollout_log_probs_diff/mean": np.mean(log_diffs),
            "training/rollout_log_probs_diff/max": np.max(log_diffs),
            "training/rollout_probs_diff_mean": np.mean(diffs),
            "training/rollout_probs_diff_max": np.max(diffs),
            "training/rollout_probs_diff_std": np.std(diffs, ddof=1),
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_log_probs_nonfinite": 1.0,
        },
        rel=1e-9,
    )


def test_mismatch_without_a_comparable_token_is_nan_and_marked_invalid():
    metrics = Metrics(SINGLE)
    mismatch_metrics(torch.full(BATCH.response_mask.shape, math.nan), BATCH, metrics)
    values = metrics.reduce()
    assert math.isnan(values["training/rollout_log_probs_diff/mean"])
    assert math.isnan(values["training/rollout_log_probs_diff/max"])
    assert values["training/rollout_probs_diff_valid"] == 0
    assert values["training/rollout_log_probs_nonfinite"] == 12


def slow_bootstrap(values, preds, n):
    """best, worst and majority value of 1000 draws, one draw at a time from numpy's global generator."""
    np.random.seed(42)
    best, worst, majority = [], [], []
    for _ in range(1000):
        draw = [int(i) for i in np.random.choice(len(values), n, replace=True)]
        best.append(max(values[i] for i in draw))
        worst.append(min(values[i] for i in draw))
        votes = defaultdict(list)
        for i in draw:
            votes[preds[i]].append(values[i])
        majority.append(max(votes.values(), key=len)[0])
    return best, worst, majority


def test_validation_metrics_equal_a_slow_bootstrap():
    rng = np.random.default_rng(3)
    rows = [
        ("gsm8k", uid, {"reward": 2 * acc - 1, "acc": bool(acc), "pred": str(rng.integers(3))})
        for uid in (4, 5, 6)
        for acc in rng.integers(0, 2, 6).tolist()
    ]
    values = validation_metrics(rows, largest=6)
    for n in (2, 4, 6):
        expected = defaultdict(list)
        for uid in (4, 5, 6):
            group = [values for _, of_uid, values in rows if of_uid == uid]
            accs, preds = [values["acc"] for values in group], [values["pred"] for values in group]
            for kind, drawn in zip(("best", "worst", "maj"), slow_bootstrap(accs, preds, n), strict=True):
                expected[f"{kind}@{n}/mean"].append(np.mean(drawn))
                expected[f"{kind}@{n}/std"].append(np.std(drawn))
        for name, numbers in expected.items():
            section = "val-core" if n == 6 and not name.startswith("worst") else "val-aux"
            assert values[f"{section}/gsm8k/acc/{name}"] == pytest.approx(np.mean(numbers), abs=1e-12), name
    assert values["val-core/gsm8k/acc/mean@6"] == pytest.approx(np.mean([values["acc"] for _, _, values in rows]))
    assert values["val-aux/gsm8k/reward/mean@6"] == pytest.approx(2 * values["val-core/gsm8k/acc/mean@6"] - 1)
    assert "val-aux/gsm8k/acc/std@6" in values


def test_one_greedy_response_gives_only_its_mean():
    rows = [("arithmetic", uid, {"reward": float(uid % 2), "acc": True, "format": "plain"}) for uid in (1, 2)]
    assert validation_metrics([*rows, ("lighteval/MATH", 1, {"reward": -1.0})], largest=1) == {
        "val-core/arithmetic/acc/mean@1": 1.0,
        "val-aux/arithmetic/reward/mean@1": 0.5,
        "val-core/lighteval/MATH/reward/mean@1": -1.0,
    }


def test_a_prompt_with_fewer_scored_responses_counts_as_one_prompt():
    rows = [("s", 0, {"reward": 1.0}), ("s", 0, {"reward": 0.0}), ("s", 1, {"reward": 1.0})]
    for largest in (2, 4):  # with 4 no prompt has all its scores, and the names stay
        values = validation_metrics(rows, largest=largest)
        assert values[f"val-core/s/reward/mean@{largest}"] == 0.75
        assert {name for name in values if "mean@" in name} == {f"val-core/s/reward/mean@{largest}"}


def test_validation_keeps_nan():
    assert math.isnan(validation_metrics([("s", 0, {"reward": math.nan})], largest=1)["val-core/s/reward/mean@1"])


def test_names_made_of_responses_are_limited_over_all_validations_and_counted():
    known: set[str] = set()
    columns: set[str] = set()
    for step in range(4):
        responses = [
            ("s", uid, {"reward": 1.0, "acc": True, "pred": "x", "format": 0.5, f"text {step} {uid}": 1.0, "why": "so"})
            for uid in range(200)
        ]
        kept, num_left_out = limit_variables(responses, known)
        assert num_left_out == (103 if step == 0 else 200)
        assert all(values["pred"] == "x" and values["why"] == "so" for _, _, values in kept)
        found = validation_metrics(kept, largest=1)
        assert {"val-core/s/acc/mean@1", "val-aux/s/reward/mean@1", "val-aux/s/format/mean@1"} <= found.keys()
        columns |= found.keys()
    assert len(columns) == MAX_VARIABLES == len(known) == 100
    few = [("s", 0, {"reward": 1.0, "acc": True})]
    assert limit_variables(few, set()) == (few, 0)


def test_every_metric_is_in_the_documentation(monkeypatch):
    monkeypatch.setattr("lib.model.speed.torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr("lib.model.speed.torch.cuda.max_memory_allocated", lambda device: 1)
    monkeypatch.setattr("lib.model.speed.torch.cuda.max_memory_reserved", lambda device: 1)
    world = type(SINGLE)(rank=0, size=1, device=torch.device("cuda", 0))
    metrics = Metrics(SINGLE)
    batch = BATCH.with_(values=BATCH.advantages)
    data_metrics(batch, metrics, max_prompt_len=5)
    advantage_metrics(batch, metrics)
    mismatch_metrics(BATCH.rollout_log_probs, BATCH, metrics)
    phases = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor",
              "update_weights", "testing", "step")  # fmt: skip
    timings = {f"timing_s/{phase}": 1.0 for phase in phases}
    rows = [("SOURCE", 0, {"reward": 1.0, "VARIABLE": 1.0, "pred": "1"})] * 4
    emitted = [
        *metrics.reduce(),
        *balance_stats(BATCH, SINGLE),
        *timings,
        *perf_metrics(BATCH, timings, world, model=MODEL),
        *validation_metrics(rows, largest=4),
    ]
    page = (ROOT / "docs/metrics.md").read_text()
    documented = set(re.findall(r"`([^`]+)`", page))
    for name in emitted:
        name = re.sub(r"@4", "@N", re.sub(r"@2", "@n", name)).replace("/reward/", "/VARIABLE/")
        name = re.sub(r"(val-\w+)/SOURCE/VARIABLE/(best|worst|maj)@\w", r"\1/SOURCE/VARIABLE/\2@n", name)
        assert name in documented, name


def test_constant_groups_are_those_whose_training_reward_is_constant():
    batch = make_batch([1, 1, 2, 2], [1.0, 1.0, 1.0, 0.0], prompt_lens=[1] * 4, response_lens=[2] * 4)
    metrics = Metrics(SINGLE)
    shaped = torch.tensor([[0.0, 1.0], [0.0, 0.9], [0.0, 0.5], [0.0, 0.5]])  # a length penalty, say
    advantage_metrics(batch.with_(token_level_rewards=shaped), metrics)
    assert metrics.reduce()["reward/constant_group_ratio"] == 0.5
    metrics = Metrics(SINGLE)
    advantage_metrics(batch.with_(valid=torch.tensor([True, True, True, False])), metrics)  # one was cut off
    assert metrics.reduce()["reward/constant_group_ratio"] == 1.0
