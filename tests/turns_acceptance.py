"""What conversations promise, at a size that CI has no time for: prints a line per claim, ends with 1 where one fails.

    python -m tests.turns_acceptance times      # 1,000 episodes on arrival against joined by step, times of 5 kinds
    python -m tests.turns_acceptance ranks      # tensor parallel 2: 200 episodes, 10 times, both ranks see the same
    python -m tests.turns_acceptance workers    # whole runs with 1 and 8 workers, slow and fast environments: equal
    python -m tests.turns_acceptance kills      # a run that is killed 20 times ends as the one that is not

A few minutes each on 2 idle CPU cores.
"""

import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from lib.dist import init_distributed, shutdown_distributed
from lib.engine.conversations import converse
from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import RolloutConfig
from lib.tracking.run_folder import read_metrics
from lib.types import Sample
from tests import conversations_worker as small
from tests.ranks import LIMIT_S, ROOT, Job, torchrun
from tests.test_resume_end_to_end import numbers
from tests.tiny import make_model

LATENCIES = small.LATENCIES | {
    "constant": lambda rng: 0.02,
    "few slow": lambda rng: 0.5 if rng.random() < 0.01 else 0.0,
}
NUM_KILLS = 20


def engine_for(folder: str, world, *, tp_size: int) -> RolloutEngine:
    cfg = RolloutConfig(
        tensor_model_parallel_size=tp_size, max_response_len=small.MAX_LEN, max_num_seqs=128,
        max_num_batched_tokens=4096, cpu_kv_cache_gib=0.3,
    )  # fmt: skip
    return RolloutEngine(
        cfg, folder, dtype="float32", max_prompt_len=16, most_responses=1024, stop_token_ids=small.STOP_IDS,
        world=world, seed=5,
    )  # fmt: skip


def samples(count: int) -> list[Sample]:
    return [
        Sample(uid=uid, prompt_ids=[1 + (7 * uid + 3 * place) % 150 for place in range(6 + uid % 8)],
               data_source="test", ground_truth="", extra_info={})
        for uid in range(count)
    ]  # fmt: skip


