"""Fast path: a turn's request takes over the block hashes that the request of its episode's turn before has."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lib.engine.fast.needs import Calls, FastPath, Has, replaced

EPISODE = "episode"
"""In a request's `SamplingParams.extra_args`: what names its episode, equal in all of its turns."""


@contextmanager
def kept_hashes(engine: Any) -> Iterator[None]:
    """Lets vLLM hash of a further turn only what its episode has got since the turn before.

    vLLM finds cached blocks by hashes, each of which is made of a block's ids and the hash before it, so it hashes the
    whole conversation anew for every turn.
    """
    core = engine.engine_core.engine_core
    if core.request_block_hasher is None:  # prefixes are not cached
        yield
        return
    with replaced((core, "request_block_hasher", keeping(core.request_block_hasher))):
        yield


def keeping(hasher: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """A hasher for new requests, which gives each the hashes that it has in common with its episode's last one."""
    latest: dict[Any, tuple[list[int], list[Any]]] = {}  # by episode, the ids and hashes of its last request

    def first_hashes(request: Any) -> list[Any]:
        request._block_hasher = hasher  # for what is sampled: that is asked for in every step
        episode = (request.sampling_params.extra_args or {}).get(EPISODE)
        if episode is not None:
            ids, hashes = latest.get(episode, ([], []))
            if request._all_token_ids[: len(ids)] == ids:
                request.block_hashes.extend(hashes)
            latest[episode] = request._all_token_ids, request.block_hashes  # lists, which grow with what is sampled
        return hasher(request)

    return first_hashes


def _difference(engine: Any) -> str | None:
    """What the path does otherwise than vLLM's own hasher, for an engine that was just built."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    own = engine.engine_core.engine_core.request_block_hasher
    if own is None:
        return None
    num = 4 * engine.vllm_config.cache_config.block_size
    ids, ours = list(range(num)), keeping(own)

    def hashes(hasher: Callable[[Any], list[Any]], ids: list[int]) -> list[Any]:
        request = Request(
            request_id="", prompt_token_ids=ids, pooling_params=None, block_hasher=hasher,
            sampling_params=SamplingParams(max_tokens=num, extra_args={EPISODE: 0}),
        )  # fmt: skip
        request.append_output_token_ids(ids[: num // 2])
        return request.block_hashes

    for name, turn in {"first": ids, "longer": 2 * ids, "other": [*ids[1:], *2 * ids]}.items():
        if hashes(ours, turn) != hashes(own, turn):
            return f"other hashes of a conversation's {name} turn"
    return None


PATH = FastPath(
    name="block hashes",
    tested=("0.26", "0.30", "0.32"),
    while_sampling=kept_hashes,
    self_check=_difference,
    needs=(
        Has("vllm.v1.engine.llm_engine:LLMEngine", "engine_core vllm_config"),
        Has("vllm.v1.engine.core_client:InprocClient", "engine_core"),
        Has("vllm.v1.engine.core:EngineCore", "request_block_hasher"),
        Has("vllm.v1.request:Request", "_all_token_ids _block_hasher block_hashes sampling_params"),
        Calls(
            "vllm.v1.request:Request", named="request_id prompt_token_ids pooling_params block_hasher sampling_params"
        ),
        Calls("vllm.v1.request:Request.append_output_token_ids", "self token_ids"),
        Calls("vllm.sampling_params:SamplingParams", named="max_tokens extra_args"),
        Has("vllm.sampling_params:SamplingParams", "extra_args"),
    ),
)
