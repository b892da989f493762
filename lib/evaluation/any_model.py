"""The model of an evaluation: found wherever it lies, and written into the engine tensor by tensor."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.config.as_json import to_json
from lib.data.prompts import DataFiles, Prompts, tokenize
from lib.data.rows import Rows
from lib.data.tokenizer import load_tokenizer, stop_token_ids
from lib.dist import World
from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import RolloutConfig, SamplingConfig
from lib.errors import WeightSyncError
from lib.evaluation.inputs import EvalDataConfig
from lib.model.networks import read_weight_
from lib.storage.adapter import Adapter
from lib.storage.checkpoint_folder import FileEntry, hash_files, share
from lib.storage.model_folder import ModelFiles, check_model_files, check_parameters
from lib.storage.model_source import find_actor, verify_actor
from lib.storage.peft_folder import CONFIG, WEIGHTS, PeftAdapter, read_peft
from lib.storage.weight_headers import iter_weight_files
from lib.storage.weights import AdaptedFolder, hash_tensors, open_weights
from lib.turns.kinds import Kinds
from lib.turns.start import Turns

NO_ANSWERS = (
    *("--turns.path", "--turns.env", "--turns.num-workers", "--turns.concurrency", "--turns.timeout-s", "--turns.join"),
)
"""Options of turns that no answer follows from; of the file its hash counts."""


@dataclass(frozen=True, kw_only=True)
class EvalModel:
    """A model that passed the checks."""

    files: ModelFiles
    """Where its config and tokenizer are, and the weights, or a checkpoint's shards beside it."""
    tokenizer: Any
    fingerprint: str
    """16 hexadecimal digits that change with any byte of the weights, of an adapter's, or of config.json."""
    warnings: tuple[str, ...]
    adapter: PeftAdapter | None = None
    """What is added to the weights."""


@dataclass(frozen=True, kw_only=True)
class EvalLoRAConfig:
    """An adapter from elsewhere; that of a run of ours is taken with the run, by --model.path."""

    path: str | None = None
    """Folder of an adapter as peft writes it, which is added to the model of --model.path; None: the model alone."""


def find_model(
    path: str, data: EvalDataConfig, rollout: RolloutConfig, world: World, *, adapter_path: str | None = None
) -> EvalModel:
    """The model at a Hugging Face folder, a hub id, RUN (its newest whole checkpoint), global_step_N or .../actor,
    with the adapter of a folder of peft's added.

    Executed by all ranks together, which share the hashing. Raises UserError as training does, DamagedCheckpoint for a
    checkpoint that is not what was saved.
    """
    adapter = None
    if adapter_path is not None:
        adapter = world.agree(lambda: read_peft(adapter_path, "--lora.path"))
    actor, warnings = world.on_rank_0(lambda: find_actor(path, "--model.path"))  # its run may go on meanwhile
    files = world.agree(
        lambda: check_model_files(
            path if actor is None else str(actor / "huggingface"), with_weights=actor is None,
            max_prompt_len=data.max_prompt_len, max_response_len=rollout.max_response_len,
            tensor_parallel_size=rollout.tensor_model_parallel_size,
        )
    )  # fmt: skip
    # Before the hashing, which takes minutes for a large model.
    world.agree(lambda: check_parameters(files))
    if adapter is not None:
        world.agree(lambda: adapter.check_fits(files.shapes, files.folder))
    tokenizer = world.agree(lambda: load_tokenizer(files.folder, chat_template_kwargs=data.chat_template_kwargs))
    hashes = _hash_folder(files.folder, world) if actor is None else verify_actor(actor, world)
    if adapter is not None:
        base_hashes = hash_tensors(files.folder, world) if adapter.base_hashes else {}
        world.on_rank_0(lambda: adapter.check_base(base_hashes, files.folder, used=files.shapes))
        both = {CONFIG: FileEntry(0, ""), WEIGHTS: FileEntry(0, "")}
        entries = world.on_rank_0(lambda: hash_files(adapter.folder, both))
        hashes |= {name: entry.hash for name, entry in entries.items()}
    text = "".join(f"{name} {digest}\n" for name, digest in sorted(hashes.items()))
    return EvalModel(
        files=files,
        tokenizer=tokenizer,
        fingerprint=hashlib.sha256(text.encode()).hexdigest()[:16],
        warnings=(*files.warnings, *warnings),
        adapter=adapter,
    )


