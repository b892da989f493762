"""Under torchrun: one real engine, steps of `Collector.collect` for many configs, as JSON from rank 0.

torchrun --nproc_per_node=N -m tests.sampling_worker FOLDER OUT TP_SIZE CASE...
"""

import json
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from lib.algorithms.group_filter import GroupFilterConfig
from lib.algorithms.step_metrics import mismatch_metrics
from lib.data.prompt_stream import PromptStream
from lib.data.prompts import DataConfig, check_data_files, tokenize
from lib.data.tokenizer import load_tokenizer
from lib.dist import init_distributed, shutdown_distributed
from lib.engine.engine import RolloutEngine, request_seed
from lib.engine.rollout_config import RolloutConfig, Sampling
from lib.engine.weight_sync import WeightSync
from lib.errors import LockstepError
from lib.model.batching import make_batch
from lib.model.forward import compute_log_probs, with_old_log_probs
from lib.model.fsdp import FSDPConfig, load_policy
from lib.model.networks import ModelConfig
from lib.rewards.scoring import RewardConfig, Scorer
from lib.rollouts.collector import Collector
from lib.stopping import Stopper
from lib.tracking.metrics import Metrics
from lib.tracking.run import Run, TrackingConfig
from tests.ranks import ROOT
from tests.tiny import count_progress

NUM_ALONE = 24
"""Prompts that one rank also samples one by one."""
RESPONSE_LEN = 12
STOP_IDS = [11, 17, 23, 29, 31]
MANY_STOP_IDS = list(range(5, 200, 6))  # of the partial cases: their responses must end at many lengths


@dataclass(frozen=True, kw_only=True)
class Case:
    """Steps of a collector of its own, over prompts 0, 1, 2... in that order."""

    reward: str
    steps: int = 1
    filter_groups: GroupFilterConfig = field(default_factory=lambda: GroupFilterConfig(enable=True))
    n: int = 4
    prompts_per_step: int = 4
    mini_batch_size: int = 8
    with_greedy: bool = False
    max_error_rate: float = 1.0
    num_rows: int | None = None
    partial_share: float = 1.0
    max_continued: int = 2
    max_memory_gib: float | None = None
    curriculum: bool = False


def filtered(**options) -> GroupFilterConfig:
    return GroupFilterConfig(enable=True, **options)


ALL = GroupFilterConfig()
CASES = {
    "all": Case(reward="of_all", steps=2, filter_groups=ALL),
    "one rank without signal": Case(reward="of_even_rows", steps=2),
    "cap": Case(reward="of_every_eighth_row", steps=2, filter_groups=filtered(max_rounds=2)),
    "dropped": Case(reward="of_none", steps=2, filter_groups=filtered(max_rounds=2)),
    "surplus kept": Case(reward="but_for_the_first_row", steps=2),
    "surplus dropped": Case(reward="but_for_the_first_row", steps=2, filter_groups=filtered(keep_surplus=False)),
    "stale mini-batch": Case(reward="but_for_the_first_row", steps=2, mini_batch_size=4),
    "unequal": Case(
        reward="of_every_eighth_row", steps=2, filter_groups=filtered(max_rounds=6), n=3, prompts_per_step=8,
        mini_batch_size=6,
    ),
    "band": Case(reward="of_all", steps=2, filter_groups=filtered(low=0.45, high=0.6)),
    "acc": Case(reward="with_acc", steps=2, filter_groups=filtered(metric="acc")),
    "band of acc": Case(reward="with_acc", filter_groups=filtered(metric="acc", low=0.2, high=0.3)),
    "no such metric": Case(reward="with_acc", filter_groups=filtered(metric="accuracy")),
    "a text as metric": Case(reward="with_acc", filter_groups=filtered(metric="pred")),
    "more than an epoch": Case(reward="of_even_rows", steps=2, num_rows=3),
    "greedy": Case(reward="that_fails_for_some", steps=2, filter_groups=ALL, with_greedy=True),
    "greedy, n 1": Case(
        reward="that_fails_for_some", filter_groups=ALL, n=1, mini_batch_size=4, with_greedy=True,
        max_memory_gib=1e-3,  # less than any worker holds: each is replaced after its first response
    ),
    "greedy, filtered": Case(reward="that_fails_for_some", steps=2, with_greedy=True),
    "a failure in a small round": Case(reward="that_fails_twice_for_row_7", max_error_rate=0.15, steps=2),
    "failures": Case(reward="that_fails", max_error_rate=0.05),
}  # fmt: skip
PARTIAL_CASES = {
    "partial": Case(reward="of_all", steps=5, filter_groups=ALL, partial_share=0.6),
    "partial, bounded": Case(reward="of_all", steps=5, filter_groups=ALL, partial_share=0.3, max_continued=1),
    "partial, many mini-batches": Case(
        reward="of_all", steps=4, filter_groups=ALL, partial_share=0.7, n=3, mini_batch_size=3
    ),
    "partial, filtered": Case(reward="of_even_rows", steps=5, partial_share=0.4, max_continued=3),
    "partial, greedy": Case(
        reward="that_fails_for_some", steps=3, filter_groups=ALL, with_greedy=True, partial_share=0.6
    ),
}


