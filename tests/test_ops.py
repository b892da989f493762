"""Masked reductions and the chunked head against plain torch."""

import math

import pytest
import torch
from torch.nn import functional

from lib.model.head import linear_log_probs
from lib.ops import masked_mean, masked_sum


def plain(hidden, weight, labels, temperature):
    """Log-probs and entropy from the full logits matrix."""
    logits = (hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32))
    log_p = functional.log_softmax(logits / temperature, -1)
    return log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)


def inputs(num_rows, dtype=torch.float32, hidden_size=16, vocabulary=37, scale=1.0):
    generator = torch.Generator().manual_seed(num_rows)
    hidden = scale * torch.randn(num_rows, hidden_size, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, hidden_size, generator=generator, dtype=torch.float64)
    labels = torch.randint(vocabulary, (num_rows,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def test_masked_sum_and_mean_match_a_loop():
    values = torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0], [64.0, 128.0, 256.0]])
    mask = torch.tensor([[True, False, True], [False, True, False], [False, False, False]])
    assert masked_sum(values, mask) == 21
    assert masked_mean(values, mask) == 7
    assert masked_sum(values, mask, -1).tolist() == [5, 16, 0]
    assert masked_mean(values, mask, -1).tolist() == [2.5, 16, 0]


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("reduce", [masked_sum, masked_mean])
def test_masked_places_reach_neither_result_nor_gradient(reduce, poison):
    mask = torch.tensor([[True, False], [False, False]])
    values = torch.tensor([[3.0, poison], [poison, poison]], requires_grad=True)
    result = reduce(values, mask)
    result.backward()
    assert result == 3
    assert values.grad.tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100, None])
def test_log_probs_and_entropy_match_log_softmax(chunk_size):
    hidden, weight, labels = inputs(7)
    log_probs, entropy = linear_log_probs(hidden, weight, labels, temperature=0.7, chunk_size=chunk_size)
    expected_log_probs, expected_entropy = plain(hidden, weight, labels, 0.7)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)], ids=["log_probs", "entropy", "both"])
def test_gradients_match_autograd_through_the_full_logits(outputs):
    hidden, weight, labels = inputs(11, torch.float64)
    upstream = torch.randn(2, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    gradients = []
    for head in (lambda *args: linear_log_probs(*args[:3], temperature=args[3], chunk_size=4), plain):
        results = head(hidden, weight, labels, 1.3)
        loss = sum((upstream[output] * results[output]).sum() for output in outputs)
        gradients.append(torch.autograd.grad(loss, (hidden, weight)))
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)


def test_gradients_pass_gradcheck():
    hidden, weight, labels = inputs(5, torch.float64, hidden_size=3, vocabulary=6)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probs(h, w, labels, temperature=0.8, chunk_size=2), (hidden, weight)
    )


def test_bfloat16_errs_no_more_than_plain_bfloat16():
    hidden, weight, labels = inputs(300, torch.bfloat16, hidden_size=64, vocabulary=500, scale=0.3)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    results = {}
    for name, head, (h, w) in (
        ("exact", plain, exact),
        ("plain", plain, (hidden, weight)),
        ("ours", lambda *args: linear_log_probs(*args[:3], temperature=args[3], chunk_size=7), (hidden, weight)),
    ):
        log_probs, entropy = head(h, w, labels, 0.9)
        results[name] = (log_probs, entropy, *torch.autograd.grad((log_probs + 0.1 * entropy).sum(), (h, w)))
    assert [tensor.dtype for tensor in results["ours"]] == [torch.float32] * 2 + [torch.bfloat16] * 2
    for ours, standard, expected in zip(results["ours"], results["plain"], results["exact"], strict=True):
        assert relative_error(ours, expected) < 1.2 * relative_error(standard, expected) + 1e-6
        assert relative_error(ours, expected) < 1e-2


