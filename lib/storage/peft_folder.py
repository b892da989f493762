"""An adapter as peft writes it: what other systems load beside the base model, and what a run or eval.py begins from.

    adapter_config.json          rank, alpha and modules, and what we cannot compute with, which is refused by name
    adapter_model.safetensors    base_model.model.NAME.lora_A.weight (rank, in) and .lora_B.weight (out, rank)

In its header ours says which numbers it belongs to: {name: hash} of the base model's tensors and of the factors. What
others write says nothing of that kind: its shapes are all that can be compared.
"""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lib.config.values import resolve_path
from lib.errors import DamagedCheckpoint, UserError
from lib.storage.adapter import (
    FACTORS,
    START,
    Adapter,
    adapter_shapes,
    as_one_product,
    check_base,
    hash_tensor,
    layer_matrices,
)
from lib.storage.weight_headers import Shape, listing, read_bytes, read_json, read_safetensors_header, some
from lib.storage.whole_tensors import ANOTHER, ShardedTensor, Shards, read_tensor, write_safetensors

PREFIX = "base_model.model."
"""Of peft's names: its wrapper, and the attribute that holds the model."""
LEAST_ALPHA, MOST_ALPHA = 1e-6, 1e6
"""Beyond these, W_eff or its gradients leave what float32 holds, or no update moves it."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_HASHES, FACTOR_HASHES = "lockstep_base", "lockstep_factors"
"""Entries of the weights' header."""
REFUSED = (
    "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "lora_bias", "modules_to_save", "layers_to_transform",
    "layer_replication", "fan_in_fan_out", "target_parameters", "trainable_token_indices", "alora_invocation_tokens",
    "arrow_config", "kasa_config", "monteclora_config", "use_bdlora", "use_qalora",
)  # fmt: skip
"""Entries of peft's config that change what an adapter computes, in a way that ours has not."""
BASE_STAYS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
"""Its init_lora_weights that leave the weights beside the factors as they are. Others, such as pissa, take from them
what the factors begin with: what is saved belongs to weights that are in no folder."""


@dataclass(frozen=True, kw_only=True)
class PeftAdapter:
    """What a folder of peft's holds; its numbers are unread."""

    folder: Path
    base: str
    """The model that it was trained on, in its own words."""
    rank: int
    alpha: float
    modules: tuple[str, ...]
    """Such as q_proj, in the order of the layers' weights."""
    shapes: Mapping[str, Shape]
    """Of its factors, by our names."""
    base_hashes: Mapping[str, str]
    """{name: hash} of the base model's tensors; empty: it does not say."""
    factor_hashes: Mapping[str, str]
    """{name: hash} of the factors; empty: it does not say."""

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def read(self, name: str) -> Tensor:
        """A factor by our name, float32. Raises UserError when it is not what was written, or not finite."""
        file = self.folder / WEIGHTS
        factor = read_tensor(file, f"{PREFIX}{name}.weight").float()
        if self.factor_hashes and self.factor_hashes.get(name) != hash_tensor(factor):
            raise UserError(
                f"an adapter is not as it was written; {name} in {file}; found other numbers, expected those that its "
                "header has the hash of: names may have been swapped; write it again with merge.py --adapter"
            )
        if not bool(torch.isfinite(factor).all()):
            raise UserError(
                f"an adapter holds NaN or infinity; {name} in {file}; found {int((~torch.isfinite(factor)).sum())} "
                "such values, expected finite numbers; use one from before the run diverged"
            )
        return factor

    def check_fits(self, shapes: dict[str, Shape], model: Path) -> None:
        """Raises UserError unless it has factors of its modules in every layer of a model, whose {name: shape} these
        are, in the shapes that they need."""
        weights = [name for name in layer_matrices(shapes) if name.split(".")[-2] in self.modules]
        expected = adapter_shapes(shapes, weights, self.rank, with_start=False)
        if self.shapes == expected:
            return
        name = min(name for name in {*self.shapes, *expected} if self.shapes.get(name) != expected.get(name))
        there, here = (list(of[name]) if name in of else "none" for of in (self.shapes, expected))
        raise UserError(
            f"the adapter is of another model, or of some of its layers; {name} in {self.folder}; found {there}, "
            f"expected {here} as {model} has it; give the model that it was trained on ({self.base}) as --model.path; "
            "if that is it, merge the adapter into it where it was trained"
        )

    def check_base(self, hashes: Mapping[str, str], model: Path, *, used: Collection[str]) -> None:
        """Raises UserError when it was trained beside other numbers than these, of which the model computes with those
        `used`, and unless its own are as they were."""
        if self.base_hashes:
            check_base(self.base_hashes, hashes, model, used=used)
        for name in self.shapes:
            self.read(name)