CURRICULUM_CASES = {
    "curriculum": Case(reward="of_even_rows", steps=8, filter_groups=ALL, num_rows=24, curriculum=True),
    "curriculum, filtered": Case(reward="but_for_the_first_row", steps=4, num_rows=6, curriculum=True),
}


def main(folder, out, tp_size, *names):
    world, folder = init_distributed(), Path(folder)
    model = str(folder / "model")
    data = DataConfig(train_files=(str(folder / "train.parquet"),), max_prompt_len=24)
    tokenizer = load_tokenizer(folder / "model", chat_template_kwargs={})
    prompts = tokenize(data, check_data_files(data), tokenizer, split="train")
    stop_ids = MANY_STOP_IDS if PARTIAL_CASES.keys() & set(names) else STOP_IDS
    with Run(Path(out).with_suffix(""), TrackingConfig(), world, config={}, num_steps=1) as run:
        engine = RolloutEngine(
            RolloutConfig(tensor_model_parallel_size=int(tp_size), max_response_len=RESPONSE_LEN, max_num_seqs=32,
                          max_num_batched_tokens=2048, temperature=0.9),
            model, dtype="float32", max_prompt_len=24, most_responses=32, stop_token_ids=stop_ids,
            world=world, seed=5,
        )  # fmt: skip
        engine.sleep()
        policy = load_policy(ModelConfig(dtype="float32"), model, FSDPConfig(), world)
        weight_sync = WeightSync(policy, engine, fsdp=FSDPConfig())
        weight_sync.load()
        weight_sync.verify()

        def alone(stream, **sampling):
            """[prompt][response]: (ids, text, log-probs) of each prompt sampled by itself."""
            sampling = Sampling(**{"n": 4, "max_response_len": RESPONSE_LEN, "temperature": 0.9, **sampling})
            groups = [next(engine.generate([prompts.sample(place, place)], sampling, stream=stream))
                      for place in range(NUM_ALONE)]  # fmt: skip
            return [[(r.response_ids, tokenizer.decode(r.response_ids, skip_special_tokens=True), r.rollout_log_probs)
                     for r in group] for group in groups]  # fmt: skip

        found = {}
        if world.size == 1:
            found = {"alone": alone("train", log_probs=True), "greedy": alone("greedy", n=1, temperature=0.0)}
        cases = {**CASES, **PARTIAL_CASES, **CURRICULUM_CASES}
        found["cases"] = {name: run_case(cases[name], engine, policy, tokenizer, prompts, run, world) for name in names}
        if world.size == 1:
            found["continued"] = continue_alone(engine, prompts, found["cases"].values())
    if world.rank == 0:
        with open(out, "w") as file:
            json.dump(found, file)
    shutdown_distributed()


def run_case(case, engine, policy, tokenizer, prompts, run, world):
    reward = RewardConfig(
        path=str(ROOT / "tests/sampling_rewards.py"),
        name=case.reward,
        num_workers=1,
        max_error_rate=case.max_error_rate,
        max_memory_gib=case.max_memory_gib,
    )
    if case.num_rows is not None:
        prompts = type(prompts)(**{**vars(prompts), "kept": prompts.kept[: case.num_rows]})
    stream = PromptStream(prompts, seed=0, shuffle=case.curriculum, curriculum=case.curriculum)
    rollout = RolloutConfig(
        n=case.n, max_response_len=RESPONSE_LEN, temperature=0.9, partial_share=case.partial_share,
        max_continued=case.max_continued, tensor_model_parallel_size=engine.tp_size,
    )  # fmt: skip
    steps, counts = [], {}
    count_progress(run.terminal, counts)
    with closing(Scorer(reward, {"test"})) as scorer:
        collector = Collector(
            engine, scorer, stream, tokenizer, rollout=rollout, reward=reward, filter_groups=case.filter_groups,
            prompts_per_step=case.prompts_per_step, mini_batch_size=case.mini_batch_size, with_greedy=case.with_greedy,
            mask_truncated=False, run=run, stopper=Stopper(world), world=world,
        )  # fmt: skip
        for _ in range(case.steps):
            metrics, log = Metrics(world), run.log_file.stat().st_size
            try:
                collected = collector.collect(metrics, label="here")
            except LockstepError as error:
                steps.append({"errors": world.gather((type(error).__name__, str(error))), "drawn": stream.num_drawn})
                break
            steps.append(describe(collected, collector, metrics, policy, world))
            steps[-1]["drawn"] = stream.num_drawn
            steps[-1]["progress"] = world.gather(list(counts.values()))
            counts.clear()
            with open(run.log_file) as file:
                file.seek(log)
                steps[-1]["said"] = file.read().splitlines()
    return steps


