"""An adapter's folder as peft writes it: read, and refused by name where ours would compute something else."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lib.config import parse_args
from lib.dist import SINGLE
from lib.errors import UserError
from lib.launch.checks import trained_shapes
from lib.model.lora import LoRAConfig
from lib.storage.adapter import Adapter, as_one_product, effective_weight
from lib.storage.model_folder import check_model_files
from lib.storage.peft_folder import CONFIG, WEIGHTS, export_adapter, read_peft
from lib.storage.weights import AdaptedFolder, hash_tensors
from lib.storage.whole_tensors import Shards
from tests.merge_checkpoints import loaded, weights
from tests.tiny import make_model, make_tokenizer
from train_grpo import GRPOConfig

RANK = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = make_model(tmp_path_factory.mktemp("peft") / "base", kind="qwen2", tied=False)
    make_tokenizer(folder)
    return folder


@pytest.fixture
def theirs(base, tmp_path):
    """What peft itself saves, with B that has learned."""
    from peft import LoraConfig, get_peft_model

    cfg = LoraConfig(r=RANK, lora_alpha=8, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(loaded(base, dtype=torch.float32), cfg)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs", model


@pytest.fixture
def ours(theirs, base, tmp_path):
    """The same adapter as merge.py --adapter writes it."""
    from dataclasses import dataclass

    adapter = read_peft(str(theirs[0]), "--lora.path")

    @dataclass
    class Whole:
        name: str

        def check(self):
            pass

        def read(self, dtype):
            return adapter.read(self.name)

    folder = tmp_path / "ours"
    folder.mkdir()
    shards = Shards(folder=folder, tensors={name: Whole(name) for name in adapter.shapes})
    about = Adapter(base=str(base), dtype="float32", scale=adapter.scale, tensors=hash_tensors(base, SINGLE))
    export_adapter(shards, about, folder, base=str(base))
    return folder


def change(folder, **entries):
    """Entries of its config, as somebody else wrote it."""
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


def rewrite(folder, change):
    """Its tensors, after `change`, below the same header."""
    with safe_open(folder / WEIGHTS, "pt") as stream:
        about = stream.metadata()
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, about)


def files(folder):
    return check_model_files(str(folder), max_prompt_len=8, max_response_len=8)


def test_pefts_own_folder_gives_the_weights_that_peft_merges(theirs, base):
    folder, model = theirs
    adapter = read_peft(str(folder), "--lora.path")
    assert (adapter.rank, adapter.alpha, adapter.scale) == (RANK, 8.0, 2.0)
    assert {*adapter.modules} == {"q_proj", "down_proj"} and len(adapter.shapes) == 8 and not adapter.base_hashes
    adapter.check_fits(files(base).shapes, base)
    about = Adapter(base=str(base), dtype="float32", scale=adapter.scale, tensors={})
    found, expected = AdaptedFolder(folder, about, adapter), model.merge_and_unload().state_dict()
    for name, weight in weights(base).items():
        assert torch.allclose(found.read(name), expected[name], atol=1e-6)
        assert torch.equal(found.read(name), weight) != name.endswith(("q_proj.weight", "down_proj.weight"))


def test_a_run_takes_rank_alpha_and_modules_from_the_folder(theirs, base):
    folder, _ = theirs
    lora = LoRAConfig(path=str(folder))
    assert (lora.rank, lora.alpha, {*lora.targets}) == (RANK, 8.0, {"q_proj", "down_proj"})
    assert trained_shapes(lora, files(base)).keys() == read_peft(str(folder), "--lora.path").shapes.keys()
    assert LoRAConfig(path=str(folder), rank=RANK, alpha=8.0) == lora
    assert LoRAConfig(path=str(folder), targets=lora.targets[::-1]) == lora
    for option in (dict(rank=8), dict(alpha=16.0), dict(targets=("k_proj",)), dict(init="pissa")):
        [name] = option
        said = f"has its own --lora.{name}; .*leave --lora.{name} out, or where a recipe gives it, say --lora.{name}"
        with pytest.raises(UserError, match=said):
            LoRAConfig(path=str(folder), **option)


@pytest.mark.parametrize("said", [("rank", "0"), ("alpha", "32"), ("targets", "all-linear"), ("rank", "8")])
def test_a_default_that_is_said_is_none_that_is_left_out(theirs, said):
    folder, _ = theirs
    name, word = said
    with pytest.raises(UserError, match=f"has its own --lora.{name}; .*found"):
        parse_args(GRPOConfig(), ["--lora.path", str(folder), f"--lora.{name}", word])
    own = ["--lora.rank", str(RANK), "--lora.alpha=8", "--lora.targets", "down_proj", "q_proj"]
    assert parse_args(GRPOConfig(), ["--lora.path", str(folder), *own]).lora == LoRAConfig(path=str(folder))


@pytest.mark.parametrize(
    "entry",
    [
        dict(use_rslora=True), dict(use_dora=True), dict(rank_pattern={"q_proj": 2}), dict(alpha_pattern={"q_proj": 1}),
        dict(bias="all"), dict(modules_to_save=["lm_head"]), dict(peft_type="LOHA"), dict(layers_to_transform=[0]),
        dict(fan_in_fan_out=True), dict(lora_bias=True), dict(alora_invocation_tokens=[5, 6]),
        dict(kasa_config={"beta": 1}), dict(use_bdlora={"nblocks": 2}), dict(arrow_config={"top_k": 2}),
        dict(monteclora_config={"n": 2}), dict(use_qalora=True),
    ],
    ids=lambda entry: next(iter(entry)),
)  # fmt: skip
def test_what_ours_would_compute_otherwise_is_refused_by_name(theirs, entry):
    folder, _ = theirs
    change(folder, **entry)
    with pytest.raises(UserError, match=f"computes in a way that this version has not; .*found {next(iter(entry))}"):
        read_peft(str(folder), "--lora.path")


def test_a_rank_above_a_matrixs_own_is_computed_with(base, tmp_path):
    """merge.py --adapter doubles PiSSA's rank, and peft takes any."""
    from peft import LoraConfig, get_peft_model

    smallest = min(min(shape) for name, shape in files(base).shapes.items() if name.endswith("k_proj.weight"))
    cfg = LoraConfig(r=smallest + 8, lora_alpha=8, target_modules=["k_proj"], init_lora_weights=False)
    model = get_peft_model(loaded(base, dtype=torch.float32), cfg)
    model.save_pretrained(tmp_path / "theirs")
    adapter = read_peft(str(tmp_path / "theirs"), "--lora.path")
    assert trained_shapes(LoRAConfig(path=str(tmp_path / "theirs")), files(base)) == adapter.shapes
    about = Adapter(base=str(base), dtype="float32", scale=adapter.scale, tensors={})
    found, expected = AdaptedFolder(tmp_path / "theirs", about, adapter), model.merge_and_unload().state_dict()
    assert all(torch.allclose(found.read(name), expected[name], atol=1e-5) for name in weights(base))
    with pytest.raises(UserError, match=f"--lora.rank {smallest + 8} is more than a matrix has"):
        trained_shapes(LoRAConfig(rank=smallest + 8, targets=("k_proj",)), files(base))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "gaussian", "orthogonal"])
