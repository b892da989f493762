"""What rollouts/step_N.parquet says of a step, against the rollouts and the batch themselves, row by row."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from lib.data.parquet import write_rows
from lib.data.prompt_stream import PromptStream
from lib.data.prompts import DataConfig, check_data_files, tokenize
from lib.data.tokenizer import load_tokenizer
from lib.dist import SINGLE
from lib.evaluation.inputs import EvalDataConfig, groups_of, read_input
from lib.model.batching import make_batch
from lib.rollouts.saved_rollouts import save_rollouts
from lib.tracking.run import Run, TrackingConfig
from lib.turns.conversations import Conversations
from lib.types import Rollout, Score
from train_grpo import GRPOConfig

N = 3
TEXTS = ("a-long-answer", "b", "ü")


def question(place, *, key="prompt", index, **more):
    return {
        key: [{"role": "user", "content": f"what-is-{place}"}], "data_source": "test", "reward_model": {"style": "rule",
        "ground_truth": str(place)}, "extra_info": {"index": index}, **more,
    }  # fmt: skip


def save(model, folder, files, *, every=1, steps=(1,), num_prompts=2, val_files=(), key="prompt", error=None):
    """Steps of a run on rows of these files, one rollout in each group without a score; the batch of the last."""
    paths = []
    for number, rows in enumerate(files):
        write_rows(folder / f"{number}.parquet", rows)
        paths.append(str(folder / f"{number}.parquet"))
    data = DataConfig(train_files=tuple(paths), val_files=val_files, prompt_key=key)
    cfg = GRPOConfig(data=data, tracking=TrackingConfig(rollouts_every=every))
    tokenizer = load_tokenizer(model)
    prompts = tokenize(data, check_data_files(data), tokenizer, split="train")
    stream = PromptStream(prompts, seed=0, shuffle=False)
    with Run(folder / "run", cfg.tracking, SINGLE, config={}, num_steps=4) as run:
        for step in steps:
            rollouts = [
                Rollout(sample=sample, index=index, response_ids=tokenizer.encode(TEXTS[index]) + [0] * (index == 1),
                        rollout_log_probs=None, finish_reason="stop" if index == 1 else "length",
                        score=Score(score=None, error=error) if index == 2 else Score(
                            score=sample.uid + index / 4, extras={"acc": index == 1, "pred": "\ud800", "x": 0.5}))
                for sample in stream.next(num_prompts) for index in range(N)
            ]  # fmt: skip
            batch = make_batch(rollouts[::-1], SINGLE, mini_batch_size=6)
            noise = torch.rand(batch.response_mask.shape, generator=torch.Generator().manual_seed(step))
            batch = batch.with_(advantages=noise * batch.response_mask)
            values = save_rollouts(
                step, rollouts[::-1], batch, prompts, tokenizer, run=run, show=not cfg.data.val_files
            )
            run.log(step, values)
            assert bool(values) == (run.dir / "rollouts" / f"step_{step}.parquet").exists()
    return rollouts, batch


def test_a_row_a_prompt_has_what_its_responses_were_and_what_was_made_of_them(model, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "long-answer")
    files = [[question(place, index=place) for place in range(3)]]
    rollouts, batch = save(model, tmp_path, files, error="KeyError: \udc80")
    rows = pq.read_table(tmp_path / "run/rollouts/step_1.parquet").to_pylist()
    assert [row["uid"] for row in rows] == [0, 1]
    for uid, row in enumerate(rows):
        given = {name: row[name] for name in files[0][uid]}
        assert given == files[0][uid]
        assert row["responses"] == ["a-[MY_API_KEY]", "b", "ü"]
        assert row["finish_reasons"] == ["length", "stop", "length"]
        assert row["scores"] == [uid, uid + 0.25, None] and row["errors"] == [None, None, "KeyError: \\udc80"]
        assert row["response_lengths"] == [len(r.response_ids) for r in rollouts[N * uid : N * uid + N]] == [13, 2, 2]
        assert row["prompt_length"] == len("what-is-0") and row["step"] == 1
        assert [json.loads(text) for text in row["extras"]][1:] == [{"acc": True, "pred": "\ud800", "x": 0.5}, {}]
        for index, found in enumerate(row["advantages"]):
            [place] = [i for i in range(len(batch)) if (batch.uids[i], batch.indices[i]) == (uid, index)]
            of_tokens = [
                a.item() for a, m in zip(batch.advantages[place], batch.response_mask[place], strict=True) if m
            ]
            assert found == (pytest.approx(sum(of_tokens) / len(of_tokens)) if of_tokens else None)
            assert bool(of_tokens) == (index < 2)


def test_the_first_step_and_every_nth_are_saved_and_none_with_0(model, tmp_path):
    files = [[question(place, index=place) for place in range(3)]]
    for every, expected in ((2, {1, 2, 4}), (0, set())):
        save(model, tmp_path / str(every), files, every=every, steps=(1, 2, 3, 4))
        found = (tmp_path / str(every) / "run" / "rollouts").iterdir()
        assert {path.name for path in found} == {f"step_{step}.parquet" for step in expected}


def test_responses_to_different_prompts_are_shown_where_there_is_no_validation(model, tmp_path, capfd):
    files = [[question(place, index=place) for place in range(3)]]
    save(model, tmp_path / "a", files)
    lines = capfd.readouterr().out.splitlines()
    lines = lines[lines.index("samples of step 1") + 1 :]
    source = files[0][0]["data_source"]
    assert lines[0::2] == [f"  {source} | what-is-{uid}" for uid in (0, 1)]
    assert lines[1::2] == [f"    -> a-long-answer  (score {uid}.0, expected {uid}, length)" for uid in (0, 1)]
    save(model, tmp_path / "b", files, val_files=(str(tmp_path / "a/0.parquet"),))
    assert " -> " not in capfd.readouterr().out


FAILED = {"response_ids": [], "finish_reason": "error", "score": Score(score=None, error="no level")}


def save_episodes(model, folder, of_prompts):
    """Of these prompts' episodes, {field: value} each; the rollouts, and the file."""
    write_rows(folder / "train.parquet", [question(place, index=place) for place in range(len(of_prompts))])
    data, tokenizer = DataConfig(train_files=(str(folder / "train.parquet"),)), load_tokenizer(model)
    prompts = tokenize(data, check_data_files(data), tokenizer, split="train")
    samples = PromptStream(prompts, seed=0, shuffle=False).next(len(of_prompts))
    rollouts = [
        Rollout(**{"sample": sample, "index": index, "rollout_log_probs": None, "score": Score(score=1.0)} | fields)
        for sample, of_prompt in zip(samples, of_prompts, strict=True) for index, fields in enumerate(of_prompt)
    ]  # fmt: skip
    batch = make_batch(rollouts, SINGLE, mini_batch_size=4)
    batch = batch.with_(advantages=batch.response_mask.float())
    with Run(folder / "run", TrackingConfig(), SINGLE, config={}, num_steps=1) as run:
        save_rollouts(1, rollouts, batch, prompts, tokenizer, run=run, show=True)
    return rollouts, folder / "run/rollouts/step_1.parquet"


