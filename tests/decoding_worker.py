"""vLLM's schedulers with and without our short cuts, over a made-up model, step by step; what both did, as JSON.

    python -m tests.decoding_worker MODEL OUT NUM_SEEDS

A seed makes a scenario: sizes, prompts that share beginnings and go on from what others sampled, aborts. The model is
a hash: the next token and log-prob depend on a prompt's name and the position alone. It keeps what a GPU worker keeps
of what it is sent, and what every place of the KV cache holds: a hash of all tokens up to it, compared when read.
"""

import hashlib
import json
import random
import sys
from collections import Counter, deque
from pathlib import Path

import numpy
import torch

from lib.engine.fast.decode_loop import _Decoder
from lib.engine.in_process import set_engine_environment

STOPS, EOS = [3, 5], 7


def token_and_log_prob(prompt_name, position):
    digest = hashlib.blake2b(f"{prompt_name}:{position}".encode(), digest_size=8).digest()
    return digest[0] % 150, -float(numpy.float32(int.from_bytes(digest[1:4], "big") / 2**24))


class Worker:
    """The model's side: what it is sent, and what it samples."""

    def __init__(self, block_size, budget):
        self.block_size, self.budget = block_size, budget
        self.prompt_names, self.blocks, self.ids, self.known, self.computed = {}, {}, {}, {}, {}
        self.cache = {}  # (block, place in it): the hash of all tokens up to it

    def run(self, step):
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        for name in step.finished_req_ids | (step.preempted_req_ids or set()):
            for kept in (self.blocks, self.ids, self.known, self.computed):
                kept.pop(name, None)
        for new in step.scheduled_new_reqs:
            name, self.blocks[new.req_id] = new.req_id, list(new.block_ids[0])
            self.ids[name], self.known[name] = list(new.prefill_token_ids), len(new.prefill_token_ids)
            self.computed[name] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        assert not cached.resumed_req_ids and len(set(cached.req_ids)) == len(cached.req_ids)
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            assert self.computed[name] == computed, (name, self.computed[name], computed)
            self.blocks[name] += blocks[0] if blocks else []
        assert sum(step.num_scheduled_tokens.values()) == step.total_num_scheduled_tokens <= self.budget
        assert set(step.num_scheduled_tokens) == {*cached.req_ids, *(new.req_id for new in step.scheduled_new_reqs)}
        names, sampled, log_probs = list(step.num_scheduled_tokens), [], []
        for name, count in step.num_scheduled_tokens.items():
            before, ids, blocks = self.computed[name], self.ids[name], self.blocks[name]
            after = self.computed[name] = before + count
            assert after <= min(len(ids), self.block_size * len(blocks)), "no token or no place for it"
            so_far = 0
            for position in range(after):
                so_far = hash((so_far, ids[position]))
                place = blocks[position // self.block_size], position % self.block_size
                if position >= before:
                    self.cache[place] = so_far
                assert self.cache[place] == so_far, f"{name} reads another token's keys at {position} of {before}"
            token, log_prob = token_and_log_prob(self.prompt_names[name], after)
            sampled.append([token] if after >= self.known[name] else [])
            ids.extend(sampled[-1])
            log_probs.append([log_prob])
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: row for row, name in enumerate(names)}, sampled_token_ids=sampled,
            logprobs=LogprobsLists(numpy.zeros((len(names), 1)), numpy.array(log_probs, dtype=numpy.float32),
                                   numpy.zeros(len(names))), prompt_logprobs_dict={}, pooler_output=None,
        )  # fmt: skip


