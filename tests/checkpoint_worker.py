"""A training loop without an engine, through the real checkpoints: prompts, left-over groups, updates, saves.

    torchrun --nproc_per_node=N -m tests.checkpoint_worker MODEL OUT [OPTION...]

trains as `train_grpo.py OPTION...` would, on responses that are functions of their prompt's uid, and writes OUT on rank
0: {"uids": by step, "losses": by step, "weights": ...}. With `full=STEP:RANK` that rank may write no large file at that
step's save, as on a full disk; with `poor=RANK` that one gets no large block of memory for asynchronous saves; with
`broken=STEP:RANK` that one's reward function fails after that step's update.
"""

import resource
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from lib.algorithms.advantages import GroupAdvantage
from lib.algorithms.kl import KLController, KLRewardConfig
from lib.checkpoints.checkpointer import Checkpointer, Progress, Trained
from lib.config.as_json import to_json
from lib.config.flags import parse_args
from lib.config.reporting import reporting_errors
from lib.data.prompt_stream import PromptStream
from lib.data.prompts import Prompts
from lib.data.reading import rows_from_dicts
from lib.dist import init_distributed, shutdown_distributed
from lib.engine.rollout_config import RolloutConfig
from lib.errors import RewardError
from lib.launch.resume import find_resume, with_date
from lib.model.batching import iter_mini_batches, make_batch
from lib.model.fsdp import iter_full_tensors, load_policy, offload, onload
from lib.model.optim import OptimConfig, build_optimizer, optimizer_step, set_lr_
from lib.rollouts.collector import Collector
from lib.stopping import Stopper
from lib.storage.model_folder import check_model_files
from lib.tracking.run import Run
from lib.types import Rollout, Score
from tests.tiny import VOCAB_SIZE
from tests.update_worker import backward
from train_grpo import GRPOConfig

NUM_PROMPTS = 10
REWARD = "reward: compute_score in /a/b.py (sha256 ab); warning: it printed"
EXTRAS = {"acc": 0.1, "note": "ü", "ok": True}


def make_prompts(answers=None):
    answers = answers or range(NUM_PROMPTS)
    rows = rows_from_dicts(
        [
            {
                "prompt": [{"role": "user", "content": "x"}],
                "data_source": "test",
                "reward_model": {"style": "rule", "ground_truth": answer},
            }
            for answer in answers
        ],
        "test",
    )
    ids = [np.arange(1 + place, dtype=np.int32) for place in range(len(answers))]
    return Prompts(
        rows=rows, kept=list(range(len(answers))), token_ids=ids, num_filtered=0, num_truncated=0,
        longest=len(answers), warnings=(),
    )  # fmt: skip


def respond(sample, index):
    """A response that depends on the uid alone, as ours do; its numbers are no round ones."""
    generator = torch.Generator().manual_seed(1000 * sample.uid + index)
    length = int(torch.randint(1, 12, (), generator=generator))
    return Rollout(
        sample=sample, index=index, response_ids=torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist(),
        rollout_log_probs=(-torch.rand(length, generator=generator)).tolist(), finish_reason="stop",
        score=Score(score=float(torch.rand((), generator=generator)), extras=EXTRAS),
    )  # fmt: skip


def next_groups(collector, prompts, cfg, world):
    """Three new groups and one left over; the last new one is left over in turn, on the rank that sampled it."""
    new = [[respond(s, i) for i in range(cfg.rollout.n)] for s in prompts.next(cfg.prompts_per_step)]
    own = [group for group in new if group[0].sample.uid % world.size == world.rank]
    kept = collector.carried + [group for group in own if group is not new[-1]]
    collector.carried = [group for group in own if group is new[-1]]
    collector._share_kept *= 0.9
    return kept


def end_step_without_memory(checkpointer, step, values):
    """`end_step`, in which this process gets 32 MiB more and no larger block, as under `ulimit -v`."""
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**25, limit[1]))
    is_due = checkpointer.end_step(step, values)
    checkpointer._prepared.exception()  # the limit is the whole process's
    resource.setrlimit(resource.RLIMIT_AS, limit)
    return is_due


def fail(is_broken):
    if is_broken:
        raise RewardError("the reward function failed; a test; found nothing; mend it")


