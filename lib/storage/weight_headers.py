"""The weights of a model folder by their headers: which tensors, what shapes, are the files whole.

Of the tensors themselves it reads only two that must be equal, as bytes.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lib.errors import UserError
from lib.regular_files import check_regular, open_regular

DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
LFS_POINTER = b"version https://git-lfs"
MAX_HEADER = 100_000_000  # bytes; the safetensors format's own limit
DOWNLOAD_AGAIN = "download or copy the folder again"
ROTARY_TABLES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
"""How the names of tensors end that older releases saved, and that every model computes itself."""
COMPARED_BYTES = 2**24  # bytes compared at once

Shape = tuple[int, ...]


class Entry(NamedTuple):
    """A tensor in a safetensors file: bytes `begin` to `stop` of the file."""

    file: Path
    dtype: str
    shape: Shape
    begin: int
    stop: int


def check_weights(
    folder: Path,
    expected: dict[str, Shape],
    *,
    optional: Mapping[str, Shape] | None = None,
    tied: Mapping[str, str] | None = None,
) -> None:
    """Raises UserError unless the folder's safetensors hold the expected tensors, whole, in these shapes, and no other.

    `optional`: tensors that may be left out, but must have these shapes; `tied`: {tensor that may be there: the one
    that it must equal}.
    """
    found = read_headers(folder)
    missing = [name for name in expected if name not in found]
    if missing:
        raise UserError(
            f"the weights lack tensors; {folder}; found {len(found)} tensors, expected also {some(missing)}; "
            f"use the config.json that belongs to these weights, or {DOWNLOAD_AGAIN}"
        )
    present = {name: shape for name, shape in (optional or {}).items() if name in found}
    for name, shape in (expected | present).items():
        if found[name].shape != shape:
            raise UserError(
                f"a tensor's shape differs from config.json; {name} in {folder}; found {list(found[name].shape)}, "
                f"expected {list(shape)}; use the config.json that belongs to these weights"
            )
    known = {*expected, *present, *(tied or {})}
    unused = [name for name in found if name not in known and not name.endswith(ROTARY_TABLES)]
    if unused:
        raise UserError(
            f"the weights hold tensors that config.json has no place for; {folder}; found {some(unused)}; use the "
            "config.json that belongs to these weights, or save them without these tensors if they mean nothing"
        )
    for name, source in (tied or {}).items():
        if name in found and not _are_equal(found[name], found[source]):
            ours, theirs = found[name].dtype, found[source].dtype
            differs, remedy = "other numbers", ""
            if ours != theirs:
                differs, remedy = f"{ours} and {theirs}", f"save the model without {name} if it is a copy; else "
            raise UserError(
                f"config.json says tied, the weights differ; {name} and {source} in {folder}; found {differs}, "
                f"expected the same; {remedy}set tie_word_embeddings to false in config.json, and both are trained"
            )


def read_headers(folder: Path) -> dict[str, Entry]:
    """Every tensor of the folder's files, in which each one is that the index places there. Raises UserError."""
    found: dict[str, Entry] = {}
    for file, names in iter_weight_files(folder):
        header = read_safetensors_header(file)
        missing = sorted(names - header.keys())
        if missing:
            raise UserError(
                f"a shard lacks tensors that the index places there; {file}; found {len(header)} tensors, expected "
                f"also {some(missing)}; {DOWNLOAD_AGAIN}"
            )
        twice = sorted(found.keys() & header.keys())
        if twice:
            raise UserError(
                f"a tensor is in two weight files; {some(twice)} in {file} and {found[twice[0]].file.name}; found it "
                f"twice, expected every tensor once; {DOWNLOAD_AGAIN}"
            )
        found |= header
    return found


def _are_equal(one: Entry, other: Entry) -> bool:
    """Whether two tensors hold the same bytes; those that differ mostly do so at once."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with open_regular(one.file) as a, open_regular(other.file) as b:
        a.seek(one.begin)
        b.seek(other.begin)
        for left in range(one.stop - one.begin, 0, -COMPARED_BYTES):
            if a.read(min(left, COMPARED_BYTES)) != b.read(min(left, COMPARED_BYTES)):
                return False
    return True


def shards_beside(folder: Path) -> Path | None:
    """The folder of a checkpoint's weights, where this one is the checkpoint's `huggingface`; else None."""
    shards = folder.parent / "model"
    return shards if folder.name == "huggingface" and shards.is_dir() else None


def some(names: list[str], count: int = 3) -> str:
    """The first names, and how many more there are, for a message."""
    return ", ".join(names[:count]) + (f" and {len(names) - count} more" if len(names) > count else "")


def iter_weight_files(folder: Path) -> Iterator[tuple[Path, set[str]]]:
    """Each safetensors file of the model, with the tensors that the index expects in it. Raises UserError."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise UserError(_no_weights_message(folder))
        check_regular(single)
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


def read_safetensors_header(file: Path) -> dict[str, Entry]:
    """{tensor name: entry} of a safetensors file. Raises UserError when the file is not exactly what its header says.

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
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _read_entry(file, entry, data=8 + length) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(f"a damaged safetensors header; {file}; found {error}; {DOWNLOAD_AGAIN}") from error
    end = 8 + length
    for name, (_, dtype, shape, begin, stop) in sorted(tensors.items(), key=lambda item: item[1][3:]):
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
    if size != end:
        what = "truncated" if size < end else "followed by bytes that are not its own"
        raise UserError(f"a weight file is {what}; {file}; found {size} bytes, expected {end}; {DOWNLOAD_AGAIN}")
    return tensors


def _read_entry(file: Path, entry: dict[str, Any], *, data: int) -> Entry:
    """`data`: where the file's tensors begin, from which the header counts."""
    begin, stop = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    return Entry(file, str(entry["dtype"]), shape, data + int(begin), data + int(stop))


# ---- Files ----


def read_json(file: Path, *, object_hook: Callable[[dict], Any] | None = None) -> dict[str, Any]:
    """The object in a JSON file that others may have made, as json.loads makes it. Raises UserError, with the line."""
    data = read_bytes(file)
    if data.startswith(LFS_POINTER):
        raise UserError(_lfs_message(file))
    try:
        value = json.loads(data.decode("utf-8-sig"), object_hook=object_hook)
    except UnicodeDecodeError as error:
        raise UserError(
            f"not UTF-8 text; {file}; found byte {data[error.start]:#x} at {error.start}; {DOWNLOAD_AGAIN}"
        ) from error
    except json.JSONDecodeError as error:
        raise UserError(
            f"not valid JSON; {file}, line {error.lineno}, column {error.colno}; found {error.msg}; mend that line, or "
            f"{DOWNLOAD_AGAIN}"
        ) from error
    except (RecursionError, ValueError) as error:  # thousands of brackets in each other, or of digits
        raise UserError(f"not JSON that can be read; {file}; found {error}; {DOWNLOAD_AGAIN}") from error
    if not isinstance(value, dict):
        raise UserError(
            f"not a JSON object; {file}; found {type(value).__name__}, expected an object; {DOWNLOAD_AGAIN}"
        )
    return value


def read_bytes(file: Path, limit: int = -1) -> bytes:
    """The first `limit` bytes of a file, or all. Raises UserError when it cannot be read."""
    try:
        with open_regular(file) as stream:
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
    return some(names, 6) or "an empty folder"
