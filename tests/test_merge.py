"""A merged model is, bit for bit, the weights that were saved; nothing is left of a merge that fails."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib.errors import DamagedCheckpoint, UserError
from lib.storage.export import expected_tensors, plan_files
from lib.storage.whole_tensors import read_shards
from tests.merge_checkpoints import (  # noqa: F401 (fixtures)
    LOCKSTEP_MODELS,
    VERL_MODELS,
    checkpoints,
    command,
    loaded,
    merged,
    models,
    own_step,
    refusal,
    seal,
    step,
    weights,
    write_pieces,
)
from tests.merge_worker import IDS
from tests.prefork import prefork
from tests.ranks import LIMIT_S, ROOT

# ---- The weights ----


@pytest.mark.parametrize("name", LOCKSTEP_MODELS)
@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2, 3])
def test_merged_weights_are_the_gathered_ones_and_compute_the_same(checkpoints, num_ranks, name, tmp_path):
    out = checkpoints("lockstep", num_ranks)
    gathered = load_file(out / f"{name}.safetensors")
    numbers = gathered.pop("numbers")
    role = "critic" if name == "critic" else "actor"
    folder = merged(seal(tmp_path / "run", {role: out / name}) / role, tmp_path / "model", dtype="keep")
    found = weights(folder)
    assert found.keys() == gathered.keys() and all(torch.equal(found[key], gathered[key]) for key in gathered)
    assert ("lm_head.weight" in found) == (name == "untied")
    assert (folder / "tokenizer.json").exists() and (folder / "generation_config.json").exists()
    model = loaded(folder)
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0]  # (T, V), or (T, 1) values
    expected = logits[:, 0] if role == "critic" else logits.log_softmax(-1)[range(len(IDS) - 1), IDS[1:]]
    assert torch.allclose(numbers, expected, atol=1e-5)


@pytest.mark.parametrize("name", VERL_MODELS)
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_verls_checkpoints_merge_to_the_gathered_weights(checkpoints, num_ranks, name, tmp_path):
    out = checkpoints("verl", num_ranks)
    gathered = load_file(out / f"{name}.safetensors")
    del gathered["numbers"]
    folder = merged(out / name, tmp_path / "model", dtype="keep")
    found = weights(folder)
    assert found.keys() == gathered.keys() and all(torch.equal(found[key], gathered[key]) for key in gathered)
    loaded(folder)
    assert not list(folder.glob("*.pt"))


def test_verls_checkpoint_of_one_rank_holds_plain_tensors(models, tmp_path):
    state = weights(models / "untied")
    folder = shutil.copytree(models / "untied", tmp_path / "actor" / "huggingface").parent
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    found = weights(merged(folder, tmp_path / "model", dtype="keep"))
    assert all(torch.equal(found[key], state[key]) for key in state)


def test_a_replicated_buffer_is_taken_once_and_must_be_the_same_on_all_ranks(models, tmp_path):
    from lib.storage.verl_shards import read_verl_shards

    for rank in range(2):
        torch.save({"buffer": torch.arange(3.0)}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    tensor = read_verl_shards(tmp_path).tensors["buffer"]
    assert torch.equal(tensor.read(torch.float32), torch.arange(3.0))
    torch.save({"buffer": torch.ones(3)}, tmp_path / "model_world_size_2_rank_1.pt")
    with pytest.raises(DamagedCheckpoint, match="different values"):
        read_verl_shards(tmp_path).tensors["buffer"].read(torch.float32)


def test_a_tied_head_that_was_saved_apart_must_equal_the_embedding(models, tmp_path):
    state = weights(models / "tied")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    folder = shutil.copytree(models / "tied", tmp_path / "actor" / "huggingface").parent
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    assert "lm_head.weight" not in weights(merged(folder, tmp_path / "model"))
    state["lm_head.weight"][0, 0] += 1
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    assert "tied" in refusal(UserError, folder, tmp_path / "other")


@pytest.mark.parametrize("entry", ["_attn_implementation", "attn_implementation"])
def test_an_attention_that_config_names_need_not_be_installed_to_merge(models, entry, tmp_path):
    folder = shutil.copytree(models / "tied", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | {entry: "flash_attention_2"}
    (folder / "config.json").write_text(json.dumps(config))
    assert expected_tensors(folder).shapes == {name: tuple(each.shape) for name, each in weights(folder).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "keep", "auto"])
def test_weights_are_cast_to_the_precision_that_is_asked_for_and_config_says_so(own_step, checkpoints, dtype, tmp_path):
    gathered = load_file(checkpoints("lockstep", 2) / "tied.safetensors")
    config_file = own_step / "actor" / "huggingface" / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"dtype": "bfloat16"}))
    folder = merged(own_step / "actor", tmp_path / "model", dtype=dtype, skip_verify=True)
    name = {"keep": "float32", "auto": "bfloat16"}.get(dtype, dtype)
    found = weights(folder)
    assert all(torch.equal(tensor, gathered[key].to(getattr(torch, name))) for key, tensor in found.items())
    assert json.loads((folder / "config.json").read_text())["dtype"] == name


def test_large_models_are_cut_into_files_with_an_index(step, tmp_path):
    whole = weights(merged(step / "actor", tmp_path / "whole"))
    folder = merged(step / "actor", tmp_path / "cut", max_shard_gib=100_000 / 2**30)
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for file in files:
        inside = load_file(file)
        assert inside.keys() == {name for name, place in index["weight_map"].items() if place == file.name}
        assert sum(tensor.nbytes for tensor in inside.values()) <= 100_000
        assert all(torch.equal(tensor, whole[name]) for name, tensor in inside.items())
    loaded(folder)
    assert plan_files({"a": 3, "b": 3, "c": 9, "d": 1}, 6) == [["a", "b"], ["c"], ["d"]]


SAME = 1e-5
"""Between two float32 programs: log-probs here are from -4 to -10, where float32 moves in steps of 5e-7 to 1e-6, and
sums of up to 200 terms in another order cost some of these (measured: 2.4e-6)."""


def vllm_log_probs(folder, out):
    """Of IDS, by vLLM's own loader in a process that knows nothing of training."""
    words = [sys.executable, "-m", "tests.vllm_worker", str(folder), str(out), *map(str, IDS)]
    env = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return torch.tensor(json.loads(out.read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_vllm_loads_a_merged_folder_and_gives_the_trainers_log_probs(checkpoints, name, tmp_path):
    out = checkpoints("lockstep", 2)
    expected = load_file(out / f"{name}.safetensors")["numbers"]
    folder = merged(seal(tmp_path / "run", {"actor": out / name}) / "actor", tmp_path / "model", dtype="keep")
    found = vllm_log_probs(folder, tmp_path / "found.json")
    assert (found - expected).abs().max() < SAME


@pytest.mark.slow
def test_two_weights_of_one_shape_that_change_places_are_seen_in_vllms_log_probs(checkpoints, tmp_path):
    out = checkpoints("lockstep", 2)
    expected = load_file(out / "untied.safetensors")["numbers"]
    folder = merged(seal(tmp_path / "run", {"actor": out / "untied"}) / "actor", tmp_path / "model", dtype="keep")
    [file] = folder.glob("*.safetensors")
    state, names = load_file(file), [f"model.layers.{layer}.post_attention_layernorm.weight" for layer in range(2)]
    state |= {names[0]: state[names[1]], names[1]: state[names[0]]}  # the smallest there are
    save_file(state, file, metadata={"format": "pt"})
    found = vllm_log_probs(folder, tmp_path / "found.json")
    assert (found - expected).abs().max() > 1000 * SAME


# ---- Damage ----


@pytest.mark.parametrize(
    ("second", "match"),
    [
        (([2, 0], torch.ones(2, 3)), None),
        (([1, 0], torch.ones(3, 3)), "overlap"),
        (([0, 0], torch.ones(4, 3)), "overlap"),
        (([3, 0], torch.ones(1, 3)), "missing"),
        (([2, 1], torch.ones(2, 2)), "missing"),
        (([2, 0], torch.ones(2, 3, dtype=torch.bfloat16)), "does not belong"),
    ],
)
def test_every_number_must_be_in_exactly_one_piece(second, match, tmp_path):
    write_pieces(tmp_path, {1: {"a": ([0, 0], torch.zeros(2, 3))}, 2: {"a": second}})
    tensor = read_shards(tmp_path).tensors["a"]
    if match is None:
        tensor.check()
        assert torch.equal(tensor.read(torch.float32), torch.tensor([[0.0] * 3] * 2 + [[1.0] * 3] * 2))
    else:
        with pytest.raises(DamagedCheckpoint, match=match):
            tensor.check()


def test_a_flipped_bit_is_found_and_nothing_is_written(own_step, tmp_path):
    shard = next((own_step / "actor" / "model").iterdir())
    data = bytearray(shard.read_bytes())
    data[-5] ^= 4
    shard.write_bytes(data)
    done = command("--local-dir", own_step / "actor", "--target-dir", tmp_path / "model")
    assert done.returncode == 3 and shard.name in done.stderr and "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == ["run"]
    merged(own_step / "critic", tmp_path / "critic")  # another model's damage is not its own


def test_weights_and_manifest_are_enough_and_still_verified(own_step, tmp_path):
    copy = tmp_path / "copy" / own_step.name
    for name in ("actor/model", "actor/huggingface"):
        shutil.copytree(own_step / name, copy / name)
    shutil.copy(own_step / "MANIFEST.json", copy)
    assert {path.name for path in own_step.iterdir()} - {path.name for path in copy.iterdir()}  # what is left out
    merged(copy / "actor", tmp_path / "model")
    (copy / "actor" / "huggingface" / "tokenizer.json").unlink()
    refusal(DamagedCheckpoint, copy / "actor", tmp_path / "again", skip_verify=False)


@pytest.mark.parametrize("fault", ["truncated", "missing", "no manifest", "extra tensor", "lost tensor", "wrong shape"])
def test_a_damaged_checkpoint_is_refused(own_step, fault, tmp_path):
    actor, skip = own_step / "actor", fault not in ("truncated", "missing", "no manifest")
    shard = sorted((actor / "model").iterdir())[1]
    if fault == "truncated":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif fault == "missing":
        shard.unlink()
    elif fault == "no manifest":
        (own_step / "MANIFEST.json").unlink()
    elif fault == "extra tensor":
        write_pieces(actor / "model", {9: {"model.layers.9.weight": ([0], torch.ones(3))}})
    elif fault == "lost tensor":
        for file in sorted((actor / "model").iterdir()):
            from safetensors import safe_open

            with safe_open(file, "pt") as old:
                offsets = json.loads(old.metadata()["DCP_SHARDING_INFO"])
                held = {name: (offsets[name]["saved_offsets"], old.get_tensor(name)) for name in old.keys()}  # noqa: SIM118
            held.pop("model.norm.weight")
            write_pieces(actor / "model", {int(file.name[6:11]): held})
    else:
        config = actor / "huggingface" / "config.json"
        config.write_text(config.read_text().replace('"intermediate_size": 96', '"intermediate_size": 95'))
    message = refusal(DamagedCheckpoint, actor, tmp_path / "model", skip_verify=skip)
    assert fault != "no manifest" or "--skip-verify" in message
    if fault in ("truncated", "missing"):  # found without hashes too
        refusal(DamagedCheckpoint, actor, tmp_path / "model", skip_verify=True)


@pytest.mark.parametrize("fault", ["flipped", "truncated", "missing", "two sizes", "not a pickle", "wrong size"])
def test_a_damaged_checkpoint_of_verls_is_refused(checkpoints, fault, tmp_path):
    actor = shutil.copytree(checkpoints("verl", 2) / "tied", tmp_path / "actor")
    shard = actor / "model_world_size_2_rank_1.pt"
    data = bytearray(shard.read_bytes())
    if fault == "flipped":
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif fault == "truncated":
        shard.write_bytes(data[: len(data) // 2])
    elif fault == "missing":
        shard.unlink()
    elif fault == "two sizes":
        shutil.copy(shard, actor / "model_world_size_3_rank_1.pt")
    elif fault == "wrong size":
        (actor / "fsdp_config.json").write_text('{"world_size": 4}')
    else:
        shard.write_bytes(b"weights")
    refusal(DamagedCheckpoint, actor, tmp_path / "model")


class Malicious:
    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("function", [os.system, eval, exec, Path.touch, subprocess.check_output])
@pytest.mark.parametrize("skip_verify", [False, True])
def test_a_pickle_that_would_run_code_is_refused_and_runs_nothing(models, function, skip_verify, tmp_path):
    evidence, actor = tmp_path / "evidence", tmp_path / "actor"
    shutil.copytree(models / "tied", actor / "huggingface")
    code = f"__import__('pathlib').Path({str(evidence)!r}).touch()"
    arguments = {
        os.system: f"touch {evidence}", subprocess.check_output: ["touch", str(evidence)], Path.touch: evidence,
    }  # fmt: skip
    state = {"model.norm.weight": torch.ones(64), "x": Malicious(function, arguments.get(function, code))}
    torch.save(state, actor / "model_world_size_1_rank_0.pt")
    registered = set(map(str, torch.serialization.get_safe_globals()))
    with torch.serialization.safe_globals([function]):  # what others have registered as safe is not for these files
        message = refusal(UserError, actor, tmp_path / "model", skip_verify=skip_verify)
    assert "run code" in message and not evidence.exists()
    assert set(map(str, torch.serialization.get_safe_globals())) == registered


def test_a_layout_that_is_not_fsdps_is_refused(tmp_path):
    """Tensor parallelism: a strided shard would be put together in the wrong order."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import torch, torch.distributed as dist, sys\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.tensor import DTensor, Shard\n"
        "from torch.distributed.tensor.placement_types import _StridedShard\n"
        "dist.init_process_group('gloo')\n"
        "mesh = init_device_mesh('cpu', (1, 1), mesh_dim_names=('fsdp', 'tp'))\n"
        "placements = [_StridedShard(0, split_factor=1), Shard(0)]\n"
        "x = DTensor.from_local(torch.ones(4, 2), mesh, placements, run_check=False)\n"
        "torch.save({'x': x}, sys.argv[1] + '/model_world_size_1_rank_0.pt')\n"
    )
    assert prefork(1, str(worker), str(tmp_path)).returncode == 0
    from lib.storage.verl_shards import read_verl_shards

    with pytest.raises(UserError, match="_StridedShard"):
        read_verl_shards(tmp_path)


@pytest.mark.parametrize(("value", "dtype", "match"), [(math.nan, "keep", "NaN"), (1e6, "float16", "too large")])
def test_numbers_that_are_not_finite_are_refused(models, value, dtype, match, tmp_path):
    state = weights(models / "tied")
    state["model.norm.weight"][3] = value
    folder = shutil.copytree(models / "tied", tmp_path / "actor" / "huggingface").parent
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    assert match in refusal(UserError, folder, tmp_path / "model", dtype=dtype)
