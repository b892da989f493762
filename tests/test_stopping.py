"""A run that is asked to stop ends on all ranks together; tests/stopping_worker.py is what the ranks run."""

import json
import os
import re
import signal
import time
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, TCPStore

from eval import EvalScriptConfig
from lib.config.flags import parse_args
from lib.dist import SINGLE
from lib.errors import Stopped, UserError
from lib.evaluation.any_model import find_model
from lib.messages import Messages
from lib.rewards.scoring import RewardConfig, Scorer
from lib.stopping import ECHO_S, POLL_S, Stopper
from lib.storage.checkpoint_folder import find_checkpoints
from lib.torchrun import ATTEMPT
from lib.tracking.run import read_metrics
from tests.ranks import LIMIT_S, ONE_KILLED, ROOT, Job, free_port
from tests.stopping_worker import SLOW_REWARD, response
from tests.tiny import make_model, make_questions, make_tokenizer


def job(folder, case, *words, num_ranks=2, options=()):
    return Job(num_ranks, "-m", "tests.stopping_worker", str(folder), case, *words, options=options)


def notes(folder, *, with_key="pid", num_ranks=2):
    """What all ranks have noted, once they have."""
    paths = [folder / f"rank_{rank}.json" for rank in range(num_ranks)]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    return found if len(found) == num_ranks and all(with_key in one for one in found) else None


def arrived(folder, ranks):
    """Whether these ranks of the case "hang" have taken a signal."""
    return all("arrived" in json.loads((folder / f"rank_{rank}.json").read_text()) for rank in ranks)


def status(folder):
    found = json.loads((folder / "run" / "status.json").read_text())
    return {name: found[name] for name in ("state", "step", "resumable", "error")}


def stopped(reason, *, step):
    return {"state": "stopped", "step": step, "resumable": False, "error": reason}


@pytest.mark.parametrize(("case", "step"), [("wait_for_another", 1), ("wait_for_rewards", 0)])
def test_a_signal_to_a_rank_that_waits_in_a_collective_stops_all(tmp_path, case, step):
    with job(tmp_path, case) as running:
        os.kill(running.until(lambda: notes(tmp_path))[0]["pid"], signal.SIGTERM)
        assert running.wait() == 1
        assert status(tmp_path) == stopped("SIGTERM on rank 0", step=step)
        assert f"stopped after step {step} of 9: SIGTERM on rank 0; there is no checkpoint" in running.stdout
        assert running.stderr.count("exitcode  : 143") == 2, running.stderr  # both came to their end by themselves
        assert "lib/stopping.py" not in running.stderr  # no traceback of ours
        running.wait_for_all()


def test_a_signal_to_all_processes_at_once_is_one_request(tmp_path):
    with job(tmp_path, "wait_for_rewards") as running:
        ranks = running.until(lambda: notes(tmp_path))
        for pid in (expected := running.alive()):  # as some schedulers do, while torchrun hands it on
            with suppress(ProcessLookupError):  # where this loop is slow, the first ones have stopped the last
                os.kill(pid, signal.SIGTERM)
        assert set(expected) >= {running.process.pid, *(rank[key] for rank in ranks for key in ("pid", "worker"))}
        assert running.wait() == 1
        assert status(tmp_path)["error"] in ("SIGTERM on rank 0", "SIGTERM on rank 1")
        assert "exits at once" not in running.stderr and "SIGKILL" not in running.stderr
        running.wait_for_all()


def test_what_a_stranger_writes_into_the_store_neither_stops_a_run_nor_keeps_it_from_stopping(tmp_path):
    with job(tmp_path, "wait_for_another") as running:
        [rank, _] = running.until(lambda: notes(tmp_path))
        store = TCPStore(*rank["store"], timeout=timedelta(seconds=LIMIT_S))
        for name in ("failed", "request"):
            store.set(f"lockstep/0/stop/{name}", '["a stranger", 0]')
        running.until(lambda: "is ignored; " in running.stderr)
        for text in (b"\xff\x00", b"null", b"[" * 10_000):
            store.set("lockstep/0/stop/request", text)
            time.sleep(3 * POLL_S)
        assert status(tmp_path)["state"] == "running"
        os.kill(rank["pid"], signal.SIGTERM)
        assert running.wait() == 1
        assert status(tmp_path) == stopped("SIGTERM on rank 0", step=1)
        assert running.stderr.count("exitcode  : 143") == 2 and running.stderr.count("is ignored; ") == 1


