"""Real engines beside real trainers: the proof of the start passes, and each planted error fails it, by its message."""

import json
import re

import pytest
import torch

from lib.engine.function_proof import max_diff
from tests.function_proof_worker import CASES
from tests.prefork import prefork

LAYOUTS = {"1 rank": (1, 1), "tensor parallel 2": (2, 2), "2 replicas": (2, 1)}
LOOKS = [(layout, case) for layout in LAYOUTS for case in (CASES if layout != "2 replicas" else CASES[:1])]
DIFFER = "WeightSyncError: engine and trainer hold the same weights and do not compute the same"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """{layout: {case: what the worker found}}."""
    found = {}
    for name, (num_ranks, tp_size) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("proof")
        words = ("-m", "tests.function_proof_worker", str(folder), str(folder / "out.json"), str(tp_size))
        done = prefork(num_ranks, *words, vllm=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        found[name] = json.loads((folder / "out.json").read_text())
    return found


@pytest.fixture(params=LOOKS, ids=" of ".join)
def found(request, results):
    layout, case = request.param
    return results[layout][case] | {"case": case}


def stated(error):
    """(mean difference, limit, the trainer's rounding or None) that an error states, in nats."""
    number = r"(\d[\d.e-]*)"
    [words] = re.findall(
        rf"difference\| {number} nats, expected at most {number}(?: \(.* float32 is {number},)?", error
    )
    return tuple(float(word) if word else None for word in words)


def test_engine_and_trainer_of_equal_weights_pass_with_64_tokens_or_a_few_more(found):
    """Although every second token ends a sequence and, in one case, half of the letters stop it."""
    proof, most, limit = found["as it is"], *((0.03, 0.05) if found["case"] == "bfloat16" else (1e-5, 1e-4))
    assert 0 < proof["mean"] < most and proof["limit"] == limit
    assert proof["num_tokens"] == (65 if found["case"] == "llama" else 64)  # 13 responses of 5, 4 of 16


def test_the_proof_is_seeded_and_leaves_everything_as_it_was(found):
    assert found["again"]["mean"] == found["as it is"]["mean"]
    assert found["no random state is changed"] and found["verified after it"] and found["rollouts are the same"]


def test_the_engines_memory_is_free_while_the_trainer_computes_and_comes_back(found):
    assert found["events"] == ["sleep", "onload", "forward", "forward", "forward", "wake, 7"]


def test_float32_on_a_gpu_may_differ_as_much_as_tf32_rounds():
    devices = [torch.device(name) for name in ("cpu", "cuda")]
    assert [max_diff(torch.float32, device) for device in devices] == [1e-4, 0.01]
    assert [max_diff(torch.bfloat16, device) for device in devices] == [0.05, 0.05]


@pytest.mark.parametrize(("error", "least"), [("logits x 1.1", 0.1), ("a layer skipped", 1.0), ("transposed", 1.0)])
def test_an_error_in_the_engine_is_refused_by_the_mean_difference_over_the_same_tokens(found, error, least):
    assert found[error].startswith(f"{DIFFER}; {found['as it is']['num_tokens']} tokens that the engine sampled; ")
    mean, limit, rounding = stated(found[error])
    assert mean > least > limit
    assert (rounding is not None) == (found["case"] == "bfloat16")


def test_an_error_in_one_replica_is_refused_by_all_ranks(results):
    found = results["2 replicas"]["qwen3"]
    assert stated(found["one replica"]) == stated(found["logits x 1.1"])


def test_a_trainer_whose_sequences_see_each_other_is_refused_by_name(found):
    assert found["leak"].startswith("UserError: this model's layers see across the borders of packed sequences; ")
    assert f"{'llama' if found['case'] == 'llama' else 'qwen3'} in " in found["leak"]
    assert "linear attention and state-space layers" in found["leak"]


def test_log_probs_that_are_not_finite_are_refused_on_either_side(found):
    tokens = f"log-probs that are not finite; {found['as it is']['num_tokens']} sampled tokens"
    assert found["trainer not finite"].startswith(f"WeightSyncError: the trainer gave {tokens}")
    assert found["engine not finite"].startswith("WeightSyncError: the engine gave log-probs that are not finite; 1 ")


@pytest.mark.parametrize("layout", ["1 rank", "tensor parallel 2"])
def test_in_bfloat16_a_difference_above_the_limit_is_measured_by_the_trainers_own_rounding(results, layout):
    found = results[layout]["bfloat16"]
    assert found["copies as it is"] == 0  # below the limit nothing is built
    sharpened = found["sharpened"]
    assert sharpened["copies"] == 1 and found["the copy is the float32 model"]
    assert 0.05 < sharpened["mean"] < sharpened["limit"] == pytest.approx(3 * found["rounding"], rel=1e-5)
    mean, limit, rounding = stated(found["sharpened, a layer skipped"])
    assert mean > limit > 0.05 and limit == pytest.approx(3 * rounding, rel=0.1)  # two digits each
    _, limit, rounding = stated(found["logits x 1.1"])
    assert 3 * rounding < limit == 0.05  # never below what any model is allowed
