"""A Hugging Face folder from the shards of a checkpoint: whole or not there, with one tensor in memory at a time."""

import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lib.errors import DamagedCheckpoint, UserError
from lib.families.supported import CAUSAL, VALUES
from lib.storage.beside_weights import copy_beside_weights
from lib.storage.checkpoint_folder import MANIFEST, fsync
from lib.storage.peft_folder import CONFIG, WEIGHTS
from lib.storage.weight_headers import Shape, listing, read_json, some
from lib.storage.whole_tensors import ANOTHER, SafetensorsFolder, Shards, write_safetensors

MODEL_FILES = (
    *("config.json", "generation_config.json", "*processor_config.json", "special_tokens_map.json"),
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "added_tokens.json"),
    *("tokenizer*.json", "*.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)
"""Names in a model's folder, whatever the model: what transformers writes there with safetensors and a tokenizer."""
ADAPTER_FILES = (CONFIG, WEIGHTS)
COMPARE_NUMBERS = 2**22  # at a time


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What transformers expects in the weights of a model, by its config.json."""

    shapes: dict[str, Shape]
    """{name: shape}, in the model's order."""
    tied: dict[str, str]
    """{name: the tensor that it is another name of, and that alone is written}."""
    computed: frozenset[str]
    """Buffers that the model computes itself; older releases saved some."""


def expected_tensors(folder: Path) -> Expected:
    """What transformers expects for the architecture in the folder's config.json. Builds it without memory for weights.

    Raises UserError when config.json names no architecture of transformers.
    """
    import transformers

    file = folder / "config.json"
    names = read_json(file).get("architectures") or [None]
    architecture = getattr(transformers, str(names[0]), None)
    # Of some families (Gemma 3, Granite, OLMo) transformers has no such class: their critics are ours alone.
    is_own = architecture is None and str(names[0]).endswith(VALUES)
    if is_own:
        architecture = getattr(transformers, names[0].replace(VALUES, CAUSAL), None)
    if not isinstance(architecture, type) or not issubclass(architecture, transformers.PreTrainedModel):
        raise UserError(
            f"not an architecture of transformers; {file}; found {names[0]}, expected one like Qwen3ForCausalLM or "
            f"Qwen3ForTokenClassification; transformers {transformers.__version__} does not know it: use the release "
            "that the model needs"
        )
    try:
        with torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
            config._attn_implementation = "eager"  # it may name one that is not installed, and nothing runs here
            model = _critic(config) if is_own else architecture(config)
    except Exception as error:  # KeyError, ValueError, dataclass validation: transformers has no class for it
        raise UserError(
            f"transformers cannot build the model; {file}; found {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}; mend that entry, or copy config.json again"
        ) from error
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {name: own[id(parameter)] for name, parameter in every if own[id(parameter)] != name}
    saved = model.state_dict()
    return Expected(
        shapes={name: tuple(tensor.shape) for name, tensor in saved.items() if name not in tied},
        tied=tied,
        computed=frozenset(name for name, _ in model.named_buffers() if name not in saved),
    )


def _critic(config: Any) -> nn.Module:
    """A decoder below a value head, by the names of transformers' models for token classification."""
    from transformers import AutoModel

    critic = nn.Module()
    critic.model, critic.score = AutoModel.from_config(config), nn.Linear(config.hidden_size, 1)
    return critic


def check_tensors(shards: Shards, expected: Expected) -> None:
    """Raises DamagedCheckpoint unless the shards hold each expected tensor once, whole, in its shape, and no other.

    A tied tensor may be there a second time, under its other name, if it is equal bit for bit. Raises UserError when it
    is not, and for an adapter.
    """
    found = shards.tensors
    adapters = [name for name in found if "lora_" in name]
    if adapters:
        raise UserError(
            f"the checkpoint has an adapter of another system; {shards.folder}; found {adapters[0]}, expected the "
            "model's own weights; merge the adapter into its model where it was trained, and save that"
        )
    missing = [name for name in expected.shapes if name not in found]
    unknown = [name for name in found if name not in {*expected.shapes, *expected.tied, *expected.computed}]
    for what, names in (("lack tensors", missing), ("hold tensors that config.json has no place for", unknown)):
        if names:
            raise DamagedCheckpoint(
                f"the shards {what}; {shards.folder}; found {len(found)} tensors, {len(names)} of which "
                f"{'are missing' if names is missing else 'are unknown'}, first {names[0]}; expected what the "
                f"config.json in huggingface/ describes; {ANOTHER}"
            )
    for name, shape in expected.shapes.items():
        if found[name].shape != shape:
            raise DamagedCheckpoint(
                f"a tensor's shape differs from config.json; {name} in {shards.folder}; found "
                f"{list(found[name].shape)}, expected {list(shape)}; {ANOTHER}"
            )
        found[name].check()
    for name, source in expected.tied.items():
        if name in found:
            found[name].check()
            dtype = found[source].dtype
            if found[name].dtype != dtype or not torch.equal(found[name].read(dtype), found[source].read(dtype)):
                raise UserError(
                    f"config.json says tied, the weights differ; {name} and {source} in {shards.folder}; found other "
                    "numbers, expected the same; set tie_word_embeddings to false in huggingface/config.json"
                )
    shards.release()


def export(
    shards: Shards, expected: Expected, source: Path, folder: Path, *, dtype: torch.dtype | None, max_file_bytes: int
) -> str:
    """Writes the model into an empty folder, with config.json, tokenizer and the like from `source`, but no code.

    Gives what it wrote, and what it left out, in words.

    Floating-point tensors are cast to `dtype` (None: as saved). Files of at most `max_file_bytes` (a larger tensor has
    one of its own), with an index when there are several. Raises as `ShardedTensor.read` does.
    """
    from tqdm import tqdm

    left_out = copy_beside_weights(source, folder)
    dtypes = {name: _target_dtype(shards.tensors[name].dtype, dtype) for name in expected.shapes}
    sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in expected.shapes.items()}
    total, free = sum(sizes.values()), shutil.disk_usage(folder).free
    if free < total:
        raise UserError(
            f"not enough disk space for the model; {folder.parent}; found {_size(free)} free, expected "
            f"{_size(total)}; free some space, or choose another --target-dir"
        )
    plan = plan_files(sizes, max_file_bytes)
    weight_map = {}
    with tqdm(total=total, desc="merging", unit="B", unit_scale=True) as bar:
        for number, names in enumerate(plan, start=1):
            file = f"model-{number:05}-of-{len(plan):05}.safetensors" if len(plan) > 1 else "model.safetensors"
            # Widest numbers first, so that all of them are aligned, as the format's own library does it.
            names = sorted(names, key=lambda name: -dtypes[name].itemsize)
            header = {name: (dtypes[name], expected.shapes[name]) for name in names}

            def read(names: list[str] = names) -> Iterator[Tensor]:
                for name in names:
                    yield shards.tensors[name].read(dtypes[name])
                    bar.update(sizes[name])

            write_safetensors(folder / file, header, read(), {})
            shards.release()  # what was read of mapped files would stay resident
            weight_map |= dict.fromkeys(names, file)
    if len(plan) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    _name_dtype(folder / "config.json", {each for each in dtypes.values() if each.is_floating_point})
    kinds = " and ".join(sorted({str(each).removeprefix("torch.") for each in dtypes.values()}))
    without = f"; left out, as it can run: {some([repr(each) for each in left_out])}" if left_out else ""
    return f"{len(sizes)} tensors, {total / 1e9:.2f} GB of {kinds} in {len(plan)} file(s){without}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def _target_dtype(saved: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and saved.is_floating_point else saved