@pytest.mark.parametrize("case", ["wait_for_another", "hang"])
def test_a_rank_that_is_killed_is_named_by_another_in_one_line(tmp_path, case):
    """Rank 0 waits for it in a collective, or never comes to one."""
    with job(tmp_path, case) as running:
        os.kill(running.until(lambda: notes(tmp_path))[1]["pid"], signal.SIGKILL)
        assert running.wait() == 1
        [line] = [line for line in running.stderr.splitlines() if line.startswith("error[")]
        assert re.match(ONE_KILLED, line) and "it may have been memory" in line
        assert str(ROOT / "lib") not in running.stderr  # no traceback
        if case == "wait_for_another":
            assert status(tmp_path) == stopped(line, step=1) | {"state": "failed"}
        running.wait_for_all()


def test_a_killed_rank_is_told_although_no_launcher_ends_the_others_which_hang(tmp_path):
    launch = dict(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    words = ("-m", "tests.stopping_worker", str(tmp_path), "hang")
    with (
        Job(None, *words, RANK="0", LOCAL_RANK="0", **launch) as first,
        Job(None, *words, RANK="1", LOCAL_RANK="1", **launch) as second,
    ):
        first.until(lambda: notes(tmp_path))
        os.kill(second.process.pid, signal.SIGKILL)
        first.until(lambda: re.search(ONE_KILLED, first.stderr))


@pytest.mark.parametrize("how", ["a bug", "SIGTERM", "SIGHUP"])
def test_a_rank_that_leaves_by_itself_is_not_called_killed(tmp_path, how):
    """Where the machine is so busy that its exit status is gone before another rank looks, which then fails by itself,
    or is stopped; or it leaves for a signal that somebody sent it."""
    with job(tmp_path, "leave", how) as running:
        first, second = (rank["pid"] for rank in running.until(lambda: notes(tmp_path)))
        os.kill(first, signal.SIGSTOP)
        if how == "SIGHUP":
            os.kill(second, signal.SIGHUP)
        (tmp_path / "go").touch()
        running.until(lambda: not Path(f"/proc/{second}").exists())
        os.kill(first, signal.SIGCONT)
        if how == "SIGTERM":
            os.kill(running.process.pid, signal.SIGTERM)
        assert running.wait() == 1
        assert "killed" not in running.stderr
        assert ("RuntimeError: a bug" in running.stderr) == (how == "a bug")
        running.wait_for_all()


@pytest.mark.parametrize("case", ["wait_for_another", "wait_for_another_after_a_compiler"])
def test_a_request_to_save_and_stop_is_no_failure_to_torchrun(tmp_path, case):
    with job(tmp_path, case) as running:
        os.kill(running.until(lambda: notes(tmp_path))[0]["pid"], signal.SIGUSR1)
        assert running.wait() == 0
        assert status(tmp_path) == stopped("SIGUSR1 on rank 0", step=1)


@pytest.mark.parametrize("to_launcher", [False, True])
def test_the_second_signal_ends_ranks_that_hang_at_once(tmp_path, to_launcher):
    with job(tmp_path, "hang") as running:
        ranks = running.until(lambda: notes(tmp_path))
        pid = running.process.pid if to_launcher else ranks[1]["pid"]
        os.kill(pid, signal.SIGTERM)
        running.until(lambda: arrived(tmp_path, range(2) if to_launcher else [1]))
        if not to_launcher:
            os.kill(pid, signal.SIGTERM)  # an echo
        time.sleep(2 * ECHO_S)
        assert set(running.alive()) >= {running.process.pid, *(rank["pid"] for rank in ranks)}
        os.kill(pid, signal.SIGTERM)
        assert running.wait() == 1
        running.wait_for_all()
        assert "SIGKILL" not in running.stderr  # torchrun alone would kill them after 30 s
        assert "exits at once" in running.stderr
        if not to_launcher:  # rank 0 learnt of the second one as well, from torchrun and by the failure of rank 1
            assert "SIGTERM came a second time: rank 1 exits at once" in running.stderr
            assert "SIGTERM came after another rank had failed: rank 0 exits at once" in running.stderr


def test_ranks_that_do_not_notice_another_ones_failure_end_with_it(tmp_path):
    with job(tmp_path, "fail") as running:
        assert running.wait() == 1
        assert "SIGTERM came after another rank had failed: rank 0 exits at once" in running.stderr
        assert status(tmp_path)["error"] == "error[1] ValueError: a bug; on rank 1"


def test_all_ranks_stop_at_the_same_step_before_the_time_limit(tmp_path):
    with job(tmp_path, "save_in_time") as running:
        assert running.wait() == 0
        ranks = notes(tmp_path, with_key="step")
        assert ranks[0]["step"] == ranks[1]["step"] == 6  # after it 4.0 of 4.1 s are over, its save included
        assert ranks[0]["left_s"] > 0
        found = status(tmp_path)
        assert (found["state"], found["step"]) == ("stopped", ranks[0]["step"])
        assert found["error"].startswith("the time limit of 5 minutes")


def test_restarted_ranks_keep_the_time_limit_and_save_when_they_are_stopped(tmp_path):
    """What the first ranks have left in the store, that they failed above all, is not the second ones' business."""
    with job(tmp_path, "restart", options=("--max-restarts", "1")) as running:
        pid = running.until(lambda: notes(tmp_path))[0]["pid"]
        first, second = ((tmp_path / f"deadline_{attempt}").read_text() for attempt in (0, 1))
        assert first == second
        os.kill(pid, signal.SIGTERM)
        assert running.wait() == 1
        assert status(tmp_path) == stopped("SIGTERM on rank 0", step=1) | {"resumable": True}
        [saved] = find_checkpoints(tmp_path / "run")
        assert saved.step == 1 and saved.problem is None


@pytest.mark.parametrize("case", ["wait_for_rewards", "hang"])
def test_nothing_survives_a_killed_launcher(tmp_path, case):
    with job(tmp_path, case) as running:
        ranks = running.until(lambda: notes(tmp_path))
        expected = {rank[key] for rank in ranks for key in ("pid", "worker") if key in rank}
        assert expected <= set(running.alive())
        running.process.kill()
        running.wait_for_all()


@pytest.mark.slow
def test_ranks_whose_launcher_is_killed_before_they_join_end_too(tmp_path):
    with job(tmp_path, "be_late") as running:
        running.until((tmp_path / "importing").exists)
        running.process.kill()
        running.wait_for_all()


def test_a_process_without_torchrun_outlives_its_parent(tmp_path):
    """As after `nohup python train_grpo.py &` in a shell that ends."""
    code = (
        "import os, pathlib, time\n"
        "from lib.dist import init_distributed\n"
        "first = os.getppid()\n"
        "init_distributed()\n"
        f"pathlib.Path({str(tmp_path)!r}, 'ready').touch()\n"
        "while os.getppid() == first: time.sleep(0.01)\n"
        f"pathlib.Path({str(tmp_path)!r}, 'alive').touch()\n"
    )
    shell = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {code!r}])\ntime.sleep(600)"
    with Job(None, "-c", shell) as running:
        running.until((tmp_path / "ready").exists)
        running.process.kill()
        running.process.wait()
        deadline = time.monotonic() + LIMIT_S
        while running.alive() and not (tmp_path / "alive").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (tmp_path / "alive").exists()


