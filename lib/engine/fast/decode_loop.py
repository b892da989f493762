"""Fast path: requests that only need one more token are kept from vLLM's scheduler and output processor."""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy

from lib.engine.fast import decode_check
from lib.engine.fast.needs import Calls, FastPath, Has, Replaces, replaced


class TokenIds(list):
    """Token ids in which vLLM looks up every sampled token: as fast for hundreds of them as for one."""

    def __init__(self, ids: Iterable[int]) -> None:
        super().__init__(ids)
        self.as_set = frozenset(self)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self.as_set

    def __deepcopy__(self, memo: Any) -> "TokenIds":  # for every request; it never changes
        return self


@contextmanager
def short_cuts(engine: Any) -> Iterator[None]:
    """Decodes with two short loops of our own instead of vLLM's scheduler and output processor.

    With hundreds of sequences in flight their Python sets the pace, not the GPU: 16 to 19 us a token in the scheduler
    alone, 2 to 3 here. Results are the same, tested against an engine without short cuts. Only for models whose layers
    all attend to the whole sequence; a no-op for others.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor

    scheduler = engine.engine_core.engine_core.scheduler
    if not _serves(scheduler):
        yield
        return
    # With stop strings every token becomes text at once.
    with (
        _loop_in(scheduler, tells_at_once=engine.renderer.tokenizer is not None) as decoder,
        replaced((LogprobsProcessor, "_update_sample_logprobs", _keep_log_probs)),
    ):
        yield
        engine.output_processor.process_outputs(decoder.untold())  # of requests that go on


def _serves(scheduler: Any) -> bool:
    """Whether all layers of the scheduler's model attend to the whole sequence, and nothing else is unusual."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    groups = scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if len(groups) == 1 else None
    special = (scheduler.connector, scheduler.lora_config, scheduler.num_lookahead_tokens)
    return type(spec) is FullAttentionSpec and not spec.sliding_window and not any(special)


@contextmanager
def _loop_in(scheduler: Any, *, tells_at_once: bool = False) -> Iterator["_Decoder"]:
    """A decoder in place of the methods of a scheduler that it serves."""
    assert "schedule" not in vars(scheduler), "two calls of generate at once"
    [group] = scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    decoder = _Decoder(scheduler, group.kv_cache_spec.block_size, tells_at_once=tells_at_once)
    with replaced(
        (scheduler, "schedule", decoder.schedule), (scheduler, "update_from_output", decoder.update_from_output)
    ):
        yield decoder


def _difference(engine: Any) -> str | None:
    """The self-check, for an engine that was just built."""
    core = engine.engine_core.engine_core
    return decode_check.difference(core, _loop_in) if _serves(core.scheduler) else None


def _keep_log_probs(processor: Any, lists: Any) -> None:
    """All that `_to_rollouts` reads of the log-probs: one per token (vLLM files four numbers for it)."""
    processor.logprobs.logprobs.extend(lists.logprobs[:, 0].tolist())


class _Decoding:
    """A request whose prompt is computed, with what it sampled that vLLM's output processor has not been told yet."""

    __slots__ = ("eos", "limit", "log_probs", "name", "request", "stops", "tokens")

    def __init__(self, request: Any, max_model_len: int) -> None:
        self.request, self.name = request, request.request_id
        self.limit = min(request.num_prompt_tokens + request.max_tokens, max_model_len)  # tokens at which it ends
        self.eos = request.sampling_params.eos_token_id
        stops = request.sampling_params.stop_token_ids or ()  # some versions of vLLM make a plain list of ours
        self.stops = stops.as_set if isinstance(stops, TokenIds) else frozenset(stops)
        self.tokens: list[int] = []
        self.log_probs: list[float] = []

    def tell(self, output: Any) -> None:
        """Puts what is not told yet before an EngineCoreOutput's own tokens."""
        if not self.tokens:
            return
        output.new_token_ids = self.tokens + output.new_token_ids
        if self.log_probs:
            values = numpy.array(self.log_probs, dtype=numpy.float32)[:, None]
            if output.new_logprobs is not None:
                values = numpy.concatenate([values, output.new_logprobs.logprobs[:, :1]])
            output.new_logprobs = _log_probs_lists(values)
        self.tokens, self.log_probs = [], []


def _log_probs_lists(values: Any) -> Any:
    from vllm.v1.outputs import LogprobsLists

    return LogprobsLists(logprob_token_ids=None, logprobs=values, sampled_token_ranks=None)


