"""A merged model is, bit for bit, the weights that were saved; nothing is left of a merge that fails."""

import base64
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib.checkpoint_files import checkpoint_path, hash_file, publish, stage
from lib.config import parse_args
from lib.errors import DamagedCheckpoint, LockstepError, UserError
from lib.export import plan_files
from lib.whole_tensors import read_shards
from merge import MergeConfig, merge
from tests.merge_worker import IDS
from tests.ranks import ROOT, torchrun
from tests.tiny import make_model, make_tokenizer

LOCKSTEP_MODELS = ("tied", "untied", "critic")
VERL_MODELS = ("tied", "untied", "value")


def merged(local_dir, target, **options):
    merge(MergeConfig(local_dir=str(local_dir), target_dir=str(target), **options))
    return target


def command(*words, **env):
    """`python merge.py WORDS` as a user runs it."""
    return subprocess.run(
        [sys.executable, "merge.py", *map(str, words)], cwd=ROOT, env={**os.environ, **env}, capture_output=True,
        text=True, timeout=200,
    )  # fmt: skip


def refusal(kind, local_dir, target, **options):
    """The message of a merge that must fail and leave nothing."""
    with pytest.raises(kind) as caught:
        merged(local_dir, target, **options)
    assert type(caught.value) is kind
    assert not list(target.parent.glob(f"*{target.name}*")), "something is left"
    text = str(caught.value)
    assert text.count(";") >= 2, f"not what; where; found; remedy: {text}"
    return text


def weights(folder):
    """All tensors of a Hugging Face folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def loaded(folder, **options):
    """The model as transformers loads it, with nothing missing and nothing left over."""
    import transformers

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, architecture).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


def seal(run, models, step=1):
    """global_step_N of a run, published with a manifest, from folders {actor or critic: folder}."""
    staging = stage(run, step, "test")
    for name, folder in models.items():
        shutil.copytree(folder, staging / name)
    files = [path for path in staging.rglob("*") if path.is_file()]
    entries = {path.relative_to(staging).as_posix(): hash_file(path) for path in files}
    publish(staging, checkpoint_path(run, step), entries, inventory={})
    return checkpoint_path(run, step)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Hugging Face folders: a policy with a tied and one with an untied head, critics of ours and of verl's."""
    root = tmp_path_factory.mktemp("models")
    for name, tied in (("tied", True), ("untied", False), ("critic", False)):
        make_tokenizer(make_model(root / name, tied=tied))
    import transformers

    config = transformers.AutoConfig.from_pretrained(root / "tied", num_labels=1)
    transformers.Qwen3ForTokenClassification(config).save_pretrained(root / "value")
    return root


@pytest.fixture(scope="module")
def checkpoints(models, tmp_path_factory):
    """(kind, number of ranks) -> folder of what tests/merge_worker.py wrote; each is written once."""
    written = {}

    def get(kind, num_ranks):
        if (kind, num_ranks) not in written:
            out = tmp_path_factory.mktemp(f"{kind}{num_ranks}")
            names = LOCKSTEP_MODELS if kind == "lockstep" else VERL_MODELS
            done = torchrun(num_ranks, "-m", "tests.merge_worker", kind, str(out), *(str(models / n) for n in names))
            assert done.returncode == 0, done.stderr[-3000:]
            written[kind, num_ranks] = out
        return written[kind, num_ranks]

    return get


@pytest.fixture(scope="module")
def step(checkpoints, tmp_path_factory):
    """A published checkpoint of two ranks with an actor and a critic."""
    out = checkpoints("lockstep", 2)
    return seal(tmp_path_factory.mktemp("run"), {"actor": out / "tied", "critic": out / "critic"})


@pytest.fixture
def own_step(step, tmp_path):
    """A copy of `step` that may be damaged."""
    return shutil.copytree(step, tmp_path / "run" / step.name)


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
    from lib.verl_shards import read_verl_shards

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


# ---- Damage ----


