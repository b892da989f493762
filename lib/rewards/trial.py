"""The reward function tried on first rows, in one worker process, before any model is loaded."""

import hashlib
import re
from collections.abc import Mapping, Sequence, Set
from contextlib import closing
from dataclasses import replace

from lib.data.paths import resolve_file
from lib.data.rows import Rows
from lib.errors import RewardError, UserError
from lib.rewards.scoring import GRADERS, RewardConfig, Scorer
from lib.secret_values import secret_variables
from lib.types import Rollout, Sample

TRIAL_RESPONSES = ("", "The answer is 0.", "The answer is 0.")
IMPORT_LIMIT_S = 12.0  # of the reward file, unless --reward.timeout-s is longer: a line within 20 s of the launch
NUM_ANSWERS = 20  # rows of which a grader must accept an answer to one
OF_EPISODE = {"num_turns": 2, "tool_calls": 0, "turn_rewards": [], "tool_rewards": [], "turn_scores": []}
"""What conversations add to extra_info, beside `reply`."""

Lot = Mapping[str, Sample]
"""Where each row stands -> the row."""


def check_reward(
    cfg: RewardConfig,
    data_sources: Set[str],
    samples: Lot,
    *,
    to_answer: Sequence[Lot] = (),
    needed: Mapping[str, str] | None = None,
    of_episodes: bool = False,
) -> str:
    """One line for the log: the function, its file and the file's hash, after a trial on at most 3 rows.

    `to_answer`: of each lot, the grader must accept an answer that it writes itself, if it writes any. `needed`: number
    that one trial at least must return -> the option that needs it. `of_episodes`: responses are conversations, of
    which extra_info says more. Raises UserError for a wrong flag, data source or
    ground truth (exit 2), RewardError for reward code that does not import, lacks the function, fails on a row, or
    accepts no answer (exit 4). Local to the rank: wrap it in `World.agree`.
    """
    limit = max(IMPORT_LIMIT_S, cfg.timeout_s)
    with closing(Scorer(replace(cfg, num_workers=1), data_sources, start_timeout_s=limit)) as scorer:
        for sample, response in zip(samples.values(), TRIAL_RESPONSES, strict=False):
            said = OF_EPISODE | {"reply": response} if of_episodes else {}
            scorer.submit(_as_rollout(replace(sample, extra_info={**sample.extra_info, **said})), response)
        trials = scorer.collect()
        if scorer.start_error is not None:
            raise (RewardError if cfg.path else UserError)(scorer.start_error)  # built in: a flag or a package
        source = _describe_source(cfg, data_sources, scorer)
        _check_trials(cfg, scorer, samples, trials, needed or {})
        if scorer.call_error is not None:
            raise RewardError(
                f"the reward function failed on a call with {len(trials)} rows, and on none of them alone; {source}; "
                f"{scorer.call_error}; expected a list with a score per row; mend the function"
            )
        for lot in to_answer:
            _check_answers(cfg, lot, scorer)
        notes = scorer.warnings
    if trials and all(trial.score.score is None for trial in trials):
        notes = [*notes, f"it returned None for all of {len(trials)} trials: what has no score is not trained on"]
    if withheld := ", ".join(sorted(secret_variables().keys() - set(cfg.env))):
        notes = [*notes, f"its workers do not get {withheld}: --reward.env NAME ... hands over"]
    return "; ".join([f"reward: {source}", *(f"warning: {note}" for note in notes)])


def rows_to_answer(cfg: RewardConfig, rows: Rows, limit: int | None) -> list[Lot]:
    """For each grader that these rows need, some that are spread over all of its own (of the first `limit`)."""
    sources = [None] if cfg.path else sorted(rows.data_sources(limit) & set(GRADERS))
    lots = [rows.spread(NUM_ANSWERS, data_source=source, limit=limit) for source in sources]
    return [{rows.where(row): rows.sample(row, uid=row) for row in lot} for lot in lots]


def code_hash(line: str) -> str | None:
    """The hash in a line of `check_reward`; None for the built-in graders."""
    found = re.search(r"\(sha256 (\w+)\)", line)
    return found and found[1]


def _check_trials(
    cfg: RewardConfig, scorer: Scorer, samples: Lot, trials: Sequence[Rollout], needed: Mapping[str, str]
) -> None:
    for where, trial, response in zip(samples, trials, TRIAL_RESPONSES, strict=False):
        if trial.score.error is not None:
            raise RewardError(
                f"the reward function failed on a trial; {_describe_source(cfg, {trial.sample.data_source}, scorer)}; "
                f"{where} (ground truth {trial.sample.ground_truth!r:.80}) with the response {response!r}: "
                f"{trial.score.error}; expected a finite number, a dict with the key 'score', or None (leave out); "
                "mend the function: a response can be any text, also none"
            )
    numbers = {"score"} | {
        name for trial in trials for name, value in trial.score.extras.items() if not isinstance(value, str)
    }
    for name, flag in needed.items():
        if name not in numbers and any(trial.score.score is not None for trial in trials):
            raise UserError(
                f"the reward function returns no number {name!r}; {flag}; found none on a trial, expected one of "
                f"{', '.join(sorted(numbers)[:20])}; change one of the two"
            )


def _check_answers(cfg: RewardConfig, lot: Lot, scorer: Scorer) -> None:
    """Raises UserError (of the user's code: RewardError) when the grader accepts its own answer to no row of the lot.

    One row after the other, since mostly the first one settles it.
    """
    refused: Rollout | None = None
    for sample in lot.values():
        scorer.submit(_as_rollout(sample), None)
        [tried] = scorer.collect()
        if tried.score.score != 0 and tried.score.error is None:
            return  # accepted, or it writes no answers
        refused = refused or tried
    if refused is None:
        return
    truth, score = refused.sample.ground_truth, refused.score
    came = score.error or f"{score.extras['answer']!r:.80} scores no more than an empty response"
    mend = "mend write_answer, or the ground truths" if cfg.path else "write the ground truths as it reads them"
    raise (RewardError if cfg.path else UserError)(
        f"no ground truth can be answered, so every reward would be 0; {next(iter(lot))} and {len(lot) - 1} more rows, "
        f"column 'reward_model.ground_truth', {_describe_source(cfg, {refused.sample.data_source}, scorer)}; found "
        f"{truth!r:.80} ({type(truth).__name__}): {came}; expected an answer that the grader writes to be right; "
        f"{mend}{'' if cfg.path else ', or give a reward function with --reward.path FILE'}"
    )


def _as_rollout(sample: Sample) -> Rollout:
    return Rollout(sample=sample, index=0, response_ids=[], rollout_log_probs=None, finish_reason="stop")


def _describe_source(cfg: RewardConfig, data_sources: Set[str], scorer: Scorer) -> str:
    if cfg.path is None:
        of_grader: dict[str, list[str]] = {}
        for source in sorted(data_sources):
            of_grader.setdefault(GRADERS[source], []).append(source)
        return ", ".join(f"{grader} for {' and '.join(sources)}" for grader, sources in of_grader.items())
    path = resolve_file(cfg.path, "--reward.path").resolve()
    rows = f", up to {cfg.batch_size} rows a call" if scorer.takes_rows else ""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return f"{scorer.function or cfg.name} in {path} (sha256 {digest}){rows}"
