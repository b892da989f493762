"""A checkpoint's folder is written whole, found by scanning, and every damage to it is named."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.errors import DamagedCheckpoint, UserError
from lib.storage.checkpoint_folder import (
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
    _sealed,
    check,
    checkpoint_path,
    find_checkpoints,
    hash_file,
    publish,
    share,
    stage,
    verify,
)
from tests.checkpoint_folders import INVENTORY, NAMES, OPTIMIZER, flip, memory_folder, record_disk, save, steps, write
from tests.ranks import ROOT


@pytest.fixture
def tmp_path():
    with memory_folder() as folder:
        yield folder


# ---- What is written ----


def test_a_published_checkpoint_is_found_and_holds_what_was_written(tmp_path):
    folder = save(tmp_path, 3, {"acc": 0.5, "broken": float("nan")})
    expected = write(tmp_path / "again", 3)
    manifest = verify(folder)
    assert manifest == Manifest(step=3, files=expected, metrics={"acc": 0.5}, inventory=INVENTORY)
    assert manifest.has_optimizer
    for name, entry in manifest.files.items():
        data = (folder / name).read_bytes()
        assert entry == FileEntry(len(data), hashlib.sha256(data).hexdigest())
    assert (tmp_path / LATEST).read_text() == "3\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "global_step_3", LATEST]


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_the_return(tmp_path, monkeypatch):
    staging, final = stage(tmp_path, 1, "id"), checkpoint_path(tmp_path, 1)
    events = record_disk(monkeypatch)
    entries = write(staging, 1)
    files = {f"fsync {staging / name}" for name in entries}
    assert set(events) == files  # by the rank that wrote them
    events.clear()
    folders = {f"fsync {folder}" for folder in (staging, *staging.rglob("*")) if folder.is_dir()}
    publish(staging, final, entries, inventory={})
    rename, manifest = events.index(f"rename {final}"), events.index(f"fsync {staging / MANIFEST}")
    assert files <= set(events[:manifest]) and folders <= set(events[manifest:rename])
    assert events[rename + 1] == f"fsync {tmp_path}"
    assert events[-1] == f"rename {tmp_path / LATEST}"


def test_a_save_starts_in_a_fresh_folder_and_sweeps_only_what_saves_left(tmp_path):
    for name in (".tmp-global_step_4-old", ".trash-global_step_2-ab", ".trash-optim-ab", ".trash-global_step_4"):
        (tmp_path / name / "actor").mkdir(parents=True)
    (tmp_path / f".tmp-{LATEST}-ab").write_text("4")
    (tmp_path / f".tmp-{MANIFEST}-ab").write_text("{}")
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / ".tmp-global_step_9-link").symlink_to(outside)
    (outside / "mine").write_text("mine")
    kept = {"outside", ".trash-global_step_4", ".tmp-mine", ".status.json.0", "global_step_x", "tmp-global_step_4-a"}
    for name in kept - {"outside", ".trash-global_step_4"}:
        (tmp_path / name).write_text("mine")
    staging = stage(tmp_path, 4, "../../old\n")
    assert staging.parent == tmp_path and list(staging.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == kept | {staging.name}
    assert (outside / "mine").exists()


def test_a_whole_checkpoint_is_never_replaced(tmp_path):
    folder = save(tmp_path, 1)
    before = (folder / MANIFEST).read_bytes()
    with pytest.raises(UserError, match="already there"):
        stage(tmp_path, 1, "id")
    staging = tmp_path / ".tmp-global_step_1-id"
    entries = write(staging, 1)
    with pytest.raises(UserError, match="not empty"):
        publish(staging, folder, entries, inventory={})
    assert (folder / MANIFEST).read_bytes() == before and steps(tmp_path) == [1]


def test_a_damaged_checkpoint_whose_step_is_repeated_is_moved_aside(tmp_path):
    folder = save(tmp_path, 1)
    flip(folder / NAMES[1], 5)
    save(tmp_path, 1)
    assert steps(tmp_path) == [1]
    (aside,) = tmp_path.glob("global_step_1.damaged-*")
    with pytest.raises(DamagedCheckpoint):
        verify(aside)


@pytest.mark.parametrize("lie", ["missing", "short", "unhashed"])
def test_a_file_that_is_not_what_its_writer_said_is_not_published(tmp_path, lie):
    save(tmp_path, 1)
    staging = stage(tmp_path, 2, "id")
    entries = write(staging, 2)
    if lie == "missing":
        (staging / NAMES[2]).unlink()
    elif lie == "short":
        os.truncate(staging / NAMES[2], 10)
    else:
        (staging / "actor" / "notes.txt").write_text("nobody hashed this")
    with pytest.raises(AssertionError if lie == "unhashed" else DamagedCheckpoint):
        publish(staging, checkpoint_path(tmp_path, 2), entries, inventory={})
    assert steps(tmp_path) == [1]


def test_a_file_is_hashed_as_a_stream(tmp_path):
    with open(tmp_path / "large", "wb") as file:
        file.truncate(2**26)
    tracemalloc.start()
    try:
        hash_file(tmp_path / "large")
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()


# ---- What is damaged ----


def test_every_flipped_bit_is_found_and_its_file_is_named(tmp_path):
    folder = save(tmp_path, 1, {"acc": 0.5}, size=3000)
    rng = random.Random(0)
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    weights = [path.stat().st_size if path.name not in (MANIFEST, "trainer.json") else 10_000 for path in paths]
    for path in rng.choices(paths, weights, k=1000):
        bit = rng.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(DamagedCheckpoint, match=path.relative_to(folder).as_posix()):
            verify(folder)
        flip(path, bit)
    verify(folder)


def test_every_bit_of_a_manifest_counts(tmp_path):
    folder = save(tmp_path, 1)
    data = (folder / MANIFEST).read_bytes()
    for place in range(len(data)):
        flip(folder / MANIFEST, 8 * place + place % 8)
        with pytest.raises(DamagedCheckpoint, match=MANIFEST):
            check(folder)
        (folder / MANIFEST).write_bytes(data)
    spelled = data.replace(rb"\u00e9", rb"\u00E9")  # one bit, and the same value
    assert spelled != data
    (folder / MANIFEST).write_bytes(spelled)
    with pytest.raises(DamagedCheckpoint, match=MANIFEST):
        check(folder)
    (folder / MANIFEST).write_bytes(data)
    check(folder)


def replace_by_link(folder: Path) -> None:
    path = folder / NAMES[1]
    path.rename(folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")


def replace_folder_by_link(folder: Path) -> None:
    (folder / "actor/model").rename(folder.parent / "elsewhere")
    (folder / "actor/model").symlink_to(folder.parent / "elsewhere")


def replace_by_pipe(folder: Path) -> None:
    (folder / NAMES[1]).unlink()
    os.mkfifo(folder / NAMES[1])


DAMAGES = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "no MANIFEST.json"),
    "empty manifest": (lambda f: os.truncate(f / MANIFEST, 0), "damaged manifest; .*MANIFEST.json"),
    "half a manifest": (lambda f: os.truncate(f / MANIFEST, 200), "damaged manifest"),
    "missing file": (lambda f: (f / NAMES[2]).unlink(), "is missing; .*shard-00002"),
    "missing folder": (lambda f: shutil.rmtree(f / "actor/huggingface"), "is missing; .*config.json"),
    "file for a folder": (lambda f: (shutil.rmtree(f / "actor"), (f / "actor").write_text("")), "is missing"),
    "truncated": (lambda f: os.truncate(f / NAMES[1], 100), "truncated; .*shard-00001.*found 100 bytes, expected 342"),
    "empty": (lambda f: os.truncate(f / "trainer.json", 0), "truncated; .*trainer.json; found 0 bytes"),
    "longer": (lambda f: (f / NAMES[1]).open("ab").write(b"x"), "longer than it was written; .*found 343 bytes"),
    "changed": (lambda f: flip(f / NAMES[3], 9), "changed after it was written; .*config.json; found SHA-256"),
    "extra shard": (lambda f: (f / "actor/model/more.safetensors").write_text(""), "does not list; .*more.safe"),
    "extra deeper": (lambda f: (f / "actor/huggingface/extra/b").write_text(""), "does not list; .*extra/b"),
    "extra folder": (
        lambda f: (f / "actor/model/a/b").mkdir(parents=True) or (f / "actor/model/a/b/c").touch(),
        "list",
    ),
    "extra link": (lambda f: (f / "actor/model/link").symlink_to("/tmp"), "does not list; .*link"),
    "a link": (replace_by_link, "a link or a special file"),
    "a linked folder": (replace_folder_by_link, "a link or a special file"),
    "a pipe": (replace_by_pipe, "a link or a special file"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_with_file_and_reason_and_the_checkpoint_skipped(tmp_path, damage):
    do, message = DAMAGES[damage]
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    do(folder)
    with pytest.raises(DamagedCheckpoint, match=message) as caught:
        verify(folder)
    assert str(folder) in str(caught.value) and str(caught.value).count(";") >= 2
    newest, older = find_checkpoints(tmp_path)
    assert (newest.step, older.step, older.problem) == (2, 1, None)
    if damage != "changed":  # its bytes are read on `verify` alone
        assert newest.problem == str(caught.value)


def test_a_folder_under_another_step_is_damaged_and_under_another_name_is_not(tmp_path):
    folder = save(tmp_path, 2).rename(tmp_path / "mine")
    assert verify(folder).step == 2
    with pytest.raises(DamagedCheckpoint, match=r"found step 2 .* expected 7"):
        verify(folder.rename(tmp_path / "global_step_7"))


def test_notes_and_folders_of_their_own_do_no_harm(tmp_path):
    folder = save(tmp_path, 2)
    (folder / "notes.txt").write_text("the good one")
    (folder / "actor" / "merged").mkdir()
    (folder / "actor" / "merged" / "model.safetensors").write_text("merged into it by somebody")
    assert steps(tmp_path) == [2]


def resealed(folder: Path, change: Callable[[dict], None]) -> None:
    """Writes a manifest whose own hash is right: by someone who means harm."""
    body = json.loads((folder / MANIFEST).read_text())
    del body["sha256"]
    change(body)
    (folder / MANIFEST).write_bytes(_sealed(body))


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "actor/../../x", "a//b", "./a", "a/.", ".", "", MANIFEST]
)
def test_a_name_that_leaves_the_folder_is_refused(tmp_path, name):
    (tmp_path / "secret").write_text("")
    folder = save(tmp_path, 1)
    resealed(folder, lambda body: body["files"].update({name: {"size": 0, "sha256": hashlib.sha256().hexdigest()}}))
    with pytest.raises(DamagedCheckpoint, match=r"does not stay in the folder|damaged manifest"):
        verify(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.pop("files"),
        lambda body: body.update(files=[1]),
        lambda body: body.update(files={"a": 1}),
        lambda body: body.update(files={"a": {"size": "x", "sha256": ""}}),
        lambda body: body.update(metrics={"acc": "high"}),
        lambda body: body.update(step=None),
        lambda body: body.update(inventory=3),
        lambda body: body.pop("format"),
    ],
)
def test_a_manifest_of_another_shape_is_a_damaged_one(tmp_path, change):
    folder = save(tmp_path, 1)
    resealed(folder, change)
    with pytest.raises(DamagedCheckpoint, match="damaged manifest"):
        verify(folder)


@pytest.mark.parametrize("data", [b"null", b"[]", b"3", b"\xff\xfe", b"[" * 100_000, b'{"sha256": NaN}', b"9" * 5000])
def test_bytes_that_are_no_manifest_are_a_damaged_one(tmp_path, data):
    folder = save(tmp_path, 1)
    (folder / MANIFEST).write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="damaged manifest"):
        verify(folder)


def test_a_later_format_names_the_version_and_is_not_called_damaged(tmp_path):
    folder = save(tmp_path, 1)
    resealed(folder, lambda body: body.update(format=2))
    with pytest.raises(UserError, match="found format 2, expected 1"):
        verify(folder)
    with pytest.raises(UserError, match="format"):  # nor moved aside
        stage(tmp_path, 1, "id")
    with pytest.raises(UserError, match="no such checkpoint"):
        verify(tmp_path / "global_step_9")


def test_ranks_share_the_files_and_all_of_them_find_the_damage_together(tmp_path):
    folder = save(tmp_path, 1, size=1000)
    flip(folder / OPTIMIZER[0], 77)
    for size in (1, 2, 3, 8):
        shares = [share(check(folder).files, rank, size) for rank in range(size)]
        assert sorted(name for names in shares for name in names) == sorted((*NAMES, *OPTIMIZER))
        for names in shares:
            if OPTIMIZER[0] in names:
                with pytest.raises(DamagedCheckpoint):
                    verify(folder, names)
            else:
                verify(folder, names)


def test_shares_have_similar_numbers_of_bytes():
    rng = random.Random(0)
    files = {f"shard-{number}": FileEntry(rng.randrange(1, 1000), "") for number in range(64)}
    loads = [sum(files[name].size for name in share(files, rank, 8)) for rank in range(8)]
    assert sum(loads) == sum(entry.size for entry in files.values())
    assert max(loads) - min(loads) <= max(entry.size for entry in files.values())
    files = {"large": FileEntry(1000, ""), **{f"small-{number}": FileEntry(100, "") for number in range(7)}}
    assert share(files, 0, 2) == ["large"] and len(share(files, 1, 2)) == 7


# ---- What is found ----


def test_checkpoints_are_found_by_scanning_newest_step_first(tmp_path):
    assert find_checkpoints(tmp_path / "nowhere") == []
    for step in (9, 100, 10, 0):
        save(tmp_path, step)
    for name in (
        "global_step_007",
        "global_step_x",
        "global_step_5.damaged-ab",
        ".tmp-global_step_200-x",
        "xglobal_step_3",
    ):
        shutil.copytree(tmp_path / "global_step_9", tmp_path / name)
    (tmp_path / LATEST).write_text("5000 or so")  # only a hint
    assert steps(tmp_path) == [100, 10, 9, 0]
    (tmp_path / "global_step_300").write_text("a file")
    (tmp_path / "global_step_200").mkdir()
    assert [item.step for item in find_checkpoints(tmp_path)] == [300, 200, 100, 10, 9, 0]
    assert [item.problem is None for item in find_checkpoints(tmp_path)] == [False, False, True, True, True, True]


def test_no_torch_is_needed():
    code = "import sys, lib.storage.checkpoint_folder; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "False\n"
