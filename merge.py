"""Merges the shards of a checkpoint into an ordinary Hugging Face folder.

    python merge.py --local-dir runs/x/global_step_410/actor --target-dir out

Takes Lockstep's checkpoints and verl's FSDP checkpoints, of policies and of critics. One process, no GPU, no engine;
host memory for one tensor at a time. The folder appears when it is whole, or not at all.
"""

import math
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from lib.config import parse_cli, reporting_errors, resolve_path
from lib.errors import DamagedCheckpoint, LockstepError, UserError, check_fields
from lib.regular_files import check_tree
from lib.storage import is_verl, read_shards, read_verl_shards, verify
from lib.storage.adapter import Adapter, folders_below, hash_tensor, read_adapter, refuse_other_base
from lib.storage.checkpoint_folder import MANIFEST
from lib.storage.export import check_target, check_tensors, compare_folders, expected_tensors, export, new_folder
from lib.storage.peft_folder import export_adapter
from lib.storage.weight_headers import listing, read_json, shards_beside
from lib.storage.weights import adapted_shards, open_weights
from lib.storage.whole_tensors import Shards

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class MergeConfig:
    """Merges the shards of a checkpoint into an ordinary Hugging Face folder."""

    local_dir: str = ""
    """Folder of the model to merge: RUN/global_step_N/actor or .../critic, or verl's folder of that name."""
    target_dir: str = ""
    """Folder to write; it must not be there, or be empty, unless --force is given."""
    dtype: Literal["auto", "bfloat16", "float16", "float32", "keep"] = "auto"
    """Precision of the written weights; auto: the one that config.json names, or with an adapter the training's where
    that one would round the sum again; keep: the checkpoint's own."""
    max_shard_gib: float = 4.0
    """Largest size of a written file, in GiB, above 0; a single larger tensor still has one file."""
    base: str | None = None
    """Model that an adapter was trained on, where it is not where the run found it; with --adapter also a hub id."""
    adapter: bool = False
    """Write the adapter alone, as peft loads it, instead of a merged model."""
    test_hf_dir: str | None = None
    """Hugging Face folder to compare the result with, tensor by tensor; a difference ends with exit code 1."""
    force: bool = False
    """Replace a model or an adapter in the target folder once the new one is whole; a folder that holds anything else
    is refused."""
    skip_verify: bool = False
    """Merge without comparing the files with the checkpoint's hashes, or where its manifest was not copied along."""
    upload: str | None = None
    """Repository of the Hugging Face Hub (user/name) to upload the result to; needs a token that may write."""
    private: bool = False
    """Make the repository private if --upload creates it."""
    debug: bool = False
    """Print the traceback of an error too."""

    def __post_init__(self) -> None:
        check_fields(self, "", max_shard_gib=(0 < self.max_shard_gib < math.inf, "GiB above 0, and finite"))
        if self.private and self.upload is None:
            raise UserError("--private means nothing alone; found no --upload, expected one; add --upload USER/NAME")


def main(cfg: MergeConfig) -> None:
    """Merges; an error leaves no folder and ends with one line and its exit code."""
    with reporting_errors(debug=cfg.debug):
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: sys.exit(128 + number))  # so that nothing half-written is left
        merge(cfg)


