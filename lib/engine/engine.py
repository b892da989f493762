"""The vLLM engine inside this process: sampling, sleep and wake, and its parameters.

Only this room imports vllm; what depends on its version is in in_process.py and fast/. Every rank builds an engine;
`tensor_model_parallel_size` consecutive ranks form one replica, whose ranks must call every method here with the same
arguments. Replicas know nothing of each other.

It does not gather weights (weight_sync.py), does not score, and never re-tokenises: token ids in, token ids out.
"""

import gc
import hashlib
import math
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from lib.dist import TIMEOUT, World
from lib.engine.fast.block_hashes import EPISODE
from lib.engine.fast.decode_loop import TokenIds
from lib.engine.fast.paths import FastPaths
from lib.engine.in_process import (
    build_llm,
    restored_host_state,
    set_engine_environment,
    told_refusals,
    unfinished_requests,
)
from lib.engine.required import check_names
from lib.engine.rollout_config import MAX_GROUP, RolloutConfig, Sampling
from lib.errors import Stopped, UserError
from lib.types import Rollout, Sample

STOP_POLL_S = 0.25  # between two questions of a replica's ranks whether to stop, as far as its steps are that short
STOP_POLL_STEPS = 32  # and the most steps between them
RESERVE = 0.03  # of a GPU's memory, free beside an engine that does not sleep


