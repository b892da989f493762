"""What is wrong with a model folder, found in its headers, before weights are read.

Reads JSON files and the first bytes of the weights; a tensor only where two must be equal (NaN and infinity are found
when weights load). Which tensors there must be, transformers says, which builds the model without memory.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from lib.config.values import either, nearest_divisors, resolve_path
from lib.errors import UserError
from lib.families.supported import KNOWN, VALUES, check_family, is_proved, refuse_parts, refuse_tensors
from lib.storage.beside_weights import check_beside_weights
from lib.storage.weight_headers import (
    DOWNLOAD_AGAIN,
    Shape,
    check_weights,
    listing,
    read_headers,
    read_json,
    shards_beside,
    some,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
MAX_SIZE = 2**31  # beyond it a number in config.json is a mistake
MAX_LAYERS = 1_000  # and above all too many to list
LENGTH_DEPENDENT = ("longrope", "su", "dynamic")
"""Rotary scalings whose tables change with the longest sequence of a batch."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
)
OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "sliding_window")
"""Sizes that a config.json may leave out. Of a window that is none, as -1, trainer, engine and transformers' own masks
each make something else."""


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """A model folder that passed the checks."""

    folder: Path
    """Absolute; for a hub id, the folder of its snapshot."""
    config: dict[str, Any]
    """config.json."""
    is_critic: bool = False
    """Whether it is trained with a value head in place of its own."""
    reference: "ModelFiles | None" = None
    """The frozen model of the KL; None without one."""
    warnings: tuple[str, ...] = ()
    """About checkpoints that were passed over on the way to it."""
    tensor_hashes: Mapping[str, str] = field(default_factory=dict)
    """{name: hash} of its weights, where an adapter is bound to them."""
    code: tuple[str, ...] = ()
    """Entries of its configs that name code, in words: it is neither run nor copied into a checkpoint."""

    @cached_property
    def _network(self) -> tuple[dict[str, Any], dict[str, Shape]]:
        return _config_and_shapes(self.config, self.folder)

    @property
    def full_config(self) -> dict[str, Any]:
        """config.json with transformers' defaults for what it leaves out. Imports transformers; raises UserError."""
        return self._network[0]

    @property
    def shapes(self) -> dict[str, Shape]:
        """{name: shape} of every parameter that is trained. Imports transformers; raises UserError."""
        shapes = self._network[1]
        return _without_head(shapes) | value_head(self.config) if self.is_critic else shapes

    @property
    def num_parameters(self) -> int:
        """Of the model itself. Imports transformers; raises UserError."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def block_parameters(self) -> int:
        """Of the layers' matrices: each costs a multiplication and an addition per token."""
        matrices = [shape for name, shape in self.shapes.items() if name.startswith("model.layers.") and len(shape) > 1]
        return sum(math.prod(shape) for shape in matrices)

    @property
    def has_adapter(self) -> bool:
        """Whether its weights are frozen, and an adapter trains beside them."""
        return bool(self.tensor_hashes)

    @property
    def num_frozen_parameters(self) -> int:
        """The reference's."""
        return self.reference.num_parameters if self.reference else 0

    @property
    def began_from(self) -> dict[str, str]:
        """{"model": folder, "reference": folder} of those that are checkpoints: where a run's newest one moves on, it
        must find these again."""
        named = {"model": self, "reference": self.reference}
        return {name: str(files.folder) for name, files in named.items() if files and shards_beside(files.folder)}

    @property
    def in_words(self) -> str:
        """Where it lies."""
        is_checkpoint = shards_beside(self.folder) is not None
        return f"the weights of {self.folder.parent.parent}" if is_checkpoint else str(self.folder)


