"""Checkpoints to merge, written by real processes (tests/merge_worker.py), and what is done with them in the tests."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from lib.storage.checkpoint_folder import checkpoint_path, hash_file, publish, stage
from merge import MergeConfig, merge
from tests.prefork import prefork
from tests.ranks import LIMIT_S, ROOT
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
        text=True, timeout=LIMIT_S,
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
            done = prefork(num_ranks, "-m", "tests.merge_worker", kind, str(out), *(str(models / n) for n in names))
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


def write_pieces(folder, pieces):
    """Shards with pieces {file number: {name: (offsets, tensor)}} of float32 tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, held in pieces.items():
        info = json.dumps({name: {"saved_offsets": offsets} for name, (offsets, _) in held.items()})
        file = folder / f"shard-{number:05}-model-00001-of-00001.safetensors"
        save_file({name: tensor for name, (_, tensor) in held.items()}, file, metadata={"DCP_SHARDING_INFO": info})
