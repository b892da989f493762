"""The few responses that report.html shows token by token: which they are, and what is kept of them.

RUN/tokens/step_N.jsonl, a line a response:
kind                                       "validation" or "training"
uid, index, data_source                    its prompt, its place in the group, where it is from
temperature                                of validation; null in training, where --rollout.temperature says it
prompt, ground_truth                       texts without special tokens; of a long one both ends
score, error, finish_reason, num_tokens    what came of it
texts       its tokens, special ones too: of a long response the first 320 and the last 80
left_out    [place among these, how many tokens are missing there], or null
log_probs   of each of these tokens, as the engine reported it; null: not reported
advantages  the same in training, null for a token that does not train; null in validation
num_turns   of an episode: its turns as verl counts them, two for each turn of the model
turns       of an episode: what lib/rollouts/episode_turns.py says, in place of a turn's text its texts, left_out,
            log_probs and advantages, and `first`, its first token's place in the response; in the middle of many turns
            an entry {"role": "left out", "count": entries}. The episode's own lists are empty then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from lib.data.tokenizer import decode
from lib.dist import World
from lib.pages.page import cut
from lib.rollouts.episode_turns import described
from lib.secret_values import blank
from lib.types import Batch, Rollout

VALIDATION_PROMPTS, TRAINING_PROMPTS = 4, 2
HEAD, TAIL = 320, 80  # tokens that are kept of a response, or of a turn
ENTRIES = 24  # that are kept of an episode
MOST_TOKENS_OF_A_CHARACTER = 4

Place = tuple[int, int]
"""A response's uid and index."""


def first_prompts(prompts: Iterable[tuple[int, str]], most: int) -> set[int]:
    """The uids of the first prompts, given as (uid, data source): of each source its first, then its second, ..."""
    seen: dict[str, int] = {}
    order = []
    for uid, source in sorted(set(prompts)):
        seen[source] = seen.get(source, 0) + 1
        order.append((seen[source], uid))
    return {uid for _, uid in sorted(order)[:most]}


def keep_log_probs_of_shown(rollouts: Sequence[Rollout], shown: set[int]) -> list[Rollout]:
    """Of a validation, the responses without the log-probs that nobody will see: they travel between ranks."""
    return [r if r.sample.uid in shown and r.index == 0 else replace(r, rollout_log_probs=None) for r in rollouts]


def validation_rows(
    rollouts: Sequence[Rollout], shown: set[int], tokenizer: Any, *, temperature: float
) -> list[dict[str, Any]]:
    """The first response to each of the shown prompts."""
    chosen = [r for r in rollouts if r.sample.uid in shown and r.index == 0]
    return [_row(r, tokenizer, kind="validation", temperature=temperature) for r in chosen]


def training_rows(rollouts: Sequence[Rollout], batch: Batch, tokenizer: Any, world: World) -> list[dict[str, Any]]:
    """The worst and the best response to each of the step's first prompts, on rank 0; nothing elsewhere.

    `rollouts` are those that this rank sampled, `batch` the rows that it trained on, which may be others. Executed by
    all ranks together.
    """
    told = [(r.sample.uid, r.index, r.sample.data_source, r.score.score) for r in rollouts]
    chosen = _worst_and_best([entry for of_rank in world.gather(told) for entry in of_rank])
    own = {
        (r.sample.uid, r.index): _row(r, tokenizer, kind="training", temperature=None)
        for r in rollouts
        if (r.sample.uid, r.index) in chosen
    }
    rows: dict[Place, dict[str, Any]] = {}
    advantages: dict[Place, list[float | None]] = {}
    for of_rank, trained in world.gather_to_rank_0((own, _advantages(batch, chosen))):
        rows |= of_rank
        advantages |= trained
    return [_with_advantages(rows[place], advantages.get(place)) for place in sorted(rows)]


def _worst_and_best(entries: Sequence[tuple[int, int, str, float | None]]) -> set[Place]:
    """Of each of the first prompts the places of the lowest and of the highest score; one place where all are equal."""
    shown = first_prompts(((uid, source) for uid, _, source, _ in entries), TRAINING_PROMPTS)
    chosen = set()
    for uid in shown:
        scored = sorted((score, index) for other, index, _, score in entries if other == uid and score is not None)
        if not scored:
            chosen.add((uid, min(index for other, index, _, _ in entries if other == uid)))
            continue
        highest = next(entry for entry in scored if entry[0] == scored[-1][0])  # of equal ones the first
        chosen |= {(uid, scored[0][1]), (uid, highest[1])}
    return chosen


