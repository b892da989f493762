"""What the engine needs of vLLM beside its promises, and has nothing to fall back on: looked up before it is built.

CONTRIBUTING.md says what each is for. What a fast path needs is declared there (fast/), and costs a warning.
"""

from lib.engine.fast.needs import Calls, Has, Need, Replaces, first_unmet
from lib.engine.in_process import TESTED, vllm_version
from lib.errors import UserError

NEEDS: tuple[Need, ...] = (
    Calls("vllm.entrypoints.llm:LLM.apply_model", "self func"),
    Has("vllm.entrypoints.llm:LLM", "llm_engine"),
    Has("vllm.v1.engine.llm_engine:LLMEngine", "output_processor vllm_config"),
    Has("vllm.v1.engine.output_processor:OutputProcessor", "request_states"),
    Has("vllm.v1.engine.output_processor:RequestState", "external_req_id detokenizer logprobs_processor"),
    Has("vllm.config:CompilationConfig", "static_forward_context"),
    Has("vllm.config:CacheConfig", "num_gpu_blocks block_size"),
    Has("vllm.compilation.decorators", "_support_torch_compile"),
)
ON_CPU: tuple[Need, ...] = (
    Replaces("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm", "layer remove_weight"),
    Replaces(
        "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name", "communicator"
    ),
)


def check_names(*, on_gpu: bool) -> None:
    """Raises UserError where the installed vLLM, which it imports, lacks one of them."""
    if unmet := first_unmet(NEEDS if on_gpu else NEEDS + ON_CPU):
        raise UserError(
            f"this vLLM lacks what the engine cannot do without; vLLM {vllm_version()}; {unmet}; install one of the "
            f"versions that work: {TESTED}"
        )
