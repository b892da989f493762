"""The benchmark's tiny workload under torchrun: every figure that it promises, from a real run."""

import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from lib.families import build_causal_lm
from lib.launch import setup
from recipes import bench
from recipes.bench import (
    FIGURES,
    Probes,
    Workload,
    count_parameters,
    make_folder,
    read_shape,
    rooflines,
    training_config,
)
from recipes.make_random_model import SHAPES, SIZES
from tests.ranks import torchrun

GPU_ONLY = {
    "mfu_update", "mfu_update_nominal", "mfu_logprob", "memory_after_sleep_gib", "peak_allocated_gib",
    "roofline_rollout_s", "roofline_update_s", "step_over_roofline",
}  # fmt: skip
QWEN3_1_7B = {
    "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the run printed, and its figures."""
    out = tmp_path_factory.mktemp("bench") / "figures.json"
    words = ("--workload", "tiny", "--steps", "2", "--lora-rank", "4", "--lora-init", "pissa", "--out", str(out))
    done = torchrun(1, "-m", "recipes.bench", *words, XDG_CACHE_HOME=str(out.parent))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout, json.loads(out.read_text())


def test_every_figure_is_there_and_null_only_where_the_cpu_has_none(found):
    printed, figures = found
    assert set(figures) == {"workload", "num_gpus", "torch", *FIGURES}
    assert json.loads(printed.strip().splitlines()[-1]) == figures
    assert {name for name in FIGURES if figures[name] is None} == GPU_ONLY
    assert all(math.isfinite(figures[name]) for name in FIGURES if name not in GPU_ONLY)
    assert 0 < figures["pissa_init_s"] < figures["launch_to_first_step_s"] and figures["pissa_was_cached"] == 0


def test_figures_agree_with_one_another(found):
    _, figures = found
    assert figures["step_s_min"] <= figures["step_s_median"] <= figures["step_s_max"]
    assert figures["rollout_s"] + figures["update_s"] < figures["step_s_max"]
    assert figures["gen_tok_per_s"] == pytest.approx(16 * 16 / figures["rollout_s"], rel=1e-3)
    assert figures["padding_fraction"] == 0 and 0 < figures["log_probs_diff_mean"] < 1e-4
    assert figures["grad_norm_min"] > 0.1 and 0 < figures["outside_share"] < 1


def test_rooflines_of_fixed_lengths_are_the_formula_by_hand(tmp_path):
    from lib.dist import SINGLE
    from recipes.bench import BenchConfig

    config = training_config(BenchConfig(), Workload("1.7b", 64, 512), str(tmp_path), SINGLE)
    probes = Probes(num_steps=1)
    probes.prompt_lens, probes.response_lens = [100] * 64, [512] * 512
    probes.kv_cache_tokens, probes.max_num_seqs = 10**9, 512
    num_parameters = count_parameters(QWEN3_1_7B)
    assert num_parameters == pytest.approx(1.72e9, rel=0.01)
    rollout_s, update_s = rooflines(QWEN3_1_7B, probes, config, num_parameters, SINGLE)
    # decode: 512 steps of 512 sequences, mean context 100 + 256.5; sampler: 8 bytes a logit; prefill of 64 prompts
    step = (2 * 1.72e9 + 512 * 356.5 * 114688) / 4.3e12 + 512 * 151936 * 8 / 4.3e12
    assert rollout_s == pytest.approx(512 * step + 2 * 1.409e9 * 6400 / 790e12, rel=0.01)
    blocks, head = 2 * 1.409e9 * 512 * 612, 2 * 151936 * 2048 * 512 * 512
    attention = 2 * 28 * 2048 * 512 * 612**2
    assert update_s == pytest.approx(3 * (blocks + head + attention) / 790e12 + 32 * 1.72e9 / 4.3e12, rel=0.01)


def test_a_micro_batch_is_the_workloads_unless_told(tmp_path):
    from lib.dist import SINGLE
    from recipes.bench import WORKLOADS, BenchConfig

    for workload, rank, told, tokens in (
        ("P1", 0, None, 7168), ("P1", 32, None, 10240), ("P1", 32, 9000, 9000), ("P3", 32, None, 8192),
    ):  # fmt: skip
        cfg = BenchConfig(max_tokens_per_gpu=told, lora_rank=rank)
        config = training_config(cfg, WORKLOADS[workload], str(tmp_path), SINGLE)
        assert config.max_tokens_per_gpu == tokens


def test_half_the_sequences_in_flight_take_more_steps(tmp_path):
    from lib.dist import SINGLE
    from recipes.bench import BenchConfig

    config = training_config(BenchConfig(), Workload("1.7b", 64, 512), str(tmp_path), SINGLE)
    probes = Probes(num_steps=1)
    probes.prompt_lens, probes.response_lens = [100] * 64, [512] * 512
    times = []
    for probes.max_num_seqs in (512, 256):
        probes.kv_cache_tokens = 10**9
        times.append(rooflines(QWEN3_1_7B, probes, config, count_parameters(QWEN3_1_7B), SINGLE)[0])
    weights = 512 * 2 * 1.72e9 / 4.3e12  # read once more: everything else is the same work
    assert times[1] - times[0] == pytest.approx(weights, rel=0.02)


def test_the_folder_keeps_its_name_unless_another_run_has_it(tmp_path, monkeypatch):
    """vLLM's compilations are found by the model's path."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first, beside = make_folder("P1"), make_folder("P1")
    assert first != beside and Path(beside).is_dir()
    Path(first).rmdir()
    assert make_folder("P1") == first


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape != "tiny"])
def test_the_parameters_of_every_shape_are_counted(shape, tmp_path):
    import transformers

    config_class, sizes, tied, rest = SHAPES[shape]
    words = dict(zip(SIZES, sizes, strict=True)) | rest
    getattr(transformers, config_class)(**words, tie_word_embeddings=tied).save_pretrained(tmp_path)
    matrices = [it for it in build_causal_lm(tmp_path).parameters() if it.ndim > 1]
    assert count_parameters(read_shape(str(tmp_path))) == sum(it.numel() for it in matrices)


def test_the_yardstick_is_taken_in_the_last_step_whatever_the_start_samples():
    class Engine:
        world = SimpleNamespace(gather=lambda value: [value])
        kv_cache_tokens = max_num_seqs = pool_bytes = 0

        def generate(self, samples, sampling, **_):
            yield from ()

    taken, probes = [], Probes(num_steps=2)
    with (
        patch.object(bench, "RolloutEngine", Engine),
        patch.object(bench, "generate_raw", lambda *_: taken.append(None) or (1.0, 1)),
        probes.installed(),
    ):
        engine = setup.RolloutEngine()
        for stream, expected in (("proof", 0), ("train", 0), ("train", 1)):
            list(engine.generate([], None, stream=stream))
            assert len(taken) == expected, stream
