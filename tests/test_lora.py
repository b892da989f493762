"""Adapters: one weight for trainer, engine and merged model, gradients of autograd and of peft, and what is refused."""

import json
import os
import re
import shutil
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from lib.config.flags import parse_args
from lib.dist import SINGLE
from lib.errors import DamagedCheckpoint, UserError
from lib.launch.checks import trained_shapes
from lib.model.adapter_start import cache_file, principal_factors
from lib.model.lora import AdaptedLinear, LoRAConfig, initial_factor
from lib.storage.adapter import ADAPTER_FILE, Adapter, adapted_weights, effective_weight, hash_tensor, read_adapter
from lib.storage.model_folder import check_model_files
from lib.storage.weights import hash_tensors, open_weights
from merge import MergeConfig, precision
from tests.lora_worker import LORA, STEPS, noise
from tests.merge_checkpoints import loaded, merged, refusal, weights
from tests.prefork import prefork
from tests.tiny import make_model, make_rollouts, make_tokenizer
from train_grpo import GRPOConfig

LAYOUTS = {
    "1 rank": (1, 1, "float32", "kaiming"), "tensor parallel 2": (2, 2, "float32", "kaiming"),
    "3 ranks": (3, 1, "float32", "kaiming"), "bfloat16": (1, 1, "bfloat16", "kaiming"),
    "pissa": (1, 1, "float32", "pissa"), "pissa, tensor parallel 2": (2, 2, "float32", "pissa"),
    "pissa, bfloat16": (1, 1, "bfloat16", "pissa"),
}  # fmt: skip
MATRICES = 14  # of two layers


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model with biases; untied."""
    folder = make_model(tmp_path_factory.mktemp("lora") / "base", kind="qwen2", tied=False, random_norms=True)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def results(base):
    """{layout: what the worker found}. Each of PiSSA's has an empty cache at first, the others read what it wrote."""
    return {layout: run(layout, base) for layout in LAYOUTS}