def check_model_files(
    path: str, *, max_prompt_len: int, max_response_len: int, tensor_parallel_size: int = 1, with_weights: bool = True,
    option: str = "--model.path",
) -> ModelFiles:  # fmt: skip
    """The folder and its config.json, without a look at its tensors (`check_parameters`): imports nothing that is slow.

    Raises UserError, with a remedy, for a folder that could not be trained. A hub id (`Qwen/Qwen3-0.6B`) is looked up
    in the local cache or downloaded, then checked like a folder. `with_weights` False: the weights lie elsewhere, as a
    checkpoint's do.
    """
    folder = _find_folder(path, option)
    config, warnings = _read_config(folder, option)
    _check_length(config, folder, max_prompt_len, max_response_len)
    _check_tensor_parallel(config, folder, tensor_parallel_size)
    if with_weights:
        read_headers(folder)
    _check_vocabulary(folder, config["vocab_size"])
    _check_tokenizer_config(folder)
    code = check_beside_weights(folder)
    return ModelFiles(folder=folder, config=config, code=tuple(code), warnings=tuple(warnings))


def check_parameters(files: ModelFiles) -> None:
    """Raises UserError unless transformers builds a model of the folder's config.json, and its weights are that
    model's. Imports transformers."""
    shapes, config = files.shapes, files.full_config
    if shards_beside(files.folder) is None:
        # A value head may lie in any folder: train_ppo.py can start a critic from it.
        tied = {HEAD: EMBEDDING} if HEAD not in shapes else {}
        check_weights(files.folder, shapes, optional=value_head(config), tied=tied)


def check_critic_files(path: str, policy: ModelFiles, *, max_prompt_len: int, max_response_len: int) -> ModelFiles:
    """The folder that the critic starts from, the policy's own where `path` is empty.

    A causal language model, or one for token classification with a single label, as a saved critic is. It needs no
    tokenizer: the ids are the policy's. Raises UserError, with a remedy, for a folder that could not be trained or
    whose vocabulary is not the policy's. Imports transformers.
    """
    files = replace(policy, is_critic=True, reference=None, warnings=())
    if path.strip():
        files = _find_critic(path, policy, max_prompt_len, max_response_len)
    elif shards_beside(policy.folder) is not None:
        return files  # its weights are whole
    shapes, optional = dict(files.shapes), value_head(files.config)
    del shapes["score.bias"]  # it may be left out
    if not _has_value_head(files.config):
        del shapes["score.weight"]
        head = {HEAD: (files.config["vocab_size"], files.config["hidden_size"])}
        if files.full_config["tie_word_embeddings"]:
            optional |= head  # no critic has it
        else:
            shapes |= head
    check_weights(files.folder, shapes, optional=optional)
    check_beside_weights(files.folder)
    return files