def read_peft(path: str, option: str) -> PeftAdapter:
    """The adapter in a folder of peft's. Raises UserError."""
    folder = resolve_path(path, option)
    if not folder.is_dir():
        raise UserError(
            f"no such folder; {option} {path}; found nothing, expected a folder with {CONFIG}; check the path; "
            "a run that began with it goes on without it in a new --run-dir: --checkpoint.resume, and --lora.rank, "
            "--lora.alpha and --lora.targets instead"
        )
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"no adapter is there; {option} {path}; found {listing(folder)}, expected {CONFIG}; of a run of ours "
            "`python merge.py --local-dir RUN/global_step_N/actor --target-dir DIR --adapter` writes one"
        )
    config = read_json(folder / CONFIG)
    chosen = [f"{name} {config[name]}" for name in REFUSED if config.get(name)]
    chosen += [f"bias {config['bias']}"] if config.get("bias", "none") != "none" else []
    init = config.get("init_lora_weights")
    chosen += [] if init in BASE_STAYS else [f"init_lora_weights {init}"]
    if config.get("peft_type") != "LORA":
        chosen = [f"peft_type {config.get('peft_type')}"]
    if chosen:
        raise UserError(
            f"the adapter computes in a way that this version has not; {folder / CONFIG}; found {some(chosen)}, "
            "expected LoRA without them; merge it into its model where it was trained, and give that as --model.path"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    is_usable = type(rank) is int and rank >= 1 and type(alpha) in (int, float)
    if not is_usable or not LEAST_ALPHA <= alpha <= MOST_ALPHA:
        raise UserError(
            f"the adapter has no usable rank or alpha; {folder / CONFIG}; found r {str(rank)[:40]!r} and lora_alpha "
            f"{str(alpha)[:40]!r}, expected an integer of 1 or more, and a number from {LEAST_ALPHA:g} to "
            f"{MOST_ALPHA:g}; write it again where it was trained"
        )
    shapes = _factor_shapes(folder, rank)
    return PeftAdapter(
        folder=folder, base=str(config.get("base_model_name_or_path")), rank=rank, alpha=float(alpha), shapes=shapes,
        modules=tuple(dict.fromkeys(name.split(".")[-2] for name in shapes)),
        base_hashes=_hashes(folder, BASE_HASHES), factor_hashes=_hashes(folder, FACTOR_HASHES),
    )  # fmt: skip


def _factor_shapes(folder: Path, rank: int) -> dict[str, Shape]:
    file = folder / WEIGHTS
    if not file.is_file():
        raise UserError(
            f"the adapter has no weights that can be read; {folder}; found {listing(folder)}, expected {WEIGHTS}; "
            "save it as safetensors: pickled ones can run code"
        )
    shapes = {}
    for name, entry in read_safetensors_header(file).items():
        ours = re.fullmatch(rf"{re.escape(PREFIX)}(model\.layers\..+\.({'|'.join(FACTORS)}))\.weight", name)
        if ours is None or len(entry.shape) != 2 or entry.shape[FACTORS.index(ours[2])] != rank:
            raise UserError(
                f"the adapter holds what is no factor of a layer's matrix; {name} in {file}; found "
                f"{list(entry.shape)}, expected {FACTORS[0]} ({rank}, inputs) and {FACTORS[1]} (outputs, {rank}) of "
                "layers alone; train one on these, or merge it into its model where it was trained"
            )
        shapes[ours[1]] = entry.shape
    if not shapes:
        raise UserError(f"the adapter is empty; {file}; found no tensor, expected factors; save it again")
    return shapes


def _hashes(folder: Path, entry: str) -> dict[str, str]:
    """Of the header, which `_factor_shapes` found whole."""
    file = folder / WEIGHTS
    start = read_bytes(file, limit=8)
    about = json.loads(read_bytes(file, limit=8 + int.from_bytes(start, "little"))[8:]).get("__metadata__")
    try:
        found = json.loads(about[entry]) if isinstance(about, dict) and entry in about else {}
    except (ValueError, TypeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UserError(
            f"an adapter's header is damaged; {file}; found {entry} that is no JSON object; write it again with "
            "merge.py --adapter"
        )
    return found


def export_adapter(shards: Shards, adapter: Adapter, folder: Path, *, base: str) -> str:
    """Writes adapter_config.json and adapter_model.safetensors, float32, into an empty folder; gives what, in words.

    PiSSA's has twice the rank: an ordinary adapter of the model as it was.

    Raises DamagedCheckpoint when a factor is missing or not whole.
    """
    modules: dict[str, list[ShardedTensor]] = {}
    for name in sorted({name.rpartition(".")[0] for name in shards.tensors}):
        factors = (f"{name}.{factor}" for factor in (*FACTORS, *START))
        modules[name] = [shards.tensors[factor] for factor in factors if factor in shards.tensors]
    held = [len(factors) for factors in modules.values()]
    if set(held) not in ({2}, {4}) or sum(held) != len(shards.tensors):
        raise DamagedCheckpoint(
            f"an adapter lacks a factor; {shards.folder}; found {len(shards.tensors)} of them for {len(modules)} "
            f"modules, expected {' and '.join(FACTORS)} of each, or {' and '.join(START)} too; {ANOTHER}"
        )
    tensors = {}
    for name, factors in modules.items():
        for factor in factors:
            factor.check()
        product = as_one_product(*(factor.read(torch.float32) for factor in factors))
        tensors |= {f"{name}.{factor}": whole.contiguous() for factor, whole in zip(FACTORS, product, strict=True)}
    [rank] = {len(whole) for name, whole in tensors.items() if name.endswith(f".{FACTORS[0]}")}
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": adapter.scale * rank, "target_modules": sorted({module.split(".")[-1] for module in modules}),
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    header = {f"{PREFIX}{name}.weight": (torch.float32, tuple(tensor.shape)) for name, tensor in tensors.items()}
    hashes = {name: hash_tensor(tensor) for name, tensor in tensors.items()}
    about = {BASE_HASHES: json.dumps(dict(adapter.tensors)), FACTOR_HASHES: json.dumps(hashes)}
    size = write_safetensors(folder / WEIGHTS, header, tensors.values(), about)
    return f"an adapter of rank {rank} on {len(modules)} matrices of {base}, {size / 1e6:,.1f} MB"
