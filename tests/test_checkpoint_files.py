"""A checkpoint's folder is whole or named as damaged, and a kill, a full disk or a pruning never costs a good one."""

import contextlib
import errno
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.checkpoint_files import (
    LATEST,
    MANIFEST,
    FileEntry,
    Manifest,
    _sealed,
    check,
    check_space,
    checkpoint_path,
    discard,
    disk_errors,
    find_checkpoints,
    hash_file,
    hash_files,
    prune,
    publish,
    share,
    stage,
    verify,
)
from lib.errors import DamagedCheckpoint, NoSpace, UserError
from tests.ranks import ROOT

NAMES = (
    "trainer.json",
    "actor/model/shard-00001.safetensors",
    "actor/model/shard-00002.safetensors",
    "actor/huggingface/config.json",
    "actor/huggingface/extra/template.jinja",
)
OPTIMIZER = ("actor/optim/shard-00001.safetensors", "actor/optim/shard-00002.safetensors")


def write(staging: Path, step: int, size: int = 300) -> dict[str, FileEntry]:
    """Files whose sizes and bytes depend on the step."""
    for number, name in enumerate((*NAMES, *OPTIMIZER)):
        (staging / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).write_bytes(random.Random(f"{step} {name}").randbytes(size + 40 * number + step))
    return hash_files(staging, (*NAMES, *OPTIMIZER), sync=True)


def save(run: Path, step: int, metrics: dict[str, float] | None = None, size: int = 300) -> Path:
    staging = stage(run, step, "first/run:1")
    final = checkpoint_path(run, step)
    publish(staging, final, write(staging, step, size), inventory={"seed": 1, "sizes": [2.5, None]}, metrics=metrics)
    return final


def steps(run: Path) -> list[int]:
    """The steps of the checkpoints that are whole to the bit, newest first; nothing else may look like one."""
    found = find_checkpoints(run)
    assert [item.problem for item in found] == [None] * len(found)
    for item in found:
        assert verify(item.path) == item.manifest
    return [item.step for item in found]