def _advantages(batch: Batch, chosen: set[Place]) -> dict[Place, list[float | None]]:
    """Of the chosen responses among these rows: each token's advantage, None where it does not train."""
    found = {}
    for row, place in enumerate(zip(batch.uids.tolist(), batch.indices.tolist(), strict=True)):
        if place in chosen:
            num_tokens = int(batch.response_lens[row])
            values, masks = batch.advantages[row, :num_tokens].tolist(), batch.response_mask[row, :num_tokens].tolist()
            found[place] = [round(value, 4) if mask else None for value, mask in zip(values, masks, strict=True)]
    return found


def _with_advantages(row: dict[str, Any], values: list[float | None] | None) -> dict[str, Any]:
    """The row of a response with the advantages of all its tokens; None: it was not trained on."""
    if "turns" not in row:
        return row | {"advantages": _ends(values)}
    turns = [
        turn | {"advantages": _ends(values[turn["first"] : turn["first"] + turn["num_tokens"]])}
        if "first" in turn and values is not None
        else turn
        for turn in row["turns"]
    ]
    return row | {"turns": turns}


def _row(rollout: Rollout, tokenizer: Any, *, kind: str, temperature: float | None) -> dict[str, Any]:
    """What the file keeps of a response, but for the advantages."""
    sample, ids, score = rollout.sample, rollout.response_ids, rollout.score
    about = {"num_turns": rollout.num_turns, "turns": _turns(rollout, tokenizer)} if rollout.spans else {}
    return {
        "kind": kind, "uid": sample.uid, "index": rollout.index, "data_source": sample.data_source,
        "temperature": temperature, "prompt": cut(blank(decode(tokenizer, sample.prompt_ids))),
        "ground_truth": cut(blank(str(sample.ground_truth)), 500), "score": score.score,
        "error": score.error and cut(blank(score.error), 500), "finish_reason": rollout.finish_reason,
        "num_tokens": len(ids), **_tokens(rollout, tokenizer, 0, 0 if about else len(ids)), "advantages": None, **about,
    }  # fmt: skip


def _tokens(rollout: Rollout, tokenizer: Any, begin: int, end: int) -> dict[str, Any]:
    """What is kept of the sampled tokens at these places: texts, left_out, log_probs."""
    ids, log_probs = rollout.response_ids[begin:end], rollout.rollout_log_probs
    texts: list[str] | None = _ends(token_texts(tokenizer, ids))
    log_probs = None if log_probs is None else _ends([round(value, 4) for value in log_probs[begin:end]])
    left_out = [HEAD, len(ids) - HEAD - TAIL] if len(ids) > HEAD + TAIL else None
    whole = tokenizer.decode(ids)
    if blank(whole) != whole:  # a secret may be spread over tokens, of which none is one
        texts, log_probs, left_out = [cut(blank(whole))], None, None
    return {"texts": texts, "left_out": left_out, "log_probs": log_probs}


def _turns(rollout: Rollout, tokenizer: Any) -> list[dict[str, Any]]:
    """An episode's entries; of many the first and the last."""

    def describe(begin: int, end: int) -> dict[str, Any]:
        about = {"first": begin, "num_tokens": end - begin, "advantages": None}
        return about | _tokens(rollout, tokenizer, begin, end)

    entries = []
    for entry in described(rollout, describe):
        observed = "content" in entry
        texts = {"content": cut(blank(entry["content"]))} if observed else {"calls": blank(entry.get("calls", []))}
        entries.append(entry | texts)
    if len(entries) <= ENTRIES:
        return entries
    left_out = {"role": "left out", "count": len(entries) - ENTRIES}
    return [*entries[: ENTRIES // 2], left_out, *entries[-ENTRIES // 2 :]]


def _ends(values: list[Any] | None) -> list[Any] | None:
    """The first and the last of a response's values."""
    return values if values is None or len(values) <= HEAD + TAIL else values[:HEAD] + values[-TAIL:]


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to those before it; joined, they are the response.

    A character that is spread over tokens belongs to its last one, and the others are empty. Decoded after a token
    before it, since tokenizers strip spaces at the start of a text.
    """
    texts: list[str] = []
    before, begin = 0, 0  # the token that a piece is decoded after, and the piece's first
    for end in range(1, len(ids) + 1):
        head, whole = tokenizer.decode(ids[before:begin]), tokenizer.decode(ids[before:end])
        in_a_character = whole.endswith("\ufffd") and end - begin < MOST_TOKENS_OF_A_CHARACTER and end < len(ids)
        if in_a_character:
            texts.append("")
            continue
        texts.append(whole[len(head) :])
        before, begin = begin, end
    return texts
