"""Where memory decides: the estimate of an update's peak against peaks measured on an H200 (EXPERIMENTS.md)."""

import pytest
import torch

from lib.dist import SINGLE, World
from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import RolloutConfig
from lib.errors import UserError
from lib.model.fsdp import update_bytes
from lib.model.networks import CausalPolicy, Critic

SHAPES = {"0.6b": (1024, 3072, 28, 16), "1.7b": (2048, 6144, 28, 16), "4b": (2560, 9728, 36, 32)}


def policy(shape: str) -> CausalPolicy:
    """A Qwen3 on the meta device."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, intermediate, layers, heads = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        return CausalPolicy(Qwen3ForCausalLM(config))


@pytest.mark.parametrize(
    ("shape", "tokens", "gib"),
    [("0.6b", 8192, 21.8), ("0.6b", 32768, 55.3), ("1.7b", 8192, 46.7), ("1.7b", 16384, 63.8), ("4b", 8192, 100.0)],
)
def test_the_estimate_is_a_little_above_what_was_measured(shape, tokens, gib):
    estimate = update_bytes(
        policy(shape), SINGLE, dtype=torch.bfloat16, max_tokens_per_gpu=tokens, keeps_gathered=True
    )  # fmt: skip
    assert gib < estimate / 2**30 < 1.17 * gib


def test_ranks_share_the_shards_and_resharding_leaves_two_layers_gathered():
    found, tokens = policy("1.7b"), dict(dtype=torch.bfloat16, max_tokens_per_gpu=0)
    parameters = sum(p.numel() for p in found.parameters())
    layers = sum(p.numel() for layer in found.layers for p in layer.parameters())
    four = World(rank=0, size=4, device=torch.device("cpu"))
    assert update_bytes(found, four, **tokens, keeps_gathered=True) == 4 * parameters + 6 * parameters
    resharding = update_bytes(found, four, **tokens, keeps_gathered=False)
    assert resharding == 4 * parameters + 6 * (parameters - layers + 2 * layers // 28)


def test_a_critic_has_no_logits_to_keep():
    actor = policy("0.6b")
    with torch.device("meta"):
        critic = Critic(actor.model)
    known = dict(dtype=torch.bfloat16, keeps_gathered=False)
    sizes = [update_bytes(it, SINGLE, max_tokens_per_gpu=n, **known) for it in (actor, critic) for n in (0, 8)]
    of_head = 2 * 8 * 151936
    assert (sizes[1] - sizes[0]) - (sizes[3] - sizes[2]) == of_head


@pytest.mark.parametrize(
    ("sleep", "spare_bytes", "sleeps"),
    [(None, 9, True), (None, 10, False), (None, -1, True), (True, 2**60, True), (False, 0, False)],
)
def test_an_engine_stays_where_it_and_a_reserve_fit_unless_it_was_told(monkeypatch, sleep, spare_bytes, sleeps):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50, 100))  # free and total: 3 stay free
    engine = object.__new__(RolloutEngine)  # as it is after its first sleep
    engine.cfg, engine.world, engine._sleeping_bytes = RolloutConfig(sleep=sleep), SINGLE, {"weights": 3, "kv_cache": 4}
    engine.sleeps = sleep is not False
    engine.decide_to_stay(spare_bytes)
    assert engine.sleeps == sleeps


def test_memory_that_another_process_gives_back_while_an_engine_starts_is_told(monkeypatch):
    """vLLM's words, as they came on a GPU that several runs shared; on a CPU it measures nothing."""

    def build(*_):
        raise AssertionError("Error in memory profiling. Initial free memory 73.32 GiB, current free memory 79.68 GiB.")

    monkeypatch.setattr("lib.engine.engine.build_llm", build)
    with pytest.raises(UserError, match=r"found Error in memory profiling.* 79\.68 GiB\.; start again"):
        RolloutEngine(
            RolloutConfig(), "", dtype="bfloat16", max_prompt_len=1, most_responses=1, stop_token_ids=[], world=SINGLE,
            seed=0,
        )  # fmt: skip