def in_child(body: Callable[[], None], *, user: int | None = None) -> int:
    """Runs the body in a forked process, as another user if told; gives its exit status (negative: the signal)."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if user is not None:
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
            body()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- What is written ----


def test_a_published_checkpoint_is_found_and_holds_what_was_written(tmp_path):
    folder = save(tmp_path, 3, {"acc": 0.5, "broken": float("nan")})
    expected = write(tmp_path / "again", 3)
    manifest = verify(folder)
    assert manifest == Manifest(
        step=3, files=expected, metrics={"acc": 0.5}, inventory={"seed": 1, "sizes": [2.5, None]}
    )
    assert manifest.has_optimizer
    for name, entry in manifest.files.items():
        data = (folder / name).read_bytes()
        assert entry == FileEntry(len(data), hashlib.sha256(data).hexdigest())
    assert (tmp_path / LATEST).read_text() == "3\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "global_step_3", LATEST]


def test_everything_is_on_the_disk_before_the_rename_and_the_rename_before_the_return(tmp_path, monkeypatch):
    """The order of the system calls; a power failure cannot be had here."""
    events, fsync, rename = [], os.fsync, os.rename

    def record_fsync(descriptor):
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def record_rename(source, target, **options):
        events.append(("rename", str(target)))
        rename(source, target, **options)

    staging = stage(tmp_path, 1, "id")
    entries = write(staging, 1)
    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    publish(staging, checkpoint_path(tmp_path, 1), entries, inventory={})
    place = events.index(("rename", str(tmp_path / "global_step_1")))
    for path in (staging, *staging.rglob("*"), *(tmp_path / "global_step_1").rglob("*")):
        relative = str(path).replace("global_step_1", ".tmp-global_step_1-id") if path != staging else str(path)
        assert relative in events[:place]
    manifest_place = events.index(str(staging / MANIFEST))
    assert {str(staging / name) for name in entries} <= set(events[:manifest_place])
    assert manifest_place < events.index(str(staging)) < place
    assert events[place + 1] == str(tmp_path)


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


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


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
    code = "import sys, lib.checkpoint_files; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "False\n"


# ---- What is kept ----


def test_prune_keeps_what_a_slow_obvious_selection_keeps(tmp_path):
    rng = random.Random(0)
    for trial in range(12):
        run = tmp_path / str(trial)
        values = {step: rng.choice([None, 0.1, 0.5, 0.9, float("nan")]) for step in rng.sample(range(30), 7)}
        for step, value in values.items():
            save(run, step, {"other": 1.0} if value is None else {"acc": value})
        damaged, protected = rng.sample(sorted(values), 2)
        os.truncate(run / f"global_step_{damaged}" / "trainer.json", 1)
        last, best = rng.choice([1, 2, 3]), rng.choice([0, 1, 2])
        assert (
            prune(run, keep_last=last, keep_best=best, metric="acc", protect=[run / f"global_step_{protected}"]) == []
        )

        whole = sorted(set(values) - {damaged})
        expected = set(whole[-last:]) | {damaged, protected}
        candidates = [step for step in whole if values[step] is not None and values[step] == values[step]]
        for _ in range(min(best, len(candidates))):
            winner = candidates[0]
            for step in candidates:
                if values[step] > values[winner]:
                    winner = step
            expected.add(winner)
            candidates.remove(winner)
        assert {item.step for item in find_checkpoints(run)} == expected
        assert not list(run.glob(".*"))


def test_the_only_good_checkpoint_is_never_deleted(tmp_path):
    save(tmp_path, 1)
    for step in (2, 3, 4):
        (save(tmp_path, step) / MANIFEST).unlink()
    prune(tmp_path, keep_last=1)
    assert [item.step for item in find_checkpoints(tmp_path) if item.problem is None] == [1]
    prune(tmp_path, keep_last=None)
    assert len(find_checkpoints(tmp_path)) == 4


def test_a_protected_checkpoint_is_known_by_any_path(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path / "run", step)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    prune(tmp_path / "run", keep_last=1, keep_optimizer=1, protect=[tmp_path / "link" / "global_step_1"])
    assert steps(tmp_path / "run") == [3, 1]
    assert check(tmp_path / "run" / "global_step_1").has_optimizer


def test_a_checkpoint_linked_from_another_disk_loses_only_the_link(tmp_path):
    folder = save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "disk").mkdir()
    moved = folder.rename(tmp_path / "disk" / "global_step_1")
    folder.symlink_to(moved)
    assert steps(tmp_path) == [2, 1]
    assert prune(tmp_path, keep_last=1) == []
    assert steps(tmp_path) == [2] and verify(moved)


def test_older_checkpoints_lose_their_optimizer_and_stay_whole(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, {"acc": 0.5})
    before = {name: (tmp_path / "global_step_1" / name).read_bytes() for name in NAMES}
    assert prune(tmp_path, keep_last=3, keep_optimizer=2) == []
    assert steps(tmp_path) == [3, 2, 1]
    assert [item.manifest.has_optimizer for item in find_checkpoints(tmp_path)] == [True, True, False]
    old = tmp_path / "global_step_1"
    assert sorted(p.relative_to(old).as_posix() for p in old.rglob("*") if p.is_file()) == sorted((*NAMES, MANIFEST))
    assert {name: (old / name).read_bytes() for name in NAMES} == before
    manifest = check(old)
    assert (manifest.step, manifest.metrics, manifest.inventory) == (
        1,
        {"acc": 0.5},
        check(tmp_path / "global_step_2").inventory,
    )
    stamp = (old / MANIFEST).stat().st_mtime_ns
    assert prune(tmp_path, keep_last=3, keep_optimizer=2) == []
    assert (old / MANIFEST).stat().st_mtime_ns == stamp  # nothing is written twice


# ---- Killed ----

MUTATING = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir"}


def save_and_prune(run: Path, step: int) -> None:
    save(run, step, {"acc": 1.0 if step == 2 else 0.0})
    prune(run, keep_last=2, keep_best=1, metric="acc", keep_optimizer=1)


def test_a_kill_before_any_single_file_operation_loses_nothing(tmp_path):
    """Kills the n-th save before its k-th operation on the file system, for every k there is."""
    base = tmp_path / "base"
    for step in (1, 2, 3, 4):
        save_and_prune(base, step)
    assert steps(base) == [4, 3, 2]
    for deadline in range(1, 1000):
        run = shutil.copytree(base, tmp_path / f"run_{deadline}")

        def killed(run: Path = run, deadline: int = deadline) -> None:
            count = 0

            def hook(event: str, args: tuple) -> None:
                nonlocal count
                if event in MUTATING:
                    count += 1
                    if count == deadline:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            save_and_prune(run, 5)

        status = in_child(killed)
        left = steps(run)
        assert {4, 2} <= set(left) and (left[0] == 5 or 3 in left)  # newest two, and the best
        assert check(run / f"global_step_{left[0]}").has_optimizer
        save_and_prune(run, 6)  # the next one clears up
        assert steps(run) == [6, left[0], 2]
        assert not list(run.glob(".*"))
        optimizers = [item.manifest.has_optimizer for item in find_checkpoints(run)]
        assert optimizers == [True, False, False] and not list(run.glob("global_step_[25]/actor/optim"))
        shutil.rmtree(run)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0 and deadline > 60


def test_a_process_that_saves_in_a_loop_and_is_killed_at_random_moments_loses_nothing(tmp_path):
    rng, run = random.Random(0), tmp_path / "run"
    best, reported = None, 0
    values = {step: random.Random(step).random() for step in range(1, 10_000)}
    num_staging_left = 0
    for _ in range(20):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                step = max((item.step for item in find_checkpoints(run)), default=0)
                while True:
                    step += 1
                    save(run, step, {"acc": values[step]}, size=rng.choice([300, 300_000]))
                    os.write(writer, f"{step}\n".encode())
                    prune(run, keep_last=2, keep_best=1, metric="acc", keep_optimizer=1)
            os._exit(1)
        os.close(writer)
        time.sleep(rng.uniform(0.005, 0.2))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL  # it did not fail before
        with open(reader) as lines:
            reported = max([reported, *map(int, lines.read().split())])
        left = steps(run)
        newest = max(left, default=0)
        assert newest in (reported, reported + 1)  # published, but killed before it said so
        best = max(range(1, newest + 1), key=lambda step: values[step], default=None)
        assert {newest, newest - 1, best} - {0, None} <= set(left)
        num_staging_left += bool(list(run.glob(".tmp-*")))
    assert reported > 20 and num_staging_left > 0  # it saved, and some kills hit a save


# ---- Full disk, no permission ----


def test_too_little_space_is_said_before_anything_is_written(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    check_space(tmp_path, free // 2)
    with pytest.raises(NoSpace, match=r"found [0-9.]+ GiB free, expected [0-9.]+ GiB"):
        check_space(tmp_path, free * 2)


def fill_disk(run: Path, size: int) -> None:
    """Saves a small checkpoint, then one that does not fit, then a small one again."""
    save(run, 1)
    staging = stage(run, 2, "id")
    try:
        with disk_errors(staging):
            write(staging, 2, size=size)
    except NoSpace as error:
        message = str(error)
        discard(staging)
    assert "older checkpoints are untouched" in message, message
    assert steps(run) == [1] and [path.name for path in run.glob(".*")] == []
    save(run, 3)
    assert steps(run) == [3, 1]


def test_a_disk_that_fills_up_during_a_save_costs_no_checkpoint(tmp_path):
    """A tmpfs of 1 MiB, mounted for one process alone."""
    alone = ["unshare", "--map-root-user", "--mount"]
    mount = f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"
    if not shutil.which("unshare") or subprocess.run([*alone, "sh", "-c", mount], capture_output=True).returncode != 0:
        pytest.skip("no permission to mount a small disk")
    code = (
        "from pathlib import Path; from tests.test_checkpoint_files import *; import sys; run = Path(sys.argv[1]); "
        "fill_disk(run, 400_000); fill_manifest(run)"
    )
    words = [*alone, "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def fill_manifest(run: Path) -> None:
    """A disk that is full exactly when the manifest is written, or the optimizer's state is dropped."""
    staging = stage(run, 4, "id")
    entries = write(staging, 4)
    ballast = run / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(NoSpace):
        publish(staging, checkpoint_path(run, 4), entries, inventory={})
    (warning,) = prune(run, keep_last=2, keep_optimizer=1)
    assert "cannot drop the optimizer's state" in warning and "No space" in warning
    assert steps(run) == [3, 1] and all(item.manifest.has_optimizer for item in find_checkpoints(run))
    discard(staging)
    ballast.unlink()
    assert prune(run, keep_last=2, keep_optimizer=1) == [] and steps(run) == [3, 1]