def continue_alone(engine, prompts, cases):
    """[((uid, index, ids so far), ids to come, their log-probs)] of interrupted responses, by vLLM's own generate."""
    interrupted = {
        (uid, index, tuple(ids)): None
        for steps in cases
        for step in steps
        for of_rank in step.get("unfinished", ())
        for uid, index, ids, _ in of_rank
    }
    from vllm import SamplingParams

    found = []
    for uid, index, ids in interrupted:
        params = SamplingParams(
            seed=request_seed(5, uid, len(ids)) + index, max_tokens=RESPONSE_LEN - len(ids), temperature=0.9,
            stop_token_ids=MANY_STOP_IDS, logprobs=0, detokenize=False,
        )  # fmt: skip
        prompt = {"prompt_token_ids": prompts.sample(uid, uid).prompt_ids + list(ids)}
        [output] = engine._llm.generate([prompt], [params], use_tqdm=False)
        response = output.outputs[0]
        pairs = zip(response.token_ids, response.logprobs, strict=True)
        log_probs = [of_token[token].logprob for token, of_token in pairs]
        found.append(((uid, index, ids), list(response.token_ids), log_probs))
    return found


def describe(collected, collector, metrics, policy, world):
    """What all ranks collected, and what the trainer makes of it."""
    batch = make_batch(collected.rollouts, world, mini_batch_size=collected.mini_batch_size)
    # At another temperature the trainer's log-probs are not the engine's, so that one sees whose are used.
    settings = dict(max_tokens_per_gpu=200, temperature=2.0, world=world)
    ours = compute_log_probs(policy, batch, **settings)[0]
    olds = with_old_log_probs(policy, batch, **settings).old_log_probs
    mismatch = Metrics(world)
    mismatch_metrics(ours, batch, mismatch)
    rows = [
        {"uid": uid, "index": index, "mini_batch": mini_batch, "engines": old == reported, "trainers": old == own,
         "num_engines": sum(a == b != c for a, b, c in zip(old, reported, own, strict=True)),
         "difference": sum(abs(a - b) for a, b in zip(own, reported, strict=True)), "tokens": sum(mask)}
        for uid, index, mini_batch, old, reported, own, mask in zip(
            batch.uids.tolist(), batch.indices.tolist(), batch.mini_batch_ids.tolist(),
            *(tensor.where(batch.response_mask, 0).tolist() for tensor in (olds, batch.rollout_log_probs, ours)),
            batch.response_mask.tolist(), strict=True,
        )
    ]  # fmt: skip
    rollouts = [
        {"uid": r.sample.uid, "index": r.index, "ids": r.response_ids, "log_probs": r.rollout_log_probs,
         "score": r.score.score, "error": r.score.error, "greedy": r.greedy_score, "num_stale": r.num_stale,
         "num_continued": r.num_continued, "end": r.finish_reason, "place": r.sample.place}
        for r in collected.rollouts
    ]  # fmt: skip
    return {
        "by_rank": world.gather(rollouts),
        "unfinished": world.gather(
            [(r.sample.uid, r.index, r.response_ids, r.num_continued) for r in collector.unfinished]
        ),
        "open": world.gather({uid: [r.index for r in group] for uid, group in collector.open_groups.items()}),
        "carried": world.gather([group[0].sample.uid for group in collector.carried]),
        "numbers": world.gather((collected.mini_batch_size, collected.num_mini_batches, collected.any_stale)),
        "rows": sorted(
            (row for of_rank in world.gather(rows) for row in of_rank), key=lambda r: (r["uid"], r["index"])
        ),
        "metrics": metrics.reduce(),
        "mismatch": mismatch.reduce(),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
