"""Under torchrun: ranks that wait, generate, save, fail or hang, for tests that send them signals.

torchrun --nproc_per_node=N -m tests.stopping_worker FOLDER CASE
"""

import ctypes
import json
import os
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import torch

import lib.stopping
from lib.config.reporting import reporting_errors
from lib.dist import World, init_distributed
from lib.engine.engine import RolloutEngine
from lib.engine.rollout_config import RolloutConfig, Sampling
from lib.errors import Stopped
from lib.rewards.scoring import RewardConfig, Scorer
from lib.stopping import POLL_S, SIGACTION_BYTES, STOP_SIGNALS, Stopper
from lib.tracking.run import Run, TrackingConfig
from lib.types import Rollout, Sample
from tests.ranks import LIMIT_S

FOREVER_S = 10 * LIMIT_S
SLOW_REWARD = f"import time\ndef compute_score(**_):\n    time.sleep({FOREVER_S})\n"


def note(folder: Path, world: World, **values) -> None:
    """Writes rank_R.json in one move, so that the test reads all of it or nothing."""
    temporary = folder / f".rank_{world.rank}"
    store = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    temporary.write_text(json.dumps({"pid": os.getpid(), "store": store, **values}))
    temporary.replace(folder / f"rank_{world.rank}.json")


def sample(uid: int) -> Sample:
    return Sample(uid=uid, prompt_ids=[1, 7, 9], data_source="", ground_truth="", extra_info={})


def response(uid: int) -> Rollout:
    return Rollout(sample=sample(uid), index=0, response_ids=[], rollout_log_probs=None, finish_reason="stop")


def wait_for_another(folder, world, stopper, run):
    """Rank 0 sits in the collective at the end of a phase in which rank 1 still generates."""
    run.log(1, {})
    note(folder, world)
    with stopper.together():
        if world.rank == 1:
            while not stopper.requested():
                time.sleep(0.05)
            raise Stopped("in a loop over engine steps")


def wait_for_another_after_a_compiler(folder, world, stopper, run):
    """As LLVM does: a handler that does nothing, put without Python's knowledge."""
    libc = ctypes.CDLL(None)
    nothing = ctypes.cast(libc.abs, ctypes.c_void_p)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    ours, stopper._ours = stopper._ours, {}  # held back, or the watcher puts a handler back before the signal is sent
    time.sleep(3 * POLL_S)
    for number in STOP_SIGNALS:
        libc.signal(number, nothing)
        os.kill(os.getpid(), number)  # is swallowed
    time.sleep(3 * POLL_S)
    assert not stopper.requested()
    stopper._ours = ours
    now = ctypes.create_string_buffer(SIGACTION_BYTES)  # its first eight bytes are the handler
    while any(libc.sigaction(number, None, now) or now.raw[:8] != ours[number].raw[:8] for number in ours):
        time.sleep(0.05)
    wait_for_another(folder, world, stopper, run)


def wait_for_rewards(folder, world, stopper, run):
    """Rank 1 waits for a reward that does not come, rank 0 for rank 1."""
    (folder / f"slow_{world.rank}.py").write_text(SLOW_REWARD)
    cfg = RewardConfig(path=str(folder / f"slow_{world.rank}.py"), num_workers=1, timeout_s=FOREVER_S)
    with closing(Scorer(cfg, {""})) as scorer:
        scorer.submit(response(0), "")
        while not (scorer._workers and scorer._workers[0].requests):
            time.sleep(0.05)
        note(folder, world, worker=scorer._workers[0].process.pid)
        with stopper.together():
            if world.rank == 1:
                scorer.collect(stop=stopper.requested)


def hang(folder, world, stopper, run):
    """No rank's loop ever asks whether to stop. What signals have come is noted."""
    note(folder, world)
    threading.Thread(target=note_signals, args=(folder, world, stopper), daemon=True).start()
    time.sleep(FOREVER_S)


def note_signals(folder, world, stopper):
    while not stopper._arrivals:
        time.sleep(0.01)
    note(folder, world, arrived=True)


def fail(folder, world, stopper, run):
    """Rank 1 fails; rank 0 does not notice, as in a collective on a GPU."""
    if world.rank == 1:
        raise ValueError("a bug")
    time.sleep(FOREVER_S)


def save_in_time(folder, world, stopper, run):
    """Steps and saves of a known length, with a limit that a rank's own clock alone would reach at different steps.

    On a clock that only they move: on a real one a step may take longer than all before it, and nobody can know.
    """
    step_s, save_s, now = 0.4, 0.8, 0.0
    lib.stopping._now_s = lambda: now
    stopper._deadline = deadline = 4.1 + 100 * world.rank
    for step in range(1, 1000):
        now += step_s
        run.log(step, {})
        stopped = stopper.step_ended(step_s, save_s=save_s if step > 2 else 0.0)
        if step == 2 or stopped:
            now += save_s
        if stopped:
            note(folder, world, step=step, left_s=deadline - now)
            raise stopped