def test_weight_gradient_of_many_chunks_accumulates_in_float32():
    # 4,096 equal contributions: a bfloat16 sum stalls once it is 256 times larger than what is added.
    hidden = torch.full((4096, 1), 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(4096, dtype=torch.int64)
    linear_log_probs(hidden, weight, labels, temperature=1.0, chunk_size=1)[0].sum().backward()
    assert weight.grad.flatten().tolist() == [2048, -2048]


def test_without_rows_the_graph_stays_connected_with_zero_gradients():
    hidden, weight, labels = inputs(0)
    log_probs, entropy = linear_log_probs(hidden, weight, labels, temperature=1.0)
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert hidden.grad.shape == (0, 16)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_without_entropy_log_probs_and_their_gradients_are_the_same():
    hidden, weight, labels = inputs(9)
    results = []
    for statistic in ("entropy", "none"):
        log_probs, entropy = linear_log_probs(hidden, weight, labels, temperature=0.5, statistic=statistic)
        results.append((log_probs, *torch.autograd.grad(log_probs.sum(), (hidden, weight))))
    assert not entropy.requires_grad
    assert entropy.tolist() == [0] * 9
    for with_entropy, without in zip(*results, strict=True):
        assert torch.equal(with_entropy, without)


def test_a_frozen_weight_gets_no_gradient_and_hidden_the_same():
    hidden, weight, labels = inputs(4)
    (expected,) = torch.autograd.grad(plain(hidden, weight, labels, 1.0)[0].sum(), (hidden,))
    frozen = weight.detach()
    linear_log_probs(hidden, frozen, labels, temperature=1.0)[0].sum().backward()
    assert frozen.grad is None
    torch.testing.assert_close(hidden.grad, expected, rtol=1e-5, atol=1e-6)


def test_extreme_logits_stay_finite():
    # A certain token: its log-prob and the entropy are 0, and so are all gradients.
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    log_probs, entropy = linear_log_probs(hidden, weight, torch.tensor([0, 0]), temperature=1e-3)
    (log_probs[0] + entropy.sum()).backward()
    assert log_probs.tolist() == [0, -2e7]
    assert entropy.tolist() == [0, 0]
    assert hidden.grad.abs().sum() == weight.grad.abs().sum() == 0


def test_the_full_logits_matrix_is_never_built():
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    hidden, weight, labels = inputs(256, vocabulary=2000, hidden_size=4)
    with Watch():
        log_probs, entropy = linear_log_probs(hidden, weight, labels, temperature=1.0, chunk_size=16)
        (log_probs + entropy).sum().backward()
    assert largest == 16 * 2000


def logit_grad_squared(logits, labels):
    """|d log p[label] / d logits|^2 of each row, by autograd in float64."""
    logits = logits.detach().double().requires_grad_()
    (grad,) = torch.autograd.grad(logits.log_softmax(-1).gather(1, labels[:, None]).sum(), (logits,))
    return grad.square().sum(-1)


def test_the_squared_gradient_in_the_logits_is_autograds_for_any_chunk():
    hidden, weight, labels = inputs(9)
    expected = logit_grad_squared(hidden @ weight.T / 0.5, labels)
    for chunk_size in (None, 4):
        log_probs, squares = linear_log_probs(
            hidden, weight, labels, temperature=0.5, chunk_size=chunk_size, statistic="logit_grad_squared"
        )
        assert not squares.requires_grad and log_probs.requires_grad
        torch.testing.assert_close(squares.double(), expected, rtol=1e-5, atol=0)


def test_the_squared_gradient_keeps_its_digits_where_the_label_is_nearly_certain():
    hidden = torch.linspace(0, 20, 100)[:, None]  # 1 - p of the first label: from 0.75 down to 4e-9
    weight = torch.tensor([[1.0], [0.0], [-0.5], [0.0]])
    for label in (0, 1):
        labels = torch.full((100,), label)
        squares = linear_log_probs(hidden, weight, labels, temperature=1.0, statistic="logit_grad_squared")[1]
        torch.testing.assert_close(squares.double(), logit_grad_squared(hidden @ weight.T, labels), rtol=1e-5, atol=0)