def check_reference(policy: ModelFiles, reference: ModelFiles) -> None:
    """Raises UserError unless every id that the policy may write means the same token to the reference."""
    _refuse_unproved(policy, reference, f"the reference; --model.reference-path {reference.folder}")
    ours, theirs = _token_ids(policy.folder), _token_ids(reference.folder)
    rows, expected_rows = reference.config["vocab_size"], policy.config["vocab_size"]
    if rows < expected_rows:  # more are padding
        found, expected = f"vocab_size={rows}", f"at least the policy's {expected_rows}"
    elif ours != theirs:
        token = min(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
        found, expected = f"token {token!r} with id {theirs.get(token)}", f"the policy's id {ours.get(token)}"
    else:
        return
    raise UserError(
        f"the reference reads other tokens than the policy writes; --model.reference-path {reference.folder}; found "
        f"{found}, expected {expected}; use a reference with the policy's tokenizer, or leave the option out"
    )


def _find_critic(path: str, policy: ModelFiles, max_prompt_len: int, max_response_len: int) -> ModelFiles:
    folder = _find_folder(path, "--critic.model.path")
    config, warnings = _read_config(folder, "--critic.model.path", is_critic=True)
    _check_length(config, folder, max_prompt_len, max_response_len)
    if config["vocab_size"] != policy.config["vocab_size"]:
        raise UserError(
            f"the critic reads other token ids than the policy writes; --critic.model.path {path}; found "
            f"vocab_size={config['vocab_size']}, expected the policy's {policy.config['vocab_size']}; use a critic "
            "with the policy's tokenizer, or leave --critic.model.path out"
        )
    labels = config.get("id2label")  # transformers leaves its default, 2 labels, out
    num_labels = len(labels) if isinstance(labels, dict) else 2
    if _has_value_head(config) and num_labels != 1:
        raise UserError(
            f"the critic's head gives several numbers a token; {folder / 'config.json'}; found {num_labels} labels, "
            "expected 1 (num_labels=1); use a value model, or the causal language model: its head then starts at 0"
        )
    files = ModelFiles(folder=folder, config=config, is_critic=True, warnings=tuple(warnings))
    _refuse_unproved(policy, files, f"the critic; --critic.model.path {path}")
    return files


def _refuse_unproved(policy: ModelFiles, other: ModelFiles, what: str) -> None:
    """The proofs at the start are of the policy alone."""
    if not is_proved(other.config) and other.config["model_type"] != policy.config["model_type"]:
        raise UserError(
            f"a family that nothing proves right as {what}; found {other.config['architectures'][0]}, expected the "
            f"policy's family or one of {KNOWN}; use such a model"
        )


def _has_value_head(config: dict[str, Any]) -> bool:
    return config["architectures"][0].endswith(VALUES)


def _config_and_shapes(raw: dict[str, Any], folder: Path) -> tuple[dict[str, Any], dict[str, Shape]]:
    """The config with all defaults, and {name: shape} of what transformers builds of it. Raises UserError."""
    from lib.families.heads import check_head  # they import torch, which takes longer than all checks before
    from lib.families.meta_model import build_causal_lm, read_config

    config, model = read_config(folder), build_causal_lm(folder)
    refuse_parts(config.to_dict() | {"architectures": raw["architectures"]}, folder / "config.json")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    refuse_tensors(shapes, folder / "config.json")
    buffers = sorted(model.state_dict().keys() - shapes.keys() - {HEAD})
    elsewhere = [name for name in shapes if not name.startswith("model.") and name != HEAD]
    if EMBEDDING not in shapes or buffers or elsewhere:
        raise UserError(
            f"the model is put together in another way; {folder / 'config.json'}; found "
            f"{some(buffers or elsewhere or sorted(shapes))}, expected parameters alone, of a decoder under model. and "
            f"of {HEAD}; choose another model"
        )
    check_head(model)
    return config.to_dict() | {"architectures": raw["architectures"]}, shapes


def _without_head(shapes: dict[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if name != HEAD}


def value_head(config: Mapping[str, Any]) -> dict[str, Shape]:
    """{name: shape} of a critic's head."""
    return {"score.weight": (1, config["hidden_size"]), "score.bias": (1,)}


def head_dim(config: Mapping[str, Any]) -> int:
    """Numbers of one head."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


# ---- The folder ----


def _find_folder(path: str, option: str) -> Path:
    if not path.strip():
        raise UserError(f"no model is given; {option}; found nothing, expected a folder or a hub id; add {option} DIR")
    folder = resolve_path(path, option)
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(
            f"{option} is not a folder; {path}; found a file, expected a folder with config.json, weights and "
            f"tokenizer; use {folder.parent if (folder.parent / 'config.json').exists() else 'the folder of a model'}"
        )
    if re.fullmatch(r"[\w][\w.-]*/[\w][\w.-]*", path) and not folder.parent.exists():
        return _download(path, option)
    raise UserError(f"no such model folder; {option} {path}; found nothing, expected a folder{_did_you_mean(folder)}")


def _did_you_mean(folder: Path) -> str:
    import difflib

    parent = folder.parent
    siblings = [entry.name for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    nearest = difflib.get_close_matches(folder.name, siblings, n=1, cutoff=0.5)
    return f"; did you mean {parent / nearest[0]}" if nearest else "; check the spelling and the working directory"


def _download(hub_id: str, option: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, etag_timeout=4))
    except (OSError, ValueError) as error:  # no network, no such id, gated, cache not writable
        raise UserError(
            f"{option} is no local folder, and the hub does not give it; {hub_id}; found neither, "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}; give a local "
            "folder, check the id, or download it where there is a network"
        ) from error


# ---- config.json ----


def _read_config(folder: Path, option: str, *, is_critic: bool = False) -> tuple[dict[str, Any], list[str]]:
    """config.json as it is, of a family that can be trained, and warnings."""
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        base = read_json(adapter).get("base_model_name_or_path", "unknown")
        beside = f"give that model, and the adapter as --lora.path {folder}"
        raise UserError(
            f"{option} is an adapter, not a model; {adapter}; found an adapter of {base}, expected a whole model; "
            f"{beside if option == '--model.path' else 'merge the two where it was trained, and give that'}"
        )
    file = folder / "config.json"
    if not file.exists():
        inside = sorted(str(child) for child in folder.glob("*/config.json"))
        hint = f"use {Path(inside[0]).parent}" if inside else "give a folder in the Hugging Face format"
        raise UserError(f"the model folder has no config.json; {folder}; found {listing(folder)}; {hint}")
    config = read_json(file)
    warnings = check_family(config, folder, is_critic=is_critic)
    for name in (*SIZES, *(name for name in OPTIONAL_SIZES if config.get(name) is not None)):
        most = MAX_LAYERS if name == "num_hidden_layers" else MAX_SIZE
        if type(config.get(name)) is not int or not 0 < config[name] <= most:
            remedy = "say null for none" if name == "sliding_window" else DOWNLOAD_AGAIN
            raise UserError(
                f"config.json has no usable {name}; {file}; found {config.get(name)!r}, expected a positive integer "
                f"up to {most}; {remedy}"
            )
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    if heads % kv_heads:
        raise UserError(
            f"the heads do not divide; {file}; found num_attention_heads={heads}, num_key_value_heads={kv_heads}, "
            f"expected a multiple; {DOWNLOAD_AGAIN}"
        )
    return config, warnings


def longest_sequence(path: str) -> int | None:
    """Tokens of prompt and response together that the model in a local folder takes; None: there is no such folder.

    Raises UserError for a config.json that cannot be used.
    """
    folder = Path(path).expanduser()
    if not path.strip() or not (folder / "config.json").is_file():
        return None
    return _longest(_read_config(folder, "--model.path")[0], folder)[0]


def _check_length(config: dict[str, Any], folder: Path, max_prompt_len: int, max_response_len: int) -> None:
    limit, name = _longest(config, folder)
    if max_prompt_len + max_response_len > limit:
        raise UserError(
            f"prompt and response do not fit the model; {folder / 'config.json'}; found --data.max-prompt-len "
            f"{max_prompt_len} + --rollout.max-response-len {max_response_len} = {max_prompt_len + max_response_len}, "
            f"expected at most {name}={limit}; lower one of the two"
        )


def _longest(config: dict[str, Any], folder: Path) -> tuple[int, str]:
    """Tokens of prompt and response together, and what of config.json says so."""
    limit = config["max_position_embeddings"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    is_yarn = isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "yarn"
    if is_yarn:  # the only scaling whose factor max_position_embeddings may not include yet
        original, factor = rope.get("original_max_position_embeddings", limit), rope.get("factor", 1)
        if type(original) is not int or type(factor) not in (int, float) or not 0 < original * factor < MAX_SIZE:
            raise UserError(
                f"config.json has no usable rope scaling; {folder / 'config.json'}; found factor {factor!r} and "
                f"original_max_position_embeddings {original!r}, expected positive numbers; {DOWNLOAD_AGAIN}"
            )
        limit = max(limit, int(original * factor))
    name = "max_position_embeddings"
    shorter = [length for length in _lengths_of_one_table(config, rope) if length < limit]
    if shorter:  # beyond, a sequence's tables would depend on the longest one that is packed beside it
        name, limit = "original_max_position_embeddings", min(shorter)
    return limit, name


def _lengths_of_one_table(config: dict[str, Any], rope: Any) -> list[int]:
    """Up to which lengths the rotary tables of a config.json do not change; of all its kinds of layers."""
    scalings = [rope, *rope.values()] if isinstance(rope, dict) else []
    kinds = [each for each in scalings if isinstance(each, dict)]
    name = "original_max_position_embeddings"  # Phi-3 has it beside the scaling, not in it
    found = [
        each.get(name) or config.get(name)
        for each in kinds
        if (kind := each.get("rope_type", each.get("type"))) in LENGTH_DEPENDENT
        or (kind == "yarn" and config["model_type"] == "phi3")  # transformers reads both as longrope
    ]
    return [length for length in found if type(length) is int]


def _check_tensor_parallel(config: dict[str, Any], folder: Path, size: int) -> None:
    heads, intermediate_size = config["num_attention_heads"], config["intermediate_size"]
    kv_heads = config.get("num_key_value_heads") or heads

    def fits(size: int) -> bool:
        return heads % size == intermediate_size % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)

    if not fits(size):
        raise UserError(
            f"--rollout.tensor-model-parallel-size {size} does not divide the model; {folder / 'config.json'}; found "
            f"{heads} attention heads, {kv_heads} key-value heads and intermediate_size={intermediate_size}; use "
            f"{either([d for d in nearest_divisors(heads, size, count=heads) if fits(d)])}"
        )


# ---- Tokenizer ----


def _check_vocabulary(folder: Path, num_rows: int) -> None:
    """Refuses a folder without tokenizer, or with token ids that the embedding has no row for."""
    single, vocabulary = folder / "tokenizer.json", folder / "vocab.json"
    if single.exists():
        file, count = single, _count_tokens
    elif vocabulary.exists() and (folder / "merges.txt").exists():
        file, count = vocabulary, lambda tokens: 1 + max([-1, *tokens.values()])
    elif (folder / "tokenizer.model").exists():
        return  # SentencePiece, read by transformers later
    else:
        raise UserError(
            f"the model folder has no tokenizer; {folder}; found {listing(folder)}, expected tokenizer.json; copy the "
            "tokenizer's files of the same model into it"
        )
    try:
        size = count(read_json(file))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"a damaged tokenizer file; {file}; found {error!r}; {DOWNLOAD_AGAIN}") from error
    if size == 0:
        raise UserError(f"the tokenizer has no vocabulary; {file}; found 0 tokens; {DOWNLOAD_AGAIN}")
    if size > num_rows:
        raise UserError(
            f"the tokenizer has more tokens than the embedding has rows; {file}; found {size} tokens, expected at most "
            f"vocab_size={num_rows}; use the tokenizer that belongs to the model, or enlarge the embedding"
        )


def _token_ids(folder: Path) -> dict[str, int]:
    """{token: id} of a folder that passed the checks; of SentencePiece's the bytes, as one token."""
    single, vocabulary = folder / "tokenizer.json", folder / "vocab.json"
    if single.exists():
        tokenizer = read_json(single)
        tokens = tokenizer["model"]["vocab"]
        ids = tokens if isinstance(tokens, dict) else {str(token[0]): place for place, token in enumerate(tokens)}
        return ids | {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    if vocabulary.exists():
        return read_json(vocabulary)
    return {(folder / "tokenizer.model").read_bytes().hex(): 0}


def _count_tokens(tokenizer: dict[str, Any]) -> int:
    """1 + the largest id of a tokenizer.json, added tokens included."""
    vocabulary = tokenizer["model"]["vocab"]  # {token: id}, or a list in the order of the ids
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return 1 + max([-1, *ids, *(token["id"] for token in tokenizer.get("added_tokens") or [])])


def _check_tokenizer_config(folder: Path) -> None:
    """Refuses a folder without tokenizer_config.json: the tokenizer would load, and treat special tokens as text."""
    file = folder / "tokenizer_config.json"
    if not file.exists():
        raise UserError(
            f"the tokenizer has no configuration; {folder}; found {listing(folder)}, expected tokenizer_config.json; "
            "copy it from the model that the tokenizer belongs to"
        )
    read_json(file)
