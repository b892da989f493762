"""Under torchrun: one real engine and episodes of several turns, answered in threads after times that differ.

torchrun --nproc_per_node=N -m tests.conversations_worker FOLDER OUT TP_SIZE

The answers are a function of what was said, as those of a tool are.
"""

import hashlib
import json
import queue
import random
import sys
import threading
import time

import torch

from lib.dist import init_distributed, shutdown_distributed
from lib.engine.conversations import Answer, converse
from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import RolloutConfig, Sampling
from lib.errors import Stopped
from lib.types import Rollout, Sample

UNFINISHED = ("unfinished", "waiting", "ending")
TURNS, OBSERVED, MAX_LEN, PER_PROMPT = 4, 5, 60, 3
STOP_IDS = list(range(5, 200, 8))
LATENCIES = {"none": lambda rng: 0.0, "some": lambda rng: rng.random() * 0.05, "heavy": lambda rng: rng.expovariate(20)}
SAMPLING = Sampling(n=1, max_response_len=MAX_LEN, temperature=1.0, log_probs=True)


def observed(rollout: Rollout) -> list[int]:
    """Ids that depend on everything before."""
    said = json.dumps([rollout.sample.uid, rollout.index, rollout.response_ids]).encode()
    return [1 + byte % 150 for byte in hashlib.blake2b(said, digest_size=OBSERVED).digest()]


class InThreads:
    """Answers each turn after a while; the last one ends the episode."""

    def __init__(self, latency, seed: int) -> None:
        self.arrived: queue.Queue[Answer] = queue.Queue()
        self.latency, self.rng = latency, random.Random(seed)
        self.order: list[tuple[int, int, int]] = []

    def begin(self, rollout: Rollout) -> None:
        if rollout.finish_reason == "waiting":
            self.ask(rollout)
        elif rollout.finish_reason == "ending":
            self.end(rollout)
        else:
            self.arrived.put(Answer(uid=rollout.sample.uid, index=rollout.index))

    def end(self, rollout: Rollout) -> None:
        self.arrived.put(Answer(uid=rollout.sample.uid, index=rollout.index, finish_reason="length"))

    def ask(self, rollout: Rollout) -> None:
        turn = len(rollout.spans) // 2
        answer = Answer(
            uid=rollout.sample.uid, index=rollout.index, ids=observed(rollout), reward=float(turn),
            finish_reason="stop" if turn == TURNS - 1 else None,
        )  # fmt: skip
        threading.Timer(self.latency(self.rng), self.arrived.put, [answer]).start()

    def take(self, *, wait_s: float) -> list[Answer]:
        found = []
        try:
            found.append(self.arrived.get(timeout=wait_s) if wait_s else self.arrived.get_nowait())
            while True:
                found.append(self.arrived.get_nowait())
        except queue.Empty:
            return found


def new(samples: list[Sample]) -> list[Rollout]:
    return [
        Rollout(sample=sample, index=index, response_ids=[], rollout_log_probs=[], finish_reason="unfinished")
        for sample in samples
        for index in range(PER_PROMPT)
    ]


def found_of(rollouts) -> dict[str, list]:
    return {
        f"{it.sample.uid} {it.index}": [
            it.response_ids, it.rollout_log_probs, it.spans, it.finish_reason, it.turn_rewards, it.sample.prompt_ids,
        ]
        for it in rollouts
    }  # fmt: skip


def main(folder: str, out: str, tp_size: str) -> None:
    world = init_distributed()
    cfg = RolloutConfig(
        tensor_model_parallel_size=int(tp_size), max_response_len=MAX_LEN, max_num_seqs=16, max_num_batched_tokens=2048,
        cpu_kv_cache_gib=0.1,
    )  # fmt: skip
    engine = RolloutEngine(
        cfg, folder, dtype="float32", max_prompt_len=16, most_responses=16, stop_token_ids=STOP_IDS, world=world, seed=5
    )
    samples = [
        Sample(uid=uid, prompt_ids=[1 + (7 * uid + 3 * place) % 150 for place in range(6 + uid)], data_source="test",
               ground_truth="", extra_info={})
        for uid in range(6)
    ]  # fmt: skip
    found = {}
    for join in ("step", "round", "arrival"):
        for seed, (name, latency) in enumerate(LATENCIES.items()):
            engine.sleep()  # forgets prefixes: each case begins alike
            answers = InThreads(latency, seed)
            found[f"{join} {name}"] = found_of(converse(engine, new(samples), SAMPLING, answers, join=join))
    engine.sleep()
    answers = InThreads(LATENCIES["none"], 0)
    found["short turns"] = found_of(converse(engine, new(samples), SAMPLING, answers, join="step", max_turn_len=3))

    class Ending(InThreads):
        def ask(self, rollout):
            self.arrived.put(Answer(uid=rollout.sample.uid, index=rollout.index, finish_reason="stop"))

    engine.sleep()
    found["one turn"] = found_of(converse(engine, new(samples), SAMPLING, Ending(None, 0), join="arrival"))
    engine.sleep()
    group = Sampling(n=PER_PROMPT, max_response_len=MAX_LEN, temperature=1.0, log_probs=True)
    found["generate"] = found_of(it for rollouts in engine.generate(samples, group) for it in rollouts)

    class Silent(InThreads):
        def ask(self, rollout):
            pass

    engine.sleep()
    left, found["partly"] = new(samples), []
    while left:  # 3 rounds and more: each ends once a third of the episodes have
        most = len(left) * 2 // 3
        ended = list(converse(
            engine, left, SAMPLING, InThreads(LATENCIES["some"], 1), join="arrival",
            enough=lambda pending, most=most: len(pending) <= most,
        ))  # fmt: skip
        left = [it for it in ended if it.finish_reason in UNFINISHED]
        found["partly"].append(found_of(ended))
    begin = time.monotonic()
    try:
        stop = (lambda: time.monotonic() - begin > 1.0) if world.rank == 0 else (lambda: False)
        list(converse(engine, new(samples), SAMPLING, Silent(None, 0), join="arrival", stop=stop))
    except Stopped as error:
        found["stopped"] = str(error)
    found["after"] = found_of(it for rollouts in engine.generate(samples, group) for it in rollouts)
    torch.save(found, f"{out}.{world.rank}")
    shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