class _Decoder:
    """Stands in for `schedule` and `update_from_output` of vLLM's scheduler.

    A request that decodes needs one more token, a KV block now and then, and an end; those that do are kept from
    vLLM's methods, which see all others: prompts, preempted requests, and tokens that may be a response's last. The
    scheduler's and the requests' state is at all times what vLLM's methods would have left, so they can take over at
    any step, as they do when KV blocks run out. Only the output processor is told later, at a response's end, unless
    `tells_at_once`.
    """

    def __init__(self, scheduler: Any, block_size: int, *, tells_at_once: bool = False) -> None:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.request import RequestStatus

        self.scheduler, self.block_size = scheduler, block_size
        self.plain_schedule, self.plain_update = scheduler.schedule, scheduler.update_from_output
        self.runs_ahead = isinstance(scheduler, AsyncScheduler)  # a step is scheduled before the last one's tokens
        self.running, self.tells_at_once = RequestStatus.RUNNING, tells_at_once
        self.limits_active = hasattr(scheduler, "max_num_active_reqs")  # from 0.31 on it admits requests by this
        self.decoding: dict[str, _Decoding] = {}

    def schedule(self, *arguments: Any) -> Any:
        """A step: one token for every request that decodes, and what vLLM schedules beside them."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        before, now, others, places, at_border, of_others = scheduler.running, [], [], [], [], 0
        for request in before:
            place, ahead = request.num_computed_tokens, request.num_output_placeholders
            num_new = len(request._all_token_ids) + ahead - place
            if request.is_prefill_chunk or num_new != 1:
                others.append(request)
                of_others += 1 + num_new // self.block_size  # KV blocks that it may take, at most
                continue
            one = self.decoding.get(request.request_id)
            if one is None:
                one = self.decoding[request.request_id] = _Decoding(request, scheduler.max_model_len)
            if place + 2 - ahead >= one.limit:  # the last token, or beyond it
                others.append(request)
                of_others += place % self.block_size == 0
                continue
            if place % self.block_size == 0:
                at_border.append(len(now))
            now.append(one)
            places.append(place)
        if not now or len(at_border) + of_others > manager.block_pool.get_num_free_blocks():
            return self.plain_schedule(*arguments)  # which preempts, and whom it would

        if not self.runs_ahead:  # else `allocate_slots` does it
            for one, place in zip(now, places, strict=True):
                if (place + 1) % self.block_size == 0:
                    manager.cache_blocks(one.request, place + 1)  # a block that this step fills
        new_blocks: list[Any] = [None] * len(now)
        for index in at_border:
            new_blocks[index] = manager.allocate_slots(now[index].request, 1).get_block_ids(allow_none=True)
        scheduler.running = list(others)  # to which vLLM appends
        self._raise_limits(-len(now))
        try:
            output = self.plain_schedule(*arguments)
        finally:
            self._raise_limits(len(now))
            assert scheduler.running[: len(others)] == others, "preempted although there are blocks"
            scheduler.running = before + scheduler.running[len(others) :]

        num_sampled = []
        for one in now:
            request = one.request
            num_sampled.append(len(request._output_token_ids) + request.num_output_placeholders)
            request.num_computed_tokens += 1
            request.num_in_flight_tokens += 1
            request.num_output_placeholders += self.runs_ahead
        names, cached = [one.name for one in now], output.scheduled_cached_reqs
        cached.req_ids[:0], cached.num_computed_tokens[:0] = names, places
        cached.new_block_ids[:0], cached.num_output_tokens[:0] = new_blocks, num_sampled
        output.decoding, output.not_decoding = now, output.num_scheduled_tokens
        output.num_scheduled_tokens = dict.fromkeys(names, 1) | output.num_scheduled_tokens
        output.total_num_scheduled_tokens += len(now)
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.update(names)
        return output

    def _raise_limits(self, number: int) -> None:
        scheduler = self.scheduler
        scheduler.max_num_running_reqs += number
        scheduler.max_num_scheduled_tokens += number
        if self.limits_active:
            scheduler.max_num_active_reqs += number

    def update_from_output(self, scheduled: Any, result: Any) -> Any:
        """Takes the tokens of a step that has run; what vLLM's output processor is told of them."""
        from vllm.v1.engine import EngineCoreOutputs

        if hasattr(scheduled, "decoding"):
            scheduled = self._take(scheduled, result)
        told = self.plain_update(scheduled, result)
        for client in told.values():
            for output in client.outputs:
                if output.request_id in self.decoding:
                    self.decoding[output.request_id].tell(output)
                    if output.finish_reason is not None:
                        del self.decoding[output.request_id]
        if self.tells_at_once:
            told.setdefault(0, EngineCoreOutputs()).outputs.extend(self.untold())
        return told

    def _take(self, scheduled: Any, result: Any) -> Any:
        """Appends the tokens of those that go on; the step as scheduled for all others."""
        rows, sampled, running, ahead = result.req_id_to_index, result.sampled_token_ids, self.running, self.runs_ahead
        log_probs = None if result.logprobs is None else result.logprobs.logprobs[:, 0].tolist()
        others = dict(scheduled.not_decoding)
        for one in scheduled.decoding:
            request, row = one.request, rows[one.name]
            token, ids = sampled[row][0], request._all_token_ids
            length = len(ids) + 1
            is_ours = request.status is running and self.decoding.get(one.name) is one  # not of an earlier call
            if not is_ours or token == one.eos or token in one.stops or length >= one.limit:
                others[one.name] = 1
                continue
            ids.append(token)
            request._output_token_ids.append(token)
            request.num_in_flight_tokens -= 1
            request.num_output_placeholders -= ahead
            if length % self.block_size == 0:
                request.update_block_hashes()
            one.tokens.append(token)
            if log_probs is not None:
                one.log_probs.append(log_probs[row])
        rest = copy.copy(scheduled)
        rest.num_scheduled_tokens = others
        return rest

    def untold(self) -> list[Any]:
        """What the output processor has not been told of requests that have not ended."""
        from vllm.v1.engine import EngineCoreOutput

        outputs = []
        for one in self.decoding.values():
            if one.tokens:
                outputs.append(EngineCoreOutput(request_id=one.name, new_token_ids=[]))
                one.tell(outputs[-1])
        return outputs


SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
PATH = FastPath(
    name="decode loop",
    tested=("0.26", "0.30", "0.32"),
    while_sampling=short_cuts,
    self_check=_difference,
    needs=(
        Has("vllm.v1.engine.llm_engine:LLMEngine", "engine_core output_processor renderer"),
        Has("vllm.v1.engine.core_client:InprocClient", "engine_core"),
        Has("vllm.v1.engine.core:EngineCore", "scheduler"),
        Replaces(f"{SCHEDULER}.schedule", "self throttle_prefills"),
        Replaces(f"{SCHEDULER}.update_from_output", "self scheduler_output model_runner_output"),
        Has(SCHEDULER, "connector kv_cache_manager lora_config max_model_len max_num_running_reqs running"),
        Has(SCHEDULER, "max_num_scheduled_tokens num_lookahead_tokens prev_step_scheduled_req_ids"),
        Has(SCHEDULER, "use_v2_model_runner"),
        Has("vllm.v1.core.sched.async_scheduler:AsyncScheduler", ""),
        Calls("vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots", "self request num_new_tokens"),
        Calls("vllm.v1.core.kv_cache_manager:KVCacheManager.cache_blocks", "self request num_computed_tokens"),
        Calls("vllm.v1.core.kv_cache_manager:KVCacheBlocks.get_block_ids", "self", "allow_none"),
        Has("vllm.v1.core.kv_cache_manager:KVCacheManager", "block_pool kv_cache_config"),
        Calls("vllm.v1.core.block_pool:BlockPool.get_num_free_blocks", "self"),
        Has("vllm.v1.kv_cache_interface:KVCacheConfig", "kv_cache_groups"),
        Has("vllm.v1.kv_cache_interface:KVCacheGroupSpec", "kv_cache_spec"),
        Has("vllm.v1.kv_cache_interface:FullAttentionSpec", "block_size sliding_window"),
        Has("vllm.v1.request:Request", "_all_token_ids _output_token_ids is_prefill_chunk max_tokens"),
        Has("vllm.v1.request:Request", "num_computed_tokens num_in_flight_tokens num_output_placeholders"),
        Has("vllm.v1.request:Request", "num_prompt_tokens request_id sampling_params status"),
        Calls("vllm.v1.request:Request.update_block_hashes", "self"),
        Has("vllm.v1.request:RequestStatus", "RUNNING"),
        Has("vllm.sampling_params:SamplingParams", "eos_token_id stop_token_ids"),
        Has("vllm.v1.core.sched.output:SchedulerOutput", "num_scheduled_tokens scheduled_cached_reqs"),
        Has("vllm.v1.core.sched.output:SchedulerOutput", "total_num_scheduled_tokens"),
        Has(
            "vllm.v1.core.sched.output:CachedRequestData", "new_block_ids num_computed_tokens num_output_tokens req_ids"
        ),
        Has("vllm.v1.outputs:ModelRunnerOutput", "logprobs req_id_to_index sampled_token_ids"),
        Calls("vllm.v1.outputs:LogprobsLists", named="logprob_token_ids logprobs sampled_token_ranks"),
        Calls("vllm.v1.engine:EngineCoreOutput", named="request_id new_token_ids"),
        Has("vllm.v1.engine:EngineCoreOutput", "finish_reason new_logprobs new_token_ids request_id"),
        Calls("vllm.v1.engine:EngineCoreOutputs"),
        Has("vllm.v1.engine:EngineCoreOutputs", "outputs"),
        Replaces("vllm.v1.engine.logprobs:LogprobsProcessor._update_sample_logprobs", "self logprobs_lists"),
        Has("vllm.v1.engine.logprobs:LogprobsProcessor", "logprobs"),
        Has("vllm.logprobs:FlatLogprobs", "logprobs"),
        Calls("vllm.v1.engine.output_processor:OutputProcessor.process_outputs", "self engine_core_outputs"),
        *decode_check.NEEDS,
    ),
)
