"""A turn's request takes over the block hashes of the turn before where its ids go on from there, and no others."""

from types import SimpleNamespace

import pytest
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from lib.engine.fast import block_hashes
from lib.engine.fast.block_hashes import EPISODE, keeping

BLOCK = 4


@pytest.fixture
def hashing():
    """(vLLM's hasher, the contents of blocks that it was given)."""
    init_none_hash(sha256)
    hashed = []

    def noted(block):
        hashed.append(block)
        return sha256(block)

    return get_request_block_hasher(BLOCK, noted), hashed


def request(hasher, ids, episode=None, sampled=()):
    params = SamplingParams(max_tokens=64, extra_args=None if episode is None else {EPISODE: episode})
    made = Request("0", list(ids), params, None, block_hasher=hasher)
    for token in sampled:
        made.append_output_token_ids(token)
    return made


def credulous(own):
    """A hasher that looks at the names of episodes alone."""
    latest = {}

    def hashes(request):
        request._block_hasher = own
        request.block_hashes.extend(latest.get(0, []))
        latest[0] = request.block_hashes
        return own(request)

    return hashes


def test_a_further_turn_has_vllms_hashes_and_only_what_is_new_is_hashed(hashing):
    own, hashed = hashing
    ours, ids = keeping(own), list(range(10))
    for turn in range(3):
        expected = request(own, ids, sampled=range(7)).block_hashes
        before = len(hashed)
        found = request(ours, ids, (3, 1), sampled=range(7))
        assert found.block_hashes == expected and len(expected) == len(found.all_token_ids) // BLOCK
        known = (len(ids) - 3) // BLOCK if turn else 0  # all full blocks of the turn before, its sampled ids too
        assert len(hashed) - before == len(expected) - known
        ids = [*ids, *range(7), *range(20, 23)]


def test_what_does_not_go_on_from_the_turn_before_is_hashed_whole(hashing):
    own, _ = hashing
    ours, ids = keeping(own), list(range(40))
    request(ours, ids, (3, 1), sampled=range(8))
    others = {
        "another first id": ([99, *ids[1:], *range(8), 5], (3, 1)),
        "another sampled id": ([*ids, 7, *range(1, 8), 5], (3, 1)),
        "shorter": (ids[:20], (3, 1)),
        "another episode": ([*ids[:39], 98, *range(8)], (3, 2)),
        "no episode": ([*ids, *range(8), 5], None),
    }
    for name, (longer, episode) in others.items():
        request(ours, ids, (3, 1), sampled=range(8))
        assert request(ours, longer, episode).block_hashes == request(own, longer).block_hashes, name


def test_what_is_sampled_asks_vllms_own_hasher(hashing):
    own, _ = hashing
    assert request(keeping(own), range(9), (0, 0))._block_hasher is own


def measuring(own):
    """A hasher that looks at the number of ids alone."""
    latest = []

    def hashes(request):
        request._block_hasher = own
        if latest and len(request.all_token_ids) >= len(latest[-1].all_token_ids):
            request.block_hashes.extend(latest[-1].block_hashes)
        latest.append(request)
        return own(request)

    return hashes


@pytest.mark.parametrize(
    ("ways", "found"),
    [
        (keeping, None),
        (lambda own: lambda request: own(request)[1:], "first"),
        (credulous, "other"),
        (measuring, "other"),
    ],
)
def test_the_self_check_finds_other_hashes(hashing, monkeypatch, ways, found):
    core = SimpleNamespace(request_block_hasher=hashing[0])
    engine = SimpleNamespace(
        engine_core=SimpleNamespace(engine_core=core),
        vllm_config=SimpleNamespace(cache_config=SimpleNamespace(block_size=BLOCK)),
    )
    monkeypatch.setattr(block_hashes, "keeping", ways)
    said = block_hashes._difference(engine)
    assert said == (found and f"other hashes of a conversation's {found} turn")
    core.request_block_hasher = None  # prefixes are not cached
    assert block_hashes._difference(engine) is None