# ---- One rank, in this process ----


def test_a_step_is_only_begun_when_it_and_a_save_end_before_the_limit():
    stopper = Stopper(SINGLE, max_minutes=1.0)
    assert stopper.step_ended(59.0, save_s=0.5) is None
    assert stopper.step_ended(5.0, save_s=0.5) is None
    reason = stopper.step_ended(5.0, save_s=2.0)  # the longest step counts
    assert isinstance(reason, Stopped) and reason.code == 0
    assert "1 minutes: a step of up to 59 s and a save of up to 2 s" in str(reason)


def test_a_clock_that_is_set_moves_no_time_limit(monkeypatch):
    for leap_s in (86400.0, -86400.0):
        stopper, clock = Stopper(SINGLE, max_minutes=1.0), time.time
        monkeypatch.setattr(time, "time", lambda leap_s=leap_s, clock=clock: clock() + leap_s)
        assert stopper.step_ended(5.0, save_s=0.5) is None
        assert stopper.step_ended(59.0, save_s=2.0) is not None


def test_a_save_of_unknown_length_is_taken_to_be_as_long_as_a_step():
    stopper = Stopper(SINGLE, max_minutes=1.0)
    assert stopper.step_ended(29.0, save_s=0.0) is None
    assert "a save of up to 31 s" in str(stopper.step_ended(31.0, save_s=0.0))


def test_without_a_limit_or_a_signal_nothing_stops():
    stopper = Stopper(SINGLE)
    assert stopper.step_ended(1e9, save_s=1e9) is None and not stopper.requested()
    with stopper.together():
        pass
    with pytest.raises(AssertionError, match="broke off"), stopper.together():
        raise Stopped("alone")