class Scenario:
    """A seed's scheduler, worker and requests, with short cuts or without."""

    def __init__(self, model, seed, *, runs_ahead, with_short_cuts):
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        self.rng, self.runs_ahead, self.with_short_cuts = random.Random(seed), runs_ahead, with_short_cuts
        rng = self.rng
        block, num_seqs, self.longest = rng.choice((8, 16, 32)), rng.choice((1, 3, 8, 24)), rng.choice((64, 100, 128))
        budget, caches, needed = rng.choice((32, 48, 128)), rng.random() < 0.75, -(-self.longest // block)
        num_blocks = rng.choice((1000, needed + 2, needed + rng.randrange(2, 10), 3 * needed))
        config = EngineArgs(
            model=model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**24,
            max_model_len=self.longest, max_num_seqs=num_seqs, max_num_batched_tokens=budget, block_size=block,
            enable_prefix_caching=caches, enable_chunked_prefill=True,
        ).create_engine_config()  # fmt: skip
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float32)
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(block, hash_function) if caches else None
        self.scheduler = (AsyncScheduler if runs_ahead else Scheduler)(
            vllm_config=config, block_size=block, log_stats=False,
            kv_cache_config=KVCacheConfig(
                num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["0"], spec)]
            ),
            structured_output_manager=StructuredOutputManager(config),
        )  # fmt: skip
        self.scheduler.use_v2_model_runner = True  # as on a GPU
        self.block, self.worker, self.queue = block, Worker(block, budget), deque()
        self.prompts, self.counts = {}, Counter(requests=0, preempted=0, calls=0, aborted=0)
        self.found = {"sent": [], "states": [], "tokens": {}, "log_probs": {}, "ends": {}}
        self.shared = [rng.randrange(150) for _ in range(64)]
        self._count_preemptions()

    def _count_preemptions(self):
        preempt = self.scheduler._preempt_request

        def counting(*arguments, **keywords):
            self.counts["preempted"] += 1
            return preempt(*arguments, **keywords)

        self.scheduler._preempt_request = counting

    def add_requests(self):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        rng, block = self.rng, self.block
        for _ in range(rng.randrange(3, 12)):
            length = rng.choice((1, 2, block - 1, block, block + 1, 2 * block, rng.randrange(1, self.longest - 1)))
            prompt = self.shared[: rng.choice((0, rng.randrange(length + 1)))]
            prompt = (prompt + [rng.randrange(150) for _ in range(length - len(prompt))])[: self.longest - 1]
            prompt_name, count = f"{self.counts['requests']}", rng.choice((1, 1, 4))
            if self.prompts and rng.random() < 0.5:  # goes on from what another one has sampled
                other = rng.choice(sorted(self.prompts))
                longer = self.prompts[other][1] + self.found["tokens"].get(other, [])
                if len(longer) < self.longest:
                    prompt_name, prompt = self.prompts[other][0], longer
            for _ in range(count):
                name = f"{self.counts['requests']}"
                self.counts["requests"] += 1
                params = SamplingParams(
                    max_tokens=rng.choice((1, 2, 3, 17, block, 90, 200)), logprobs=0,
                    stop_token_ids=STOPS if rng.random() < 0.3 else None, ignore_eos=rng.random() < 0.6,
                )  # fmt: skip
                params.update_from_generation_config({}, None if params.ignore_eos else EOS)
                self.prompts[name], self.worker.prompt_names[name] = (prompt_name, prompt), prompt_name
                self.scheduler.add_request(
                    Request(request_id=name, prompt_token_ids=list(prompt), sampling_params=params,
                            pooling_params=None, block_hasher=self.hasher)
                )  # fmt: skip

    def abort(self, names):
        from vllm.v1.request import RequestStatus

        self.counts["aborted"] += len(names)
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    def hear(self, outputs):
        for output in outputs:
            name, found = output.request_id, self.found
            assert name not in found["ends"], "told after its end"
            self.counts["calls"] += 1
            found["tokens"].setdefault(name, []).extend(output.new_token_ids)
            found["log_probs"].setdefault(name, []).extend(output.new_logprobs.logprobs[:, 0].tolist())
            if output.finish_reason is not None:
                found["ends"][name] = str(output.finish_reason), output.stop_reason

    def step(self):
        scheduler, worker, found = self.scheduler, self.worker, self.found
        step = scheduler.schedule()
        result = worker.run(step)
        if step.total_num_scheduled_tokens:
            self.queue.append((step, result))
            cached = step.scheduled_cached_reqs
            found["sent"].append(
                [sorted(step.num_scheduled_tokens.items()),
                 sorted(zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)),
                 sorted((name, len(worker.blocks[name])) for name in step.num_scheduled_tokens)]
            )  # fmt: skip
            for request in scheduler.running:
                blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
                assert worker.blocks[request.request_id] == blocks, "the worker's blocks are not the scheduler's"
        if self.queue and (len(self.queue) > self.runs_ahead or not step.total_num_scheduled_tokens):
            for client in scheduler.update_from_output(*self.queue.popleft()).values():
                self.hear(client.outputs)
        pool = scheduler.kv_cache_manager.block_pool
        states = [
            (r.request_id, r.num_computed_tokens, r.num_output_placeholders, r.num_in_flight_tokens,
             list(r._all_token_ids), len(r.block_hashes), r.is_prefill_chunk, str(r.status))
            for r in [*scheduler.running, *scheduler.waiting]
        ]  # fmt: skip
        text = f"{states} {pool.get_num_free_blocks()} {len(pool.cached_block_hash_to_block)}"
        found["states"].append(hashlib.blake2b(text.encode(), digest_size=8).hexdigest())

    def run(self):
        """Three calls, the first two of which may end early, as when responses are interrupted."""
        scheduler, rng = self.scheduler, self.rng
        for call in range(3):
            self.add_requests()
            decoder = _Decoder(scheduler, self.block)
            if self.with_short_cuts:
                scheduler.schedule, scheduler.update_from_output = decoder.schedule, decoder.update_from_output
            most_steps = rng.choice((10**6, rng.randrange(1, 60))) if call < 2 else 10**6
            steps = 0
            while (scheduler.has_requests() or self.queue) and steps < most_steps:
                steps += 1
                if rng.random() < 0.01 and scheduler.requests:
                    live = sorted(scheduler.requests, key=int)
                    self.abort(rng.sample(live, rng.randrange(1, 1 + len(live))))
                self.step()
            self.hear(decoder.untold())
            for name, request in scheduler.requests.items():
                assert self.found["tokens"].get(name, []) == list(request._output_token_ids), "not told"
            if rng.random() < 0.5:  # else they go on in the next call
                self.abort(list(scheduler.requests))
            if self.with_short_cuts:
                del scheduler.schedule, scheduler.update_from_output
        return {**self.found, **self.counts}


def main(model, out, num_seeds):
    set_engine_environment(on_gpu=False)
    results = {}
    for seed in range(int(num_seeds)):
        for runs_ahead in (False, True):
            results[f"seed {seed}, ahead {runs_ahead}"] = [
                Scenario(model, seed, runs_ahead=runs_ahead, with_short_cuts=with_short_cuts).run()
                for with_short_cuts in (False, True)
            ]
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
