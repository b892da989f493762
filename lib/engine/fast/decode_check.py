"""Self-check of the decode loop: two schedulers like an engine's, with and without it, over a made-up model.

It takes milliseconds and neither the engine's scheduler nor its model: a token is a function of its request and place.
"""

import copy
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from lib.engine.fast.needs import Calls, Has, Need

MOST_RUNNING = 3
RESPONSE_LENS = (9, 4, 7, 5, 8)  # a request each: some wait until another ends, while others decode
NUM_BLOCKS = 64
MOST_STEPS = 1000

NEEDS: tuple[Need, ...] = (
    Calls(
        "vllm.v1.core.sched.scheduler:Scheduler",
        named="vllm_config kv_cache_config structured_output_manager block_size hash_block_size log_stats",
    ),
    Calls("vllm.v1.core.sched.scheduler:Scheduler.add_request", "self request"),
    Calls("vllm.v1.core.sched.scheduler:Scheduler.has_requests", "self"),
    Has("vllm.v1.core.sched.scheduler:Scheduler", "block_size hash_block_size structured_output_manager vllm_config"),
    Has("vllm.v1.kv_cache_interface:KVCacheConfig", "num_blocks"),
    Has("vllm.config:VllmConfig", "scheduler_config"),
    Has("vllm.config:SchedulerConfig", "max_num_seqs"),
    Has("vllm.v1.engine.core:EngineCore", "request_block_hasher"),
    Calls("vllm.v1.request:Request", named="request_id prompt_token_ids sampling_params pooling_params block_hasher"),
    Calls("vllm.sampling_params:SamplingParams", named="max_tokens logprobs ignore_eos"),
    Calls(
        "vllm.v1.outputs:ModelRunnerOutput",
        named="req_ids req_id_to_index sampled_token_ids logprobs prompt_logprobs_dict pooler_output",
    ),
    Has("vllm.v1.core.sched.output:SchedulerOutput", "scheduled_new_reqs"),
    Has("vllm.v1.core.sched.output:NewRequestData", "req_id prompt_token_ids num_computed_tokens block_ids"),
)


def difference(core: Any, with_loop: Callable[[Any], AbstractContextManager[Any]]) -> str | None:
    """What the loop sends to a model or tells of its tokens otherwise than vLLM's scheduler; None: nothing.

    `core` is vLLM's EngineCore; `with_loop` puts the loop into a scheduler, and gives its decoder.
    """
    plain, ours = _Twin(core), _Twin(core)
    plain.run()
    with with_loop(ours.scheduler) as decoder:
        ours.run()
        ours.hear(decoder.untold())
    for name in ("sent", "told"):
        if getattr(ours, name) != getattr(plain, name):
            return f"other steps for the same requests ({name})" if name == "sent" else "other tokens"
    return None


class _Twin:
    """A scheduler like the engine's, few requests, and what passed between it and the made-up model."""

    def __init__(self, core: Any) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.request import Request

        like = core.scheduler
        config = copy.copy(like.vllm_config)
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.max_num_seqs = min(MOST_RUNNING, config.scheduler_config.max_num_seqs)
        self.scheduler = type(like)(
            vllm_config=config, kv_cache_config=replace(like.kv_cache_manager.kv_cache_config, num_blocks=NUM_BLOCKS),
            structured_output_manager=like.structured_output_manager, block_size=like.block_size,
            hash_block_size=like.hash_block_size, log_stats=False,
        )  # fmt: skip
        self.runs_ahead = isinstance(like, AsyncScheduler)
        self.computed: dict[str, int] = {}
        self.prompt_len: dict[str, int] = {}
        self.sent: list[Any] = []
        self.told: dict[str, Any] = {}
        longest = like.max_model_len - max(RESPONSE_LENS)
        for index, response_len in enumerate(
            RESPONSE_LENS
        ):  # from one token to one that fills a KV block, whose borders responses cross
            length = max(1, min(like.block_size - index if index else 1, longest))
            params = SamplingParams(max_tokens=response_len, logprobs=0, ignore_eos=True)
            request = Request(
                request_id=f"{index}", prompt_token_ids=[index] * length, sampling_params=params, pooling_params=None,
                block_hasher=core.request_block_hasher,
            )  # fmt: skip
            self.prompt_len[f"{index}"] = length
            self.scheduler.add_request(request)

    def run(self) -> None:
        """Steps until all requests have ended."""
        queue: deque[Any] = deque()
        for _ in range(MOST_STEPS):
            if not (self.scheduler.has_requests() or queue):
                return
            step = self.scheduler.schedule()
            if step.total_num_scheduled_tokens:
                queue.append((step, self._compute(step)))
            if queue and (len(queue) > self.runs_ahead or not step.total_num_scheduled_tokens):
                for client in self.scheduler.update_from_output(*queue.popleft()).values():
                    self.hear(client.outputs)
        raise AssertionError("requests that do not end")

    def _compute(self, step: Any) -> Any:
        """What a model runner gives for a step."""
        import numpy
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        cached = step.scheduled_cached_reqs
        self.computed |= {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        rows = zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids, strict=True
        )
        blocks = [(name, len(new[0]) if new else 0) for name, _, _, new in rows]
        new = [(one.req_id, len(one.block_ids[0])) for one in step.scheduled_new_reqs]
        places = sorted(zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True))
        self.sent.append((sorted(step.num_scheduled_tokens.items()), places, sorted(blocks), sorted(new)))
        names, sampled, log_probs = list(step.num_scheduled_tokens), [], []
        for name, count in step.num_scheduled_tokens.items():
            place = self.computed[name] = self.computed[name] + count
            sampled.append([100 + (7 * int(name) + place) % 13] if place >= self.prompt_len[name] else [])
            log_probs.append([-(place % 8) / 8])
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: row for row, name in enumerate(names)}, sampled_token_ids=sampled,
            logprobs=LogprobsLists(
                logprob_token_ids=numpy.zeros((len(names), 1)), logprobs=numpy.array(log_probs, dtype=numpy.float32),
                sampled_token_ranks=numpy.zeros(len(names)),
            ), prompt_logprobs_dict={}, pooler_output=None,
        )  # fmt: skip

    def hear(self, outputs: Any) -> None:
        """What the output processor would be told."""
        for output in outputs:
            ids, log_probs, _ = self.told.setdefault(output.request_id, ([], [], ""))
            log_probs += output.new_logprobs.logprobs[:, 0].tolist()
            self.told[output.request_id] = ids + output.new_token_ids, log_probs, str(output.finish_reason)