@settings(max_examples=200)
@given(found=st.binary() | st.text(alphabet="[]{}0", max_size=5000).map(str.encode))
def test_a_message_is_none_whatever_bytes_stand_for_it(found):
    store = HashStore()
    messages = Messages(store, b"key", rank=0)
    messages.post("request", "stop")
    store.set("request", found)
    assert messages.read("request") is None and messages.refused in (found, None)
    messages.post("request", "stop")
    assert messages.read("request") == "stop"


def test_a_message_that_is_copied_or_of_another_attempt_is_none(monkeypatch):
    store = HashStore()
    first, second = Messages(store, b"key", rank=0), Messages(store, b"key", rank=1)
    assert second.read("request") is None
    first.post("request", "stop")
    old = store.get("request")
    assert second.read("request") == "stop" and second.refused is None
    store.set("failed", old)
    assert second.read("failed") is None and second.refused == old
    first.post("request", "another")
    assert second.read("request") == "another"
    store.set("request", old)
    assert second.read("request") is None  # put back
    assert Messages(store, b"another key", rank=1).read("request") is None
    monkeypatch.setenv(ATTEMPT, "1")
    assert Messages(store, b"key", rank=1).read("request") is None


def test_handlers_are_put_back_and_ignored_signals_stay_ignored():
    usual = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
        with Stopper(SINGLE) as stopper:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as a library may
            stopper.agreed()
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            deadline = time.monotonic() + LIMIT_S
            while not stopper.requested() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert (str(stopper.agreed()), stopper.agreed().code) == ("SIGTERM on rank 0", 143)
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGHUP, usual)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_reward_workers_live_through_signals_and_their_children_do_not(tmp_path, number):
    (tmp_path / "reward.py").write_text(
        "import os, signal, subprocess\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    codes = []\n"
        "    for _ in range(50):\n"
        "        forked = os.fork()\n"
        "        if not forked:\n"
        "            while True: signal.pause()\n"
        "        os.kill(forked, signal.SIGTERM)\n"
        "        codes.append(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))\n"
        "    child = subprocess.Popen(['sleep', '600'])\n"
        "    child.terminate()\n"
        "    return {'score': os.getpid(), 'codes': str({*codes, child.wait()})}\n"
    )
    with closing(Scorer(RewardConfig(path=str(tmp_path / "reward.py"), num_workers=1), {""})) as scorer:
        pids = set()
        for uid in range(2):
            scorer.submit(response(uid), "")
            [scored] = scorer.collect()
            assert scored.score.error is None and scored.score.extras["codes"] == "{-15}"
            pids.add(int(scored.score.score))
            os.kill(int(scored.score.score), number)
        assert len(pids) == 1


def test_waiting_for_rewards_ends_when_the_run_is_to_stop(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_REWARD)
    with closing(Scorer(RewardConfig(path=str(tmp_path / "slow.py"), timeout_s=600.0), {""})) as scorer:
        scorer.submit(response(0), "")
        asked = iter([False, False, True])
        with pytest.raises(Stopped):
            scorer.collect(stop=lambda: next(asked))


def test_a_limit_that_is_no_time_is_refused():
    from train_grpo import GRPOConfig

    for minutes in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match="--max-minutes is out of range"):
            GRPOConfig(max_minutes=minutes)


def test_a_plain_process_stops_with_the_signals_code(tmp_path):
    (tmp_path / "script.py").write_text(
        "import pathlib, time\n"
        "from lib.config.reporting import reporting_errors\n"
        "from lib.dist import init_distributed\n"
        "from lib.stopping import Stopper\n"
        "with reporting_errors(), Stopper(init_distributed()) as stopper:\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'ready').touch()\n"
        "    while not stopper.requested(): time.sleep(0.01)\n"
        "    raise stopper.agreed()\n"
    )
    with Job(None, str(tmp_path / "script.py"), PYTHONPATH=str(ROOT)) as running:
        running.until((tmp_path / "ready").exists)
        os.kill(running.process.pid, signal.SIGINT)
        assert running.wait() == 130 and running.stderr == ""


# ---- The real engine ----


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_sampling_stops_on_all_ranks_long_before_its_end_and_the_engine_goes_on_working(tmp_path, tp_size):
    path = make_model(tmp_path / "model")
    with job(tmp_path, "generate", str(path), str(tp_size)) as running:
        ranks = running.until(lambda: notes(tmp_path))
        os.kill(ranks[1]["pid"], signal.SIGTERM)
        assert running.wait() == 1
        ranks = notes(tmp_path, with_key="num_steps")
        for rank in ranks:
            assert rank["num_steps"] < 25_000, ranks  # of 50,000 or more; it takes about a second to be heard
            assert rank["same"]
        assert tp_size == 1 or ranks[0]["num_steps"] == ranks[1]["num_steps"]
        assert status(tmp_path) == stopped("SIGTERM on rank 1", step=0)


