"""A folder that others made: links out of it and files without an end are refused, its code is not copied."""

import json
import os
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib.checkpoints.checkpointer import _write_beside_weights
from lib.errors import DamagedCheckpoint, UserError
from lib.storage.checkpoint_folder import MANIFEST, check, find_checkpoints
from lib.storage.model_folder import check_model_files
from lib.storage.verl_shards import read_verl_shards
from lib.storage.whole_tensors import SafetensorsFolder, read_shards
from tests.merge_checkpoints import merged, refusal, seal, write_pieces
from tests.tiny import make_model, make_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A model folder, and beside it a checkpoint of its weights by one rank of verl."""
    root = tmp_path_factory.mktemp("foreign")
    make_tokenizer(make_model(root / "model"))
    shutil.copytree(root / "model", root / "actor" / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(load_file(root / "model" / "model.safetensors"), root / "actor" / "model_world_size_1_rank_0.pt")
    return root


@pytest.fixture
def model(whole, tmp_path):
    return shutil.copytree(whole / "model", tmp_path / "model")


@pytest.fixture
def actor(whole, tmp_path):
    return shutil.copytree(whole / "actor", tmp_path / "actor")


@pytest.fixture(autouse=True)
def a_read_without_an_end_ends():
    def end(number, frame):
        raise TimeoutError("it waits for ever")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def checked(folder):
    return check_model_files(str(folder), max_prompt_len=16, max_response_len=16)


def repeated(folder, target):
    """What a checkpoint of this model has beside its weights, {name: bytes}."""
    _write_beside_weights(target, SimpleNamespace(folder=folder, model=None, adapter=None))
    return {path.name: path.read_bytes() for path in target.iterdir()}


def add_code(folder):
    """A model's own code, and what loads it: in configs, and in one config inside another."""
    (folder / "modeling_own.py").write_text("raise SystemExit('run')")
    (folder / "nested").mkdir()
    (folder / "nested" / "more.py").write_text("")
    (folder / "nested" / "LICENSE").write_text("free")
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        config |= {"auto_map": {"AutoModel": "modeling_own.X"}, "own": {"auto_map": {}, "kept": "ä"}}
        (folder / name).write_text(json.dumps(config))
    config = json.loads((folder / "tokenizer.json").read_text())
    config["model"]["vocab"]["auto_map"] = 199
    (folder / "tokenizer.json").write_text(json.dumps(config))


# ---- Links ----


LINKS = {
    "a file": lambda folder, outside: os.symlink(outside / "secret", folder / "huggingface" / "notes.txt"),
    "a folder": lambda folder, outside: os.symlink(outside, folder / "huggingface" / "notes"),
    "the folder above": lambda folder, outside: os.symlink("..", folder / "huggingface" / "notes"),
    "through a link": lambda folder, outside: (
        os.symlink("other", folder / "huggingface" / "notes"),
        os.symlink(outside / "secret", folder / "huggingface" / "other"),
    ),
    "all of huggingface": lambda folder, outside: (
        (folder / "huggingface").rename(outside / "hf"), os.symlink(outside / "hf", folder / "huggingface"),
    ),
    "a shard": lambda folder, outside: (
        (folder / "model_world_size_1_rank_0.pt").rename(outside / "shard"),
        os.symlink(outside / "shard", folder / "model_world_size_1_rank_0.pt"),
    ),
    "nothing": lambda folder, outside: os.symlink("nowhere", folder / "huggingface" / "notes"),
    "itself": lambda folder, outside: os.symlink("notes", folder / "huggingface" / "notes"),
}  # fmt: skip


@pytest.mark.parametrize("link", LINKS)
def test_a_foreign_checkpoint_with_a_link_out_of_it_is_not_merged(actor, link, tmp_path):
    outside = tmp_path / "private"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    LINKS[link](actor, outside)
    assert "link" in refusal(UserError, actor, tmp_path / "out") or link == "the folder above"


def test_a_link_inside_a_checkpoint_is_the_file_that_it_leads_to(actor, tmp_path):
    os.symlink("config.json", actor / "huggingface" / "copy.json")
    target = merged(actor, tmp_path / "out")
    assert not (target / "copy.json").is_symlink() and "hidden_size" in (target / "copy.json").read_text()


def test_a_snapshot_of_the_hubs_cache_whose_files_are_links_to_its_blobs_goes_on_working(model, tmp_path):
    cache = tmp_path / "cache"
    blobs, shared, snapshot = cache / "models--x" / "blobs", cache / "blobs" / "ab", cache / "models--x/snapshots/0"
    for folder in (blobs, shared, snapshot):
        folder.mkdir(parents=True)
    for file in sorted(model.iterdir()):
        shutil.move(file, shared / file.name)
        os.symlink(f"../../blobs/ab/{file.name}", blobs / file.name)  # as the hub shares blobs between models
        os.symlink(f"../../blobs/{file.name}", snapshot / file.name)
    os.symlink(cache, tmp_path / "linked")
    assert checked(snapshot).num_parameters == checked(tmp_path / "linked/models--x/snapshots/0").num_parameters
    kept = repeated(snapshot, tmp_path / "huggingface")
    assert kept["tokenizer.json"] == (shared / "tokenizer.json").read_bytes()
    assert not any(path.is_symlink() for path in (tmp_path / "huggingface").iterdir())


