"""Adapters (LoRA, https://arxiv.org/abs/2106.09685): what lies beside a weight, and the one function that adds it.

    W_eff = round(W + scale * B A)                                A (rank, in), B (out, rank), scale = alpha / rank
    W_eff = round(W + scale * [B, B0] [A0 + A; A])                what (B0 + B) (A0 + A) is more than B0 A0

The second form is PiSSA's (https://arxiv.org/abs/2404.02948), whose A0 and B0 are frozen: W stays as it is, and at the
start, where A and B are 0, W_eff is W in all bits (of a zero, its sign may differ).

The trainer's forward pass, the copy into the engine, the proofs and merge.py all call `effective_weight`, or the same
sum in a place of their own: on one kind of device they compute with the same bits. An engine with merged weights beside
a trainer that multiplies with W and A and B one after the other hardly sees a small update in bfloat16, because most of
B A is less than half a step of W's own grid.
"""

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from lib.errors import DamagedCheckpoint, UserError
from lib.regular_files import open_regular
from lib.storage.weight_headers import Shape, some

FACTORS = ("lora_A", "lora_B")
"""Of the adapter of NAME.weight: NAME.lora_A and NAME.lora_B, which train."""
START = ("lora_A0", "lora_B0")
"""Where PiSSA's begin, and stay."""
ALL_LINEAR = "all-linear"
ROWS = 1024
"""Of a weight that are in memory in float64 at once."""


@torch.library.custom_op("lockstep::effective_weight", mutates_args=())
def effective_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The weight (out, in) with `a` (rank, in) and `b` (out, rank) added, all of one dtype: a sum in float32 or more,
    then rounded.

    An operation that no compiler looks into: it must give the same bits within a compiled layer and outside.
    """
    out = torch.empty_like(weight)
    put_effective_weight_(out, weight, a, b, scale)
    return out


@effective_weight.register_fake
def _(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    return torch.empty_like(weight)


def put_effective_weight_(out: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """Puts the effective weight into `out`, which may be `weight`; of both, numbers of a row lie side by side."""
    if weight.is_cuda and weight.dtype is torch.bfloat16:
        from lib.storage.adapter_kernel import put_sum_  # where triton is

        put_sum_(out, weight, a, b, scale)
        return
    # In float64: processors of different kinds add in a different order, and what that changes is lost when the sum is
    # rounded. A model under an adapter is known by these bits.
    a = a.double()
    for out_rows, weight_rows, b_rows in zip(out.split(ROWS), weight.split(ROWS), b.split(ROWS), strict=True):
        out_rows.copy_(torch.addmm(weight_rows.double(), b_rows.double(), a, alpha=scale))


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name belongs to an adapter."""
    return name.rpartition(".")[2] in (*FACTORS, *START)


def factors_of(weight: str, *, with_start: bool = False) -> tuple[str, ...]:
    """The names of A and B, and of A0 and B0, beside NAME.weight."""
    prefix = weight.removesuffix("weight")
    return tuple(prefix + factor for factor in (*FACTORS, *(START if with_start else ())))