@pytest.mark.slow
def test_a_killed_tensor_parallel_run_does_not_keep_the_next_from_starting(tmp_path):
    path = make_model(tmp_path / "model")
    for name in ("killed", "next"):
        (tmp_path / name).mkdir()
        with job(tmp_path / name, "generate", str(path), "2") as running:
            running.until(lambda name=name: notes(tmp_path / name))
            running.process.kill()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopping")
    make_model(folder / "model")
    make_tokenizer(folder / "model")
    make_questions(folder / "train.parquet", count=400, start=0)
    make_questions(folder / "val.parquet", count=4000, start=400)
    return folder


def training(folder, *more):
    """A run on 2 ranks whose first step and validations sample for minutes, and say so after half of one."""
    return Job(
        2, "train_grpo.py", "--model.path", str(folder / "model"), "--data.train-files", str(folder / "train.parquet"),
        "--data.val-files", str(folder / "val.parquet"), "--data.max-prompt-len", "24", "--rollout.max-response-len",
        "200", "--rollout.ignore-eos", "--rollout.n", "4", "--rollout.max-num-seqs", "1", "--mini-batch-size", "8",
        "--max-tokens-per-gpu", "256", "--num-steps", "3", "--eval.before-train", "False", "--eval.every", "1",
        "--reward.path", "recipes/hash_reward.py", "--reward.num-workers", "1", *more,
    )  # fmt: skip


@pytest.mark.slow
def test_a_training_run_stops_in_the_middle_of_a_rollout(files):
    with training(files, "--prompts-per-step", "400", "--run-dir", str(files / "run")) as running:
        running.until(lambda: "  step 1/3: sampling " in running.stdout)
        os.kill(running.pid_of_rank(1), signal.SIGTERM)
        assert running.wait() == 1
        assert status(files) == stopped("SIGTERM on rank 1", step=0)
        assert "stopped after step 0 of 3: SIGTERM on rank 1" in running.stdout
        assert running.stderr.count("exitcode  : 143") == 2 and 'train_grpo.py", line' not in running.stderr
        running.wait_for_all()
        assert not (files / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_step_whose_validation_is_broken_off_is_logged(files):
    words = ("--prompts-per-step", "2", "--run-dir", str(files / "run"), "--overwrite")
    with training(files, *words) as running:
        running.until(lambda: "  validation " in running.stdout)
        os.kill(running.process.pid, signal.SIGUSR1)
        assert running.wait() == 1
        [row] = read_metrics(files / "run")
        assert row["step"] == 1 and "actor/loss" in row and not [name for name in row if name.startswith("val-")]
        found = status(files)
        assert found["error"].startswith("SIGUSR1 on rank ")
        assert found == stopped(found["error"], step=1) | {"resumable": True}
        assert 'train_grpo.py", line' not in running.stderr and "checkpoint global_step_1: " in running.stdout
        running.wait_for_all()
        assert not (files / "run" / "samples" / "step_1.jsonl").exists()


@pytest.mark.slow
def test_a_run_whose_last_validation_is_broken_off_ends_and_says_how_to_measure_it(files):
    run = files / "last"
    with training(files, "--prompts-per-step", "2", "--num-steps", "1", "--run-dir", str(run)) as running:
        running.until(lambda: "  validation " in running.stdout)
        os.kill(running.process.pid, signal.SIGUSR1)
        assert running.wait() == 1 and "exitcode" not in running.stderr  # torchrun's own; the ranks end with 0
        [row] = read_metrics(run)
        assert "actor/loss" in row and not [name for name in row if name.startswith("val-")]
        assert json.loads((run / "status.json").read_text())["state"] == "finished"
        [line] = [line for line in running.stdout.splitlines() if "was broken off" in line]
        assert line.startswith("warning: the validation of step 1 was broken off and is not in the metrics; SIGUSR1 on")
        command = line.split("eval.py ")[1].split(" measures ")[0]
        cfg = parse_args(
            EvalScriptConfig(), [*command.split(), "--data.max-prompt-len", "24", "--rollout.max-response-len", "16"]
        )
        model = find_model(cfg.model.path, cfg.data, cfg.rollout, SINGLE)
        assert model.files.folder == run / "global_step_1" / "actor" / "huggingface"
