"""A kill at any instant, a full disk, a missing permission or a pruning never costs a good checkpoint."""

import errno
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lib.errors import NoSpace, UserError
from lib.storage.checkpoint_folder import (
    LATEST,
    MANIFEST,
    check,
    check_space,
    checkpoint_path,
    discard,
    disk_errors,
    find_checkpoints,
    prune,
    publish,
    stage,
    verify,
)
from tests.checkpoint_folders import (
    NAMES,
    exit_status,
    fill,
    in_child,
    memory_folder,
    on_small_disk,
    record_disk,
    save,
    start_child,
    steps,
    write,
)


@pytest.fixture
def tmp_path():
    with memory_folder() as folder:
        yield folder


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


def test_a_deletion_is_on_the_disk_before_its_files_go(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step)
    events = record_disk(monkeypatch)
    prune(tmp_path, keep_last=2, keep_optimizer=1)
    names = [re.sub(r"-[0-9a-f]{8}$", "", event.replace(str(tmp_path), "RUN")) for event in events]
    manifest = ["fsync RUN/.tmp-MANIFEST.json", "rename RUN/global_step_2/MANIFEST.json", "fsync RUN/global_step_2"]
    optimizer = ["rename RUN/.trash-optim", "fsync RUN"]
    assert names == [*manifest, *optimizer, "rename RUN/.trash-global_step_1", "fsync RUN"]


# ---- Killed ----


def changes_files(event: str, args: tuple) -> bool:
    """True for the audit event of an operation that changes what is on the disk."""
    return event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir") or (event == "open" and args[2] & os.O_CREAT)


def save_and_prune(run: Path, step: int) -> None:
    save(run, step, {"acc": 1.0 if step == 2 else 0.0})
    prune(run, keep_last=3, keep_best=1, metric="acc", keep_optimizer=1)


def test_a_kill_before_any_single_file_operation_loses_nothing(tmp_path):
    """Kills a save before its k-th operation that changes the disk, for every k there is."""
    base = tmp_path / "base"
    for step in range(1, 6):
        save_and_prune(base, step)
    assert steps(base) == [5, 4, 3, 2]
    for deadline in range(1, 1000):
        run = shutil.copytree(base, tmp_path / f"run_{deadline}")

        def killed(run: Path = run, deadline: int = deadline) -> None:
            count = 0

            def hook(event: str, args: tuple) -> None:
                nonlocal count
                if changes_files(event, args):
                    count += 1
                    if count == deadline:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)
            save_and_prune(run, 6)

        status = in_child(killed)
        left = steps(run)
        assert {2, 4, 5} <= set(left) and (left[0] == 6 or 3 in left)  # the best, and the newest three
        assert check(run / f"global_step_{left[0]}").has_optimizer
        assert (run / LATEST).read_text() in ("5\n", "6\n")
        save_and_prune(run, 7)  # the next one clears up
        assert steps(run) == [7, *([6, 5] if left[0] == 6 else [5, 4]), 2]
        optimizers = [item.manifest.has_optimizer for item in find_checkpoints(run)]
        assert optimizers == [True, False, False, False]
        assert [path.parent.parent.name for path in run.glob("*/actor/optim")] == ["global_step_7"]
        assert not list(run.glob(".*"))
        shutil.rmtree(run)
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0 and deadline > 35


def test_a_process_that_saves_in_a_loop_and_is_killed_at_random_moments_loses_nothing(tmp_path):
    rng, run, num_cut_short = random.Random(0), tmp_path / "run", 0
    values = {step: random.Random(step).random() for step in range(1, 1000)}

    def save_forever(report: int) -> None:
        step = max((item.step for item in find_checkpoints(run)), default=0)
        while True:
            step += 1
            save(run, step, {"acc": values[step]}, size=random.choice([300, 300_000]))
            os.write(report, f"{step}\n".encode())
            prune(run, keep_last=2, keep_best=1, metric="acc", keep_optimizer=1)

    for _ in range(20):
        reader, report = os.pipe()
        child = start_child(lambda report=report: save_forever(report))
        os.close(report)
        with open(reader) as lines:
            lines.readline()
            started = time.monotonic()
            reported = int(lines.readline())
            time.sleep(rng.uniform(0, 2) * (time.monotonic() - started))  # somewhere in the next two saves
            os.kill(child, signal.SIGKILL)
            assert exit_status(child) == -signal.SIGKILL  # it did not fail before
            reported = max([reported, *map(int, lines.read().split())])
        left = steps(run)
        assert left[0] in (reported, reported + 1)  # published, but killed before it said so
        best = max(range(1, left[0] + 1), key=lambda step: values[step])
        assert {left[0], left[0] - 1, best} <= set(left)
        num_cut_short += any(run.glob(".*"))
    assert num_cut_short > 0


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
    code = (
        "from pathlib import Path; from tests.test_checkpoint_survival import *; import sys; run = Path(sys.argv[1]); "
        "fill_disk(run, 400_000); fill_manifest(run)"
    )
    on_small_disk(tmp_path, "1m", code, tmp_path)


def fill_manifest(run: Path) -> None:
    """A disk that is full exactly when the manifest is written, or the optimizer's state is dropped."""
    staging = stage(run, 4, "id")
    entries = write(staging, 4)
    ballast = run / "ballast"
    fill(ballast)
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


def test_what_cannot_be_deleted_is_a_warning_and_the_rest_is_deleted(open_folder):
    open_folder.chmod(0o777)
    run = open_folder / "run"

    def as_nobody() -> None:
        for step in (1, 2, 3):
            save(run, step)
        (run / "global_step_2" / "actor" / "model").chmod(0o555)
        (warning,) = prune(run, keep_last=1)
        assert "cannot delete" in warning and ".trash-global_step_2" in warning and "Permission denied" in warning
        assert steps(run) == [3]
        save(run, 4)  # tries again, and does not mind
        assert steps(run) == [4, 3]

    assert in_child(as_nobody, user=65534 if os.getuid() == 0 else None) == 0


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
