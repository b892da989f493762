"""The scores of an evaluation's responses: sent to reward workers one group at a time, met again on all ranks."""

import time

from lib.data.rows import Rows
from lib.dist import World
from lib.evaluation.inputs import EvalDataConfig, EvalGroup
from lib.rewards.scoring import (
    RewardConfig,
    Scorer,
    check_error_rate,
    error_counts,
    failed_calls_in_words,
    outgrown_in_words,
)
from lib.rewards.trial import check_reward, rows_to_answer
from lib.tracking.terminal import Terminal
from lib.types import Rollout, Sample, Score


def try_reward(reward: RewardConfig, data: EvalDataConfig, rows: Rows) -> str:
    """A line about the reward function, which can score the first rows, knows every data source and can be answered."""
    num_trials = min(3, len(rows), data.max_samples or 3)
    trials = {rows.where(row): rows.sample(row, uid=row) for row in range(num_trials)}
    lots = rows_to_answer(reward, rows, data.max_samples)
    return check_reward(reward, rows.data_sources(data.max_samples), trials, to_answer=lots)


def submit(scorer: Scorer, group: EvalGroup, sample: Sample) -> None:
    """Queues a group's responses and returns at once."""
    for index, (text, reason) in enumerate(zip(group.responses, group.finish_reasons, strict=True)):
        rollout = Rollout(
            sample=sample, index=index, response_ids=[], rollout_log_probs=None, finish_reason=reason or "unknown"
        )
        scorer.submit(rollout, text)


def collect_scores(scorer: Scorer, cfg: RewardConfig, world: World, terminal: Terminal) -> dict[int, list[Score]]:
    """{uid: scores in index order} of everything that any rank submitted, on all ranks. Waits for the last one.

    Executed by all ranks. Raises RewardError when too many failed.
    """
    waiting = scorer.num_waiting
    with terminal.progress("scoring", waiting) as advance:
        while waiting:
            left = scorer.num_waiting
            for _ in range(waiting - left):
                advance()
            waiting = left
            time.sleep(0.02)
    own = scorer.collect()
    for text, count in error_counts(own).items():
        print(f"the reward of {count} responses failed: {text}")
    if num_outgrown := sum(world.gather(scorer.num_outgrown)):
        terminal.say(f"warning: {outgrown_in_words(num_outgrown)}")
    if num_failed := sum(world.gather(scorer.num_failed_calls)):
        terminal.say(f"warning: {failed_calls_in_words(num_failed, scorer.call_error)}")
    check_error_rate(own, cfg, world)
    found: dict[int, dict[int, Score]] = {}
    for of_rank in world.gather([(r.sample.uid, r.index, r.score) for r in own]):
        for uid, index, score in of_rank:
            found.setdefault(uid, {})[index] = score
    return {uid: [scores[index] for index in range(len(scores))] for uid, scores in found.items()}
