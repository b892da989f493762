"""What ranks save, any number of ranks loads: bit for bit, without a pickle, and nothing of another model."""

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

from lib.dist import SINGLE, init_distributed
from lib.errors import DamagedCheckpoint, UserError
from lib.fsdp import FSDPConfig, load_policy
from lib.model import ModelConfig
from lib.optim import OptimConfig, build_optimizer
from lib.tensor_files import load_model_, load_optimizer_, model_tensors, optimizer_tensors, own_pieces, write_pieces
from tests.prefork import prefork
from tests.tiny import make_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp's, of no_dist as we ask for it
LAUNCHES = [
    (1, "save:1"),
    (2, "save:2", "load:2", "plain_load:1"),
    (3, "plain_save:3", "load:1", "plain_load:2"),
    (1, "load:2", "load:3"),
]
"""Ranks, and what they do: `save:2` writes folder 2. 3 ranks do not divide the model's dimensions."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """What 1, 2 and 3 ranks saved of a critic, by their number, and what others found in it."""
    folder = tmp_path_factory.mktemp("shards")
    path = make_model(folder / "model")
    for ranks, *actions in LAUNCHES:
        done = prefork(ranks, "-m", "tests.tensor_files_worker", str(path), str(folder), *actions)
        assert done.returncode == 0, done.stderr[-3000:]
    return {ranks: folder / str(ranks) for ranks in (1, 2, 3)}


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 2), (1, 2), (1, 3), (2, 3), (2, 1), (3, 1)])
def test_what_ranks_save_others_load_to_the_bit_and_without_a_pickle(saved, saved_by, loaded_by):
    expected = torch.load(saved[saved_by] / "expected.pt")
    found = torch.load(saved[saved_by] / f"found_{loaded_by}.pt")
    untouched = {name for name in found["tensors"] if name.endswith(".score.bias")}
    assert set(expected) == set(found["tensors"]) - untouched
    for name, tensor in expected.items():
        assert torch.equal(tensor, found["tensors"][name]), name
    assert all(not found["tensors"][name].any() for name in untouched)
    assert not found["heard"], found["heard"]  # no class unpickled, no file opened but by safetensors


def test_the_files_are_those_of_torchs_safetensors_storage(saved, tmp_path):
    """torch's own writer gives the same tensors, places and metadata."""
    [ours] = (saved[1] / "model").iterdir()
    tensors = dcp_read(saved[1] / "model")
    dcp.save(
        dict(tensors), storage_writer=dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True), no_dist=True
    )
    [torchs] = tmp_path.iterdir()
    with safe_open(ours, "pt") as left, safe_open(torchs, "pt") as right:
        assert set(left.keys()) == set(right.keys()) == set(tensors)
        assert all(torch.equal(left.get_tensor(name), right.get_tensor(name)) for name in tensors)
        mine, its = left.metadata(), right.metadata()
        assert json.loads(mine.pop("DCP_SHARDING_INFO")) == json.loads(its.pop("DCP_SHARDING_INFO"))
        assert mine == its


def dcp_read(folder):
    """Every tensor of a folder, by torch's reader."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def test_frozen_parameters_and_a_tied_head_are_not_in_it(saved):
    names = set(dcp_read(saved[2] / "model"))
    assert "model.norm.weight" not in names and "score.weight" in names and "model.embed_tokens.weight" in names
    states = set(dcp_read(saved[2] / "optim"))
    assert not [name for name in states if "model.norm.weight" in name or "score.bias" in name]
    assert states == {f"{kind}.{name}" for kind in ("step", "exp_avg", "exp_avg_sq") for name in names - {"score.bias"}}


# ---- Another model's, or not whole ----


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """A function that gives a tiny policy and its optimizer, after one step."""
    folder = tmp_path_factory.mktemp("policy")
    world = init_distributed()

    def load(**kind):
        path = make_model(folder / str(kind), **kind)
        policy = load_policy(ModelConfig(dtype="float32"), str(path), FSDPConfig(), world)
        optimizer = build_optimizer(policy, OptimConfig())
        for parameter in policy.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return policy, optimizer

    return load


def written(folder, tensors):
    folder.mkdir()
    write_pieces(folder / "shard-00001-of-00001.safetensors", own_pieces(tensors, SINGLE))
    return folder


def copies(tensors):
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda saved: saved.pop("model.norm.weight"), "it lacks model.norm.weight"),
        (lambda saved: saved.update(extra=torch.zeros(2)), "it holds extra, which the model has not"),
        (lambda saved: saved.update({"model.norm.weight": torch.ones(63)}), "is [63] there and [64] here"),
        (
            lambda saved: saved.update({"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}),
            "is torch.bfloat16 there and torch.float32 here",
        ),
    ],
)
def test_a_difference_in_names_shapes_or_dtypes_is_an_error_and_nothing_is_written(policy, tmp_path, change, words):
    model, _ = policy()
    before = copies(model_tensors(model))
    other = {name: tensor.full_tensor() + 1 for name, tensor in before.items()}
    change(other)
    with pytest.raises(UserError, match="the checkpoint is of another model") as caught:
        load_model_(written(tmp_path / "model", other), model, SINGLE)
    assert words in str(caught.value)
    assert all(torch.equal(before[name].full_tensor(), t.full_tensor()) for name, t in model_tensors(model).items())


def test_state_that_is_not_complete_is_an_error(policy, tmp_path):
    model, optimizer = policy()
    tensors = optimizer_tensors(model, optimizer)
    del tensors["exp_avg.model.norm.weight"]
    with pytest.raises(UserError, match=r"it lacks exp_avg\.model\.norm\.weight"):
        load_optimizer_(written(tmp_path / "optim", tensors), model, build_optimizer(model, OptimConfig()), SINGLE)


def test_a_tensor_with_a_hole_is_damage(policy, tmp_path):
    model, _ = policy()
    pieces = own_pieces({name: tensor.full_tensor() for name, tensor in model_tensors(model).items()}, SINGLE)
    weight, _ = pieces["model.norm.weight"]
    pieces["model.norm.weight"] = weight[32:], (32,)
    (tmp_path / "model").mkdir()
    write_pieces(tmp_path / "model" / "shard.safetensors", pieces)
    with pytest.raises(DamagedCheckpoint, match=r"lacks part of a tensor; model\.norm\.weight .* pieces of 32"):
        load_model_(tmp_path / "model", model, SINGLE)


def test_a_file_that_is_not_safetensors_is_damage(policy, tmp_path):
    model, _ = policy()
    (tmp_path / "shard.safetensors").write_bytes(b"\x80\x04}")
    with pytest.raises(DamagedCheckpoint, match="cannot be read"):
        load_model_(tmp_path, model, SINGLE)
