"""Fast path: vLLM's sampler on a GPU with gumbel.py, which reads the logits once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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

    from lib.engine.fast.gumbel import race

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