def restart(folder, world, stopper, run):
    """Says when the time is over, fails the first time, and is stopped after a step the second time."""
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if world.rank == 0:
        (folder / f"deadline_{attempt}").write_text(repr(stopper._deadline))
    world.gather(None)
    if attempt == "0":
        raise ValueError("a bug")
    # Here: other cases would wait for these imports in vain.
    from lib.algorithms.group_filter import GroupFilterConfig
    from lib.algorithms.kl import KLController, KLRewardConfig
    from lib.checkpoints.checkpointer import CheckpointConfig, Checkpointer, Progress, Trained
    from lib.data.prompt_stream import PromptStream
    from lib.model.networks import Network
    from lib.rollouts.collector import Collector
    from tests.checkpoint_worker import make_prompts

    prompts = PromptStream(make_prompts(), seed=0)
    collector = Collector(
        None, None, prompts, None, rollout=RolloutConfig(), reward=RewardConfig(), filter_groups=GroupFilterConfig(),
        prompts_per_step=4, mini_batch_size=8, with_greedy=False, mask_truncated=False, run=run, stopper=stopper,
        world=world,
    )  # fmt: skip
    progress = Progress(
        prompts=prompts, collector=collector, kl_controller=KLController(KLRewardConfig()), constant_groups=[]
    )
    weights = type("Weights", (Network, torch.nn.Linear), {})(3, 2)
    models = {"actor": Trained(model=weights, optimizer=torch.optim.AdamW(weights.parameters()), folder=folder / "hf")}
    with Checkpointer(
        CheckpointConfig(), run, world, config={}, reward="", models=models, progress=progress, num_steps=9,
        resumed=None, trainer=None,
    ) as checkpointer:  # fmt: skip
        checkpointer.end_step(1, {})
        wait_for_another(folder, world, stopper, run)


def generate(folder, world, stopper, run, *, path, tp_size):
    """Rank 1 or its replica stops in the middle of minutes of sampling; then the engine samples as before."""
    cfg = RolloutConfig(tensor_model_parallel_size=tp_size, max_response_len=200, max_num_seqs=2, ignore_eos=True)
    engine = RolloutEngine(
        cfg, path, dtype="float32", max_prompt_len=8, most_responses=8, stop_token_ids=[], world=world, seed=5
    )
    short = Sampling(n=1, max_response_len=4, temperature=0.0)
    before = [group[0].response_ids for group in engine.generate([sample(0), sample(1)], short)]
    count, step = 0, engine._engine.step

    def counted():
        nonlocal count
        count += 1
        if count == 50:
            note(folder, world)
        return step()

    engine._engine.step = counted
    try:
        with stopper.together():
            try:
                samples = [sample(uid) for uid in range(1000)][world.rank // tp_size :: world.size // tp_size]
                for _ in engine.generate(samples, Sampling(n=1, max_response_len=200, temperature=1.0),
                                         stop=stopper.requested):  # fmt: skip
                    pass
            except Stopped:
                num_steps = count
                raise
    except Stopped:
        engine._engine.step = step
        engine.sleep()  # which demands that no request is alive
        after = [group[0].response_ids for group in engine.generate([sample(0), sample(1)], short)]
        note(folder, world, num_steps=num_steps, same=before == after)
        raise


def leave(folder, world, how):
    """An evaluation that rank 1 leaves first, and rank 0 with an error, or never by itself."""
    with Stopper(world, at_once=True):
        note(folder, world)
        while not (folder / "go").exists():
            time.sleep(0.05)
        if world.rank == 0 and how == "a bug":
            raise RuntimeError(how)
        if world.rank == 0:
            time.sleep(FOREVER_S)


CASES = {case.__name__: case for case in (
    wait_for_another, wait_for_another_after_a_compiler, wait_for_rewards, hang, fail, save_in_time, restart, generate,
)}  # fmt: skip


def main(folder, name, *words):
    folder = Path(folder)
    with reporting_errors():
        if name == "be_late":  # as long as the imports of a real script take
            (folder / "importing").touch()
            time.sleep(2)
        world = init_distributed()
        if name == "leave":
            return leave(folder, world, *words)
        stopper = Stopper(world, max_minutes=5.0)
        run = Run(folder / "run", TrackingConfig(), world, config={}, num_steps=9, overwrite=True)
        with run, stopper:
            torch.set_num_threads(1)
            options = dict(path=words[0], tp_size=int(words[1])) if words else {}
            CASES[name](folder, world, stopper, run, **options)
            run.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