def test_an_episode_whose_environment_failed_before_its_first_turn_has_none(model, tmp_path):
    ended = {"response_ids": load_tokenizer(model).encode("a"), "spans": [1], "finish_reason": "stop"}
    _, file = save_episodes(model, tmp_path, [(FAILED, ended), (ended, FAILED)])
    rows = pq.read_table(file).to_pylist()
    assert [[text and len(json.loads(text)) for text in row["turns"]] for row in rows] == [[None, 1], [1, None]]
    assert [row["errors"] for row in rows] == [["no level", None], [None, "no level"]]


def several_turns(model):
    """An episode of two turns, whose environment and tools gave what they can give."""
    tokenizer = load_tokenizer(model)
    turns, end = [tokenizer.encode(text) for text in ("calc", "six", "the-end")], [0]
    spans = [len(turns[0] + end), len(turns[1]), len(turns[2] + end)]
    calls = [{"name": "calc", "arguments": {}}]
    return {
        "response_ids": turns[0] + end + turns[1] + turns[2] + end, "spans": spans, "finish_reason": "stop",
        "observed": [(1, {"role": "tool", "name": "calc", "content": "six"})],
        "turn_rewards": [(spans[0] - 1, 0.1), (sum(spans) - 1, -0.25)],
        "metrics": {"calls": 1.0, "bad_calls": 0.0, "moves": 3.0, "prompt_tokens": 9.0},
        "answers": [{"calls": calls, "seconds": 0.5, "tool_rewards": [0.3, 0.0]},
                    {"calls": [], "seconds": 0.5, "turn_scores": [1.0]}],
    }  # fmt: skip