def times(folder: str) -> None:
    """Of one rank: which ids and log-probs other times of answers change."""
    world = init_distributed()
    engine = engine_for(folder, world, tp_size=1)
    prompts, failed = samples(1000 // small.PER_PROMPT + 1), False

    def episodes(join: str, latency, seed: int):
        engine.sleep()
        answers = small.InThreads(latency, seed)
        return small.found_of(converse(engine, small.new(prompts), small.SAMPLING, answers, join=join))

    expected = episodes("step", LATENCIES["none"], 0)
    for seed, (name, latency) in enumerate(LATENCIES.items()):
        found = episodes("arrival", latency, seed)
        equal = [key for key in expected if found[key][0] == expected[key][0]]
        differences = [
            (torch.tensor(found[key][1]) - torch.tensor(expected[key][1])).abs().max().item() for key in equal
        ]
        share, largest = len(equal) / len(expected), max(differences)
        failed |= share < 0.995 or largest > 2e-5
        print(f"arrival, {name}: ids equal in {len(equal)} of {len(expected)} episodes, log-probs within {largest:.1e}")
    prompts = prompts[:20]
    for join in ("step", "round"):
        all_equal = {
            json.dumps(episodes(join, latency, seed), sort_keys=True) for seed, latency in enumerate(LATENCIES.values())
        }
        failed |= len(all_equal) > 1
        print(f"{join}: {len(all_equal)} different results of {len(LATENCIES)} kinds of times")
    shutdown_distributed()
    sys.exit(int(failed))


def ranks(folder: str) -> None:
    """Of two ranks of one replica: whether they see the same episodes."""
    world = init_distributed()
    engine = engine_for(folder, world, tp_size=2)
    prompts, failed = samples(200 // small.PER_PROMPT + 1), False
    for number in range(10):
        for join in ("arrival", "step", "round"):
            if join != "arrival" and number > 1:
                continue
            engine.sleep()
            answers = small.InThreads([*LATENCIES.values()][number % len(LATENCIES)], number)
            found = small.found_of(converse(engine, small.new(prompts), small.SAMPLING, answers, join=join))
            seen = world.gather(json.dumps(found, sort_keys=True))
            failed |= len(set(seen)) > 1
            if world.rank == 0:
                print(f"{join}, {number}: {len(found)} episodes, {len(set(seen))} results on 2 ranks", flush=True)
    shutdown_distributed()
    sys.exit(int(failed))


def words_of(folder: Path, *, num_steps: int) -> tuple[str, ...]:
    """A run of the quickstart's model whose environment answers after a while; makes model and data."""
    data, model = str(folder / "data"), str(folder / "model")
    for name, *more in (("prepare_arithmetic", "--out", data), ("make_tiny_model", "--data", data, "--out", model)):
        subprocess.run([sys.executable, "-m", f"recipes.{name}", *more], cwd=ROOT, check=True, timeout=LIMIT_S)
    return (
        "-m", "recipes.grpo_tiny_arithmetic", "--model.path", model, "--data.train-files", f"{data}/train.parquet",
        "--data.val-files", f"{data}/val.parquet", "--data.train-max-samples", "80", "--data.val-max-samples", "20",
        "--prompts-per-step", "8", "--mini-batch-size", "64", "--rollout.max-response-len", "60",
        "--rollout.partial-share", "0.7", "--turns.path", "tests/environments.py", "--turns.name", "Waits",
        "--turns.max-turns", "3", "--num-steps", str(num_steps), "--checkpoint.every", "1", "--checkpoint.keep", "1",
        "--eval.every", str(num_steps), "--turns.join",
    )  # fmt: skip


def workers(folder: str) -> None:
    """Whole runs that differ in workers and times alone."""
    words, failed = words_of(Path(folder), num_steps=3), False
    for join in ("step", "round"):
        found = []
        for num_workers, most_s in (("1", 0.0), ("8", 0.0), ("1", 0.02), ("8", 0.05)):
            run = Path(folder) / f"{join}_{num_workers}_{most_s}"
            kwargs = json.dumps({"most_s": most_s})
            more = ("--turns.num-workers", num_workers, "--turns.kwargs", kwargs, "--run-dir", str(run))
            done = torchrun(2, *words, join, *more)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
            found.append((numbers(run), (run / "samples" / "step_3.jsonl").read_bytes()))
        equal = all(it == found[0] for it in found)
        failed |= not equal
        print(
            f"{join}: {len(found)} runs with 1 and 8 workers, {'equal to the bit' if equal else 'DIFFERENT'}",
            flush=True,
        )
    sys.exit(int(failed))


def kills(folder: str) -> None:
    """A run that SIGKILL ends again and again, all ranks and workers at once, and the one that is left alone."""
    words = (
        *words_of(Path(folder), num_steps=NUM_KILLS + 4),
        "step",
        "--turns.kwargs",
        '{"most_s": 0.05}',
        "--run-dir",
    )
    straight, killed = Path(folder) / "straight", Path(folder) / "killed"
    done = torchrun(2, *words, str(straight))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rng = random.Random(0)
    for number in range(NUM_KILLS):
        before = len(read_metrics(killed)) if killed.exists() else 0
        with Job(2, *words, str(killed)) as job:  # its end kills all that belongs to it
            job.until(lambda before=before: (killed / "metrics.jsonl").exists() and len(read_metrics(killed)) > before)
            time.sleep(rng.random())
        print(f"killed {number + 1} times, {len(read_metrics(killed)) - 1} steps logged", flush=True)
    done = torchrun(2, *words, str(killed))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    last = NUM_KILLS + 4
    equal = numbers(killed) == numbers(straight)
    for path in straight.glob(f"global_step_{last}/**/*.safetensors"):
        equal &= path.read_bytes() == (killed / path.relative_to(straight)).read_bytes()
    print(f"killed {NUM_KILLS} times: metrics and weights {'equal to the bit' if equal else 'DIFFERENT'}")
    sys.exit(int(not equal))


def main(part: str) -> None:
    folder = tempfile.mkdtemp(prefix="turns_acceptance_")
    try:
        if part in ("workers", "kills"):
            globals()[part](folder)
        model = str(make_model(Path(folder) / "model"))
        number = 1 if part == "times" else 2
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={number}", "--standalone", "-m",
             "tests.turns_acceptance", "inside", part, model], cwd=ROOT,
        )  # fmt: skip
        sys.exit(done.returncode)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["inside"]:
        {"times": times, "ranks": ranks}[sys.argv[2]](sys.argv[3])
    main(sys.argv[1])