def train(
    cfg, world, *, full=None, poor=None, broken=None, files=None, validate=lambda step: {},
    before_save=lambda step: None,
):  # fmt: skip
    """{"uids", "losses", "weights"} of the steps that were trained here; `full`, `broken`: (step, rank)."""
    files = files or check_model_files(cfg.model.path, max_prompt_len=16, max_response_len=16)
    prompts = PromptStream(make_prompts(), seed=cfg.seed)
    resume = with_date(find_resume(cfg, world), cfg, world)
    resume = resume.restore_prompts(prompts)
    resume.check_steps(cfg.num_steps)
    found, gate = {"uids": {}, "losses": {}}, threading.Event()
    with Run(
        cfg.run_dir, cfg.tracking, world, config=to_json(cfg), num_steps=cfg.num_steps, overwrite=cfg.overwrite,
        last_row=resume.last_row, resumable=resume.path is not None, date=resume.date,
    ) as run, ExitStack() as stack:  # fmt: skip
        policy = load_policy(cfg.model, str(files.folder), cfg.fsdp, world)
        optimizer = build_optimizer(policy, cfg.optim, on_host=cfg.fsdp.optimizer_offload)
        resume.load_("actor", policy, optimizer, world)
        run.say(resume.in_words(cfg, cfg.num_steps, reward=REWARD))
        collector = Collector(
            None, None, prompts, None, rollout=cfg.rollout, reward=cfg.reward, filter_groups=cfg.filter_groups,
            prompts_per_step=cfg.prompts_per_step, mini_batch_size=cfg.mini_batch_size, with_greedy=False,
            mask_truncated=False, run=run, stopper=Stopper(world), world=world,
        )  # fmt: skip
        progress = Progress(
            prompts=prompts, collector=collector, kl_controller=KLController(cfg.kl_reward), constant_groups=[]
        )
        progress.restore(resume.trainer)
        checkpointer = stack.enter_context(Checkpointer(
            cfg.checkpoint, run, world, config=to_json(cfg), reward=REWARD, progress=progress, num_steps=cfg.num_steps,
            models={"actor": Trained(model=policy, optimizer=optimizer, folder=files.folder)}, resumed=resume.path,
            trainer=resume.trainer, began_from=files.began_from,
        ))  # fmt: skip
        stack.callback(gate.set)  # whatever happens: else the process would not end
        for step in range(resume.step + 1, cfg.num_steps + 1):
            groups = next_groups(collector, prompts, cfg, world)
            batch = make_batch([r for group in groups for r in group], world, mini_batch_size=cfg.mini_batch_size)
            advantages, returns = GroupAdvantage()(batch, world)
            progress.kl_controller.update(0.3 * step, 7)
            batch = batch.with_(
                advantages=advantages * progress.kl_controller.coef, returns=returns,
                old_log_probs=batch.rollout_log_probs * 4 - 3, ref_log_probs=batch.rollout_log_probs * 4 - 2,
            )  # fmt: skip
            set_lr_(optimizer, cfg.optim, step=step, num_steps=cfg.num_steps)
            onload(cfg.fsdp, policy, world)
            for mini_batch in iter_mini_batches(batch, world, update_epochs=1):
                backward(policy, mini_batch, world, 60)
                found["losses"][step], _ = optimizer_step(policy, optimizer, clip_grad=0.5)
            offload(cfg.fsdp, policy)
            gate.set()
            world.agree(lambda step=step: fail(broken == (step, world.rank)))
            found["uids"][step] = sorted({group[0].sample.uid for of_rank in world.gather(groups) for group in of_rank})
            progress.constant_groups.append(1 / (3 + step))
            values = {"x": found["losses"][step], **validate(step)}
            run.log(step, values)
            before_save(step)
            is_poor = poor == world.rank and step == 1
            if end_step_without_memory(checkpointer, step, values) if is_poor else checkpointer.end_step(step, values):
                limit = resource.getrlimit(resource.RLIMIT_FSIZE)
                if full == (step, world.rank):
                    if checkpointer._saving:
                        checkpointer._saving.files.exception()  # the save before has room, however long it takes
                    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
                gate.clear()
                if cfg.checkpoint.async_save and not full and poor is None and step < cfg.num_steps:
                    checkpointer._writer.submit(gate.wait)  # so that nothing is written before the next update
                checkpointer.save()
                if cfg.checkpoint.async_save and full == (step, world.rank):
                    checkpointer._saving.files.exception()  # the limit is the whole process's
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        checkpointer.finish()
        run.finish()
        onload(cfg.fsdp, policy, world)
        found["state"] = progress.state()
        found["weights"] = {name: full.clone() for name, full in iter_full_tensors(policy, torch.float32)}
    return found


def config(path, *words):
    """The config of `train_grpo.py WORDS`, with defaults that fit the responses above."""
    default = GRPOConfig(
        rollout=RolloutConfig(n=2), prompts_per_step=4, mini_batch_size=8, optim=OptimConfig(lr=1e-2),
        kl_reward=KLRewardConfig(coef=0.5, target=0.1, horizon=20),
    )  # fmt: skip
    return parse_args(default, ["--model.path", str(path), *map(str, words)])


def main(path, out, *words):
    full, broken = (
        next((tuple(map(int, word[len(name) :].split(":"))) for word in words if word.startswith(name)), None)
        for name in ("full=", "broken=")
    )
    poor = next((int(word[5:]) for word in words if word.startswith("poor=")), None)
    with reporting_errors():
        cfg = config(path, *(word for word in words if not word.startswith(("full=", "poor=", "broken="))))
        world = init_distributed()
        found = train(cfg, world, full=full, poor=poor, broken=broken)
        if world.rank == 0:
            torch.save(found, out)
        shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