def plan_files(sizes: dict[str, int], max_bytes: int) -> list[list[str]]:
    """Names in order, cut into files of at most `max_bytes`, or of a single tensor."""
    files: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not files or filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def _name_dtype(file: Path, dtypes: set[torch.dtype]) -> None:
    """Puts the precision of the weights into config.json, if it is one."""
    if len(dtypes) == 1:
        config = read_json(file)
        key = "torch_dtype" if "torch_dtype" in config else "dtype"  # the first is transformers' former name
        config[key] = str(dtypes.pop()).removeprefix("torch.")
        file.write_text(json.dumps(config, indent=2) + "\n")


# ---- The folder ----


def check_target(target: Path, checkpoint: Path, *, force: bool) -> None:
    """Raises UserError when the folder must not be written or replaced. Both paths are resolved.

    `force` replaces a folder only if an export can have written all that is in it, as `_foreign` tells.
    """
    inside = [each for each in (target, *target.parents) if each == checkpoint or (each / MANIFEST).exists()]
    if inside or target in checkpoint.parents:
        raise UserError(
            f"--target-dir would change a checkpoint; {target}; found it around or inside "
            f"{(inside or [checkpoint])[0]}, expected another place; choose a new folder"
        )
    if target.is_dir() and os.path.ismount(target):
        raise UserError(
            f"--target-dir is a mount point, which cannot be put in place at once; {target}; expected a folder inside "
            f"a file system; use {target / 'model'}"
        )
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    foreign = _foreign(target, checkpoint / "huggingface") if target.is_dir() else "a file"
    if foreign:
        raise UserError(
            f"--target-dir is taken by something that is neither a merged model nor an adapter; {target}; found "
            f"{foreign}, expected a folder with nothing but a model's files (config.json, model*.safetensors, "
            f"tokenizer*), or {' and '.join(ADAPTER_FILES)}; choose a new folder, or move this away yourself"
        )
    if not force:
        raise UserError(
            f"--target-dir is not empty; {target}; found {listing(target)}; choose a new folder, or add --force to "
            "replace what is in it"
        )