def test_episodes_are_scored_again_with_what_the_reward_function_was_told_in_training(model, tmp_path):
    tokenizer, several = load_tokenizer(model), several_turns(model)
    assert "<" in tokenizer.decode(several["response_ids"])  # there are special tokens, which it does not see
    one = {"response_ids": tokenizer.encode("a"), "spans": [1], "finish_reason": "length", "metrics": {"calls": 0.0}}
    rollouts, file = save_episodes(model, tmp_path, [(several, one), (FAILED, several)])
    table, _, _ = read_input(EvalDataConfig(files=(str(file),)), with_responses=True)
    found = [episode for group in groups_of(table).values() for episode in group.episodes]
    sampler = Conversations(None, SimpleNamespace(template=SimpleNamespace(tokenizer=tokenizer)), None, join="step",
                            max_turn_len=None, world=SINGLE)  # fmt: skip
    for rollout, episode in zip(rollouts, found, strict=True):
        told = sampler._for_reward(rollout).sample.extra_info
        assert {**rollout.sample.extra_info, **episode.extra_info} == told
        assert episode.metrics == {name: it for name, it in rollout.metrics.items() if name != "prompt_tokens"}
    assert [it.extra_info["reply"] for it in found] == ["the-end", "a", "", "the-end"]
    assert found[0].extra_info["tool_rewards"] == [0.3, 0.0] and found[0].extra_info["tool_calls"] == 1


def test_what_reset_said_comes_first_and_counts_for_the_prompts_length(model, tmp_path):
    several, (told,) = several_turns(model), several_turns(model)["observed"]
    begun = {"role": "user", "content": "begin"}
    rollouts, file = save_episodes(model, tmp_path / "without", [(several,)])
    sample = replace(rollouts[0].sample, prompt_ids=[*rollouts[0].sample.prompt_ids, 1, 1, 1])
    several |= {"observed": [(0, begun), told], "sample": sample}
    _, with_reset = save_episodes(model, tmp_path / "with", [(several,)])
    [before], [after] = (pq.read_table(it).to_pylist() for it in (file, with_reset))
    assert after["prompt_length"] == before["prompt_length"] + 3 == len(sample.prompt_ids)
    assert json.loads(after["turns"][0]) == [begun, *json.loads(before["turns"][0])]
    assert [it["role"] for it in json.loads(after["turns"][0])] == ["user", "assistant", "tool", "assistant"]


def test_a_prompt_that_is_drawn_twice_and_files_of_other_columns_are_read_again(model, tmp_path, capfd):
    """The second file has an ability, and ids as extra_info.index, as DAPO's has, where the first one has numbers."""
    first = [question(0, key="question", index=0, id=7)]
    second = [question(1, key="question", index="a-1", id=8, ability="math")]
    for name, files, has_info in (("same", [first], True), ("other", [first, second], False)):
        save(model, tmp_path / name, files, num_prompts=5, key="question")
        file = str(tmp_path / name / "run/rollouts/step_1.parquet")
        table, rows, _ = read_input(EvalDataConfig(files=(file,)), with_responses=True)
        assert len(rows) == 5 and ("extra_info" in table.column_names) == has_info
        told = "the rollouts of step 1 are saved without extra_info: the training files' types differ; " in (
            capfd.readouterr().out
        )
        assert told != has_info
    assert table.column("ability").to_pylist() == [None, "math", None, "math", None]
    assert [row["ground_truth"] for row in table.column("reward_model").to_pylist()] == ["0", "1", "0", "1", "0"]
