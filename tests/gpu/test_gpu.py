"""What only a GPU can run: the fast paths against the slow ones (tests/gpu/worker.py).

python -m pytest -m gpu
"""

import json
import subprocess
import sys
from functools import partial

import pytest
import torch

from lib.model.head import linear_log_probs
from tests.ranks import ROOT
from tests.tiny import make_questions

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model's folder."""
    folder = tmp_path_factory.mktemp("gpu")
    make_questions(folder / "texts.parquet", count=300, start=0)
    run("recipes.make_random_model", "--shape", "tiny", "--texts", folder / "texts.parquet", "--out", folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def update(model):
    """What the worker found of the update and the optimizer."""
    return worker("update", model)


@pytest.fixture(scope="module")
def engine(model):
    """What the worker found of the engine."""
    return worker("engine", model)


def worker(part, model):
    run("tests.gpu.worker", part, model, model / f"{part}.json")
    print((model / f"{part}.json").read_text())
    return json.loads((model / f"{part}.json").read_text())


def run(module, *words):
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=420)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def relative_error(ours, expected):
    return float((ours.double() - expected).norm() / expected.norm())


def plain_head(hidden, weight, labels):
    """Log-probs and entropy in one line each, whatever memory they take."""
    log_softmax = ((hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)) / 0.8).log_softmax(-1)
    return log_softmax.gather(1, labels[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("chunk_size", [None, 96])
def test_head_in_bfloat16_is_as_exact_as_the_plain_one(chunk_size):
    torch.manual_seed(0)
    hidden, weight = (torch.randn(size, 256, device="cuda").bfloat16() for size in (700, 5000))
    weight *= 0.2
    labels = torch.randint(0, 5000, (700,), device="cuda")
    slope, of_entropy = torch.randn(2, 700, device="cuda")
    results = []
    for dtype, head in (
        (torch.float64, plain_head),
        (torch.bfloat16, plain_head),
        (torch.bfloat16, partial(linear_log_probs, temperature=0.8, chunk_size=chunk_size)),
    ):
        inputs = [x.to(dtype).detach().requires_grad_() for x in (hidden, weight)]
        log_probs, entropy = head(*inputs, labels)
        (log_probs * slope + 0.1 * entropy * of_entropy).sum().backward()
        results.append((log_probs.detach(), entropy.detach(), *(x.grad for x in inputs)))
    exact, plain, ours = results
    errors = [(relative_error(a, x), relative_error(b, x)) for x, a, b in zip(exact, plain, ours, strict=True)]
    print(errors)
    assert all(0 < of_ours < 1.1 * of_plain < 0.01 for of_plain, of_ours in errors)


def test_compiled_layers_are_as_exact_as_eager_ones(update):
    assert 0 < update["update"]["compiled error"] < 1.1 * update["update"]["eager error"] < 0.05


def test_one_graph_serves_all_layers_and_lengths(update):
    graphs = update["update"]["graphs"]
    assert graphs[0] == graphs[-1] <= 6  # the layer, and the head's kernels for the first and for any other length


def test_nothing_in_a_micro_batch_waits_for_the_gpu(update):
    assert update["update"]["metrics"] > 5
    assert update["update"]["ahead of the GPU"]  # nor does a copy of more than 64 KiB


def test_moments_on_the_host_give_the_same_weights_bit_for_bit(update):
    assert update["optimizer"] == {"same": [True] * 4, "locked": True, "at": "cpu"}


def test_an_engine_without_room_for_what_the_trainer_will_take_is_refused(engine):
    assert "wake the engine's kv_cache; rank 0; found 0.0 GiB free as soon as the optimizer" in engine["no room"]


def test_both_ways_of_syncing_arrive_whole(engine):
    assert [engine["loaded"], *engine["copied"]] == [2 * 8 + 2] * 3


def test_every_fast_path_is_taken(engine):
    assert engine["warnings"] == []


def test_short_cuts_change_nothing_under_preemption_and_prefix_hits(engine):
    assert engine["short cuts: preempted"] == engine["plain: preempted"] > 0
    assert engine["longest"] > 100
    assert engine["short cuts change nothing"]


def test_tokens_are_sampled_by_our_kernel_and_splits_are_for_few_sequences(engine):
    assert engine["races"] > 400 and engine["vLLM's sampler is back"]
    assert {1, 32} <= set(engine["splits"])


def test_interrupted_responses_keep_what_they_have_and_end_later(engine):
    found = engine["partial"]
    assert found["kept"] and len(found["lengths"]) == 40 and len(set(found["lengths"])) > 15
    for waiting, ended in found["calls"]:
        assert ended >= waiting / 2
    assert found["calls"][0][0] == 40 and len(found["calls"]) > 2 and 2 <= found["most continued"] <= 3


def test_log_probs_on_both_sides_of_an_interruption_belong_to_their_tokens(engine):
    found = engine["partial"]
    assert 0 < found["difference with seams"] < 2 * found["difference without"] < 0.02
    assert found["difference one token off"] > 0.1


def test_an_engine_that_was_stopped_sleeps_wakes_and_samples_as_before(engine):
    assert engine["stopped"] == "while responses were being sampled"
    assert engine["a stop changes nothing"]


def test_an_engine_that_fits_beside_the_update_keeps_its_weights(engine):
    assert engine["sleeps"] == [True, False] and engine["verified after staying"] == engine["loaded"]
    assert engine["partial, stayed"] == engine["partial"]
    assert engine["staying changes nothing"]
