"""merge.py as a command: what it replaces, what it needs, and what it says."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib.config.flags import parse_args
from lib.errors import LockstepError, UserError
from merge import MergeConfig, merge
from tests.checkpoint_folders import on_small_disk
from tests.merge_checkpoints import checkpoints, command, merged, models, own_step, step, weights, write_pieces  # noqa: F401 (fixtures)
from tests.ranks import LIMIT_S, ROOT

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


def everything(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_force_replaces_only_what_a_merge_can_have_written_and_is_recommended_only_there(step, own_step, tmp_path):
    run = own_step.parent  # another run than that of `step`
    for name in ("config.json", "status.json", "metrics.jsonl"):
        (run / name).write_text("{}")
    young = tmp_path / "young"
    young.mkdir()
    for name in ("config.json", "model.safetensors"):
        (young / name).write_text("{}")
    shutil.copytree(young, own_step / "actor" / "exported")
    targets = [run, own_step, own_step / "actor" / "huggingface", own_step / "actor" / "exported", own_step / "new"]
    for added in ("status.json", "thesis.txt", "train.py", "README.md", "global_step_1/", "tokenizer.model/", ".git/"):
        target = shutil.copytree(young, tmp_path / f"with_{added.strip('/')}")
        if added.endswith("/"):
            (target / added).mkdir()
        else:
            (target / added).write_text("years of work")
        targets.append(target)
    for missing in ("config.json", "model.safetensors"):
        target = shutil.copytree(young, tmp_path / f"without_{missing}")
        (target / missing).unlink()
        targets.append(target)
    before = everything(tmp_path)
    for target in targets:
        for force in (False, True):
            with pytest.raises(UserError) as caught:
                merged(step / "actor", target, force=force)
            assert "--force" not in str(caught.value) and "choose a new folder" in str(caught.value), caught.value
    assert everything(tmp_path) == before


def test_force_replaces_an_earlier_merge_of_this_model_and_of_others(own_step, tmp_path):
    source = own_step / "actor" / "huggingface"
    (source / "modeling_own.py").write_text("# the code of a model")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("")
    target = merged(own_step / "actor", tmp_path / "model", skip_verify=True, max_shard_gib=1e-4)
    first = everything(target)
    assert target / "additional_chat_templates" / "tools.jinja" in first and len([*target.glob("model-*")]) > 1
    for name in ("vocab.json", "merges.txt", "spiece.model", "preprocessor_config.json", "chat_template.jinja"):
        (target / name).write_text("another model's")
    with pytest.raises(UserError, match="add --force"):
        merged(own_step / "actor", target, skip_verify=True)
    merged(own_step / "actor", target, skip_verify=True, max_shard_gib=1e-4, force=True)
    assert everything(target) == first


def merge_to_a_full_disk(checkpoint, disk):
    with pytest.raises(UserError, match="not enough disk space for the model") as caught:
        merged(checkpoint, disk / "model")
    found = re.search(r"found ([\d.]+) MiB free, expected ([\d.]+) MiB", str(caught.value))
    assert float(found[1]) < float(found[2]), caught.value


def test_a_small_disk_without_room_is_told_in_numbers_that_differ(step, tmp_path):
    code = "import sys; from pathlib import Path; from tests.test_merge_command import *; "
    on_small_disk(tmp_path, "64k", code + "merge_to_a_full_disk(*map(Path, sys.argv[1:]))", step / "actor", tmp_path)


WAITING = """
import sys, time
from pathlib import Path

ready = Path(sys.argv.pop(1))


def wait_in_the_middle(event, args):
    if event == "open" and "model-00003" in str(args[0]):
        ready.touch()
        time.sleep(3600)


sys.addaudithook(wait_in_the_middle)
from merge import *
main(parse_cli(MergeConfig()))
"""
"""A merge that waits, with two files written, for the signal: a whole one may end before a slow test can send it."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_merge_leaves_nothing(number, large, tmp_path):
    target, ready = tmp_path / "out" / "model", tmp_path / "ready"
    words = ["--local-dir", large, "--target-dir", target, "--skip-verify", "--max-shard-gib", "0.02"]
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(ready), *map(str, words)], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    while not ready.exists():
        assert process.poll() is None, "it ended before it could be interrupted"
        time.sleep(0.01)
    assert list(tmp_path.glob("out/.model*/model-00002*"))
    process.send_signal(number)
    assert process.wait(LIMIT_S) == 128 + number
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
    (other / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        merged(step / "actor", tmp_path / "truncated", dtype="keep", test_hf_dir=str(other))


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
        "above 0, and finite": (*good, "--max-shard-gib", "inf"),
        "add --upload": (*good, "--private"),
        "nearest is float16": (*good, "--dtype", "float8"),
        "hf auth login": (*good, "--upload", "me/model"),
        "use USER/NAME": (*good, "--upload", "not a name"),
        "expected a model's folder": (*good, "--test-hf-dir", tmp_path / "nowhere"),
        "--test-hf-dir cannot be opened": (*good, "--test-hf-dir", "x" * 300),
        "--target-dir cannot be opened": ("--local-dir", actor, "--target-dir", "~no-such-user/x"),
        "--local-dir cannot be opened": ("--local-dir", "~no-such-user/x", "--target-dir", target),
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
