"""A step's rollouts as a parquet file: what was learned from, for people and for `eval.py --score-only`.

RUN/rollouts/step_N.parquet, a row a prompt, by uid:
prompt, data_source, ability, reward_model, extra_info           as in the training files
uid, step                                                        numbers
prompt_length   a number: tokens, with what an environment's reset said behind it; the longest of the row's episodes
responses, scores, finish_reasons, response_lengths              lists with an entry a response, as eval.py's
advantages      the same: the mean over the response's tokens that train; null: none does
extras, errors  the same: what the reward function returned beside the score, as JSON; why there is no score
turns           of episodes: the same, as JSON what lib/rollouts/episode_turns.py says, of `whole_turns_of`; null: none,
                since the environment failed before
turn_metrics    of episodes: the same, as JSON what was counted and measured

Four of these responses are kept token by token too, for report.html (lib/rollouts/shown_samples.py).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from lib.data.faults import short
from lib.data.parquet import to_parquet
from lib.data.prompts import Prompts
from lib.data.tokenizer import text_of
from lib.rollouts.episode_turns import metrics_of, whole_turns_of
from lib.rollouts.shown_samples import training_rows
from lib.rollouts.validation import rows_to_show
from lib.secret_values import blank
from lib.tracking.run import Run
from lib.tracking.run_folder import to_json
from lib.types import Batch, Rollout

ENTRIES = {
    "responses": "string", "scores": "float64", "finish_reasons": "string", "response_lengths": "int32",
    "advantages": "float64", "extras": "string", "errors": "string",
}  # fmt: skip
"""The columns of lists, and the type of their entries."""


def save_rollouts(
    step: int, rollouts: Sequence[Rollout], batch: Batch, prompts: Prompts, tokenizer: Any, *, run: Run, show: bool,
) -> dict[str, float]:  # fmt: skip
    """Writes the step's rollouts if it is one that --tracking.rollouts-every names; the seconds it took, as a metric.

    `rollouts` are those that this rank sampled, `batch` the rows that it trained on, with their advantages. `show`:
    some of them on the terminal, where no validation shows any. Executed by all ranks together.
    """
    every = run.cfg.rollouts_every
    if every == 0 or (step > 1 and step % every):
        return {}
    start = time.perf_counter()
    described = {(r.sample.uid, r.index): _describe(r, tokenizer) for r in rollouts}
    gathered = run.world.gather_to_rank_0((described, _mean_advantages(batch)))
    entries = {place: entry for of_rank, _ in gathered for place, entry in of_rank.items()}
    for _, of_rank in gathered:
        for place, advantage in of_rank.items():
            entries[place]["advantages"] = advantage
    groups: dict[int, list[dict[str, Any]]] = {}
    for uid, index in sorted(entries):
        groups.setdefault(uid, []).append(entries[uid, index])
    run.save_rollouts(step, _to_parquet(step, groups, prompts, run) if groups else b"")  # a step may be skipped
    run.save_tokens(step, training_rows(rollouts, batch, tokenizer, run.world))
    if show:
        run.show_samples(rows_to_show(rollouts, tokenizer))
    return {"timing_s/dump_rollout_generations": time.perf_counter() - start}


def _describe(rollout: Rollout, tokenizer: Any) -> dict[str, Any]:
    """A response's prompt, and its entry in each of the lists but the advantages', which another rank may have."""
    score = rollout.score
    texts = {"responses": text_of(tokenizer, rollout), "extras": to_json(score.extras), "errors": score.error}
    turns = to_json(whole_turns_of(rollout, tokenizer)) if rollout.spans else None
    texts = blank(texts | {"turns": turns, "turn_metrics": to_json(metrics_of(rollout))})
    return {
        "place": rollout.sample.place,
        "prompt_length": len(rollout.sample.prompt_ids),
        "scores": score.score,
        "finish_reasons": rollout.finish_reason,
        "response_lengths": len(rollout.response_ids),
        **{name: None if text is None else _utf8(text) for name, text in texts.items()},
    }


def _utf8(text: str) -> str:
    """The text, what UTF-8 cannot hold (halves of surrogate pairs) as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _mean_advantages(batch: Batch) -> dict[tuple[int, int], float | None]:
    """{(uid, index): the mean over the response's tokens that train, None without any}."""
    counts = batch.response_mask.sum(1).tolist()
    sums = batch.advantages.double().sum(1).tolist()
    means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
    return dict(zip(zip(batch.uids.tolist(), batch.indices.tolist(), strict=True), means, strict=True))


def _to_parquet(step: int, groups: Mapping[int, list[dict[str, Any]]], prompts: Prompts, run: Run) -> bytes:
    """The file; empty, with a warning, where the rows of several training files do not fit into one."""
    import pyarrow as pa

    places = [group[0]["place"] for group in groups.values()]
    ours = {
        "uid": pa.array(groups, pa.int64()),
        "step": pa.array([step] * len(groups), pa.int64()),
        "prompt_length": pa.array([max(it["prompt_length"] for it in group) for group in groups.values()], pa.int32()),
    }
    has_turns = any(entry["turns"] is not None for group in groups.values() for entry in group)
    of_episodes = dict.fromkeys(("turns", "turn_metrics"), "string") if has_turns else {}
    for name, kind in (ENTRIES | of_episodes).items():
        values = [[entry[name] for entry in group] for group in groups.values()]
        ours[name] = pa.array(values, pa.list_(pa.type_for_alias(kind)))
    needed = ["prompt", "data_source", "ability", "reward_model"]
    for columns, what in (([*needed, "extra_info"], "are saved without extra_info"), (needed, "are not saved")):
        try:
            table = prompts.rows.take([prompts.kept[place] for place in places], columns)
            for name, column in ours.items():
                table = table.append_column(name, column)
            return to_parquet(table.combine_chunks())
        except pa.ArrowException as error:
            run.say(f"warning: the rollouts of step {step} {what}: the training files' types differ; {short(error)}")
    return b""