def _foreign(folder: Path, source: Path) -> str | None:
    """What shows that no export made this folder, in words: neither a model nor an adapter, or a file that neither a
    model nor `source` has.

    Many folders have a config.json, runs among them, so a model is known by its weights too.
    """
    if sorted(path.name for path in folder.iterdir()) == sorted(ADAPTER_FILES):
        return None
    if not (folder / "config.json").is_file() or not any(folder.glob("model*.safetensors")):
        return listing(folder)
    own = {path.relative_to(source) for path in source.rglob("*")}  # the code of a model, for one
    for path in folder.rglob("*"):
        is_model_file = path.is_file() and path.parent == folder and any(map(path.match, MODEL_FILES))
        if not is_model_file and path.relative_to(folder) not in own:
            return f"{path.relative_to(folder)} in it"
    return None


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside the target, which becomes the target when the body ends well, and else is deleted.

    A folder that is there already stays until the new one is whole; then they are exchanged.
    """
    staging, old = (target.with_name(f".{target.name}.{os.getpid()}.{what}") for what in ("new", "old"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
        yield staging
        if target.exists():
            target.rename(old)
        staging.rename(target)
        fsync(target.parent)
    except BaseException as error:
        if old.exists() and not target.exists():
            old.rename(target)
        if isinstance(error, OSError):
            raise UserError(
                f"cannot write the model; {error.filename or target}; found {error.strerror or error}, expected a disk "
                "with room and permission to write; mend that, or choose another --target-dir; nothing was changed"
            ) from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if target.exists():
            shutil.rmtree(old, ignore_errors=True)


# ---- Comparison ----


def compare_folders(folder: Path, other: Path, *, ignored: frozenset[str] = frozenset()) -> tuple[int, list[str]]:
    """How many tensors two Hugging Face folders have in common, and what differs, in words: largest difference first.

    Names, shapes, dtypes and every bit of the numbers. Raises UserError for folders that have no whole weights.
    """
    here, there = SafetensorsFolder(folder), SafetensorsFolder(other)
    ours, theirs = here.files.keys(), there.files.keys()
    names = sorted((ours & theirs) - ignored)
    words = [f"{name} is only in {folder}" for name in sorted(ours - theirs - ignored)]
    words += [f"{name} is only in {other}" for name in sorted(theirs - ours - ignored)]
    distances: dict[str, float] = {}
    for name in names:
        a, b = here.read(name), there.read(name)
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            words.append(f"{name} is {list(a.shape)} {a.dtype} here and {list(b.shape)} {b.dtype} there")
        elif not torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
            distances[name] = _largest_difference(a, b)
    worst = sorted(distances, key=lambda name: -distances[name])
    return len(names), [f"{name} by {distances[name]:.3g}" for name in worst] + words


def _largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest |a - b|; infinite when a number is not finite on one side alone."""
    parts = zip(a.reshape(-1).split(COMPARE_NUMBERS), b.reshape(-1).split(COMPARE_NUMBERS), strict=True)
    return max(float((x.double() - y.double()).abs().nan_to_num(nan=math.inf).max()) for x, y in parts)
