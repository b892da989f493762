"""Fast path: vLLM's sampler on a GPU with gumbel.py, which reads the logits once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lib.engine.fast.needs import Calls, FastPath, Has, Replaces, replaced

SAMPLER = "vllm.v1.worker.gpu.sample.sampler"
NUM_ROWS = 32  # of the self-check
MOST_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Of log-probs, between ours and vLLM's own."""


@contextmanager
def one_pass_sampling(_: Any) -> Iterator[None]:
    """Samples on a GPU with gumbel.py: other random numbers than vLLM's, the same distribution, the same log-probs.

    For what this project asks: the log-prob of the sampled token and no other, and no rank. vLLM's older model runner,
    which it takes for some models, goes on as it is.
    """
    import vllm.v1.worker.gpu.sample.sampler as sampler
    from vllm.v1.outputs import LogprobsTensors

    from lib.engine.fast.gumbel import race

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

    with replaced((sampler, "gumbel_sample", sample), (sampler, "compute_topk_scores", log_probs)):
        yield


def difference(race: Any, gumbel_sample: Any, scores: Any, *, vocab_size: int, device: torch.device) -> str | None:
    """What `race` does otherwise than vLLM's gumbel_sample and compute_topk_scores on random logits; None: nothing.

    The random numbers are others, so tokens are compared where none decides: for greedy rows, and for rows in which one
    token has all the probability. All others must be the same wherever a row stands, and differ between seeds.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.arange(NUM_ROWS)
    random = 3 * torch.randn(NUM_ROWS, vocab_size, generator=generator)  # (NUM_ROWS, V)
    random[rows % 4 == 1, vocab_size // 2] += 1000.0
    random[rows % 4 == 2] = 0.0
    places = torch.randperm(NUM_ROWS, generator=generator)  # of a row's request in what follows
    temperatures, seeds = torch.ones(NUM_ROWS), torch.zeros(NUM_ROWS, dtype=torch.int64)
    temperatures[places[rows % 4 == 0]] = 0.0  # greedy
    seeds[places] = 2**40 + 12345 * rows
    temperatures, seeds, positions = temperatures.to(device), seeds.to(device), (rows + 7).to(device)
    requests = places.to(device, torch.int32)
    for dtype, most in MOST_DIFFERENCE.items():
        logits = random.to(device, dtype)
        tokens, log_probs = race(logits, requests, seeds, positions, temperatures)
        own = gumbel_sample(logits, requests, temperatures, seeds, positions, apply_temperature=False)
        expected = scores(logits, 0, tokens, None, max_per_req_token_ids=0, logits_mode=False).logprobs[:, 0]
        worst = float((log_probs - expected).abs().max())
        if not worst <= most:
            return f"log-probs that differ by {worst:.3g} in {dtype}".replace("torch.", "")
        decided = (rows % 4 == 1) | (rows % 4 == 0) & torch.tensor(dtype == torch.float32)  # bfloat16 has ties
        if not torch.equal(tokens.cpu()[decided], own.cpu()[decided]):
            return f"other tokens in {dtype} where no random number decides".replace("torch.", "")
        turned = race(logits.flip(0), requests.flip(0), seeds, positions.flip(0), temperatures)[0].flip(0)
        if not torch.equal(tokens, turned):
            return "tokens that depend on the place in a batch"
        if len(set(tokens[(rows % 4 == 2).to(device)].tolist())) == 1:
            return "tokens that do not depend on the seed"
    return None


def _difference(engine: Any) -> str | None:
    """The self-check, for an engine that was just built."""
    import vllm.v1.worker.gpu.sample.sampler as sampler

    from lib.engine.fast.gumbel import race

    return difference(
        race, sampler.gumbel_sample, sampler.compute_topk_scores,
        vocab_size=engine.model_config.get_vocab_size(), device=torch.device("cuda", torch.cuda.current_device()),
    )  # fmt: skip


PATH = FastPath(
    name="one-pass sampling",
    tested=("0.26",),
    without="tokens by other random numbers of the same distribution, more slowly",
    on_gpu_only=True,
    while_sampling=one_pass_sampling,
    self_check=_difference,
    needs=(
        Replaces(
            f"{SAMPLER}:gumbel_sample",
            "logits expanded_idx_mapping temperature seed pos apply_temperature output_processed_logits "
            "output_processed_logits_col use_fp64",
        ),
        Replaces(
            f"{SAMPLER}:compute_topk_scores",
            "logits num_logprobs sampled_token_ids cu_num_logits logprob_token_ids_state expanded_idx_mapping "
            "max_per_req_token_ids logits_mode",
        ),
        Calls("vllm.v1.outputs:LogprobsTensors", "logprob_token_ids logprobs selected_token_ranks"),
        Has("vllm.v1.outputs:LogprobsTensors", "logprobs"),
        Has("vllm.v1.engine.llm_engine:LLMEngine", "model_config"),
        Calls("vllm.config:ModelConfig.get_vocab_size", "self"),
    ),
)
