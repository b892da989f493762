"""The options of rollouts: how responses are drawn, what the engine takes, and what training alone has.

eval.py refuses the fields that RolloutConfig itself adds: without a trainer they mean nothing.
"""

import math
from dataclasses import dataclass
from typing import Literal

from lib.errors import UserError, check_fields

MAX_GROUP = 2**20  # seeds of a group's responses are consecutive numbers
LOWEST_TEMPERATURE = 0.01  # below it vLLM samples with 0.01 all the same


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How responses are drawn: the responses follow from all of these."""

    n: int = 8
    """Responses per prompt: the group size; works: 4 to 32."""
    max_response_len: int = 512
    """Longest response, in tokens, where it is cut; works: so long that fewer than a tenth are cut."""
    temperature: float = 1.0
    """Sampling temperature, by which the trainer divides too, 0: greedy, in eval.py alone; works: 0.6 to 1.2."""
    top_p: float = 1.0
    """Nucleus, in (0, 1]; in training, below 1 the trainer and the sampler disagree, so it is refused."""
    top_k: int = 0
    """Sample among the k likeliest tokens, 0 for all; other values are refused in training, like top-p."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, beside the model's end-of-sequence ids; they need text, so decoding gets slower."""
    ignore_eos: bool = False
    """Sample up to the longest response whatever the model says (for benchmarks)."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "rollout.",
            n=(1 <= self.n <= MAX_GROUP, f"from 1 to {MAX_GROUP}"),
            max_response_len=(self.max_response_len >= 1, "at least 1"),
            temperature=(
                self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < 100,
                f"at least {LOWEST_TEMPERATURE}, and below 100 (in eval.py also 0, greedy)",
            ),
            top_p=(0 < self.top_p <= 1, "in (0, 1]"),
            top_k=(self.top_k >= 0, "0 (all tokens) or more"),
            stop=(all(self.stop), "texts that are not empty"),
        )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the engine takes of the machine, and how fast it samples: the same responses, up to rounding.

    Without one-pass sampling, a fast path of GPUs, others of the same distribution.
    """

    tensor_model_parallel_size: int = 1
    """GPUs that share one copy of the model while sampling; must divide the number of ranks."""
    gpu_memory_utilization: float = 0.5
    """Share of the GPU's total memory for the engine's weights, KV cache and graphs while it is awake; works: 0.3
    to 0.85."""
    max_num_seqs: int | None = None
    """Most responses in flight per replica; None: all that are asked for, 2,048 at most."""
    max_num_batched_tokens: int = 16384
    """Most tokens that the engine computes at once, prompts and responses together; on a CPU at least a prompt and its
    response."""
    max_cudagraph_capture_size: int = 2048
    """Largest batch replayed as a CUDA graph, in sequences; larger ones run slower, capturing takes start-up time."""
    enforce_eager: bool = False
    """Neither compile nor capture graphs in the engine: starts faster, samples slower."""
    enable_prefix_caching: bool = True
    """Compute the prompt of a group once."""
    cpu_kv_cache_gib: float = 1.0
    """KV cache when running on a CPU, in GiB per rank."""
    fast_paths: Literal["auto", "off"] = "auto"
    """Our own ways in place of slower ones of vLLM's: auto: each where the installed vLLM has what it needs, or a
    warning; off: none."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            "rollout.",
            tensor_model_parallel_size=(self.tensor_model_parallel_size >= 1, "at least 1"),
            gpu_memory_utilization=(0 < self.gpu_memory_utilization < 1, "in (0, 1)"),
            max_num_seqs=(self.max_num_seqs is None or 1 <= self.max_num_seqs <= 2**16, f"from 1 to {2**16}"),
            max_num_batched_tokens=(2**11 <= self.max_num_batched_tokens <= 2**22, f"from {2**11} to {2**22}"),
            max_cudagraph_capture_size=(
                self.max_cudagraph_capture_size >= 1,
                "at least 1 (--rollout.enforce-eager captures nothing)",
            ),
            cpu_kv_cache_gib=(0 < self.cpu_kv_cache_gib < math.inf, "above 0 and finite"),
        )
        if self.max_num_seqs is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"--rollout.max-num-batched-tokens {self.max_num_batched_tokens} is smaller than "
                f"--rollout.max-num-seqs {self.max_num_seqs}; every running response needs one token of the budget; "
                f"expected at least {self.max_num_seqs}; raise the first or lower the second"
            )


@dataclass(frozen=True, kw_only=True)
class RolloutConfig(EngineConfig, SamplingConfig):
    """How responses are sampled, and how much of the GPU the engine may use."""

    log_probs: bool = True
    """Let the engine report the log-prob of every sampled token; without them a stale engine is seen by bits only."""
    max_log_probs_diff: float = 0.1
    """Stop when the mean absolute log-prob difference between engine and trainer exceeds this, in nats per token."""
    sleep: bool | None = None
    """Free the engine's GPU memory while training: True: always (where an update runs out of memory); False: never;
    None: only where an update, by an estimate, needs it."""
    partial_share: float = 1.0
    """Share of a step's responses after which it ends, in (0, 1]; the others go on in the next step, under its weights;
    1: every step waits for its longest response."""
    max_continued: int = 2
    """Most steps in which a response goes on after its first, with --rollout.partial-share below 1; the last of them
    waits for it."""

    def __post_init__(self) -> None:
        SamplingConfig.__post_init__(self)
        EngineConfig.__post_init__(self)
        check_fields(
            self,
            "rollout.",
            max_log_probs_diff=(0 < self.max_log_probs_diff < math.inf, "above 0 and finite"),
            partial_share=(0 < self.partial_share <= 1, "in (0, 1]"),
            max_continued=(self.max_continued >= 1, "at least 1"),
        )


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling settings of one `generate` call. Temperature 0 is greedy."""

    n: int
    max_response_len: int
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    log_probs: bool = False
    full_len: bool = False
    """Whether nothing ends a response before `max_response_len`: neither an end-of-sequence id nor a stop string."""


def training_sampling(cfg: RolloutConfig) -> Sampling:
    """The settings of training rollouts."""
    return Sampling(
        n=cfg.n,
        max_response_len=cfg.max_response_len,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
        log_probs=cfg.log_probs,
    )