def run(layout, base):
    """What the worker finds."""
    num_ranks, tp_size, dtype, init = LAYOUTS[layout]
    out = base.parent / f"{layout}.pt"
    words = ("-m", "tests.lora_worker", str(base), str(out), str(tp_size), dtype, init)
    done = prefork(num_ranks, *words, vllm=True, XDG_CACHE_HOME=str(base.parent / f"cache of {layout}"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return torch.load(out)


@pytest.fixture(params=LAYOUTS)
def found(request, results):
    return results[request.param]


def test_a_policy_begins_as_its_base_model_to_the_bit(found):
    assert found["step 0"] and found["step 0 log-probs"]
    assert len(found["trained"]) == 2 * MATRICES
    has_start = any(name.endswith("lora_A0") for name in found["start"])
    for name, factor in found["start"].items():
        expected = torch.zeros(factor.shape)
        if name.endswith("lora_A") and not has_start:
            expected = initial_factor(name, factor.shape, seed=3)
        assert bool(factor.any()) if name.endswith("0") else torch.equal(factor, expected), name


def test_pissa_begins_at_the_same_factors_on_any_number_of_ranks(results, base):
    one, two = (results[layout]["start"] for layout in ("pissa", "pissa, tensor parallel 2"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    lora, own = LORA["pissa"], weights(base)
    for name in (name for name in one if name.endswith("lora_A0")):
        weight = name.replace("lora_A0", "weight")
        found = principal_factors(weight, own[weight], rank=lora.rank, scale=lora.scale)
        assert all(map(torch.equal, found, (one[name], one[name.replace("A0", "B0")])))


def test_pissas_factors_are_kept_for_the_next_run_on_the_same_weights(results, base, tmp_path, monkeypatch):
    for layout in ("pissa", "pissa, tensor parallel 2", "pissa, bfloat16"):
        assert results[layout]["cached"] == [False, True, True, True]
    [file] = (base.parent / "cache of pissa" / "lockstep" / "pissa").iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(base.parent / "cache of pissa"))
    hashes = {name: digest for name, digest in hash_tensors(base, SINGLE).items() if name.endswith("_proj.weight")}
    precision = "torch.float32 cpu"
    assert cache_file(LORA["pissa"], hashes, precision) == file
    others = {
        cache_file(replace(LORA["pissa"], rank=5), hashes, precision),
        cache_file(LORA["pissa"], hashes | {"x": "0"}, precision),
        cache_file(LORA["pissa"], hashes, "torch.bfloat16 cuda"),
    }
    assert len(others | {file}) == 4
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert cache_file(LORA["pissa"], hashes, precision) is None


def test_pissa_begins_at_the_largest_singular_directions():
    generator = torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(size, 192, generator=generator).double())[0] for size in (256, 192))
    values = 1 / torch.arange(1, 193).double()  # falls as those of trained weights
    state = torch.get_rng_state()
    a0, b0 = (each.double() for each in principal_factors("q", ((u * values) @ v.T).float(), rank=8, scale=2.0))
    assert torch.equal(torch.get_rng_state(), state)
    for found, exact in ((a0.T, v), (b0, u)):
        cosines = torch.linalg.svdvals(exact[:, :8].T @ torch.linalg.qr(found)[0])  # of the angles between the spaces
        assert float(cosines.min()) > 0.999
    assert torch.allclose(torch.linalg.svdvals(2 * b0 @ a0)[:8], values[:8], rtol=1e-3)
    assert bool((a0.gather(1, a0.abs().argmax(1, keepdim=True)) > 0).all())


def test_pissa_begins_as_kaiming_where_the_weight_is_zero():
    """As of layers that were added to a model: gradients of A and B are 0 where A0 and B0 are."""
    a0, b0 = principal_factors("q", torch.zeros(24, 16), rank=4, scale=2.0)
    assert torch.equal(a0, initial_factor("q", (4, 16), seed=0)) and bool((a0 != 0).all()) and not b0.any()
    lower = torch.zeros(24, 16)
    lower[0, 0] = 3.0
    a0, b0 = principal_factors("q", lower, rank=4, scale=2.0)
    assert torch.allclose(2 * b0 @ a0, lower, atol=1e-6) and bool(a0.any(1).all())


def test_the_base_model_never_changes_and_the_policy_without_its_adapter_is_it(found):
    assert found["base is as it was"] and found["reference"]
    assert found["changed"] > 0.1
    assert found["held"] == sorted(found["trained"])  # moments, of adapters alone


def test_matrices_that_the_engines_loader_splits_are_made_whole_before_they_are_copied(results, tmp_path):
    """Of a family whose files have query, key and value in one, gate and up in another."""
    assert results["1 rank"]["in place"] and results["bfloat16"]["in place"]
    base = make_model(tmp_path / "base", kind="phi3", tied=False, random_norms=True)
    make_tokenizer(base)
    found = run("1 rank", base)
    assert not found["in place"] and found["compared"] == 15 and found["function"] < 1e-5
    assert "1 tensors differ in bits" in str(found["scaled"]) and torch.equal(found["own"], found["plain"])


def test_the_engine_holds_the_weights_that_the_trainer_multiplies_with(found, request):
    is_bfloat16 = "bfloat16" in request.node.name
    assert found["compared"] == 17
    assert found["function"] < (0.05 if is_bfloat16 else 1e-5)
    for error in ("scaled", "flipped"):
        assert re.search("1 tensors differ in bits, such as model.layers.1.mlp.down_proj", str(found[error])), error


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_merged_model_is_the_engines_to_the_bit_and_computes_what_the_policy_does(results, base, layout):
    found, dtype = results[layout], LAYOUTS[layout][2]
    ours = weights(base.parent / layout / "merged")
    assert ours.keys() == found["merged"].keys()
    assert all(torch.equal(ours[name], found["merged"][name]) for name in ours)
    own = weights(base)
    changed = [name for name in ours if not torch.equal(ours[name], own[name].to(ours[name].dtype))]
    assert len(changed) == MATRICES
    assert torch.equal(found["own"], found["plain"]), float((found["own"] - found["plain"]).abs().max())
    assert loaded(base.parent / layout / "merged", dtype=getattr(torch, dtype)) is not None


def test_gradients_depend_on_neither_ranks_nor_micro_batches_nor_recomputation(results):
    expected = results["1 rank"]["gradients  10000"]
    assert len(expected) == 2 * MATRICES
    for layout in ("1 rank", "tensor parallel 2", "3 ranks"):
        for case, gradients in results[layout].items():
            if case.startswith("gradients"):
                assert gradients.keys() == expected.keys()
                for name, gradient in gradients.items():
                    assert torch.allclose(
                        gradient, expected[name], rtol=1e-4, atol=1e-5 * float(expected[name].abs().max())
                    )
    for case in ("gradients reshard 30", "gradients recompute 10000"):
        assert results["bfloat16"][case].keys() == expected.keys()


def test_pissas_export_is_an_ordinary_adapter_of_the_model_as_it_was(results, base, tmp_path):
    from peft import PeftModel

    folder = merged(base.parent / "pissa" / "actor", tmp_path / "adapter", adapter=True, skip_verify=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2 * LORA["pissa"].rank, 2 * LORA["pissa"].alpha)
    model = PeftModel.from_pretrained(loaded(base, dtype=torch.float32), folder)
    plain = loaded(base.parent / "pissa" / "merged", dtype=torch.float32)
    ids = torch.randint(0, 200, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-3)
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, loaded(base, dtype=torch.float32)(ids).logits)