def test_factors_that_belong_to_a_base_which_peft_changed_are_refused(base, tmp_path, init):
    from peft import LoraConfig, get_peft_model

    cfg = LoraConfig(r=RANK, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=init)
    model = get_peft_model(loaded(base, dtype=torch.float32), cfg)
    model.save_pretrained(tmp_path / "theirs")
    if init in ("gaussian", "orthogonal"):  # these leave the weights beside the factors as they are
        adapter = read_peft(str(tmp_path / "theirs"), "--lora.path")
        about = Adapter(base=str(base), dtype="float32", scale=adapter.scale, tensors={})
        found, expected = AdaptedFolder(tmp_path / "theirs", about, adapter), model.merge_and_unload().state_dict()
        assert all(torch.allclose(found.read(name), expected[name], atol=1e-6) for name in weights(base))
    else:
        with pytest.raises(UserError, match=f"this version has not; .*found init_lora_weights {init}, expected"):
            read_peft(str(tmp_path / "theirs"), "--lora.path")


BAD_RANK_OR_ALPHA = [
    dict(r=0), dict(r="8"), dict(r=True), dict(lora_alpha=0), dict(lora_alpha=None), dict(lora_alpha=10**400),
    dict(lora_alpha=1e300),
]  # fmt: skip


@pytest.mark.parametrize("entry", BAD_RANK_OR_ALPHA)
def test_a_rank_or_alpha_that_is_none_is_refused(theirs, entry):
    change(theirs[0], **entry)
    with pytest.raises(UserError, match="no usable rank or alpha"):
        read_peft(str(theirs[0]), "--lora.path")