def merge(cfg: MergeConfig) -> None:
    """Checks everything, verifies the checkpoint, writes the folder, compares and uploads it as asked."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    checkpoint = find_model(cfg.local_dir)
    if not cfg.target_dir.strip():
        raise UserError("no folder to write to; --target-dir; found nothing, expected a folder; add --target-dir DIR")
    target = resolve_path(cfg.target_dir, "--target-dir").resolve()
    check_target(target, checkpoint, force=cfg.force)
    if cfg.test_hf_dir is not None and not resolve_path(cfg.test_hf_dir, "--test-hf-dir").is_dir():
        raise UserError(
            f"no such folder; --test-hf-dir {cfg.test_hf_dir}; found nothing, expected a model's folder; check the path"
        )
    if cfg.upload is not None:
        check_upload(cfg.upload)
    shards = read_checkpoint(checkpoint, skip_verify=cfg.skip_verify)
    adapter = read_adapter(checkpoint / "huggingface")
    check_adapter_options(cfg, checkpoint, adapter)
    check_base_stays(target, checkpoint / "huggingface", cfg)
    if cfg.adapter:
        base = base_to_name(cfg, adapter)
        with new_folder(target) as folder:
            written = export_adapter(shards, adapter, folder, base=base)
        print(f"{target}: {written}")
        return
    expected = expected_tensors(checkpoint / "huggingface")
    if adapter is not None:
        base = None if cfg.base is None else base_folder(cfg.base)
        shards = adapted_shards(checkpoint / "huggingface", adapter, expected.shapes, base=base)
    check_tensors(shards, expected)
    with new_folder(target) as folder:
        written = export(
            shards, expected, checkpoint / "huggingface", folder,
            dtype=precision(cfg, checkpoint, adapter), max_file_bytes=int(cfg.max_shard_gib * 2**30),
        )  # fmt: skip
    print(f"{target}: {written}")
    if cfg.test_hf_dir is not None:
        compare(target, resolve_path(cfg.test_hf_dir, "--test-hf-dir"), frozenset(expected.tied))
    if cfg.upload is not None:
        upload(target, cfg.upload, private=cfg.private)


def precision(cfg: MergeConfig, checkpoint: Path, adapter: Adapter | None) -> torch.dtype | None:
    """Of the written weights; None: the checkpoint's own."""
    config = read_json(checkpoint / "huggingface" / "config.json")
    named = PRECISIONS.get(config.get("dtype", config.get("torch_dtype")) if cfg.dtype == "auto" else cfg.dtype)
    if cfg.dtype != "auto" or adapter is None or named is None:
        return named
    # Most of a small update is less than half a step of a narrower grid: what the engine sampled with is kept.
    own = PRECISIONS[adapter.dtype]
    return named if torch.promote_types(named, own) is named else own


def check_adapter_options(cfg: MergeConfig, checkpoint: Path, adapter: Adapter | None) -> None:
    """Raises UserError for options about an adapter that is not there, or that mean nothing beside --adapter."""
    if adapter is None and (cfg.adapter or cfg.base is not None):
        raise UserError(
            f"--{'adapter' if cfg.adapter else 'base'} needs an adapter; {checkpoint}; found a checkpoint of all "
            "weights, expected one of a run with --lora.rank; leave it out"
        )
    beside = {"test_hf_dir": None, "upload": None, "dtype": "auto", "max_shard_gib": MergeConfig.max_shard_gib}
    said = [f"--{name.replace('_', '-')}" for name, default in beside.items() if getattr(cfg, name) != default]
    if cfg.adapter and said:
        raise UserError(
            f"--adapter writes one file of float32, and no model; found {' and '.join(said)}, expected it alone; leave "
            "out one of the two"
        )


def check_base_stays(target: Path, checkpoint: Path, cfg: MergeConfig) -> None:
    """Raises UserError where the target is, or holds, a model under the adapter: --force would replace it."""
    models = [*folders_below(checkpoint)]
    if cfg.base is not None and (base := resolve_path(cfg.base, "--base")).is_dir():  # else a hub id, or refused later
        models += [base, *folders_below(base)]
    for folder in (Path(os.path.realpath(model)) for model in models):
        if target in (folder, *folder.parents):
            raise UserError(
                f"--target-dir would replace the model under the adapter; {target}; found it at or around {folder}, "
                "expected another place: no checkpoint of the adapter could be used any more; choose a new folder"
            )


def base_to_name(cfg: MergeConfig, adapter: Adapter) -> str:
    """What others load below the adapter: a folder with the weights that it was trained on, or a hub id, unproved.

    Raises UserError.
    """
    base = cfg.base or adapter.base
    if cfg.base is not None and not Path(base).is_dir() and re.fullmatch(r"[\w.-]+/[\w.-]+", base):
        print(f"warning: nothing proves that {base} is the model that the adapter was trained on", file=sys.stderr)
        return base
    folder = base_folder(base)
    if shards_beside(folder) is not None:
        raise UserError(
            f"no other system loads the model under the adapter; {folder}; found a checkpoint of a run, expected a "
            "Hugging Face folder; merge that checkpoint too, with --dtype keep, and give the merged folder as --base"
        )
    weights = open_weights(folder)
    for name, digest in adapter.tensors.items():
        if name not in weights.files or hash_tensor(weights.read(name)) != digest:
            raise refuse_other_base(name, folder)
    return str(folder)


def base_folder(base: str) -> Path:
    """The folder of the model under an adapter. Raises UserError where there is none."""
    folder = resolve_path(base, "--base")
    if not folder.is_dir():
        raise UserError(
            f"the model under the adapter is not there; {folder}; found nothing, expected what it was trained on; give "
            "its folder as --base, or beside --adapter its hub id"
        )
    return folder


