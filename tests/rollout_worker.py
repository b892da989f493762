"""Under torchrun: one real engine, all that a test wants to know of it, as JSON from rank 0.

torchrun --nproc_per_node=N -m tests.rollout_worker MODEL OUT TP_SIZE
"""

import gc
import json
import os
import random
import sys
from dataclasses import replace

import numpy
import torch

import lib.engine.weight_sync
import lib.model.fsdp
from lib.dist import SINGLE, init_distributed, shutdown_distributed
from lib.engine.engine import RolloutEngine
from lib.engine.fast.paths import FastPaths
from lib.engine.in_process import set_engine_environment
from lib.engine.rollout_config import RolloutConfig, Sampling
from lib.engine.weight_sync import WeightSync, names_to_check
from lib.errors import WeightSyncError
from lib.model.batching import make_batch
from lib.model.forward import forward_policy
from lib.model.fsdp import FSDPConfig, load_policy
from lib.model.networks import ModelConfig
from lib.model.optim import OptimConfig, build_optimizer, optimizer_step
from lib.types import Sample, Score

TEMPERATURE = 0.7
LEFT_OUT = "model.layers.1.mlp.up_proj.weight"
SAMPLES = [
    Sample(uid=uid, prompt_ids=[1 + uid % 50, 7, 9, 3 + uid % 11][: 2 + uid % 3], data_source="", ground_truth="",
           extra_info={})
    for uid in range(10)
]  # fmt: skip


def host_state():
    return (
        random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist(),
        torch.get_num_threads(), torch.get_float32_matmul_precision(), str(torch.get_default_dtype()),
        torch.set_num_threads.__name__, gc.isenabled(),
    )  # fmt: skip


def stops(action):
    try:
        action()
    except WeightSyncError as error:
        return str(error)
    return None


def generate(engine, samples, world, *, stream="train", **sampling):
    sampling = Sampling(**{"n": 3, "max_response_len": 12, "temperature": TEMPERATURE, "log_probs": True, **sampling})
    groups = list(engine.generate(engine.share(samples), sampling, stream=stream))
    gathered = world.gather([r for group in groups for r in group] if engine.is_leader else [])
    return sorted((r for of_rank in gathered for r in of_rank), key=lambda r: (r.sample.uid, r.index))


def summary(rollouts):
    return [(r.sample.uid, r.index, r.response_ids, r.finish_reason) for r in rollouts]


def without_a_second_process(cache):
    """vLLM's registry, which has seen no model and cannot start a process to look at one; and SamplingParams."""
    set_engine_environment(on_gpu=False)
    os.environ["VLLM_CACHE_ROOT"] = cache
    from vllm import SamplingParams
    from vllm.model_executor.models import registry

    registry._SUBPROCESS_COMMAND = ["false"]
    return registry, SamplingParams