def test_a_model_whose_tokenizer_is_a_link_to_elsewhere_is_refused_and_linked_weights_are_not(model, tmp_path):
    shutil.move(model / "model.safetensors", tmp_path / "weights")
    os.symlink(tmp_path / "weights", model / "model.safetensors")
    checked(model)  # weights are not copied
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", model / "merges.txt")
    with pytest.raises(UserError, match=r"a link leads out of its folder; .*merges\.txt"):
        checked(model)


# ---- Code ----


def test_a_merged_model_has_no_code_of_the_checkpoint_and_says_so(actor, tmp_path, capsys):
    add_code(actor / "huggingface")
    target = merged(actor, tmp_path / "out")
    assert not list(target.rglob("*.py")) and (target / "nested" / "LICENSE").read_text() == "free"
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        assert "auto_map" not in (target / name).read_text(), name
        assert json.loads((target / name).read_text())["own"] == {"kept": "ä"}
    assert json.loads((target / "tokenizer.json").read_text())["model"]["vocab"]["auto_map"] == 199  # a token
    told = capsys.readouterr().out
    assert "left out, as it can run: 'auto_map in config.json'" in told and "and 2 more" in told  # of five


def test_a_checkpoint_of_a_model_with_code_repeats_none_of_it(model, tmp_path):
    before = (model / "config.json").read_text()
    add_code(model)
    (model / "config.json").write_text(before)  # with an auto_map there, no training begins
    kept = repeated(model, tmp_path / "huggingface")
    assert set(kept) == {path.name for path in model.iterdir() if path.suffix in (".json", ".jinja")}
    assert not [name for name in kept if name.endswith("config.json") and b"auto_map" in kept[name]]
    assert set(checked(model).code) == {"auto_map in tokenizer_config.json", "auto_map in generation_config.json"}


# ---- Files without an end, and numbers without a limit ----


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "spiece.model", "vocab.txt"]
)
def test_a_fifo_in_a_model_folder_is_told_and_never_waited_for(model, name):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(UserError, match=f"not a regular file; .*{name}; found a FIFO"):
        checked(model)


def test_a_device_and_a_fifo_among_weights_are_never_read(model, tmp_path):
    (model / "model.safetensors").unlink()
    os.symlink("/dev/zero", model / "model.safetensors")
    for read in (checked, SafetensorsFolder):
        with pytest.raises(UserError, match="found a device"):
            read(model)
    os.mkfifo(tmp_path / "shard-00001-of-00001.safetensors")
    with pytest.raises(DamagedCheckpoint, match="found a FIFO"):
        read_shards(tmp_path)


@pytest.mark.parametrize("name", ["model_world_size_1_rank_0.pt", "fsdp_config.json", "huggingface/notes", "optim.pt"])
def test_a_fifo_in_a_foreign_checkpoint_is_told(actor, name, tmp_path):
    (actor / name).unlink(missing_ok=True)
    os.mkfifo(actor / name)
    assert "found a FIFO" in refusal(UserError, actor, tmp_path / "out", skip_verify=True)


def test_a_fifo_as_a_manifest_is_a_damaged_checkpoint(tmp_path):
    write_pieces(tmp_path / "actor" / "model", {0: {"x": ([0], torch.ones(3))}})
    step = seal(tmp_path / "run", {"actor": tmp_path / "actor"})
    (step / MANIFEST).unlink()
    os.mkfifo(step / MANIFEST)
    with pytest.raises(DamagedCheckpoint, match="found a FIFO"):
        check(step)
    [found] = find_checkpoints(tmp_path / "run")
    assert "found a FIFO" in found.problem


@pytest.mark.parametrize("size", [300_000_000, 10**100])
def test_a_world_size_beyond_all_machines_takes_no_memory(tmp_path, size):
    torch.save({}, tmp_path / f"model_world_size_{size}_rank_0.pt")
    with pytest.raises(DamagedCheckpoint, match=f"found 1 of {size}, expected also model_world_size_{size}_rank_1.pt"):
        read_verl_shards(tmp_path)


@pytest.mark.parametrize("text", ['{"a":' * 200_000, '{"world_size": 1e999}', "[]"])
def test_a_description_of_shards_that_cannot_be_read_is_damaged(actor, text, tmp_path):
    (actor / "fsdp_config.json").write_text(text)
    refusal(DamagedCheckpoint, actor, tmp_path / "out")


@pytest.mark.parametrize("offsets", ['{"x":' * 200_000, '{"x": {"saved_offsets": [1e999]}}', '{"x": []}'])
def test_offsets_that_cannot_be_read_are_a_damaged_shard(tmp_path, offsets):
    file = tmp_path / "shard-00001-of-00001.safetensors"
    save_file({"x": torch.ones(3)}, file, metadata={"DCP_SHARDING_INFO": offsets})
    with pytest.raises(DamagedCheckpoint, match="not a whole shard"):
        read_shards(tmp_path)


@pytest.mark.parametrize("name", ["generation_config.json", "special_tokens_map.json", "added_tokens.json"])
def test_json_beside_the_weights_that_nests_too_deeply_is_one_line(model, name):
    (model / name).write_text('{"a":' * 200_000)
    with pytest.raises(UserError, match=f"not JSON that can be read; .*{name}; found maximum recursion depth"):
        checked(model)
