"""The packed forward pass against Hugging Face's own, one unpacked sequence at a time."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from lib.algorithms.advantages import OptimalTokenBaselineAdvantage
from lib.dist import SINGLE
from lib.errors import UserError
from lib.model import attention
from lib.model.attention import packed_attention
from lib.model.batching import make_batch
from lib.model.forward import SEQUENCES, compute_log_probs, forward_policy, pack, with_old_log_probs
from lib.model.networks import build_policy, empty_, load_weights_
from tests.tiny import VOCAB_SIZE, make_model, make_rollouts


def load_unsharded(path, dtype=torch.float32):
    policy = build_policy(str(path), param_dtype=dtype)
    empty_(policy, torch.device("cpu"))
    load_weights_(policy, str(path), SINGLE)
    return policy


def reference_log_probs(model, rollout, temperature):
    """Log-probs and entropies of one response by Hugging Face's eager attention and a full softmax."""
    ids = torch.tensor([rollout.sample.prompt_ids + rollout.response_ids])
    logits = model(ids).logits[0] / temperature
    start = len(rollout.sample.prompt_ids) - 1
    log_softmax = logits[start:-1].log_softmax(-1)
    chosen = log_softmax.gather(1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
    return chosen, -(log_softmax.exp() * log_softmax).sum(-1)


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_packed_log_probs_entropies_and_gradients_equal_unpacked_hugging_face(tmp_path, kind, tied):
    path = make_model(tmp_path, kind=kind, tied=tied)
    policy = load_unsharded(path, torch.float64)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float64)
    rollouts = [r for r in make_rollouts() if r.score.score is not None]
    batch = make_batch(rollouts, SINGLE, mini_batch_size=len(rollouts))
    log_probs, entropy = forward_policy(policy, batch, temperature=0.7)
    loss, expected_loss = 0.0, 0.0
    for row, rollout in enumerate(rollouts):
        expected, expected_entropy = reference_log_probs(model, rollout, 0.7)
        size = len(rollout.response_ids)
        torch.testing.assert_close(
            log_probs[row, :size], expected, atol=5e-6, rtol=0
        )  # eager attention takes its softmax in float32
        torch.testing.assert_close(
            entropy[row, :size], expected_entropy, atol=5e-6, rtol=0
        )  # eager attention takes its softmax in float32
        assert (log_probs[row, size:] == 0).all()
        weight = torch.linspace(-1, 1, size)
        loss = loss + (log_probs[row, :size] * weight).sum() + 0.1 * (entropy[row, :size] * weight).sum()
        expected_loss = expected_loss + (expected * weight).sum() + 0.1 * (expected_entropy * weight).sum()
    loss.backward()
    expected_loss.backward()
    reference = dict(model.named_parameters())
    for name, parameter in policy.named_parameters():
        error = (parameter.grad - reference[name].grad).norm() / reference[name].grad.norm()
        assert error < 1e-5, f"{name}: relative gradient error {error:.1e}"


def test_a_neighbour_in_the_pack_changes_nothing_not_even_a_bit(tmp_path):
    policy = load_unsharded(make_model(tmp_path))
    first, *others = [r for r in make_rollouts() if r.score.score is not None]
    packs = [[first, others[0]], [first, others[1]]]
    values = [forward_policy(policy, make_batch(p, SINGLE, mini_batch_size=2), temperature=1.0)[0][0] for p in packs]
    size = len(first.response_ids)
    torch.testing.assert_close(values[0][:size], values[1][:size], atol=1e-6, rtol=0)


def test_attention_refuses_a_keyword_that_it_does_not_know():
    """Such as gpt-oss's sinks: left out, every log-prob is another one. None says that a model has no such thing."""
    q, known = torch.randn(1, 2, 5, 16), dict(scaling=0.25, cu_seq_lens_q=torch.tensor([0, 3, 5], dtype=torch.int32))
    words = known | dict(max_length_q=3, dropout=0.0, position_ids=torch.arange(5), use_cache=False, s_aux=None)
    assert packed_attention(torch.nn.Identity(), q, q, q, None, **words)[0].shape == (1, 5, 2, 16)
    with pytest.raises(UserError, match="; Identity; found s_aux, expected none but cu_seq_lens_k"):
        packed_attention(torch.nn.Identity(), q, q, q, None, **words | dict(s_aux=torch.zeros(2)))