def test_a_folder_without_an_adapter_is_told(theirs, base, tmp_path):
    folder, _ = theirs
    for path, expected in (
        (tmp_path / "none", "no such folder"),
        (base, "no adapter is there; .*merge.py --local-dir"),
    ):
        with pytest.raises(UserError, match=expected):
            read_peft(str(path), "--lora.path")
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match="no weights that can be read"):
        read_peft(str(folder), "--lora.path")


def test_factors_of_another_rank_of_other_layers_and_of_the_head_are_refused(theirs, base):
    folder, _ = theirs
    whole = load_file(folder / WEIGHTS)
    first = min(whole)

    def refusal(tensors):
        save_file(tensors, folder / WEIGHTS)
        with pytest.raises(UserError) as caught:
            read_peft(str(folder), "--lora.path").check_fits(files(base).shapes, base)
        return str(caught.value)

    assert "holds what is no factor" in refusal(whole | {first: whole[first][:-1].contiguous()})
    assert "holds what is no factor" in refusal(
        whole | {"base_model.model.lm_head.lora_A.weight": torch.zeros(RANK, 9)}
    )
    assert "is empty" in refusal({})
    half = {name: tensor for name, tensor in whole.items() if ".layers.1." not in name}
    assert "of another model, or of some of its layers; model.layers.1" in refusal(half)
    b = [name for name in whole if ".layers.0." in name and name.endswith("lora_B.weight")]
    swapped = whole | {b[0]: whole[b[1]], b[1]: whole[b[0]]}
    a = [name.replace("lora_B", "lora_A") for name in b]
    swapped |= {a[0]: whole[a[1]], a[1]: whole[a[0]]}
    assert "of another model, or of some of its layers; model.layers.0" in refusal(swapped)
    save_file(whole, folder / WEIGHTS)
    with pytest.raises(
        UserError, match=r"--model.path is an adapter, not a model; .* give that model, and .* --lora.path"
    ):
        files(folder)


def test_numbers_that_are_not_finite_are_refused(theirs, base):
    folder, _ = theirs
    rewrite(folder, lambda tensors: {name: tensor * torch.nan for name, tensor in tensors.items()})
    with pytest.raises(UserError, match="holds NaN or infinity"):
        read_peft(str(folder), "--lora.path").check_base({}, base, used=())


def test_ours_says_which_numbers_it_belongs_to(ours, theirs, base, tmp_path):
    adapter = read_peft(str(ours), "--lora.path")
    adapter.check_base(hash_tensors(base, SINGLE), base, used=())
    assert all(torch.equal(adapter.read(name), read_peft(str(theirs[0]), "-").read(name)) for name in adapter.shapes)
    other = make_model(tmp_path / "other", kind="qwen2", tied=False, seed=1)
    with pytest.raises(UserError, match=r"the adapter was trained on another model; .*other"):
        adapter.check_base(hash_tensors(other, SINGLE), other, used=())

    def swap(tensors):
        names = [f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_B.weight" for layer in (0, 1)]
        return tensors | dict(zip(names, (tensors[names[1]], tensors[names[0]]), strict=True))

    rewrite(ours, swap)
    with pytest.raises(UserError, match=r"not as it was written; model.layers.0.self_attn.q_proj.lora_B"):
        read_peft(str(ours), "--lora.path").check_base(hash_tensors(base, SINGLE), base, used=())


def test_the_sum_is_the_one_of_training(ours, base):
    adapter = read_peft(str(ours), "--lora.path")
    about = Adapter(base=str(base), dtype="bfloat16", scale=adapter.scale, tensors=adapter.base_hashes)
    name = "model.layers.1.mlp.down_proj.weight"
    a, b = (adapter.read(name.replace("weight", factor)).bfloat16() for factor in ("lora_A", "lora_B"))
    expected = effective_weight(weights(base)[name].bfloat16(), *as_one_product(a, b), 2.0)
    assert torch.equal(AdaptedFolder(ours, about, adapter).read(name), expected)