def test_gradients_and_ten_steps_are_pefts(results, base, tmp_path):
    """peft on the unmerged model, loaded from what merge.py --adapter writes."""
    from peft import PeftModel

    lora, found = LORA["kaiming"], results["1 rank"]
    folder = merged(base.parent / "1 rank" / "actor", tmp_path / "adapter", adapter=True, skip_verify=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["bias"]) == (lora.rank, lora.alpha, "none")
    model = PeftModel.from_pretrained(loaded(base, dtype=torch.float32), folder, is_trainable=True)
    theirs = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): parameter
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    assert theirs.keys() == found["learned"].keys()
    assert all(torch.equal(theirs[name], found["learned"][name]) for name in theirs)
    plain = loaded(base.parent / "1 rank" / "merged", dtype=torch.float32)
    ids = torch.randint(0, 200, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-4)
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, loaded(base, dtype=torch.float32)(ids).logits)

    with torch.no_grad():
        for name, parameter in theirs.items():
            parameter.copy_(found["start"][name] if name.endswith("lora_A") else noise(name, parameter.shape))
    optimizer = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        loss_of(model).backward()
        if step == 0:
            for name, gradient in found["gradients  10000"].items():
                assert torch.allclose(gradient, theirs[name].grad, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in theirs.items():
        assert torch.allclose(parameter, found["learned"][name], atol=2e-4), name


def loss_of(model):
    """The worker's, a response at a time."""
    total = 0.0
    for rollout in make_rollouts():
        if rollout.score.score is None:
            continue
        prompt, response = rollout.sample.prompt_ids, torch.tensor(rollout.response_ids)
        logits = model(torch.tensor([prompt + rollout.response_ids])).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        total = total - (log_probs * (1 + response % 5)).sum()
    return total


# ---- The one weight ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_effective_weight_is_an_exact_sum_rounded(dtype):
    """On a CPU also in the last bit, of which processors of other kinds make the same: of 3 million numbers some 10 are
    otherwise where the sum is float32's."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2048, 1536), (32, 1536), (2048, 32))
    weight, a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    exact = weight.double() + 0.5 * (b.double() @ a.double())
    found = effective_weight(weight, a, b, 0.5)
    assert torch.equal(found, exact.to(dtype))
    assert not torch.equal(found, weight + 0.5 * (b @ a))
    assert torch.equal(effective_weight(weight, a, torch.zeros_like(b), 0.5), weight)


# ---- Backward, compiled and not ----


@pytest.mark.parametrize("init", ["kaiming", "pissa"])
@pytest.mark.parametrize(("rank", "scale"), [(1, 2.7), (3, 1.0), (8, 0.5)])
@pytest.mark.parametrize("shape", [(7,), (2, 3)])
@pytest.mark.parametrize("of_input", [True, False])
def test_a_layer_has_the_gradients_of_the_whole_weight(init, rank, scale, shape, of_input):
    torch.manual_seed(0)
    base = nn.Linear(20, 12).requires_grad_(False)
    layer = AdaptedLinear(base, LoRAConfig(rank=rank, alpha=scale * rank, init=init))
    with torch.no_grad():
        for factor in (layer.lora_A, layer.lora_B, layer.lora_A0, layer.lora_B0):
            if factor is not None:
                factor.normal_()
    x = torch.randn(*shape, 20, requires_grad=of_input)
    weights = torch.randn(*shape, 12)
    (layer(x) * weights).sum().backward()

    expected = gradients_of_the_whole_weight(layer, x, weights)
    for found, exact in zip((layer.lora_A, layer.lora_B, x)[: 2 + of_input], expected, strict=False):
        torch.testing.assert_close(found.grad.double(), exact, rtol=1e-4, atol=1e-4)


def gradients_of_the_whole_weight(layer, x, weights):
    """Those of A, B and x, for sum(layer(x) * weights), by autograd in float64."""
    a, b, exact_x = (it.detach().double().requires_grad_() for it in (layer.lora_A, layer.lora_B, x))
    added = b @ a
    if layer.lora_A0 is not None:
        a0, b0 = layer.lora_A0.detach().double(), layer.lora_B0.detach().double()
        added = (b0 + b) @ (a0 + a) - b0 @ a0
    whole = layer.weight.double() + layer.scale * added
    result = (nn.functional.linear(exact_x, whole, layer.bias.double()) * weights.double()).sum()
    return torch.autograd.grad(result, (a, b, exact_x))


def test_what_a_layer_computes_backward_is_an_operation_as_torch_wants_it():
    from lib.model.lora import _input_gradients

    for rank in (4, 3):  # with 20 columns, none and one that stands behind
        sizes = ((7, 12), (12, 20), (rank, 20), (12, rank))
        grads, weight, a, b = (torch.randn(size) for size in sizes)
        torch.library.opcheck(_input_gradients, (grads, weight, a, b, 0.5, b))


@pytest.mark.parametrize("init", ["kaiming", "pissa"])
def test_a_compiled_layer_has_the_gradients_of_one_that_is_not(init):
    """Where forward and backward are cut from one graph, in which both make the weight."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(AdaptedLinear(nn.Linear(12, 12), LoRAConfig(rank=3, init=init)) for _ in range(2)))
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.normal_()
    x = torch.randn(3, 5, 12)

    def gradients(function):
        inputs = x.clone().requires_grad_()
        trained = [p for name, p in layers.named_parameters() if name.endswith(("lora_A", "lora_B"))]
        return torch.autograd.grad(function(inputs).square().sum(), [inputs, *trained])

    with patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "0"}), torch._dynamo.config.patch(disable=False):
        compiled = torch.compile(layers.forward, backend="aot_eager_decomp_partition", fullgraph=True)
        found = gradients(compiled)
        assert torch._dynamo.explain(layers.forward)(x).graph_count == 1
    for ours, expected in zip(found, gradients(layers.forward), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("init", ["kaiming", "pissa"])
def test_one_graph_serves_every_number_of_tokens(init):
    """What is not compiled with a symbol in its place is compiled again for every micro-batch."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.manual_seed(0)
    layers = nn.Sequential(*(AdaptedLinear(nn.Linear(12, 12), LoRAConfig(rank=3, init=init)) for _ in range(2)))
    counted = []
    with patch.dict(os.environ, {"TORCHDYNAMO_DISABLE": "0"}), torch._dynamo.config.patch(disable=False):
        counter = CompileCounterWithBackend("aot_eager_decomp_partition")
        compiled = torch.compile(layers.forward, backend=counter, fullgraph=True, dynamic=True)
        for num_tokens in (5, 9, 14):
            compiled(torch.randn(1, num_tokens, 12, requires_grad=True)).square().sum().backward()
            counted.append(counter.frame_count)
    assert counted == counted[:1] * 3


# ---- What is refused ----


def test_options_are_checked():
    for words, expected in (
        (dict(rank=-1), "rank"), (dict(rank=4, alpha=0.0), "alpha"), (dict(rank=4, alpha=1e300), "alpha"),
        (dict(alpha=16.0), "--lora.alpha means nothing"),
        (dict(targets=("q_proj",)), "--lora.targets means nothing"), (dict(rank=4, targets=()), "targets"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=expected):
            LoRAConfig(**words)
    recipe = GRPOConfig(lora=LoRAConfig(rank=4, targets=("q_proj",)))
    for words in (["--lora.targets", "all-linear"], ["--lora.alpha=32"]):
        told = rf"means nothing without adapters; .* say --lora\.rank 0 {words[0][:9]}[a-z]+ (all-linear|32)"
        with pytest.raises(UserError, match=told):
            parse_args(GRPOConfig(), words)
    assert parse_args(GRPOConfig(), ["--lora.rank", "0", "--lora.alpha", "32"]).lora == LoRAConfig()
    assert parse_args(recipe, ["--lora.rank", "0", "--lora.targets", "all-linear"]).lora == LoRAConfig()
    assert parse_args(recipe, ["--lora.alpha", "32"]).lora == recipe.lora


def test_a_merge_rounds_no_sum_to_a_narrower_grid_unless_told(tmp_path):
    for named, trained, told, expected in (
        ("bfloat16", "float32", "auto", torch.float32), ("float16", "bfloat16", "auto", torch.bfloat16),
        ("bfloat16", "bfloat16", "auto", torch.bfloat16), ("float32", "bfloat16", "auto", torch.float32),
        (None, "float32", "auto", None), ("bfloat16", "float32", "bfloat16", torch.bfloat16),
        ("bfloat16", None, "auto", torch.bfloat16), ("bfloat16", "float32", "keep", None),
    ):  # fmt: skip
        (tmp_path / "huggingface").mkdir(exist_ok=True)
        (tmp_path / "huggingface" / "config.json").write_text(json.dumps({"dtype": named}))
        adapter = trained and Adapter(base="x", dtype=trained, scale=1.0, tensors={})
        assert precision(MergeConfig(dtype=told), tmp_path, adapter) is expected


def test_targets_that_match_nothing_are_told_with_the_modules_that_there_are(base):
    files = check_model_files(str(base), max_prompt_len=8, max_response_len=8)
    with pytest.raises(UserError, match=r"has not; q_prj; found q_proj, k_proj, .*, or all-linear"):
        trained_shapes(LoRAConfig(rank=4, targets=("q_prj",)), files)
    with pytest.raises(UserError, match="no module is left to adapt"):
        trained_shapes(LoRAConfig(rank=4, targets=("q_proj",), exclude=("q_proj",)), files)
    with pytest.raises(
        UserError, match=r"--lora.rank 65 is more than a matrix has; .*k_proj.weight of .*; found \[64, 128\]"
    ):
        trained_shapes(LoRAConfig(rank=65), files)
    some = adapted_weights(files.shapes, targets=("all-linear",), exclude=("gate_proj", "up_proj", "down_proj"))
    assert [name.split(".")[-2] for name in some] == 2 * ["q_proj", "k_proj", "v_proj", "o_proj"]


def test_another_base_of_equal_shapes_is_refused(results, base, tmp_path):
    actor = base.parent / "1 rank" / "actor"
    other = make_model(tmp_path / "other", kind="qwen2", tied=False, seed=1)
    with pytest.raises(UserError, match=r"the adapter was trained on another model; .*other; found other numbers in"):
        merged(actor, tmp_path / "out", base=str(other), skip_verify=True)
    assert not (tmp_path / "out").exists()
    fused = make_model(tmp_path / "fused", kind="phi3")  # whose tensors have other names
    for folder, told in (
        (fused, r"the adapter was trained on another model; .*fused; found .* in model\.layers\.0"),
        (
            tmp_path / "none",
            r"the model under the adapter is not there; .*none; found nothing, .* as --base, or beside --adapter",
        ),
    ):
        with pytest.raises(UserError, match=told):
            merged(actor, tmp_path / "out", base=str(folder), skip_verify=True)
    adapter = read_adapter(actor / "huggingface")
    assert hash_tensors(base, SINGLE) == adapter.tensors
    swapped = load_file(base / "model.safetensors")
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    assert hash_tensor(swapped[names[0]]) != hash_tensor(swapped[names[1]])


def test_a_base_that_is_gone_and_a_damaged_description_are_told(results, base, tmp_path):
    actor = tmp_path / "actor"
    shutil.copytree(base.parent / "1 rank" / "actor", actor)
    file = actor / "huggingface" / ADAPTER_FILE
    text = file.read_text()
    file.write_text(text.replace(str(base), str(tmp_path / "moved")))
    with pytest.raises(UserError, match=r"the model under an adapter is gone; .*moved, .*merge\.py --base DIR"):
        open_weights(actor / "huggingface")
    out = merged(actor, tmp_path / "out", base=str(base), skip_verify=True)
    assert weights(out).keys() == weights(base).keys()
    assert not (out / ADAPTER_FILE).exists()
    for damage in (
        "{",
        "[]",
        '{"base": 1}',
        text.replace('"scale": 2.0', '"scale": "x"'),
        text.replace("float32", "int8"),
        re.sub(r'(": )"[0-9a-f]{16}"', r"\g<1>7", text, count=1),
    ):
        file.write_text(damage)
        with pytest.raises(DamagedCheckpoint, match="adapter is not described as a run does it"):
            open_weights(actor / "huggingface")
    file.unlink()
    file.mkdir()
    with pytest.raises(DamagedCheckpoint, match="found a folder"):
        open_weights(actor / "huggingface")


def test_factors_that_do_not_fit_their_weight_are_told(results, base, tmp_path):
    actor = tmp_path / "actor"
    shutil.copytree(base.parent / "1 rank" / "actor", actor)
    [file] = (actor / "model").iterdir()
    with safe_open(file, "pt") as stream:
        about, tensors = stream.metadata(), {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    name = "model.layers.0.mlp.up_proj.lora_A"
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, file, about)
    text = refusal(DamagedCheckpoint, actor, tmp_path / "out", skip_verify=True)
    assert "an adapter's factors do not fit their weight; model.layers.0.mlp.up_proj.weight" in text
    save_file(tensors | {name.replace("_A", "_B"): 1e30 * tensors[name.replace("_A", "_B")]}, file, about)
    text = refusal(UserError, actor, tmp_path / "out", skip_verify=True, dtype="float16")
    assert "a weight is too large for float16; model.layers.0.mlp.up_proj.weight" in text


def test_options_about_an_adapter_need_one(base, tmp_path):
    actor = tmp_path / "actor"
    shutil.copytree(base.parent / "1 rank" / "actor", actor)
    text = refusal(UserError, actor, tmp_path / "out", adapter=True, test_hf_dir=str(base), skip_verify=True)
    assert "found --test-hf-dir, expected it alone" in text
    text = refusal(UserError, actor, tmp_path / "out", adapter=True, dtype="float16", skip_verify=True)
    assert "found --dtype, expected it alone" in text
    other = make_model(tmp_path / "other", kind="qwen2", tied=False, seed=1)
    options = dict(adapter=True, skip_verify=True)
    assert "trained on another model" in refusal(UserError, actor, tmp_path / "out", base=str(other), **options)
    assert "is not there" in refusal(UserError, actor, tmp_path / "out", base=str(tmp_path / "none"), **options)
    checkpoint = str(base.parent / "1 rank" / "actor" / "huggingface")
    text = refusal(UserError, actor, tmp_path / "out", base=checkpoint, **options)
    assert "found a checkpoint of a run" in text
    published = merged(actor, tmp_path / "published", base="user/model", **options)
    assert json.loads((published / "adapter_config.json").read_text())["base_model_name_or_path"] == "user/model"
    (actor / "huggingface" / ADAPTER_FILE).unlink()
    assert "--adapter needs an adapter" in refusal(UserError, actor, tmp_path / "out", adapter=True, skip_verify=True)
    assert "of another system" in refusal(UserError, actor, tmp_path / "out", skip_verify=True)
