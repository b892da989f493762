"""Our kernels on a GPU, against slow references in float64 on the host."""

import numpy as np
import pytest
import torch

from tests.gpu.test_gpu import relative_error
from tests.test_lora import gradients_of_the_whole_weight

pytestmark = pytest.mark.gpu
WORD = np.uint64(2**32 - 1)


def philox(seed, c0, c1):
    """Four arrays of 32 random bits, counters (c0, c1, 0, 0), 7 rounds (Salmon et al. 2011, figure 2)."""
    c0, c1, c2, c3 = c0.astype(np.uint64), np.full(len(c0), c1, np.uint64), np.uint64(0), np.uint64(0)
    k0, k1 = np.uint64(seed) & WORD, np.uint64(seed) >> np.uint64(32)
    for _ in range(7):
        left, right = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        high, low = left >> np.uint64(32), left & WORD
        c0, c1, c2, c3 = (right >> np.uint64(32)) ^ c1 ^ k0, right & WORD, high ^ c3 ^ k1, low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & WORD, (k1 + np.uint64(0xBB67AE85)) & WORD
    return c0, c1, c2, c3


def expected_token(logits, seed, position, temperature, quarter):
    """(token, all log-probs, by how much the token won its race)."""
    places = np.arange(len(logits))
    block, inside = np.divmod(places, 4 * quarter)
    which, place = np.divmod(inside, quarter)
    bits = np.stack(np.broadcast_arrays(*philox(seed, block * quarter + place, position)))[which, places]
    exponential = -np.log1p(-(bits.astype(np.float64) + 0.5) / 2**32)
    log_probs = logits - logits.max()
    log_probs = log_probs - np.log(np.exp(log_probs).sum())
    score = log_probs if temperature == 0 else log_probs - np.log(exponential)
    second, first = np.sort(score)[-2:]
    return int(score.argmax()), log_probs, first - second


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(151_936, torch.bfloat16), (5_003, torch.float32), (40, torch.float32)]
)
def test_the_race_takes_the_token_and_the_log_prob_of_the_slow_one(vocab_size, dtype):
    from lib.engine.fast.gumbel import NUM_QUARTER, race

    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(200, vocab_size + 24, device="cuda", generator=generator).mul(3).to(dtype)
    logits = rows[:, :vocab_size]  # rows do not lie end to end
    logits[10:20, : vocab_size // 2] = float("-inf")  # what top-p leaves
    logits[20:30] *= 30
    logits[30:60, ::7] = 500  # ties: the first one wins where the temperature is 0
    seeds = torch.randint(0, 2**62, (150,), device="cuda", generator=generator)
    temperatures = torch.ones(150, device="cuda")
    temperatures[::7] = 0
    requests = torch.randint(0, 150, (200,), device="cuda", dtype=torch.int32, generator=generator)
    positions = torch.randint(0, 5_000, (200,), device="cuda", generator=generator)
    tokens, log_probs = race(logits, requests, seeds, positions, temperatures)
    assert tokens.dtype == torch.int64 and log_probs.dtype == torch.float32
    checked = 0
    for row, request in enumerate(requests.tolist()):
        token, expected, lead = expected_token(
            logits[row].double().cpu().numpy(), seeds[request].item(), positions[row].item(),
            temperatures[request].item(), NUM_QUARTER,
        )  # fmt: skip
        if lead > 1e-4 or temperatures[request] == 0:
            checked += 1
            assert tokens[row] == token, (row, lead)
        of_token = expected[tokens[row].item()]
        assert abs(log_probs[row].item() - of_token) < 1e-5 * max(1, abs(of_token))
    assert checked > 150
    order = torch.randperm(200, device="cuda", generator=generator)
    again = race(rows[order][:, :vocab_size], requests[order], seeds, positions[order], temperatures)
    assert torch.equal(again[0], tokens[order]) and torch.equal(again[1], log_probs[order])


@pytest.mark.parametrize("vocab_size", [151_936, 5_003, 40])
def test_logits_that_are_no_numbers_give_a_token_all_the_same_and_no_log_prob(vocab_size):
    from lib.engine.fast.gumbel import race

    logits = torch.randn(5, vocab_size, device="cuda")
    logits[0] = logits[4] = float("nan")
    logits[1, -3] = float("nan")
    logits[2] = float("-inf")
    logits[3, 1] = float("inf")
    requests = torch.zeros(5, dtype=torch.int32, device="cuda")
    for temperature in (0.0, 1.0):
        temperatures = torch.full((1,), temperature, device="cuda")
        tokens, log_probs = race(logits, requests, requests[:1].long(), requests.long(), temperatures)
        assert ((tokens >= 0) & (tokens < vocab_size)).all() and log_probs.isnan().all()


def test_exponential_numbers_are_exact_from_the_smallest_to_the_largest():
    import triton
    import triton.language as tl

    from lib.engine.fast.gumbel import _exponential

    @triton.jit
    def kernel(bits_ptr, out_ptr, count: tl.constexpr):
        place = tl.arange(0, count)
        tl.store(out_ptr + place, _exponential(tl.load(bits_ptr + place)))

    powers = 2 ** np.arange(32, dtype=np.int64)
    bits = np.concatenate([powers, powers + 1, 3 * powers, 5 * powers, [0, 7, 2**32 - 1, 2**32 - 512, 2**32 - 99_999]])
    bits = np.unique(bits[bits < 2**32])
    padded = np.concatenate([bits, np.full(256 - len(bits), 5)]).astype(np.uint32)
    out = torch.empty(256, device="cuda")
    kernel[(1,)](torch.from_numpy(padded).cuda(), out, 256)
    expected = -np.log1p(-np.minimum((padded + 0.5) / 2**32, 1 - 2**-24))
    errors = np.abs(out.double().cpu().numpy() / expected - 1)
    print(errors.max(), padded[errors.argmax()])
    assert errors.max() < 2e-4  # 9e-5 where the series ends: the GPU's logarithm near 1


def test_the_race_is_won_as_often_as_the_probabilities_say():
    from lib.engine.fast.gumbel import race

    count, places = 400_000, [3, 1500, 2500, 3999, 4500]
    logits = torch.full((1, 5000), -8.0, device="cuda")
    logits[0, places] = torch.tensor([2.0, 1.5, 1.0, -3.0, 3.0], device="cuda")
    requests, ones = torch.zeros(count, dtype=torch.int32, device="cuda"), torch.ones(1, device="cuda")
    tokens, _ = race(logits.expand(count, -1), requests, requests[:1].long() + 7, torch.arange(count).cuda(), ones)
    expected = logits[0].double().softmax(-1)[places]
    found = torch.stack([(tokens == place).double().mean() for place in places])
    deviations = (found - expected) / (expected * (1 - expected) / count).sqrt()
    print(expected.tolist(), found.tolist())
    assert deviations.abs().max() < 4.5
    rest = torch.bincount(tokens, minlength=5000).double()
    rest[places] = 0
    assert abs(rest.sum() / count / (1 - expected.sum()) - 1) < 0.05 and rest.max() < 0.002 * rest.sum()


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(16, 8, 128), (4, 2, 64), (6, 1, 96)])
def test_packed_attention_by_cudnn_is_as_exact_as_torchs(heads, kv_heads, dim):
    from lib.model.attention import _attend_each, _attend_varlen
    from lib.model.cudnn_attention import attend_by_cudnn, has_cudnn

    assert has_cudnn()
    for lens in ([1, 700, 130, 128, 3, 64], [2_500, 90], [5]):
        borders = torch.tensor([0, *np.cumsum([*lens, 0, 0, 0])], dtype=torch.int32, device="cuda")
        total, longest, scale = sum(lens), max(lens), dim**-0.5
        generator = torch.Generator("cuda").manual_seed(total)
        sizes = ((total, heads, dim), (total, kv_heads, dim), (total, kv_heads, dim))
        plain = [torch.randn(size, device="cuda", generator=generator).bfloat16() for size in sizes]
        slope = torch.randn(sizes[0], device="cuda", generator=generator).bfloat16()
        results = []
        for dtype, attend in (
            (torch.float64, lambda *x: _attend_each(*x[:6], (-1, 0))),
            (torch.bfloat16, lambda *x: _attend_varlen(*x[:6], (-1, 0))),
            (torch.bfloat16, lambda *x: attend_by_cudnn(*x)),
            (torch.bfloat16, torch.compile(lambda *x: attend_by_cudnn(*x), fullgraph=True, dynamic=True)),
        ):
            inputs = [x.to(dtype).detach().requires_grad_() for x in plain]
            out = attend(*inputs, borders, longest, scale)
            out.backward(slope.to(dtype))
            results.append((out.detach(), *(x.grad for x in inputs)))
        exact, torchs, *ours = results
        for result in ours:
            errors = [
                (relative_error(a, x), relative_error(b, x)) for x, a, b in zip(exact, torchs, result, strict=True)
            ]
            print(lens, errors)
            assert all(of_ours < 1.1 * of_torch + 1e-4 < 0.02 for of_torch, of_ours in errors)


