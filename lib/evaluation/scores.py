"""The scores of an evaluation's responses: sent to reward workers one group at a time, met again on all ranks."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from lib.data.rows import Rows
from lib.dist import World
from lib.evaluation.episodes import Episode
from lib.evaluation.inputs import EvalDataConfig, EvalGroup
from lib.launch.checks import environments_score, needs_reward
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
from lib.turns.kinds import Kinds
from lib.types import Rollout, Sample, Score


def try_reward(
    reward: RewardConfig, data: EvalDataConfig, rows: Rows, kinds: Kinds | None = None, *, of_episodes: bool = False
) -> str:
    """A line about the reward function, which can score the first rows, knows every data source and can be answered;
    or that the environments (`kinds`) score. `of_episodes`: as `check_reward`'s.
    """
    if not needs_reward(reward, kinds):
        return environments_score(kinds, (rows, data.max_samples))
    lots = rows_to_answer(reward, rows, data.max_samples)
    sources, trials = rows.data_sources(data.max_samples), first_rows(data, rows)
    return check_reward(reward, sources, trials, to_answer=lots, of_episodes=of_episodes)


def first_rows(data: EvalDataConfig, rows: Rows) -> dict[str, Sample]:
    """{where it stands: row} of the first rows, to try things with."""
    num_trials = min(3, len(rows), data.max_samples or 3)
    return {rows.where(row): rows.sample(row, uid=row) for row in range(num_trials)}


def submit(scorer: Scorer, group: EvalGroup, sample: Sample) -> None:
    """Queues a group's responses and returns at once. An episode that its environment scored, or failed, keeps that."""
    episodes = group.episodes or [None] * len(group.responses)
    whole = zip(group.responses, group.finish_reasons, episodes, strict=True)
    for index, (text, reason, episode) in enumerate(whole):
        extra_info = sample.extra_info if episode is None else {**sample.extra_info, **episode.extra_info}
        rollout = Rollout(
            sample=replace(sample, extra_info=extra_info), index=index, response_ids=[], rollout_log_probs=None,
            finish_reason=reason or "unknown", score=_given(reason, episode),
        )  # fmt: skip
        scorer.submit(rollout, text)


def _given(reason: str | None, episode: Episode | None) -> Score | None:
    if episode is not None and reason == "error" and episode.score is None:  # of a file, which has no more of it
        return Score(score=None, error="the episode's environment had failed")
    return episode and episode.score


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
    if excluded := _excluded_in_words(own, world):
        terminal.say(f"warning: {excluded}")
    check_error_rate(own, cfg, world)
    found: dict[int, dict[int, Score]] = {}
    for of_rank in world.gather([(r.sample.uid, r.index, r.score) for r in own]):
        for uid, index, score in of_rank:
            found.setdefault(uid, {})[index] = score
    return {uid: [scores[index] for index in range(len(scores))] for uid, scores in found.items()}


def _excluded_in_words(rollouts: Sequence[Rollout], world: World) -> str | None:
    """How many episodes their environments failed, on all ranks, and how; None: none. Executed by all ranks."""
    counts: Counter[str] = Counter()
    for of_rank in world.gather(error_counts([it for it in rollouts if it.finish_reason == "error"])):
        counts.update(of_rank)
    if not counts:
        return None
    [(text, count)] = counts.most_common(1)
    return f"{counts.total()} episodes are excluded, since their environments failed; {count} times: {text}"
