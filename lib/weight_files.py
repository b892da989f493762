"""The weights of a model folder by their headers: which tensors, what shapes, are the files whole. Reads no tensor."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lib.errors import UserError

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
LFS_POINTER = b"version https://git-lfs"
MAX_HEADER = 100_000_000  # bytes; the safetensors format's own limit
DOWNLOAD_AGAIN = "download or copy the folder again"

Shape = tuple[int, ...]


def check_weights(folder: Path, expected: dict[str, Shape], *, optional: Mapping[str, Shape] | None = None) -> None:
    """Raises UserError unless the folder's safetensors hold the expected tensors, whole and in these shapes.

    `optional`: tensors that may be left out, but must have these shapes.
    """
    found: dict[str, Shape] = {}
    for file, names in iter_weight_files(folder):
        header = read_safetensors_header(file)
        missing = sorted(names - header.keys())
        if missing:
            raise UserError(
                f"a shard lacks tensors that the index places there; {file}; found {len(header)} tensors, expected "
                f"also {_some(missing)}; {DOWNLOAD_AGAIN}"
            )
        found |= header
    missing = [name for name in expected if name not in found]
    if missing:
        raise UserError(
            f"the weights lack tensors; {folder}; found {len(found)} tensors, expected also {_some(missing)}; "
            f"use the config.json that belongs to these weights, or {DOWNLOAD_AGAIN}"
        )
    present = {name: shape for name, shape in (optional or {}).items() if name in found}
    for name, shape in (expected | present).items():
        if found[name] != shape:
            raise UserError(
                f"a tensor's shape differs from config.json; {name} in {folder}; found {list(found[name])}, expected "
                f"{list(shape)}; use the config.json that belongs to these weights"
            )
    in_layers = (name for name in found if name.startswith("model.layers."))
    unused = [name for name in in_layers if name not in expected and not name.endswith("rotary_emb.inv_freq")]
    if unused:
        raise UserError(
            f"the weights hold tensors that config.json has no place for; {folder}; found {_some(unused)}; use the "
            "config.json that belongs to these weights"
        )


def _some(names: list[str], count: int = 3) -> str:
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def iter_weight_files(folder: Path) -> Iterator[tuple[Path, set[str]]]:
    """Each safetensors file of the model, with the tensors that the index expects in it. Raises UserError."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise UserError(_no_weights_message(folder))
        yield single, set()
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"the index has no weight_map; {index}; expected tensor: file name; {DOWNLOAD_AGAIN}")
    for shard in sorted(set(weight_map.values())):
        if os.path.isabs(shard) or ".." in Path(shard).parts:
            raise UserError(
                f"the index points outside the model folder; {index}; found {shard}, expected a file name; do not use "
                "this folder: get the model from a source that you trust"
            )
        if not (folder / shard).is_file():
            raise UserError(f"a shard is missing; {folder / shard}; found {listing(folder)}; {DOWNLOAD_AGAIN}")
        yield folder / shard, {name for name, file in weight_map.items() if file == shard}


def _no_weights_message(folder: Path) -> str:
    names = [entry.name for entry in folder.iterdir()]
    if any(name.endswith(".safetensors") for name in names):
        return (
            f"the model's shards have no index; {folder}; found {listing(folder)}, expected model.safetensors or "
            f"model.safetensors.index.json; {DOWNLOAD_AGAIN}"
        )
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    if pickled:
        return (
            f"the weights are pickled, which can run code; {folder / pickled[0]}; found no *.safetensors; convert them "
            "once, if you trust them: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
        )
    return (
        f"the model folder has no weights; {folder}; found {listing(folder)}, expected model.safetensors or "
        f"shards with an index; {DOWNLOAD_AGAIN}"
    )


def read_safetensors_header(file: Path) -> dict[str, Shape]:
    """{tensor name: shape} of a safetensors file. Raises UserError when the file is not exactly what its header says.

    The format: 8 bytes of little-endian header length, a JSON header with each tensor's dtype, shape and place, data.
    """
    size = os.path.getsize(file)
    start = read_bytes(file, limit=64)
    if start.startswith(LFS_POINTER):
        raise UserError(_lfs_message(file))
    length = int.from_bytes(start[:8], "little")
    if size < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
        raise UserError(
            f"not a whole safetensors file; {file}; found {size} bytes, its header alone would need {8 + length}; "
            f"{DOWNLOAD_AGAIN}"
        )
    try:
        header = json.loads(read_bytes(file, limit=8 + length)[8:])
        tensors = {name: _read_entry(entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"a damaged safetensors header; {file}; found {error}; {DOWNLOAD_AGAIN}") from error
    end = 0
    for name, (dtype, shape, begin, stop) in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if dtype not in DTYPE_BYTES:
            raise UserError(
                f"the weights are quantised or not numbers to train; {name} in {file}; found {dtype}, expected one of "
                f"{', '.join(DTYPE_BYTES)}; use the unquantised model"
            )
        if begin != end or stop - begin != math.prod(shape) * DTYPE_BYTES[dtype]:
            raise UserError(
                f"a damaged safetensors header; {name} in {file}; found bytes {begin} to {stop} for {dtype} "
                f"{list(shape)}, expected {end} to {end + math.prod(shape) * DTYPE_BYTES[dtype]}; {DOWNLOAD_AGAIN}"
            )
        end = stop
    if size != 8 + length + end:
        what = "truncated" if size < 8 + length + end else "followed by bytes that are not its own"
        raise UserError(
            f"a weight file is {what}; {file}; found {size} bytes, expected {8 + length + end}; {DOWNLOAD_AGAIN}"
        )
    return {name: shape for name, (_, shape, _, _) in tensors.items()}


def _read_entry(entry: dict[str, Any]) -> tuple[str, Shape, int, int]:
    begin, stop = entry["data_offsets"]
    return str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), int(begin), int(stop)


# ---- Files ----


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises UserError naming file and line."""
    data = read_bytes(file)
    if data.startswith(LFS_POINTER):
        raise UserError(_lfs_message(file))
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(
            f"not UTF-8 text; {file}; found byte {data[error.start]:#x} at {error.start}; {DOWNLOAD_AGAIN}"
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"not valid JSON; {file}, line {error.lineno}, column {error.colno}; found {error.msg}; mend that line, or "
            f"{DOWNLOAD_AGAIN}"
        ) from error
    if not isinstance(value, dict):
        raise UserError(
            f"not a JSON object; {file}; found {type(value).__name__}, expected an object; {DOWNLOAD_AGAIN}"
        )
    return value


def read_bytes(file: Path, limit: int = -1) -> bytes:
    """The first `limit` bytes of a file, or all. Raises UserError when it cannot be read."""
    try:
        with open(file, "rb") as stream:
            return stream.read(limit)
    except OSError as error:
        raise UserError(
            f"cannot read a file of the model; {file}; found {error.strerror}; check its permissions"
        ) from error


def _lfs_message(file: Path) -> str:
    size = file.stat().st_size
    return (
        f"a Git LFS pointer, not the file itself; {file}; found {size} bytes of pointer; run git lfs pull in its folder"
    )


def listing(folder: Path) -> str:
    """The first names in a folder, for a message."""
    names = sorted(entry.name for entry in folder.iterdir())
    return _some(names, 6) or "an empty folder"