def test_a_file_size_limit_is_reported_as_no_space(tmp_path):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        fill_disk(tmp_path, 200_000)

    assert in_child(limited) == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_disk_and_quota_give_the_same_type_of_error(tmp_path, number):
    with pytest.raises(NoSpace, match="global_step"), disk_errors(tmp_path / "global_step_1"):
        raise OSError(number, os.strerror(number))


@pytest.fixture
def open_folder():
    """A folder that every user may reach, unlike pytest's own."""
    folder = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    folder.chmod(0o755)
    yield folder
    subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=True)
    shutil.rmtree(folder)


def test_no_permission_is_a_clear_error_and_deletes_nothing(open_folder):
    run = open_folder / "run"
    for step in (1, 2, 3):
        save(run, step)
    secret = run / "global_step_2" / NAMES[1]
    secret.chmod(0)
    (run / "global_step_1" / "actor").chmod(0)
    run.chmod(0o555)

    def as_nobody() -> None:
        with pytest.raises(UserError, match=r"global_step_4-id; found Permission denied.*mend its permissions"):
            stage(run, 4, "id")
        with pytest.raises(UserError, match=r"shard-00001.*Permission denied"):
            verify(run / "global_step_2")
        newest, _, oldest = find_checkpoints(run)
        assert newest.problem is None and "Permission denied" in oldest.problem
        assert ["cannot delete" in text and "global_step_2" in text for text in prune(run, keep_last=1)] == [True]
        (warning,) = prune(run, keep_last=2, keep_optimizer=1)
        assert "cannot drop the optimizer's state" in warning

    assert in_child(as_nobody, user=65534 if os.getuid() == 0 else None) == 0
    run.chmod(0)

    def without_listing() -> None:
        with pytest.raises(UserError, match="Permission denied"):
            find_checkpoints(run)

    assert in_child(without_listing, user=65534 if os.getuid() == 0 else None) == 0
    run.chmod(0o755)
    secret.chmod(0o644)
    (run / "global_step_1" / "actor").chmod(0o755)
    assert steps(run) == [3, 2, 1]