def test_a_compiled_layer_follows_the_check_of_keywords(monkeypatch):
    monkeypatch.setattr(torch._dynamo.config, "disable", False)

    def layer(x, **keywords):
        attention._refuse_unknown(module, keywords)
        return x + 1

    module, x = torch.nn.Identity(), torch.zeros(2)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x, dropout=0.0, position_ids=x, s_aux=None), x + 1)


def test_pack_restarts_positions_and_points_one_token_before_each_response_token():
    rollouts = make_rollouts(num_groups=1, n=2)
    batch = make_batch(rollouts, SINGLE, mini_batch_size=2)
    packed = pack(batch)
    flat, positions, labels = [], [], []
    for rollout in rollouts:
        for step, token in enumerate(rollout.response_ids):
            positions.append(len(flat) + len(rollout.sample.prompt_ids) + step - 1)
            labels.append(token)
        flat += rollout.sample.prompt_ids + rollout.response_ids
    assert packed.input_ids[0].tolist() == flat
    assert packed.positions.tolist() == positions
    assert packed.labels.tolist() == labels
    lens = [len(r.sample.prompt_ids) + len(r.response_ids) for r in rollouts]
    assert packed.position_ids[0].tolist() == [p for length in lens for p in range(length)]
    assert packed.cu_seq_lens.tolist() == [0, lens[0], *[lens[0] + lens[1]] * (SEQUENCES - 1)]


@pytest.mark.parametrize("budget", [24, 40, 1000])
def test_log_probs_do_not_depend_on_the_token_budget(tmp_path, budget):
    policy = load_unsharded(make_model(tmp_path))
    batch = make_batch(make_rollouts(), SINGLE, mini_batch_size=12)
    whole, _ = forward_policy(policy, batch, temperature=1.0)
    split = compute_log_probs(policy, batch, max_tokens_per_gpu=budget, temperature=1.0, world=SINGLE)[0]
    torch.testing.assert_close(split, whole.detach(), atol=5e-6, rtol=0)  # eager attention takes its softmax in float32
    assert (split[~batch.response_mask] == 0).all()


def test_tokens_of_an_older_policy_keep_its_log_probs_but_have_gradients_of_the_present_one(tmp_path):
    policy, rollouts = load_unsharded(make_model(tmp_path)), make_rollouts()
    older = [replace(rollout, num_stale=len(rollout.response_ids) // 2 + 1) for rollout in rollouts]
    fresh, stale = (
        with_old_log_probs(
            policy, make_batch(of, SINGLE, mini_batch_size=12), max_tokens_per_gpu=1000, temperature=1.0, world=SINGLE,
            with_logit_grad_squared=True,
        )
        for of in (rollouts, older)
    )  # fmt: skip
    kept = stale.stale & stale.response_mask
    assert kept.any() and not kept[stale.response_mask].all()
    assert torch.equal(stale.old_log_probs, torch.where(kept, stale.rollout_log_probs, fresh.old_log_probs))
    assert torch.equal(stale.logit_grad_squared, fresh.logit_grad_squared)
    others = -torch.expm1(fresh.old_log_probs)  # between all of the others alike and one alone
    low, high = others.square() * (1 + 1 / (VOCAB_SIZE - 1)), others.square() * 2
    inside = (low * 0.999 <= fresh.logit_grad_squared) & (fresh.logit_grad_squared <= high * 1.001)
    assert inside[fresh.response_mask].all()
    for ours, expected in zip(*(OptimalTokenBaselineAdvantage()(of, SINGLE) for of in (stale, fresh)), strict=True):
        assert torch.equal(ours, expected)
