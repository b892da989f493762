"""The real engine under torchrun: 1 rank, 2 ranks, tensor parallel 2; tests/rollout_worker.py is what they run."""

import json
import os
import subprocess
import sys

import pytest

from lib.engine.engine import request_seed
from lib.engine.rollout_config import RolloutConfig
from lib.errors import UserError
from tests.prefork import prefork
from tests.ranks import LIMIT_S, ROOT, torchrun
from tests.tiny import make_model, make_questions, make_tokenizer


@pytest.mark.parametrize(("script", "told"), [("train_grpo.py", "missing"), ("eval.py", "too old")])
def test_a_vllm_that_is_missing_or_too_old_is_one_line_before_anything_is_loaded(tmp_path, script, told):
    if told == "missing":
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['vllm'] = None\n")
    else:
        (tmp_path / "vllm-0.8.5.dist-info").mkdir()
        (tmp_path / "vllm-0.8.5.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 0.8.5\n")
    make_questions(rows := tmp_path / "rows.parquet", count=4, start=0)
    words = {
        "train_grpo.py": ("--data.train-files", str(rows), "--run-dir", str(tmp_path / "run")),
        "eval.py": ("--data.files", str(rows), "--output", str(tmp_path / "out.parquet"), "--generate-only", "True"),
    }[script]
    done = subprocess.run(
        [sys.executable, script, "--model.path", str(tmp_path / "model"), *words], cwd=ROOT, text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, timeout=LIMIT_S,
    )  # fmt: skip
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"error[2] vLLM is {told}; the packages of {sys.executable}; found")
    assert "expected 0.25 or newer; pip install -r requirements.txt" in line


LAYOUTS = {"1 rank": (1, 1), "2 ranks": (2, 1), "tensor parallel 2": (2, 2)}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{layout: what the worker found}."""
    folder = tmp_path_factory.mktemp("rollout")
    results = {}
    for name, (num_ranks, tp_size) in LAYOUTS.items():
        # All that layouts differ in: untied head, grouped-query attention, a vocabulary that is no multiple of 64.
        path = folder / "model"
        if not results:
            make_tokenizer(make_model(path, tied=False))
        out = folder / f"{num_ranks}{tp_size}.json"
        words = ("-m", "tests.rollout_worker", str(path), str(out), str(tp_size))
        # One layout imports vLLM itself, which changes what the host's state then is compared with.
        done = torchrun(num_ranks, *words) if not results else prefork(num_ranks, *words, vllm=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        results[name] = json.loads(out.read_text())
    return results


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engine_restores_the_host_process(found, layout):
    assert found[layout]["host restored after building"] and found[layout]["start-up as it was"]
    assert found[layout]["host restored after sampling"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sampled_log_probs_equal_the_trainers(found, layout):
    assert found[layout]["log-prob difference"] < 2e-5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tensor_is_compared_and_stale_or_missing_weights_are_found(found, layout):
    # 2 layers x (qkv, o, q_norm, k_norm, gate_up, down, 2 norms) + embedding, final norm, head
    assert found[layout]["num tensors"] == 2 * 8 + 3
    assert (
        "leaves engine tensors as they are; 1, such as model.layers.1.mlp.gate_up_proj.weight"
        in (found[layout]["a tensor left out"])
    )
    assert len(found[layout]["names"]) == 8
    assert "differ in bits" in found[layout]["one step stale"]
    assert found[layout]["after another sync"] is found[layout]["after a third sync"] is None
    assert found[layout]["nothing of the old weights is left"]
    unsynced = found[layout]["one layer unsynced"]
    assert "1 tensors differ in bits, such as model.layers.1.mlp.down_proj.weight" in unsynced


@pytest.mark.parametrize("layout", LAYOUTS)
def test_short_cuts_in_the_scheduler_change_nothing(found, layout):
    assert found[layout]["longest"] > found[layout]["block size"]
    assert found[layout]["warnings"] == [] and found[layout]["short cuts change nothing"]
    assert found[layout]["short cuts: allocations"] < 0.2 * found[layout]["plain: allocations"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_short_cuts_change_nothing_where_every_token_becomes_text(found, layout):
    assert found[layout]["short cuts change nothing with stop strings"]
    assert found[layout]["stopped by strings"] > 10


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_that_was_ended_early_leaves_nothing_behind(found, layout):
    assert found[layout]["after an early end"]


def test_rollouts_do_not_depend_on_ranks_or_a_restart(found):
    assert found["2 ranks"]["rollouts"] == found["1 rank"]["rollouts"]


def test_tensor_parallel_rollouts_start_alike(found):
    # The same distribution up to rounding: the same tokens until one falls between two nearly equal sums.
    same = [a == b for a, b in zip(found["tensor parallel 2"]["rollouts"], found["1 rank"]["rollouts"], strict=True)]
    assert sum(same) >= 0.9 * len(same)


@pytest.mark.parametrize("layout", ["1 rank", "2 ranks"])
def test_rollouts_do_not_depend_on_order_or_neighbours(found, layout):
    assert found[layout]["other order"] == found[layout]["rollouts"]
    assert found[layout]["alone"] == [r for r in found[layout]["rollouts"] if r[0] == 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_beyond_one_step_of_the_engine_are_sampled_as_if_alone(found, layout):
    assert len(found[layout]["crowd"]) == 24
    assert found[layout]["crowd"] == found[layout]["one by one"]


def test_responses_of_a_group_differ_and_so_do_streams(found):
    rollouts = found["1 rank"]["rollouts"]
    assert len({tuple(ids) for uid, _, ids, _ in rollouts if uid == 0}) == 3
    assert found["1 rank"]["validation stream"] != rollouts


def test_responses_end_by_stop_ids_or_length(found):
    reasons = set()
    for _, _, ids, reason in found["1 rank"]["rollouts"]:
        reasons.add(reason)
        assert (ids[-1] in (11, 17, 23, 29, 31)) == (reason == "stop")
        assert not set(ids[:-1]) & {11, 17, 23, 29, 31}
        assert len(ids) == 12 or reason == "stop"
    assert reasons == {"stop", "length"}


def test_greedy_responses_are_the_same_in_every_layout(found):
    assert found["1 rank"]["greedy"] == found["2 ranks"]["greedy"] == found["tensor parallel 2"]["greedy"]


def test_request_seeds_are_63_bits_and_differ_by_each_ingredient():
    seeds = [request_seed(0, 0), request_seed(1, 0), request_seed(0, 1), request_seed(0, 0, 5),
             request_seed(0, 0, stream="validation")]  # fmt: skip
    assert len(set(seeds)) == 5 and all(0 <= seed < 2**63 - 1000 for seed in seeds)
    assert request_seed(3, 14) == request_seed(3, 14) == 6076101080504687867


@pytest.mark.parametrize(
    "setting",
    [{"n": 0}, {"temperature": 0.001}, {"temperature": float("nan")}, {"top_p": 1.1}, {"top_k": -1},
     {"gpu_memory_utilization": 1.0}, {"max_response_len": 0}, {"max_num_seqs": 4096, "max_num_batched_tokens": 2048},
     {"max_num_batched_tokens": 2047}, {"max_cudagraph_capture_size": 0}, {"partial_share": 0}],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(setting):
    with pytest.raises(UserError, match="--rollout." + next(reversed(setting)).replace("_", "-")):
        RolloutConfig(**setting)