@pytest.mark.parametrize("sliding_window", [None, 50])
def test_packed_attention_as_transformers_calls_it(sliding_window):
    """Tensors that lie head by head, another scale, several compiled sizes, more tokens than one workspace is for, and
    a stream of its own."""
    import lib.model.attention as attention

    attention.register_packed_attention()
    assert attention._has_cudnn
    compiled = torch.compile(attention.packed_attention, fullgraph=True, dynamic=True)
    for count, longest in ((3, 60), (40, 600), (20, 200)):
        generator = torch.Generator("cuda").manual_seed(count)
        lens = torch.randint(1, longest, (count,), generator=generator, device="cuda").tolist()
        lens[0] = longest
        borders = torch.tensor([0, *np.cumsum([*lens, *[0] * (-count % 16)])], dtype=torch.int32, device="cuda")
        plain = [torch.randn(1, h, sum(lens), 64, device="cuda", generator=generator).bfloat16() for h in (8, 4, 4)]
        slope = torch.randn(1, sum(lens), 8, 64, device="cuda", generator=generator).bfloat16()
        rest = dict(scaling=0.3, cu_seq_lens_q=borders, max_length_q=longest, sliding_window=sliding_window)
        results = []
        for dtype, attend in ((torch.float64, attention.packed_attention), (torch.bfloat16, compiled)):
            torch.cuda.synchronize()
            with torch.cuda.stream(torch.cuda.Stream()):
                inputs = [x.to(dtype).detach().requires_grad_() for x in plain]
                out, _ = attend(torch.nn.Identity(), *inputs, None, **rest)
                out.backward(slope.to(dtype))
                torch.cuda.synchronize()
            results.append((out.detach(), *(x.grad for x in inputs)))
        errors = [relative_error(ours, exact) for exact, ours in zip(*results, strict=True)]
        print(count, sum(lens), errors)
        assert all(0 < error < 0.02 for error in errors)