def _hash_folder(folder: Path, world: World) -> dict[str, str]:
    """{file: hash} of a Hugging Face folder's weights and config."""
    paths = [folder / "config.json", *(file for file, _ in iter_weight_files(folder))]
    sizes = {path.relative_to(folder).as_posix(): FileEntry(path.stat().st_size, "") for path in paths}
    own = world.agree(lambda: hash_files(folder, share(sizes, world.rank, world.size)))
    return {name: entry.hash for of_rank in world.gather(own) for name, entry in of_rank.items()}


def load_eval_prompts(
    data: EvalDataConfig, model: EvalModel, rows: Rows, *, date: str, kinds: Kinds | None = None
) -> tuple[list[int], Prompts]:
    """The ids that end a response, and the prompts under the chat template on that date, which name the tools of their
    environments. Raises UserError."""
    folder = model.files.folder
    files = DataFiles(train=None, val=rows, warnings=())
    options = dict(split="val", date=date, files_flag="--data.files", tools=kinds and kinds.of_prompts)
    prompts = tokenize(data.as_validation(), files, model.tokenizer, **options)
    return stop_token_ids(model.tokenizer, folder), prompts


def what_defines_responses(
    rollout: SamplingConfig, model: EvalModel, prompts: Prompts, stop_ids: list[int], *, dtype: str, seed: int,
    turns: Turns | None = None,
) -> dict[str, Any]:  # fmt: skip
    """What a user chose that the responses follow from: with the same values, finished ones need not be sampled again.

    Left out: versions, which fast paths were taken and when an answered episode goes on, which change no distribution.
    """
    names = [field.name for field in fields(SamplingConfig)]
    sampling = {f"--rollout.{name.replace('_', '-')}": getattr(rollout, name) for name in names}
    return sampling | {
        "--rollout.stop": list(rollout.stop),
        "--seed": seed,
        "--model.dtype": dtype,
        "model": model.fingerprint,
        "prompts": prompts.fingerprint,
        "stop token ids": stop_ids,
        **({"date": prompts.date} if prompts.date else {}),
        **(state_of_turns(turns) if turns else {}),
    }


def state_of_turns(turns: Turns) -> dict[str, Any]:
    """What a user chose that the answers between turns follow from."""
    options = {f"--turns.{name.replace('_', '-')}": value for name, value in to_json(turns.cfg).items()}
    known = {name: value for name, value in options.items() if name not in NO_ANSWERS}
    return known | {"turns' file": turns.kinds.file_hash}


# ---- Weights ----


def iter_weights(model: EvalModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every weight by its Hugging Face name, whole, on the CPU, in the given precision; one at a time.

    Raises UserError or DamagedCheckpoint for a tensor that is missing, of another shape, or not finite.
    """
    weights = open_weights(model.files.folder)
    if (peft := model.adapter) is not None:
        adapter = Adapter(
            base=str(model.files.folder), dtype=str(dtype).removeprefix("torch."), scale=peft.scale, tensors={}
        )  # its base was compared
        weights = AdaptedFolder(peft.folder, adapter, peft)
    for name, shape in model.files.shapes.items():
        tensor = torch.empty(shape, dtype=dtype)
        read_weight_(weights, tensor, name)
        yield name, tensor


def load_engine_(engine: RolloutEngine, model: EvalModel, world: World) -> int:
    """Writes the model into the engine; gives the number of engine parameters, none of which keeps a number it had.

    Every parameter is NaN before, and finite after: the engine started with random weights, and one that was left so
    would stay unseen. Executed by all ranks; raises WeightSyncError on all of them.
    """

    @torch.no_grad()
    def load() -> int:
        held = engine.parameters()
        for parameter in held.values():
            parameter.fill_(torch.nan)
        engine.load_weights(iter_weights(model, next(iter(held.values())).dtype))
        left = sorted(name for name, parameter in held.items() if not bool(torch.isfinite(parameter).all()))
        if left:
            raise WeightSyncError(
                f"the model did not reach {len(left)} of {len(held)} engine parameters; {model.files.folder}; the "
                f"first is {left[0]}; its architecture is laid out in a way this version does not know; please report "
                "the model's config.json"
            )
        return len(held)

    return world.agree(load)