def request_seed(run_seed: int, uid: int, num_generated: int = 0, stream: str = "train") -> int:
    """A 63-bit seed for one prompt's request; the engine gives sample i of the group this seed + i.

    It depends on the run's seed, the prompt's uid and the tokens already generated alone, so rollouts do not depend
    on ranks, batch order or restarts. `stream` keeps validation apart from training.
    """
    digest = hashlib.blake2b(f"{stream}:{run_seed}:{uid}:{num_generated}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (2**63 - MAX_GROUP)  # room for + i


class RolloutEngine:
    """A vLLM engine in this process. States: asleep -> weights awake -> ready; `generate` needs ready."""

    def __init__(
        self, cfg: RolloutConfig, model_path: str, *, dtype: str, max_prompt_len: int, most_responses: int,
        stop_token_ids: list[int], world: World, seed: int,
    ) -> None:  # fmt: skip
        """Builds the engine with dummy weights, on an empty GPU; it is awake then.

        `most_responses`, that a call asks of all replicas, bounds those in flight where the config leaves that open.
        Executed by all ranks together: the size of the KV cache is agreed among them. Raises UserError when the GPU
        has less free memory than `gpu_memory_utilization` asks for.
        """
        self.cfg, self.world, self.seed = cfg, world, seed
        self.tp_size = cfg.tensor_model_parallel_size
        self.tp_rank = world.rank % self.tp_size
        self.replica, self.num_replicas = world.rank // self.tp_size, world.size // self.tp_size
        if self.tp_size > 1:
            ranks = range(self.replica * self.tp_size, (self.replica + 1) * self.tp_size)
            self._replica_group = torch_dist.new_group(
                list(ranks), timeout=TIMEOUT, backend="gloo", use_local_synchronization=True
            )
        self.on_gpu = world.device.type == "cuda"
        self._stop_token_ids = TokenIds(stop_token_ids)
        self.sleeps = cfg.sleep is not False and self.on_gpu
        self.max_num_seqs = cfg.max_num_seqs or min(
            2048, cfg.max_num_batched_tokens, -(-most_responses // self.num_replicas)
        )
        world.agree(self._check_free_memory)
        set_engine_environment(self.on_gpu)
        name = world.gather(uuid.uuid4().hex)[0]
        with restored_host_state():
            gc.disable()  # what is built stays; searching it again and again takes seconds
            world.agree(lambda: check_names(on_gpu=self.on_gpu))
            self._fast_paths = FastPaths(cfg.fast_paths, world)
            with told_refusals(cfg, model_path, on_gpu=self.on_gpu, rank=world.rank):
                with self._fast_paths.while_building():
                    self._llm = build_llm(
                        cfg, model_path, dtype, max_prompt_len, self.max_num_seqs, self.on_gpu, self.sleeps, name
                    )
                self._fast_paths.check(self._llm.llm_engine)
        self._engine = self._llm.llm_engine
        self.model: nn.Module = self._llm.apply_model(lambda model: model)[0]
        self._awake = {"weights", "kv_cache"}
        self._request_count = 0
        # What torch's allocator goes on counting for the engine while it sleeps and its pages are unmapped.
        self.pool_bytes = torch.cuda.memory_allocated(world.device) if self.sleeps else 0

    @property
    def warnings(self) -> list[str]:
        """A line for each fast path that stepped aside; the same ones on all ranks."""
        return self._fast_paths.warnings

    @property
    def is_leader(self) -> bool:
        """Whether this rank speaks for its replica: its rollouts are the ones that count."""
        return self.tp_rank == 0

    def share(self, samples: list[Sample]) -> list[Sample]:
        """This replica's prompts among a step's."""
        return samples[self.replica :: self.num_replicas]

    def parameters(self) -> dict[str, Tensor]:
        """The engine's own parameters, as it lays them out on this rank (views, not copies)."""
        return {name: p.data for name, p in self.model.named_parameters()}

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copies full tensors with Hugging Face names into the engine.

        Every rank of a replica passes full tensors and keeps its own slice.
        """
        assert "weights" in self._awake, "the engine's weights are asleep: wake('weights') first"
        with torch.no_grad():
            self.model.load_weights(weights)

    def wake(self, tag: Literal["weights", "kv_cache"], *, reserved_bytes: int = 0) -> None:
        """Maps the engine's memory again; what it holds is garbage until weights are synchronised.

        Raises UserError on all ranks when a GPU has too little free memory, or would have once the trainer has taken
        another `reserved_bytes`.
        """
        if tag in self._awake:
            return
        torch.cuda.empty_cache()  # what the trainer has freed
        self.world.agree(lambda: self._check_room(tag, reserved_bytes))
        self._llm.wake_up(tags=[tag])
        self._awake.add(tag)

    def _check_room(self, tag: str, reserved_bytes: int) -> None:
        needed = self._sleeping_bytes[tag]
        free = torch.cuda.mem_get_info(self.world.device)[0] - reserved_bytes
        if free < needed:
            later = " as soon as the optimizer has its moments" if reserved_bytes else ""
            raise UserError(
                f"not enough free GPU memory to wake the engine's {tag}; rank {self.world.rank}; found "
                f"{max(free, 0) / 2**30:.1f} GiB free{later}, expected {needed / 2**30:.1f} GiB; lower "
                f"--rollout.gpu-memory-utilization (now {self.cfg.gpu_memory_utilization}), or set "
                "--fsdp.optimizer-offload True or --fsdp.param-offload True"
            )

    def decide_to_stay(self, spare_bytes: int) -> None:
        """Lets the engine keep its memory from now on where the trainer, at its largest, leaves enough of every GPU.

        `spare_bytes` are what it leaves. --rollout.sleep True and False have decided already. The engine has slept
        before. Executed by all ranks together.
        """
        if self.sleeps and self.cfg.sleep is None:
            needed = sum(self._sleeping_bytes.values()) + self._reserve_bytes()
            self.sleeps = not self.world.all_agree(needed <= spare_bytes)

    def _reserve_bytes(self) -> int:
        """What is left free for NCCL and modules that load late, and for what torch's allocator cannot hand out."""
        return int(RESERVE * torch.cuda.mem_get_info(self.world.device)[1])

    def sleep(self) -> None:
        """Frees weights and KV cache (level 2: the next sync writes every weight), unless the engine stays."""
        if not self.sleeps:
            # Cached prefixes belong to the weights that computed them.
            dropped = self._llm.reset_prefix_cache()
            assert dropped, "the engine refused to drop its prefix cache: requests are alive"
            if self.on_gpu and torch.cuda.mem_get_info(self.world.device)[0] < self._reserve_bytes():
                torch.cuda.empty_cache()
            return
        torch.cuda.empty_cache()  # so that what sleep frees is the engine's alone
        free_before = torch.cuda.mem_get_info(self.world.device)[0]
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self._llm.sleep(level=2)
        torch.cuda.synchronize()
        freed = torch.cuda.mem_get_info(self.world.device)[0] - free_before
        self._sleeping_bytes = {"weights": weights, "kv_cache": max(freed - weights, 0)}
        self._awake.clear()

    def device_used_gib(self) -> float:
        """Memory in use on this rank's GPU, by whoever, in GiB; 0 on a CPU."""
        if not self.on_gpu:
            return 0.0
        free, total = torch.cuda.mem_get_info(self.world.device)
        return (total - free) / 2**30

    def generate(
        self, samples: list[Sample], sampling: Sampling, *, stream: str = "train",
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[list[Rollout]]:  # fmt: skip
        """The groups of responses to these prompts, each as soon as its last response ends.

        Executed by all ranks of a replica with the same prompts in the same order. A group has `sampling.n` rollouts,
        in index order. The host's random states are as before the call once it ends. `stop` is asked between steps of
        the engine; where it is true on a rank, all ranks of its replica drop what is left and raise Stopped.
        """
        pending = {self._submit(s.prompt_ids, self._sampling_params(sampling, s, stream)): s for s in samples}
        for output in self._outputs(list(pending), stop):
            yield _to_rollouts(output, pending.pop(output.request_id), sampling)
        assert not pending, f"{len(pending)} requests ended without an output"

    def generate_partly(
        self, rollouts: list[Rollout], sampling: Sampling, *, share: float, max_continued: int,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Rollout]:  # fmt: skip
        """The responses one by one as they end, continued from what they have; at last those that did not end.

        `rollouts` are unfinished ones, new ones without any token. Sampling stops after the engine step in which
        `share` of them have ended, among them all that were continued `max_continued` times. The others come back
        `unfinished`, with the tokens sampled so far. `stop` as in `generate`. Executed by all ranks of a replica with
        the same rollouts.
        """
        pending = {}
        for rollout in rollouts:
            num_old, sample = len(rollout.response_ids), rollout.sample
            params = self._sampling_params(sampling, sample, "train", num_generated=num_old)
            params.n, params.seed = 1, params.seed + rollout.index
            params.max_tokens -= num_old
            prompt_ids = sample.prompt_ids + rollout.response_ids
            pending[self._submit(prompt_ids, params)] = rollout
        most = len(pending) - math.ceil(share * len(pending))  # that may stay unfinished

        def enough() -> bool:
            return len(pending) <= most and all(r.num_continued < max_continued for r in pending.values())

        requests = list(pending)
        for output in self._outputs(requests, stop, enough):
            [response] = output.outputs
            rollout = pending.pop(output.request_id)
            yield _extended(rollout, response.token_ids, response.logprobs, response.finish_reason)
        left = self.unfinished()
        assert {request for request, _, _ in left} == set(pending), "the engine lost a request"
        self._engine.abort_request(list(pending))
        for request, ids, log_probs in left:
            yield _extended(pending[request], ids, log_probs, "unfinished")

    def submit_turn(self, rollout: Rollout, sampling: Sampling, stream: str, *, max_turn_len: int) -> str:
        """Gives the engine the next turn of an episode, behind all ids that it has; the name of its request."""
        num_old = len(rollout.response_ids)
        params = self._sampling_params(sampling, rollout.sample, stream, num_generated=num_old)
        params.n, params.seed, params.max_tokens = 1, params.seed + rollout.index, max_turn_len
        params.skip_clone = True  # nobody else has them
        params.extra_args = {EPISODE: (rollout.sample.uid, rollout.index)}
        return self._submit(rollout.sample.prompt_ids + rollout.response_ids, params)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Within it the engine may be stepped; the host's random states are as before once it ends."""
        # Sampling draws from the host's random state even with a seed per request.
        with restored_host_state(), self._fast_paths.while_sampling(self._engine):
            gc.disable()  # sampling leaves no cycles, and a search takes as long as many of its steps
            yield

    def step(self) -> list[Any]:
        """The outputs that end in one step of the engine."""
        return [output for output in self._engine.step() if output.finished]

    def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """What there is to say of sampled responses beside what a batch of them shows: nothing."""
        return {}

    def unfinished(self) -> list[tuple[str, list[int], Any]]:
        """(name, ids sampled so far, their log-probs) of the requests that have not ended."""
        return unfinished_requests(self._engine)

    def abort(self, requests: list[str]) -> None:
        """Drops requests that run."""
        self._engine.abort_request(requests)

    def of_leader(self, items: list[Any]) -> list[Any]:
        """The leader's items, on all ranks of the replica; nothing is sent where it has none."""
        if self.tp_size == 1:
            return items
        count = torch.tensor([len(items)])
        leader = torch_dist.get_global_rank(self._replica_group, 0)
        torch_dist.all_reduce(count, op=torch_dist.ReduceOp.MAX, group=self._replica_group)
        if not int(count):
            return []
        box = [items]
        torch_dist.broadcast_object_list(box, src=leader, group=self._replica_group)
        return box[0]

    def _submit(self, prompt_ids: list[int], params: Any) -> str:
        """Gives the engine a request; its name."""
        assert self._awake == {"weights", "kv_cache"}, f"sampling needs an engine that is awake, not {self._awake}"
        request = f"{self._request_count}"
        self._request_count += 1
        self._engine.add_request(request, {"prompt_token_ids": prompt_ids}, params)
        return request

    def _outputs(
        self, requests: list[str], stop: Callable[[], bool], enough: Callable[[], bool] = lambda: False
    ) -> Iterator[Any]:
        """Their finished outputs, until all have ended or, after a step of the engine, it is enough."""
        stop = self.agreeing(stop)
        try:
            with self.sampling():
                while self._engine.has_unfinished_requests() and not enough():
                    if stop():
                        raise Stopped("while responses were being sampled")
                    yield from self.step()
        except BaseException:  # whoever iterates has stopped early: nothing may run on into the next call
            self.abort(requests)
            raise

    def agreeing(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """The question `stop`, asked before each step of the engine, with one answer for all ranks of the replica.

        They take the same steps, and one that stopped alone would leave the others waiting for it. So they reduce their
        answers; not before every step, but when the time of the slowest rank says so: the same number of steps on all.
        """
        if self.tp_size == 1:
            return stop
        interval, waited, last = 1, 0, time.perf_counter()

        def agreed() -> bool:
            nonlocal interval, waited, last
            waited += 1
            if waited < interval:
                return False
            answer = torch.tensor([float(stop()), time.perf_counter() - last])
            torch_dist.all_reduce(answer, op=torch_dist.ReduceOp.MAX, group=self._replica_group)
            is_over, seconds = answer.tolist()
            steps = int(interval * STOP_POLL_S / max(seconds, 1e-6))
            interval, waited, last = max(1, min(steps, 2 * interval, STOP_POLL_STEPS)), 0, time.perf_counter()
            return is_over > 0

        return agreed

    @property
    def max_len(self) -> int:
        """Tokens of the longest prompt with its response."""
        return self._engine.vllm_config.model_config.max_model_len

    def attention_windows(self) -> dict[int, int | None]:
        """{layer: the tokens that its attention sees, None for all before}."""
        layers = self._engine.vllm_config.compilation_config.static_forward_context
        places = {re.search(r"(?:^|\.)(\d+)\.", name): layer for name, layer in layers.items()}
        return {int(place[1]): layer.sliding_window for place, layer in places.items() if place}

    @property
    def kv_cache_tokens(self) -> int:
        """Tokens that the engine's KV cache holds on this rank."""
        config = self._engine.vllm_config.cache_config
        return config.num_gpu_blocks * config.block_size

    def _sampling_params(self, sampling: Sampling, sample: Sample, stream: str, *, num_generated: int = 0) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        stop = [] if sampling.full_len else list(self.cfg.stop)
        ignore_eos = sampling.full_len or self.cfg.ignore_eos
        # Every field that a model's generation_config could change is passed: nothing leaks in from the model folder.
        return SamplingParams(
            n=sampling.n,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            max_tokens=sampling.max_response_len,
            # Also when greedy: a request without a seed draws one from the host's random state.
            seed=request_seed(self.seed, sample.uid, num_generated, stream),
            stop=stop or None,
            stop_token_ids=None if ignore_eos else self._stop_token_ids,
            ignore_eos=ignore_eos,
            logprobs=0 if sampling.log_probs else None,
            flat_logprobs=sampling.log_probs,
            detokenize=bool(stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _check_free_memory(self) -> None:
        if not self.on_gpu:
            return
        free, total = torch.cuda.mem_get_info(self.world.device)
        asked = self.cfg.gpu_memory_utilization * total
        if free < asked:
            raise UserError(
                f"--rollout.gpu-memory-utilization {self.cfg.gpu_memory_utilization} asks for more than is free; "
                f"{self.world.device}; found {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, asked for "
                f"{asked / 2**30:.1f} GiB; set --rollout.gpu-memory-utilization {max(free / total - 0.03, 0.01):.2f} "
                "or less, or end the other processes on this GPU"
            )


def _to_rollouts(output: Any, sample: Sample, sampling: Sampling) -> list[Rollout]:
    """A finished request as rollouts, in index order."""
    group = []
    for response in sorted(output.outputs, key=lambda o: o.index):
        ids = list(response.token_ids)
        log_probs = list(response.logprobs.logprobs) if sampling.log_probs else None
        assert log_probs is None or len(log_probs) == len(ids), "the engine reported another number of log-probs"
        assert response.finish_reason in ("stop", "length"), f"the engine ended a response by {response.finish_reason}"
        group.append(
            Rollout(
                sample=sample,
                index=response.index,
                response_ids=ids,
                rollout_log_probs=log_probs,
                finish_reason=response.finish_reason,
            )
        )
    return group


def _extended(rollout: Rollout, ids: Sequence[int], log_probs: Any, finish_reason: str) -> Rollout:
    """The response with what was sampled since, and how that ended."""
    assert finish_reason in ("stop", "length", "unfinished"), f"the engine ended a response by {finish_reason}"
    assert len(log_probs.logprobs) == len(ids), "the engine reported another number of log-probs"
    return replace(
        rollout,
        response_ids=[*rollout.response_ids, *ids],
        rollout_log_probs=[*rollout.rollout_log_probs, *log_probs.logprobs],
        finish_reason=finish_reason,
    )