def test_cudnn_works_in_what_the_estimate_of_memory_says():
    from lib.model.cudnn_attention import _plan

    for num_seqs, longest in ((16, 1024), (128, 4608)):
        _, _, size = _plan(True, 0, num_seqs, longest, 16_384, 16, 128, 8, 0.1)
        assert 1 <= size / (12 * 16 * 128 * 16_384) < 1.01


@pytest.mark.parametrize("shape", [(96, 64), (2048, 1024), (100, 77), (1, 300)])
@pytest.mark.parametrize("rank", [1, 8, 32, 100])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_an_adapter_is_added_in_float32_and_rounded_once(shape, rank, scale):
    from lib.storage.adapter import effective_weight, put_effective_weight_

    (num_rows, num_columns), generator = shape, torch.Generator("cuda").manual_seed(0)

    def draw(*size):
        return torch.randn(size, device="cuda", generator=generator).bfloat16()

    weight, a, b = draw(num_rows, num_columns), draw(rank, num_columns), draw(num_rows, rank)
    exact = weight.double() + scale * (b.double() @ a.double())
    found = effective_weight(weight, a, b, scale)
    size = weight.double().abs() + scale * (b.double().abs() @ a.double().abs())
    assert bool(((found.double() - exact).abs() <= 0.501 * 2**-7 * exact.abs() + 1e-6 * size).all())
    assert torch.equal(effective_weight(weight, a, torch.zeros_like(b), scale), weight)
    wider = torch.full((num_rows, num_columns + 24), 7.0, device="cuda", dtype=torch.bfloat16)
    put_effective_weight_(wider[:, :num_columns], weight, a, b, scale)
    assert torch.equal(wider[:, :num_columns], found) and bool((wider[:, num_columns:] == 7).all())
    put_effective_weight_(weight, weight, a, b, scale)
    assert torch.equal(weight, found)


@pytest.mark.parametrize("init", ["kaiming", "pissa"])
@pytest.mark.parametrize("rank", [3, 32])
def test_a_compiled_adapted_layer_has_the_gradients_of_the_whole_weight(rank, init):
    from lib.model.lora import AdaptedLinear, LoRAConfig

    torch.manual_seed(0)
    base = torch.nn.Linear(256, 192, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    layer = AdaptedLinear(base, LoRAConfig(rank=rank, alpha=2.0 * rank, init=init))
    factors = {name: getattr(layer, name) for name in ("lora_A", "lora_B", "lora_A0", "lora_B0")}
    for name, factor in factors.items():
        if factor is not None:
            drawn = (0.1 * torch.randn_like(factor)).bfloat16()
            setattr(layer, name, torch.nn.Parameter(drawn, requires_grad=name in ("lora_A", "lora_B")))
    x = torch.randn(1, 500, 256, device="cuda").bfloat16().requires_grad_()
    weights = torch.randn(1, 500, 192, device="cuda").bfloat16()
    (torch.compile(layer, fullgraph=True, dynamic=True)(x) * weights).sum().backward()

    expected = gradients_of_the_whole_weight(layer, x, weights)
    for found, exact in zip((layer.lora_A, layer.lora_B, x), expected, strict=True):
        assert relative_error(found.grad, exact) < 0.02