def write_pieces(folder, pieces):
    """Shards with pieces {file number: {name: (offsets, tensor)}} of float32 tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, held in pieces.items():
        info = json.dumps({name: {"saved_offsets": offsets} for name, (offsets, _) in held.items()})
        file = folder / f"shard-{number:05}-model-00001-of-00001.safetensors"
        save_file({name: tensor for name, (_, tensor) in held.items()}, file, metadata={"DCP_SHARDING_INFO": info})


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
    assert torchrun(1, str(worker), str(tmp_path)).returncode == 0
    from lib.verl_shards import read_verl_shards

    with pytest.raises(UserError, match="_StridedShard"):
        read_verl_shards(tmp_path)


@pytest.mark.parametrize(("value", "dtype", "match"), [(math.nan, "keep", "NaN"), (1e6, "float16", "too large")])
def test_numbers_that_are_not_finite_are_refused(models, value, dtype, match, tmp_path):
    state = weights(models / "tied")
    state["model.norm.weight"][3] = value
    folder = shutil.copytree(models / "tied", tmp_path / "actor" / "huggingface").parent
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    assert match in refusal(UserError, folder, tmp_path / "model", dtype=dtype)


# ---- The folder ----


def test_a_model_is_replaced_only_by_force_and_only_by_a_whole_one(step, own_step, tmp_path):
    target = tmp_path / "model"
    target.mkdir()  # an empty folder may be there
    merged(step / "actor", target, dtype="float16")
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    with pytest.raises(UserError, match="--force"):
        merged(step / "actor", target)
    shard = next((own_step / "actor" / "model").iterdir())
    data = bytearray(shard.read_bytes())
    data[-2] = data[-1] = 0xFF  # NaN, in the last number of the last tensor: found when most is written
    shard.write_bytes(data)
    with pytest.raises(UserError, match="NaN"):
        merged(own_step / "actor", target, force=True, skip_verify=True, dtype="keep")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    merged(step / "actor", target, force=True, dtype="keep")
    assert next(iter(weights(target).values())).dtype is torch.float32
    assert sorted(os.listdir(tmp_path)) == ["model", "run"]


def test_force_never_replaces_what_is_not_a_model(own_step, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("")
    (own_step.parent / "config.json").write_text("{}")  # a model's folder, but around the checkpoint
    for target in (notes, tmp_path / "file", own_step, own_step.parent, own_step / "actor" / "huggingface", tmp_path):
        with pytest.raises(UserError):
            merged(own_step / "actor", target, force=True)
    assert (notes / "thesis.txt").exists() and (own_step / "MANIFEST.json").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_merge_leaves_nothing(number, large, tmp_path):
    target = tmp_path / "out" / "model"
    words = ["--local-dir", large, "--target-dir", target, "--skip-verify", "--max-shard-gib", "0.02"]
    process = subprocess.Popen([sys.executable, "merge.py", *map(str, words)], cwd=ROOT, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("out/.model*/model-00002*")) and time.monotonic() < deadline:
        assert process.poll() is None, "it ended before it could be interrupted"
        time.sleep(0.001)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert os.listdir(tmp_path / "out") == []


# ---- Memory ----


def make_large(folder, *, layers):
    """A checkpoint of 2 ranks in float32: 10 MB of embedding and `layers` of 13 MB."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=5_000, hidden_size=512, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )  # fmt: skip
    config.save_pretrained(folder / "huggingface")
    with torch.device("meta"):
        state = transformers.Qwen3ForCausalLM(config).state_dict()
    del state["lm_head.weight"]
    halves = {
        number: {
            name: (
                [number * (len(tensor) // 2)] + [0] * (tensor.dim() - 1),
                torch.rand(len(tensor) // 2, *tensor.shape[1:]),
            )
            for name, tensor in state.items()
        }
        for number in range(2)
    }
    write_pieces(folder / "model", halves)
    verl = folder.with_name(folder.name + "_verl")
    shutil.copytree(folder / "huggingface", verl / "huggingface")
    whole = {name: torch.cat([halves[0][name][1], halves[1][name][1]]) for name in state}
    torch.save(whole, verl / "model_world_size_1_rank_0.pt")
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return make_large(tmp_path_factory.mktemp("large") / "actor", layers=16)  # 212 MB


PEAK = "from merge import *; main(parse_cli(MergeConfig())); print(open('/proc/self/status').read())"
"""Linux counts a child's ru_maxrss from its parent's size; VmHWM begins with the child's own program."""


def peak_bytes(local_dir, target):
    """The most memory that a merge had resident."""
    words = ["--local-dir", local_dir, "--target-dir", target, "--skip-verify", "--max-shard-gib", 0.03]
    done = subprocess.run([sys.executable, "-c", PEAK, *map(str, words)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1])


@pytest.mark.parametrize("suffix", [pytest.param("", marks=pytest.mark.slow), "_verl"])
def test_memory_is_that_of_one_file_not_of_the_model(large, suffix, tmp_path):
    small = make_large(tmp_path / "small" / "actor", layers=1)
    base = peak_bytes(small.with_name(small.name + suffix), tmp_path / "small_model")
    peak = peak_bytes(large.with_name(large.name + suffix), tmp_path / "large_model")
    assert sum(file.stat().st_size for file in (tmp_path / "large_model").glob("*.safetensors")) > 200e6
    assert peak - base < 32e6  # one file


# ---- Comparison, command line, upload ----


def test_the_result_is_compared_tensor_by_tensor(step, checkpoints, tmp_path, capsys):
    other = merged(step / "actor", tmp_path / "other", dtype="keep")
    merged(step / "actor", tmp_path / "same", dtype="keep", test_hf_dir=str(other), max_shard_gib=1e-4)
    assert "all 24 tensors equal" in capsys.readouterr().out
    state = load_file(other / "model.safetensors")
    state["model.norm.weight"][5] += 0.5
    state["model.layers.1.mlp.up_proj.weight"][1, 2] -= 0.25
    save_file(state, other / "model.safetensors")
    done = command(
        "--local-dir", step / "actor", "--target-dir", tmp_path / "a", "--test-hf-dir", other, "--dtype", "keep"
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "largest: model.norm.weight by 0.5, model.layers.1.mlp.up_proj.weight by 0.25" in done.stderr
    for change, match in (("name", "is only in"), ("dtype", "bfloat16"), ("shape", "model.norm.weight is")):
        state = weights(tmp_path / "same")
        norm = state.pop("model.norm.weight")
        if change != "name":
            state["model.norm.weight"] = norm.bfloat16() if change == "dtype" else norm[:-1].clone()
        save_file(state, other / "model.safetensors")
        with pytest.raises(LockstepError, match=match):
            merged(step / "actor", tmp_path / change, dtype="keep", test_hf_dir=str(other))


def test_wrong_arguments_end_with_a_remedy(step, tmp_path, monkeypatch):
    actor, target = step / "actor", tmp_path / "model"
    good = ("--local-dir", actor, "--target-dir", target)
    wrong = {
        "add --local-dir": ("--target-dir", target),
        "add --target-dir": ("--local-dir", actor),
        "check the path": ("--local-dir", tmp_path / "nowhere", "--target-dir", target),
        f"use {actor}": ("--local-dir", step.parent, "--target-dir", target),
        f"use {actor};": ("--local-dir", step, "--target-dir", target),
        f"use {actor};;": ("--local-dir", actor / "model", "--target-dir", target),
        "expected GiB above 0": (*good, "--max-shard-gib", "0"),
        "add --upload": (*good, "--private"),
        "nearest is float16": (*good, "--dtype", "float8"),
        "hf auth login": (*good, "--upload", "me/model"),
        "use USER/NAME": (*good, "--upload", "not a name"),
        "expected a model's folder": (*good, "--test-hf-dir", tmp_path / "nowhere"),
    }
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    for remedy, words in wrong.items():
        with pytest.raises(UserError) as caught:
            merge(parse_args(MergeConfig(), list(map(str, words))))
        assert remedy.rstrip(";") in str(caught.value), caught.value
    done = command("--local-dir", step, "--target-dir", target)
    assert done.returncode == 2 and done.stderr.startswith("error[2]") and len(done.stderr.splitlines()) == 1
    assert not target.exists()


def test_without_a_network_nothing_is_merged(step, tmp_path):
    words = ("--local-dir", step / "actor", "--target-dir", tmp_path / "model", "--upload", "me/model")
    done = command(*words, HF_TOKEN="hf_none", HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "home"))
    assert done.returncode == 2 and "found ConnectError" in done.stderr and "expected a network" in done.stderr
    assert not (tmp_path / "model").exists()


@pytest.fixture
def hub():
    """A Hugging Face Hub of this machine, as far as an upload asks it; {path: what was posted there}."""
    posted = {}

    class Handler(BaseHTTPRequestHandler):
        def answer(self, value):
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self):
            self.answer({"name": "me", "auth": {"accessToken": {"role": "write"}}})

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posted[self.path] = body
            url = f"http://127.0.0.1:{server.server_port}/me/model"
            if "preupload" in self.path:
                files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
                self.answer({"files": [{**file, "shouldIgnore": False} for file in files]})
            else:
                self.answer({"url": url, "commitUrl": f"{url}/commit/0", "commitOid": "0"})

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", posted
    server.shutdown()


def test_the_result_is_uploaded_whole(step, hub, tmp_path):
    url, posted = hub
    words = ("--local-dir", step / "actor", "--target-dir", tmp_path / "model", "--upload", "me/model", "--private")
    done = command(*words, HF_TOKEN="hf_none", HF_ENDPOINT=url, HF_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert "private" in json.loads(posted["/api/repos/create"]).values()
    commit = [json.loads(line) for line in posted["/api/models/me/model/commit/main"].splitlines()]
    sent = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in commit[1:]}
    assert sent == {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
