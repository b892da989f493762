"""Where memory decides: the estimate of an update's peak against peaks measured on an H200 (EXPERIMENTS.md)."""

import os
from functools import cache
from unittest.mock import patch

import pytest
import torch

from lib.dist import SINGLE, World
from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import RolloutConfig
from lib.errors import UserError
from lib.families.meta_model import parameters_on_meta
from lib.model import fsdp
from lib.model.activations import Kept, count_kept
from lib.model.attention import PACKED, register_packed_attention
from lib.model.fsdp import FSDPConfig, settle_compiler, update_bytes
from lib.model.lora import LoRAConfig, adapt_
from lib.model.networks import CausalPolicy, Critic, ModelConfig, build_policy
from tests.tiny import KINDS, make_model

SHAPES = {"0.6b": (1024, 3072, 28, 16), "1.7b": (2048, 6144, 28, 16), "4b": (2560, 9728, 36, 32)}


@cache
def policy(shape: str, rank: int = 0) -> CausalPolicy:
    """A Qwen3 without memory, with adapters where they have a rank. Not to be changed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, intermediate, layers, heads = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    register_packed_attention()
    with parameters_on_meta():
        found = CausalPolicy(Qwen3ForCausalLM._from_config(config, attn_implementation=PACKED))
    if rank:
        adapt_(found.to(torch.bfloat16), LoRAConfig(rank=rank))
    return found


def kept(
    model: CausalPolicy, *, dtype: torch.dtype = torch.bfloat16, compiled: bool = True, as_before: bool = False
) -> Kept:
    """As a run counts it, or `as_before`: as one did that kept what costs little to make again."""
    # A module before this one may have joined ranks of a CPU, where nothing is compiled.
    with (
        patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "0"}),
        torch._dynamo.config.patch(disable=False, recompile_limit=8),
        torch._functorch.config.patch(ban_recompute_materialized_backward=True),
    ):
        torch._dynamo.reset()  # what was cut otherwise
        settle_compiler()
        torch._functorch.config.ban_recompute_materialized_backward = as_before
        return count_kept(model.model, model.layers, dtype=dtype, compiled=compiled)


@pytest.mark.parametrize(
    ("shape", "rank", "tokens", "gib"),
    [("1.7b", 0, 7168, 40.9), ("1.7b", 32, 7168, 15.3), ("4b", 32, 8192, 32.5)],
)
def test_the_estimate_is_a_little_above_what_was_measured(shape, rank, tokens, gib):
    found = policy(shape, rank)
    estimate = update_bytes(
        found, SINGLE, dtype=torch.bfloat16, kept=kept(found), max_tokens_per_gpu=tokens, keeps_gathered=True,
        base_is_whole=rank > 0,
    )  # fmt: skip
    assert gib < estimate / 2**30 < 1.17 * gib


@pytest.mark.parametrize(
    ("shape", "tokens", "gib"),
    [("0.6b", 8192, 21.8), ("0.6b", 32768, 55.3), ("1.7b", 8192, 46.7), ("1.7b", 16384, 63.8), ("4b", 8192, 100.0)],
)
def test_the_estimate_is_a_little_above_what_was_measured_where_more_was_kept(shape, tokens, gib):
    estimate = update_bytes(
        policy(shape), SINGLE, dtype=torch.bfloat16, kept=kept(policy(shape), as_before=True),
        max_tokens_per_gpu=tokens, keeps_gathered=True,
    )  # fmt: skip
    assert gib < estimate / 2**30 < 1.17 * gib


def test_layers_are_cut_as_it_is_counted_wherever_a_model_is_loaded(monkeypatch):
    for name in ("shard_", "empty_", "load_weights_"):
        monkeypatch.setattr(fsdp, name, lambda *_, **__: None)
    with (
        torch._dynamo.config.patch(recompile_limit=8),
        torch._functorch.config.patch(ban_recompute_materialized_backward=True),
    ):
        fsdp._load_(
            policy("0.6b"), ModelConfig(), "", FSDPConfig(), SINGLE, max_tokens_per_gpu=0, reserved_bytes=0
        )  # fmt: skip
        assert torch._dynamo.config.recompile_limit == 32
        assert torch._functorch.config.ban_recompute_materialized_backward is False


def test_ranks_share_the_shards_and_resharding_leaves_two_layers_gathered():
    found, tokens = policy("1.7b"), dict(dtype=torch.bfloat16, kept=Kept(per_token=0), max_tokens_per_gpu=0)
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
    known = dict(dtype=torch.bfloat16, kept=Kept(per_token=1000), keeps_gathered=False)
    sizes = [update_bytes(it, SINGLE, max_tokens_per_gpu=n, **known) for it in (actor, critic) for n in (0, 8)]
    of_head = 2 * 8 * 151936
    assert (sizes[1] - sizes[0]) - (sizes[3] - sizes[2]) == of_head


def test_what_compiled_layers_keep_is_what_products_attention_and_norms_need_once_each(tmp_path):
    """Two layers of width 64 with 4 heads and 2 key-value heads of 32 numbers, and 96 hidden units."""
    for kind, of_head_norms in (("llama", 0), ("qwen3", 2 * (128 + 64) + 4 * (4 + 2))):  # their inputs, 1 / root
        found = build_policy(str(make_model(tmp_path / kind, kind=kind)), param_dtype=torch.float32)
        products = 2 * (128 + 2 * 96)  # what goes into o; gate and up: of these, and of residuals, the rest is made
        attention = 2 * (128 + 2 * 64) + 4 * 4  # q, k, v, whose result goes into o; the log of a sum per head
        norms = 2 * (64 + 64) + 4 * 2  # the residuals before them, as far as they are not recomputed
        last_norm = 4 * 64 + 4 + 2 * 64  # not compiled: in float32, 1 / root, and before the weight
        tables_and_ids = 2 * 2 * 32 + 8
        expected = 2 * (products + attention + norms + of_head_norms) + last_norm + tables_and_ids
        assert kept(found).per_token == expected, kind
        assert kept(found).at_all < 200  # borders


def test_what_layers_keep_that_are_not_compiled_is_what_each_operation_keeps(tmp_path):
    found = build_policy(str(make_model(tmp_path, kind="llama")), param_dtype=torch.float32)
    norm = 4 * 3 * 64 + 4  # the residual, divided by its root, and times the weight; 1 / root
    attention = 4 * (2 * 128 + 2 * 64) + 4 * 4
    hidden_units = 4 * 4 * 96  # gate, its SiLU, up, their product
    expected = 2 * (2 * norm + attention + hidden_units) + (norm - 4 * 64) + 4 * 2 * 32 + 8  # tables, token ids
    assert kept(found, dtype=torch.float32, compiled=False).per_token == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_family_is_counted_and_left_as_it_was(tmp_path, kind):
    """Phi-3's rotary tables look at the positions, Gemma 3's embeddings are scaled."""
    found = build_policy(str(make_model(tmp_path, kind=kind)), param_dtype=torch.float32)
    forwards = [layer.forward for layer in found.layers]
    compiled, eager = kept(found), kept(found, compiled=False)
    assert 2000 < compiled.per_token < eager.per_token
    assert [layer.forward for layer in found.layers] == forwards
    assert all(p.is_meta and p.dtype is torch.float32 and p.requires_grad for p in found.parameters())


def test_frozen_weights_keep_less_and_what_adapters_add_to_them_is_not_kept(tmp_path):
    path = str(make_model(tmp_path))
    adapters = [LoRAConfig(), LoRAConfig(rank=8), LoRAConfig(rank=16), LoRAConfig(rank=8, init="pissa")]
    whole, small, large, pissa = (kept(build_policy(path, param_dtype=torch.bfloat16, lora=lora)) for lora in adapters)
    # Before the first adapter nothing is kept: the first norm's input and its root.
    assert small.per_token == large.per_token == pissa.per_token < whole.per_token
    assert small.at_all == large.at_all == whole.at_all < 200  # no weight of a layer with its adapter's product
    of_factors = 2 * 2 * 16 * (4 * 64 + 3 * 128 + 2 * 64 + 3 * (64 + 96))  # [A0 + A; A] and [B, B0] of two layers
    assert pissa.at_all <= whole.at_all + of_factors


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
