"""What lies beside a model's weights: config, tokenizer, chat template. Checked where it is found, copied without code.

Nothing here runs a model's own code, and a copy does not hand it on: whoever loads the copy may trust it more.
"""

import json
import os
import shutil
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lib.regular_files import check_inside, check_regular
from lib.storage.weight_headers import read_json

BESIDE_WEIGHTS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json"),
)
"""The files of a model folder that a checkpoint repeats, where there are such."""
VOCABULARIES = ("tokenizer.json", "vocab.json")
WEIGHTS = ("adapter.json", "*.safetensors", "*.index.json", "*.bin", "*.pt", "*.pth")
CODE = ("*.py*", "*.so", "*.sh", "*.pkl", "*.pickle", "__pycache__", ".git")
"""Names of what can run: modules, pickles, git's hooks."""
CODE_ENTRIES = ("auto_map", "custom_pipelines")
"""Entries of config files by which transformers loads a model's own code."""


def check_beside_weights(folder: Path) -> list[str]:
    """The entries of a model folder's configs that name code, in words: it is never run, and no checkpoint repeats it.

    Raises UserError for what would be read without end, for JSON that cannot be read (vocabularies are left to others),
    and for a link out of the folder; into the blobs of the hub's cache it may lead.
    """
    for entry in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        with suppress(OSError):  # what is not there is not read
            if not entry.is_dir():
                check_regular(entry)
    real = folder.resolve()
    code = []
    for file in (folder / name for name in BESIDE_WEIGHTS):
        if file.is_file():
            check_inside(file, real, *_hub_blobs(real))
            if file.suffix == ".json" and file.name not in VOCABULARIES:
                code += _without_code(file)[1]
    return code


def _hub_blobs(folder: Path) -> list[Path]:
    """CACHE/models--X/snapshots/COMMIT: where the hub's cache has what a snapshot links to, of a model and of all."""
    snapshots = next((parent for parent in folder.parents if parent.name == "snapshots"), None)
    return [] if snapshots is None else [parent / "blobs" for parent in snapshots.parents[:2]]


def copy_beside_weights(source: Path, folder: Path) -> list[str]:
    """Copies a folder but its weights and its code; gives the code that was left out, in words. Raises OSError."""
    left_out = []
    for file in sorted(source.rglob("*")):
        name = file.relative_to(source)
        if file.is_dir() or _is_named(name, WEIGHTS):
            continue
        if _is_named(name, CODE):
            left_out.append(str(name))
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            left_out += copy_file(file, folder / name)
    return left_out


def _is_named(name: Path, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(part, pattern) for part in name.parts for pattern in patterns)


def copy_file(source: Path, target: Path) -> list[str]:
    """Copies a file, a config without the entries that name code: gives these, in words. Raises OSError."""
    if source.name.endswith("config.json"):
        config, code = _without_code(source)
        if code:
            target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            return code
    shutil.copyfile(source, target)
    return []


def _without_code(file: Path) -> tuple[dict[str, Any], list[str]]:
    found: dict[str, None] = {}

    def strip(entries: dict[str, Any]) -> dict[str, Any]:
        found.update(dict.fromkeys(entry for entry in CODE_ENTRIES if entry in entries))
        return {name: value for name, value in entries.items() if name not in CODE_ENTRIES}

    config = read_json(file, object_hook=strip)
    return config, [f"{entry} in {os.path.basename(file)}" for entry in found]