def find_model(local_dir: str) -> Path:
    """The folder of a sharded model, resolved. Raises UserError, which names the folder that may be meant."""
    if not local_dir.strip():
        raise UserError(
            "no checkpoint is given; --local-dir; found nothing, expected RUN/global_step_N/actor; add --local-dir DIR"
        )
    folder = resolve_path(local_dir, "--local-dir").resolve()
    if not folder.is_dir():
        raise UserError(f"no such folder; --local-dir {local_dir}; found nothing, expected a folder; check the path")
    if not (folder / "model").is_dir() and not is_verl(folder):
        near = (*folder.glob("../huggingface"), *folder.glob("*/huggingface"), *folder.glob("*/*/huggingface"))
        inside = [path.resolve().parent for path in near]
        newest = max(inside, key=_step_and_name, default=None)
        raise UserError(
            f"no sharded model is there; --local-dir {folder}; found {listing(folder)}, expected model/ of Lockstep or "
            f"model_world_size_W_rank_R.pt of verl; use {newest or 'RUN/global_step_N/actor or .../critic'}"
        )
    if not (folder / "huggingface" / "config.json").is_file():
        raise UserError(
            f"the checkpoint does not say what model it is; {folder}; found no huggingface/config.json; copy that "
            "folder from the run, or config.json and the tokenizer's files from the model that was trained"
        )
    check_tree(folder)
    return folder


def _step_and_name(folder: Path) -> tuple[int, bool]:
    digits = folder.parent.name.rpartition("_")[2]
    return int(digits) if digits.isdecimal() else -1, folder.name == "actor"


def read_checkpoint(checkpoint: Path, *, skip_verify: bool) -> Shards:
    """The unread tensors of Lockstep's or verl's shards, after their bytes were compared with their hashes."""
    if not skip_verify:
        print(f"verifying {checkpoint}", file=sys.stderr)
    if is_verl(checkpoint):
        return read_verl_shards(checkpoint, verify=not skip_verify)
    if not skip_verify:
        step = checkpoint.parent
        if not (step / MANIFEST).exists():
            raise DamagedCheckpoint(
                f"not a whole checkpoint; {step}; found no {MANIFEST}, which is written last; use another checkpoint, "
                "copy it along, or merge unverified files with --skip-verify"
            )
        needed = (f"{checkpoint.name}/model/", f"{checkpoint.name}/huggingface/")
        verify(step, below=needed)
    return read_shards(checkpoint / "model")


def compare(target: Path, other: Path, ignored: frozenset[str]) -> None:
    """Prints that two folders hold the same tensors; raises a LockstepError (exit code 1) when they do not."""
    count, differences = compare_folders(target, other, ignored=ignored)
    if differences:
        raise LockstepError(
            f"the models differ; {target} and {other}; found {len(differences)} differences in {count} common tensors, "
            f"largest: {', '.join(differences[:3])}; expected none; give --dtype the precision of the other folder, or "
            "look at how it was made"
        )
    print(f"{target}: all {count} tensors equal those of {other}")


# ---- Upload ----


def check_upload(repository: str) -> None:
    """Raises UserError for a name other than USER/NAME, without a token or a network: before anything is merged."""
    from huggingface_hub import HfApi, get_token
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"not the name of a repository; --upload {repository}; found {error}; use USER/NAME") from error
    if get_token() is None:
        raise UserError(
            f"no token for the Hugging Face Hub; --upload {repository}; found neither HF_TOKEN nor a login, expected a "
            "token that may write; run `hf auth login`, or leave --upload out"
        )
    _on_hub(repository, lambda: HfApi().whoami())


def upload(folder: Path, repository: str, *, private: bool) -> None:
    """Creates the repository if it is not there and uploads the folder. Raises UserError when the hub refuses."""
    from huggingface_hub import HfApi

    hub = HfApi()
    _on_hub(repository, lambda: hub.create_repo(repository, private=private, exist_ok=True))
    commit = _on_hub(repository, lambda: hub.upload_folder(repo_id=repository, folder_path=folder))
    print(f"uploaded: {commit}")


def _on_hub(repository: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:  # the hub's client raises its own, httpx's and the operating system's
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"the Hugging Face Hub does not take the model; --upload {repository}; found {type(error).__name__}: "
            f"{reason}, expected a network and a token that may write there; mend that and run `hf upload {repository} "
            "TARGET_DIR`, or leave --upload out"
        ) from error


if __name__ == "__main__":
    main(parse_cli(MergeConfig()))
