"""Fast path: leaves out of vLLM's start-up what serves others."""

from collections.abc import Iterator
from contextlib import contextmanager

from lib.engine.fast.needs import Calls, FastPath, Replaces, replaced


@contextmanager
def quick_start() -> Iterator[None]:
    """Leaves out of vLLM's start-up what serves others.

    That is a second process that imports all of vLLM to look at a model's class for the first time (this process may
    have a GPU's context, and has), and on a GPU a trial step with every way of sampling, prompt log-probs among them:
    what a run does use compiles when it first does.
    """
    from vllm import SamplingParams
    from vllm.model_executor.models import registry

    with replaced(
        (registry, "_run_in_subprocess", lambda look: look()),
        (SamplingParams, "for_sampler_warmup", staticmethod(lambda: SamplingParams(seed=0, logprobs=0))),
    ):
        yield


PATH = FastPath(
    name="quick start",
    tested=("0.26", "0.30", "0.32"),
    without="the same engine, some seconds later",
    while_building=quick_start,
    needs=(
        Replaces("vllm.model_executor.models.registry:_run_in_subprocess", "fn"),
        Replaces("vllm.sampling_params:SamplingParams.for_sampler_warmup", ""),
        Calls("vllm.sampling_params:SamplingParams", named="seed logprobs"),
    ),
)
