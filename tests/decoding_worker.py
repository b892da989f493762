"""vLLM's schedulers with and without our short cuts, over a made-up model, step by step; what differs, as JSON.

    python -m tests.decoding_worker MODEL OUT

The model is a hash: a request's next token and log-prob depend on its name and position alone. It keeps what a GPU
worker keeps, blocks and computed tokens by request, from what the scheduler sends, and so sees what was sent wrongly.
"""

import hashlib
import json
import random
import sys
from collections import Counter, deque
from pathlib import Path

import numpy
import torch

from lib.engine_patches import _Decoder, set_engine_environment

BLOCK = 16
STOPS, EOS = [3, 5], 7


def token_and_log_prob(name, position):
    digest = hashlib.blake2b(f"{name}:{position}".encode(), digest_size=8).digest()
    return digest[0] % 150, -float(numpy.float32(int.from_bytes(digest[1:4], "big") / 2**24))


class Worker:
    """The model's side: what it is sent, and what it samples."""

    def __init__(self):
        self.blocks, self.known, self.computed = {}, {}, {}

    def run(self, step):
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        for name in step.finished_req_ids | (step.preempted_req_ids or set()):
            for kept in (self.blocks, self.known, self.computed):
                kept.pop(name, None)
        for new in step.scheduled_new_reqs:
            self.blocks[new.req_id] = list(new.block_ids[0])
            self.known[new.req_id] = len(new.prefill_token_ids)
            self.computed[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        assert not cached.resumed_req_ids and len(set(cached.req_ids)) == len(cached.req_ids) == len(
            cached.new_block_ids
        )
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            assert self.computed[name] == computed, (name, self.computed[name], computed)
            self.blocks[name] += blocks[0] if blocks else []
        assert sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens <= 128
        names, sampled, log_probs = list(step.num_scheduled_tokens), [], []
        for name, count in step.num_scheduled_tokens.items():
            self.computed[name] += count
            after = self.computed[name]
            assert after <= BLOCK * len(self.blocks[name]), "no place for a token"
            token, log_prob = token_and_log_prob(name, after)
            sampled.append([token] if after >= self.known[name] else [])
            log_probs.append([log_prob])
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: row for row, name in enumerate(names)}, sampled_token_ids=sampled,
            logprobs=LogprobsLists(numpy.zeros((len(names), 1)), numpy.array(log_probs, dtype=numpy.float32),
                                   numpy.zeros(len(names))), prompt_logprobs_dict={}, pooler_output=None,
        )  # fmt: skip


def drive(config, *, runs_ahead, with_short_cuts, num_blocks, seed, max_steps=10**6):
    """Everything that comes out of a scheduler until all requests have ended, or after `max_steps`."""
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
    cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)])
    config.cache_config.num_gpu_blocks = num_blocks
    hash_function = get_hash_fn_by_name("sha256")
    init_none_hash(hash_function)
    scheduler = (AsyncScheduler if runs_ahead else Scheduler)(
        vllm_config=config, kv_cache_config=cache, block_size=BLOCK, log_stats=False,
        structured_output_manager=StructuredOutputManager(config),
    )  # fmt: skip
    scheduler.use_v2_model_runner = True  # as on a GPU
    rng = random.Random(seed)
    hasher = get_request_block_hasher(BLOCK, hash_function)
    shared = [rng.randrange(150) for _ in range(40)]
    for index in range(40):
        params = SamplingParams(max_tokens=rng.choice((1, 2, 17, 90)), stop_token_ids=STOPS if index % 2 else None,
                                logprobs=0, ignore_eos=index % 3 == 0)  # fmt: skip
        params.update_from_generation_config({}, None if params.ignore_eos else EOS)
        prompt = shared[: rng.randrange(1, 40)] + [rng.randrange(150) for _ in range(rng.randrange(1, 90))]
        scheduler.add_request(
            Request(request_id=f"{index}", prompt_token_ids=prompt, sampling_params=params, pooling_params=None,
                    block_hasher=hasher)
        )  # fmt: skip
    decoder = _Decoder(scheduler, BLOCK)
    if with_short_cuts:
        scheduler.schedule, scheduler.update_from_output = decoder.schedule, decoder.update_from_output
    worker, queue, found = Worker(), deque(), {"sent": [], "tokens": {}, "log_probs": {}, "ends": {}, "calls": 0}
    preempt, count = scheduler._preempt_request, Counter()

    def preempting(request, *arguments, **keywords):
        count["preempted"] += 1
        return preempt(request, *arguments, **keywords)

    scheduler._preempt_request = preempting

    def hear(outputs):
        for output in outputs:
            found["calls"] += 1
            found["tokens"].setdefault(output.request_id, []).extend(output.new_token_ids)
            found["log_probs"].setdefault(output.request_id, []).extend(output.new_logprobs.logprobs[:, 0].tolist())
            if output.finish_reason is not None:
                found["ends"][output.request_id] = str(output.finish_reason), output.stop_reason

    steps = 0
    while scheduler.has_requests() or queue:
        if steps == max_steps:
            break
        steps += 1
        step = scheduler.schedule()
        if step.total_num_scheduled_tokens:
            queue.append((step, worker.run(step)))
            sent = {name: (count, worker.computed[name]) for name, count in step.num_scheduled_tokens.items()}
            found["sent"].append([sorted(sent.items()), {name: len(worker.blocks[name]) for name in sorted(sent)}])
            for request in scheduler.running:
                blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
                assert worker.blocks[request.request_id] == blocks, "the worker's blocks are not the scheduler's"
        else:
            worker.run(step)
        if len(queue) > runs_ahead or not step.total_num_scheduled_tokens:
            for client in scheduler.update_from_output(*queue.popleft()).values() if queue else ():
                hear(client.outputs)
    hear(decoder.untold())
    found |= {"preempted": count["preempted"], "steps": steps, "waiting": len(scheduler.waiting)}
    found["free blocks"] = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    found["states"] = sorted(
        (r.request_id, r.num_computed_tokens, r.num_output_placeholders, r.num_in_flight_tokens,
         list(r.output_token_ids), len(r.block_hashes)) for r in scheduler.running
    )  # fmt: skip
    if not scheduler.has_requests():  # else a block that has just become full may be cached now or with the next step
        found["cached blocks"] = len(scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block)
    return found


def main(model, out):
    set_engine_environment(on_gpu=False)
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=240, max_num_seqs=24,
        max_num_batched_tokens=128, enable_prefix_caching=True, enforce_eager=True, block_size=BLOCK,
        kv_cache_memory_bytes=2**24, enable_chunked_prefill=True,
    ).create_engine_config()  # fmt: skip
    results = {}
    for runs_ahead in (False, True):
        for num_blocks in (1000, 70):
            for max_steps in (10**6, 60):
                for seed in range(3):
                    both = [
                        drive(config, runs_ahead=runs_ahead, with_short_cuts=with_short_cuts, num_blocks=num_blocks,
                              max_steps=max_steps, seed=seed) for with_short_cuts in (False, True)
                    ]  # fmt: skip
                    results[f"ahead {runs_ahead}, {num_blocks} blocks, {max_steps} steps, seed {seed}"] = both
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