def as_one_product(a: Tensor, b: Tensor, a0: Tensor | None = None, b0: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The two factors whose product is added: A and B, or twice as many rows and columns."""
    if a0 is None:
        return a, b
    return torch.cat((a0 + a, a)), torch.cat((b, b0), dim=1)


def layer_matrices(shapes: Mapping[str, Shape]) -> list[str]:
    """The names of the weights that can have an adapter."""
    return [name for name, shape in shapes.items() if name.startswith("model.layers.") and len(shape) == 2]


def adapted_weights(shapes: dict[str, Shape], *, targets: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """The names of the weights that get an adapter: the layers' matrices of these modules (`q_proj`), or of all.

    Raises UserError when a name matches nothing, or nothing is left.
    """
    matrices = layer_matrices(shapes)
    modules = list(dict.fromkeys(name.split(".")[-2] for name in matrices))
    for flag, names in (("targets", targets), ("exclude", exclude)):
        for name in names:
            if name not in modules and not (flag == "targets" and name == ALL_LINEAR):
                raise UserError(
                    f"--lora.{flag} names a module that the model has not; {name}; found {some(modules, 12)}, expected "
                    f"one of these{f', or {ALL_LINEAR}' if flag == 'targets' else ''}; mend the name"
                )
    chosen = {*modules} if ALL_LINEAR in targets else {*targets}
    found = [name for name in matrices if name.split(".")[-2] in chosen - {*exclude}]
    if not found:
        raise UserError(
            f"no module is left to adapt; --lora.targets {' '.join(targets)} --lora.exclude {' '.join(exclude)}; "
            f"expected one at least of {some(modules, 12)}; take one off --lora.exclude"
        )
    return found


def adapter_shapes(
    shapes: dict[str, Shape], weights: Iterable[str], rank: int, *, with_start: bool
) -> dict[str, Shape]:
    """{name: shape} of the adapters of these weights."""
    found = {}
    for weight in weights:
        rows, columns = shapes[weight]
        names = factors_of(weight, with_start=with_start)
        found |= dict(zip(names, 2 * ((rank, columns), (rows, rank)), strict=False))
    return found


# ---- What a checkpoint says of its adapter ----

ADAPTER_FILE = "adapter.json"
"""In the checkpoint's huggingface folder: the `Adapter`."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What an adapter's factors belong to."""

    base: str
    """Folder of the model whose weights are frozen."""
    dtype: str
    """The precision that it was trained in, such as bfloat16: W_eff is rounded to it."""
    scale: float
    tensors: Mapping[str, str]
    """{name: 16 hexadecimal digits of its bytes' SHA-256} of the base model's weights."""

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        (folder / ADAPTER_FILE).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_adapter(folder: Path) -> Adapter | None:
    """What a checkpoint's huggingface folder says of an adapter; None where all weights were trained. Raises
    DamagedCheckpoint."""
    file = folder / ADAPTER_FILE
    if not os.path.lexists(file):
        return None
    try:
        with open_regular(file, error=DamagedCheckpoint) as stream:
            found = json.load(stream)
        kinds = {"base": str, "dtype": str, "scale": float, "tensors": dict}
        wrong = [name for name, kind in kinds.items() if type(found[name]) is not kind]
        wrong += [] if wrong or 0 < found["scale"] < math.inf else ["scale"]
        wrong += [] if wrong or {*map(type, found["tensors"].values())} <= {str} else ["tensors"]
        if found.keys() != kinds.keys() or wrong or found["dtype"] not in ("bfloat16", "float32"):
            raise ValueError(f"entries {some([*found])}, of which {some(wrong) or 'none'} is of another type")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(
            f"a checkpoint's adapter is not described as a run does it; {file}; found {type(error).__name__}: {error}, "
            "expected base, dtype, scale and the hashes of tensors; use another checkpoint, or copy this one again"
        ) from error
    return Adapter(**found)


def folders_below(folder: Path) -> Iterator[Path]:
    """The models under the adapter of a checkpoint's huggingface folder, whether or not they are there: its base, and
    where that is a checkpoint with an adapter, what lies under it. Raises DamagedCheckpoint."""
    seen = {folder}
    while (adapter := read_adapter(folder)) is not None and (folder := Path(adapter.base)) not in seen:
        seen.add(folder)  # folders that were renamed may lie in a circle
        yield folder


def hash_tensor(tensor: Tensor) -> str:
    """16 hexadecimal digits of the SHA-256 of a CPU tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()[:16]


def check_base(
    trained_beside: Mapping[str, str], here: Mapping[str, str], folder: str | Path, *, used: Collection[str] = ()
) -> None:
    """Raises UserError unless the tensors of `folder`, with the hashes `here`, are those that an adapter was trained
    beside, and those among them that its model computes with, `used`."""
    if other := sorted(name for name in {*trained_beside, *used} if here.get(name) != trained_beside.get(name)):
        raise refuse_other_base(other[0], folder)


def refuse_other_base(name: str, folder: str | Path) -> UserError:
    """The error for a base model whose tensor `name` is another, be its shape the same."""
    return UserError(
        f"the adapter was trained on another model; {folder}; found other numbers in {name}, or none, expected those "
        "that it was trained beside; give the model that the run began with (--model.path; of merge.py, --base), or "
        "copy it there again"
    )