def main(path, out, tp_size):
    world = init_distributed()
    lib.model.fsdp.BUCKET_BYTES = 2**14  # many buckets of this model
    registry, params = without_a_second_process(out + ".cache")
    start_up = registry._run_in_subprocess, params.for_sampler_warmup
    random.seed(3)
    numpy.random.seed(3)
    torch.manual_seed(3)
    torch.set_float32_matmul_precision("high")
    before, found = host_state(), {}
    cfg = RolloutConfig(
        tensor_model_parallel_size=int(tp_size), max_response_len=240, max_num_seqs=16, max_num_batched_tokens=2048
    )
    engine = RolloutEngine(
        cfg,
        path,
        dtype="float32",
        max_prompt_len=8,
        most_responses=30,
        stop_token_ids=[11, 17, 23, 29, 31],
        world=world,
        seed=5,
    )
    found["host restored after building"] = host_state() == before
    found["start-up as it was"] = start_up == (registry._run_in_subprocess, params.for_sampler_warmup)
    engine.sleep()
    policy = load_policy(ModelConfig(dtype="float32"), path, FSDPConfig(), world)
    weight_sync = WeightSync(policy, engine, fsdp=FSDPConfig())
    every = lib.engine.weight_sync.iter_full_tensors
    lib.engine.weight_sync.iter_full_tensors = lambda *of: (pair for pair in every(*of) if pair[0] != LEFT_OUT)
    found["a tensor left out"] = stops(weight_sync.load)
    lib.engine.weight_sync.iter_full_tensors = every
    weight_sync.load()
    found["num tensors"] = weight_sync.verify()

    torch.manual_seed(4)
    before = host_state()
    short = generate(engine, SAMPLES, world)
    found["host restored after sampling"] = host_state() == before
    found["rollouts"] = summary(short)
    found["log_probs"] = [r.rollout_log_probs for r in short]
    found["other order"] = summary(generate(engine, SAMPLES[::-1], world))
    found["alone"] = summary(generate(engine, SAMPLES[4:5] * engine.num_replicas, world)[:: engine.num_replicas])
    found["validation stream"] = summary(generate(engine, SAMPLES, world, stream="validation"))
    found["greedy"] = summary(generate(engine, SAMPLES, world, temperature=0.0, n=1, log_probs=False))

    def log_probs_of(samples):
        return [r.rollout_log_probs for r in generate(engine, samples, world, n=1, max_response_len=8)]

    # More prompt tokens at once than the engine takes in one step: no prompt may be torn in two.
    crowd = [
        Sample(uid=uid, prompt_ids=[1 + (7 * uid + 3 * place) % 150 for place in range(240)], data_source="",
               ground_truth="", extra_info={})
        for uid in range(100, 124)
    ]  # fmt: skip
    together = generate(engine, crowd, world, n=1, max_response_len=8)
    found["crowd"] = summary(together)
    found["one by one"] = [
        summary(generate(engine, [sample] * engine.num_replicas, world, n=1, max_response_len=8))[0] for sample in crowd
    ]

    # Long responses, over several KV blocks, with vLLM's scheduler as it is and with our short cuts in it.
    engine._stop_token_ids, usual = [3], engine._stop_token_ids
    long = {}
    manager = engine._engine.engine_core.engine_core.scheduler.kv_cache_manager
    calls, allocate = [], manager.allocate_slots
    type(manager).allocate_slots = lambda self, *a, **k: (calls.append(1), allocate(*a, **k))[1]
    found["warnings"], usual_paths = engine.warnings, engine._fast_paths
    for name, paths in {"short cuts": usual_paths, "plain": FastPaths("off", world)}.items():
        engine._fast_paths = paths
        calls.clear()
        engine.sleep()  # drops cached prefixes
        rollouts = generate(engine, SAMPLES[:6], world, max_response_len=240)
        long[name] = summary(rollouts), [r.rollout_log_probs for r in rollouts]
        found[f"{name}: allocations"] = len(calls)
    found["short cuts change nothing"] = long["short cuts"] == long["plain"]
    found["longest"] = max(len(ids) for _, _, ids, _ in long["plain"][0])
    engine._fast_paths = usual_paths
    closed = engine.generate(engine.share(SAMPLES), Sampling(n=3, max_response_len=240, temperature=TEMPERATURE))
    next(closed)
    closed.close()  # a reader who stops early: nothing runs on into the next call
    rollouts = generate(engine, SAMPLES[:6], world, max_response_len=240)
    found["after an early end"] = (summary(rollouts), [r.rollout_log_probs for r in rollouts]) == long["plain"]
    found["block size"] = engine._engine.vllm_config.cache_config.block_size
    engine._stop_token_ids = usual

    # The trainer's log-probs of the very tokens, every rank over all of them.
    scored = [type(r)(**{**vars(r), "score": Score(score=0.0)}) for r in short]
    batch = make_batch(scored, SINGLE, mini_batch_size=len(scored))
    log_probs, _ = forward_policy(policy, batch, temperature=TEMPERATURE)
    difference = (log_probs - batch.rollout_log_probs).abs()[batch.response_mask]
    found["log-prob difference"] = float(difference.max())

    # Weights one step old, at a learning rate whose changes hide in any log-prob.
    optimizer = build_optimizer(policy, OptimConfig(lr=1e-6))
    log_probs.sum().backward()
    optimizer_step(policy, optimizer, clip_grad=1.0)
    names = names_to_check(engine, seed=0, step=1)
    found["names"] = names
    found["one step stale"] = stops(lambda: weight_sync.verify(names))
    weight_sync.copy()
    found["after another sync"] = stops(weight_sync.verify)
    old = log_probs_of(crowd)  # prompts of more than a block, which the engine now remembers
    engine.sleep()
    optimizer.zero_grad()
    forward_policy(policy, batch, temperature=TEMPERATURE)[0].sum().backward()
    optimizer_step(policy, optimizer, clip_grad=1.0)
    weight_sync.copy()  # from and to the places of the first copy
    found["after a third sync"] = stops(weight_sync.verify)
    new, _, afresh = log_probs_of(crowd), engine._llm.reset_prefix_cache(), log_probs_of(crowd)
    found["nothing of the old weights is left"] = new != old and new == afresh

    # Stop strings: every token becomes text at once.
    with_text = RolloutEngine(
        replace(cfg, stop=("b", "xy")), path, dtype="float32", max_prompt_len=8, most_responses=30, stop_token_ids=[3],
        world=world, seed=5,
    )  # fmt: skip
    stopped = []
    for paths in (with_text._fast_paths, FastPaths("off", world)):
        with_text._fast_paths = paths
        with_text.sleep()
        rollouts = generate(with_text, SAMPLES, world, max_response_len=240)
        stopped.append([*summary(rollouts), [r.rollout_log_probs for r in rollouts]])
    found["short cuts change nothing with stop strings"] = stopped[0] == stopped[1]
    found["stopped by strings"] = sum(ends == "stop" and ids[-1] != 3 for _, _, ids, ends in stopped[0][:-1])

    # One layer left unsynced: as if the loader had skipped it.
    with torch.no_grad():
        engine.parameters()["model.layers.1.mlp.down_proj.weight"].zero_()
    found["one layer unsynced"] = stops(weight_sync.verify)
    if world.rank == 0:
        with open(out, "w") as file:
            json.dump(found, file)
    shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
