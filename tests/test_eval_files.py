"""The files of an evaluation: the parts that a killed one left, the output's place, the columns of responses."""

import json
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval import EvalScriptConfig, evaluate_model
from lib.config.flags import parse_args
from lib.data.prompts import DataConfig
from lib.data.reading import read_rows
from lib.dist import SINGLE
from lib.engine.rollout_config import RolloutConfig
from lib.errors import UserError
from lib.evaluation import scores
from lib.evaluation.any_model import EvalModel, find_model, load_eval_prompts
from lib.evaluation.episodes import EPISODE_COLUMNS, Episode
from lib.evaluation.inputs import (
    EvalDataConfig,
    EvalGroup,
    Parts,
    check_output,
    date_of,
    groups_of,
    parts_folder,
    read_input,
    write_output,
)
from lib.evaluation.report import summarise
from lib.evaluation.scores import collect_scores, first_rows, submit
from lib.launch import checks
from lib.launch.train_config import TrainConfig
from lib.rewards.scoring import RewardConfig, Scorer
from lib.tracking.terminal import Terminal
from lib.turns.config import TurnsConfig
from lib.turns.start import find_kinds
from lib.types import Sample, Score
from tests.ranks import LIMIT_S, ROOT
from tests.test_turns_appended import template
from tests.tiny import count_progress, make_questions

DATA, ROLLOUT = EvalDataConfig(max_prompt_len=24), RolloutConfig(max_response_len=12)


# ---- Parts ----


STATE = {"--rollout.n": 2, "model": "abc"}


def group(uid, **changes):
    known = dict(responses=["a\n☃", "b"], finish_reasons=["stop", "length"], response_lengths=[1, 2])
    return EvalGroup(uid=uid, **{**known, **changes})


def test_a_line_cut_short_or_changed_is_generated_again_and_spoils_no_other(tmp_path):
    first = Parts(tmp_path / "parts", STATE, SINGLE, overwrite=False)
    assert first.groups == {}
    for uid in (5, 0, 2):
        first.add(group(uid))
    file = tmp_path / "parts" / "rank_0.jsonl"
    whole = file.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == 10]
    first._file.close()
    for length in range(len(whole) + 1):
        file.write_bytes(whole[:length])
        again = Parts(tmp_path / "parts", STATE, SINGLE, overwrite=False)
        complete = sum(end - 1 <= length for end in ends)  # only the newline may be missing
        assert list(again.groups) == [5, 0, 2][:complete]
        again.add(group(7))
        assert list(again.read()) == [*[5, 0, 2][:complete], 7] and again.read()[7] == group(7)
        again._file.close()
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        again = Parts(tmp_path / "parts", STATE, SINGLE, overwrite=False)
        assert all(found == group(uid) for uid, found in again.groups.items()) and len(again.groups) >= 1
        again._file.close()


def test_a_finished_group_is_kept_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "canary-2f9c41d7")
    parts = Parts(tmp_path / "parts", STATE, SINGLE, overwrite=False)
    parts.add(group(0, responses=["a canary-2f9c41d7", "b"]))
    assert parts.read()[0].responses == ["a [HF_TOKEN]", "b"]


EPISODES = [
    Episode(
        turns=[
            {"role": "assistant", "content": "<tool_call>"}, {"role": "tool", "content": "5", "name": "add"},
            {"role": "assistant", "content": "five"},
        ],
        turn_rewards=[0.5], tool_rewards=[-0.05, 0.0], turn_scores=[1.0], metrics={"calls": 1.0, "moves": 3.0},
        score=Score(score=1.0, extras={"acc": True}),
    ),
    Episode(turns=[{"role": "assistant", "content": ""}], turn_rewards=[], score=Score(score=None, error="gone")),
]  # fmt: skip


def test_episodes_are_kept_with_what_their_environments_gave_them(tmp_path):
    parts = Parts(tmp_path / "parts", STATE, SINGLE, overwrite=False)
    parts.add(group(3, episodes=EPISODES))
    assert parts.read() == {3: group(3, episodes=EPISODES)}
    parts._file.close()


def test_the_columns_of_episodes_are_read_again_and_the_datas_own_of_these_names_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("GAME_API_KEY", "canary-2f9c41d7")
    spoken = [*EPISODES, replace(EPISODES[1], turns=[{"role": "assistant", "content": "canary-2f9c41d7"}])]
    found = group(0, responses=["a", "b", "c"], finish_reasons=["stop", "error", "stop"], response_lengths=[9, 0, 1])
    write_output(tmp_path / "out.parquet", pa.table({"q": ["1"]}), [replace(found, episodes=spoken)])
    table = pq.read_table(tmp_path / "out.parquet")
    assert "canary" not in str(table.to_pylist()) and table["num_turns"].to_pylist() == [[4, 2, 2]]
    [read] = groups_of(table).values()
    assert [it.extra_info for it in read.episodes[:2]] == [it.extra_info for it in EPISODES]
    assert [it.metrics for it in read.episodes[:2]] == [it.metrics for it in EPISODES]
    assert EPISODES[0].extra_info == {
        "reply": "five", "num_turns": 4, "tool_calls": 1, "turn_rewards": [0.5], "tool_rewards": [-0.05, 0.0],
        "turn_scores": [1.0],
    }  # fmt: skip
    for own in (["7", "8"], ["7"], ["[7]"], ["[" * 10_000], [["7"]], ['{"role": "user"}']):  # as many as responses, too
        foreign = pa.table({"responses": [["a"]]} | {name: [own] for name in EPISODE_COLUMNS})
        assert groups_of(foreign)[0].episodes is None
        write_output(tmp_path / "out.parquet", foreign, [group(0, responses=["a"])])
        assert pq.read_table(tmp_path / "out.parquet")["turns"].to_pylist() == [own]


SAID = {"role": "assistant", "content": "five<|im_end|>", "num_tokens": 5}


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        ([[json.dumps([SAID])]], "row 0 column 'turns'; found .*five"),  # of a run of before: the text is not known
        ([[json.dumps([SAID | {"text": "five"}])], None], "row 1 column 'turns'; found None"),  # files of both kinds
    ],
)
def test_turns_of_responses_that_cannot_be_read_are_refused(turns, found):
    table = {"responses": [["five"]], "turns": [turns[0]], "turn_metrics": [["{}"]]}
    table = {name: values * len(turns) for name, values in table.items()} | {"turns": turns}
    with pytest.raises(UserError, match=f"the turns of responses cannot be read; --data.files x {found}.*; score"):
        groups_of(pa.table(table), "--data.files x")


def test_the_prompts_name_the_tools_of_their_environments(tmp_path):
    told = '"""Doubles a number.\n\n    Args:\n        a: the number\n    """'
    (tmp_path / "tools.py").write_text(f"def double(a: int) -> int:\n    {told}\n    return 2 * a\n")
    make_questions(tmp_path / "questions.parquet", count=2, start=0)
    rows, _ = read_rows((str(tmp_path / "questions.parquet"),), "--data.files")
    kinds = find_kinds(TurnsConfig(path=str(tmp_path / "tools.py"), name=("double",)), first_rows(DATA, rows))
    model = EvalModel(
        files=SimpleNamespace(folder=tmp_path), tokenizer=template("qwen2_5").tokenizer, fingerprint="", warnings=()
    )
    data = replace(DATA, max_prompt_len=900)
    _, prompts = load_eval_prompts(data, model, rows, date="2024-02-03T04:05:06", kinds=kinds)
    for sample in prompts.all_samples():
        assert "Doubles a number." in model.tokenizer.decode(sample.prompt_ids)


def test_another_evaluations_parts_are_refused_by_the_names_of_what_differs(tmp_path):
    first = Parts(tmp_path / "parts", STATE, SINGLE, overwrite=False)
    first.add(group(0))
    with pytest.raises(UserError, match="another evaluation writes here"):
        Parts(tmp_path / "parts", STATE, SINGLE, overwrite=False)
    with pytest.raises(UserError, match="another evaluation writes here"):  # from under which nothing is cleared
        Parts(tmp_path / "parts", {"model": "def"}, SINGLE, overwrite=True)
    assert list(first.read()) == [0]
    first._file.close()
    with pytest.raises(UserError, match=r"--rollout.n 2 \(now 4\), model 'abc' \(now 'def'\)"):
        Parts(tmp_path / "parts", {"--rollout.n": 4, "model": "def"}, SINGLE, overwrite=False)
    assert list(Parts(tmp_path / "parts", STATE, SINGLE, overwrite=True).groups) == [0]  # nothing differs: go on
    (tmp_path / "parts" / "notes.txt").write_text("mine")
    other = Parts(tmp_path / "parts", {"model": "def"}, SINGLE, overwrite=True)
    assert other.groups == {} and (tmp_path / "parts" / "notes.txt").exists()


def test_an_unfinished_evaluation_goes_on_with_the_date_of_its_prompts(tmp_path):
    output, state = str(tmp_path / "out.parquet"), {**STATE, "date": "2024-02-03T04:05:06"}
    assert date_of(output) >= "2026"
    first = Parts(parts_folder(tmp_path / "out.parquet"), state, SINGLE, overwrite=False)
    first.add(group(0))
    first._file.close()
    assert date_of(output) == "2024-02-03T04:05:06"
    pinned = Parts(first.folder, {**STATE, "date": "2024-02-04T04:05:06"}, SINGLE, overwrite=False)  # equal prompts
    assert list(pinned.groups) == [0]
    for damaged in ("", "[]", '{"date": 3}', '{"model": "abc"}', "[" * 100_000):
        (first.folder / "state.json").write_text(damaged)
        assert date_of(output) >= "2026"


@pytest.mark.parametrize("damaged", ["", "7", '["a"]', "null", "[" * 100_000], ids="e7anr")
def test_a_state_that_cannot_be_read_is_told_with_the_way_to_start_afresh(tmp_path, damaged):
    (tmp_path / "state.json").write_text(damaged)
    with pytest.raises(UserError, match=r"what an earlier evaluation left cannot be read; .*state.json; .*--overwrite"):
        Parts(tmp_path, STATE, SINGLE, overwrite=False)
    assert Parts(tmp_path, STATE, SINGLE, overwrite=True).groups == {}


# ---- Input and output ----


def test_an_existing_output_is_refused_unless_unfinished_and_an_input_is_never_written(tmp_path):
    make_questions(tmp_path / "in.parquet", count=2, start=0)
    files = (str(tmp_path / "in.parquet"),)
    out = tmp_path / "new" / "out.parquet"
    assert check_output(str(out), files, overwrite=False) == out and not out.parent.exists()
    for name in ("out.parquet", "out.json", "out.html"):
        (tmp_path / name).write_text("")
        with pytest.raises(UserError, match=f"the output exists.*{name}.*--overwrite"):
            check_output(str(tmp_path / "out.parquet"), files, overwrite=False)
        check_output(str(tmp_path / "out.parquet"), files, overwrite=True)
        (tmp_path / name).unlink()
    (tmp_path / "out.parquet").write_text("")
    Parts(parts_folder(tmp_path / "out.parquet"), STATE, SINGLE, overwrite=False)
    check_output(str(tmp_path / "out.parquet"), files, overwrite=False)
    (tmp_path / "link.parquet").symlink_to(tmp_path / "in.parquet")
    for name in ("in.parquet", "link.parquet"):
        with pytest.raises(UserError, match="the output is an input"):
            check_output(str(tmp_path / name), files, overwrite=True)
    for name in ("~no-such-user/out.parquet", f"{'x' * 300}.parquet"):
        with pytest.raises(UserError, match="--output cannot be opened"):
            check_output(name, files, overwrite=False)
        with pytest.raises(UserError, match=r"--model\.path cannot be opened"):
            find_model(name, DATA, ROLLOUT, SINGLE)
    with pytest.raises(UserError, match=r"expected NAME\.parquet"):
        check_output(str(tmp_path / "out.csv"), files, overwrite=False)


def test_the_reward_is_tried_on_rows_that_are_used_and_on_no_others(tmp_path):
    make_questions(tmp_path / "in.parquet", count=3, start=0)
    table = pq.read_table(tmp_path / "in.parquet")
    sources = pa.array(["arithmetic", "nobody/grades/this", "nor/this"])
    place = table.column_names.index("data_source")
    pq.write_table(table.set_column(place, "data_source", sources), tmp_path / "mixed.parquet")
    rows, _ = read_rows((str(tmp_path / "mixed.parquet"),), "--data.files")
    for limit in (1, None):
        train = TrainConfig(data=DataConfig(train_max_samples=limit, val_max_samples=1))
        for trial in (
            lambda limit=limit: scores.try_reward(RewardConfig(), EvalDataConfig(max_samples=limit), rows),
            lambda train=train: checks.try_reward(train, rows, rows),
        ):
            if limit:
                assert trial() == "reward: lib.rewards.arithmetic for arithmetic"
            else:
                with pytest.raises(UserError, match="nobody/grades/this"):
                    trial()


def test_columns_of_responses_are_asked_for_or_refused(tmp_path):
    make_questions(tmp_path / "in.parquet", count=2, start=0)
    table = pq.read_table(tmp_path / "in.parquet")

    def read(column=None, *, with_responses):
        changed = table if column is None else table.append_column("responses", pa.array(column))
        pq.write_table(changed, tmp_path / "changed.parquet")
        cfg = parse_args(EvalScriptConfig(), ["--output", "x", "--data.files", str(tmp_path / "changed.parquet")])
        return read_input(cfg.data, with_responses=with_responses)

    assert len(read([["a"], ["b", "c"]], with_responses=True)[0]) == 2
    for column, with_responses, message in (
        ([["a"], ["b"]], False, "add --score-only"),
        (None, True, "no responses to score"),
        (["a", "b"], True, "a list of strings"),
        ([["a"], []], True, "row 1"),
        ([["a"], None], True, "row 1"),
        ([["a"], [None]], True, "row 1"),
    ):
        with pytest.raises(UserError, match=message):
            read(column, with_responses=with_responses)


def test_scores_are_of_the_rows_of_their_file_in_the_order_given(tmp_path):
    (tmp_path / "equals.py").write_text("def compute_score(solution_str, ground_truth, **_):\n"
                                        "    return float(solution_str == ground_truth)\n")  # fmt: skip
    files = [tmp_path / "z.parquet", tmp_path / "a.parquet"]
    for file, start in zip(files, (0, 50), strict=True):
        make_questions(file, count=2, start=start)
        table = pq.read_table(file)
        answers = [[row["ground_truth"]] for row in table["reward_model"].to_pylist()]
        pq.write_table(table.append_column("responses", pa.array(answers)), file)
    words = ("--score-only", "--data.files", *files, "--output", tmp_path / "out.parquet", "--reward.num-workers", 1)
    evaluate_model(parse_args(EvalScriptConfig(), [*map(str, words), "--reward.path", str(tmp_path / "equals.py")]))
    found = pq.read_table(tmp_path / "out.parquet")
    assert found["responses"].to_pylist() == [["0"], ["1"], ["50"], ["51"]]
    assert found["scores"].to_pylist() == [[1.0]] * 4


def test_the_progress_of_scoring_counts_every_response(tmp_path):
    (tmp_path / "late.py").write_text("import time\ndef compute_score(**_):\n    time.sleep(0.03)\n    return 1.0\n")
    cfg, counts = RewardConfig(path=str(tmp_path / "late.py"), num_workers=1), {}
    with Terminal(SINGLE, None) as terminal, closing(Scorer(cfg, {"test"})) as scorer:
        count_progress(terminal, counts)
        for uid in range(3):
            sample = Sample(uid=uid, prompt_ids=[], data_source="test", ground_truth="", extra_info={})
            submit(scorer, group(uid), sample)
        scores = collect_scores(scorer, cfg, SINGLE, terminal)
    assert [len(scores[uid]) for uid in range(3)] == [2] * 3 and set(counts) == {"scoring"}
    total, done = counts["scoring"]
    assert total == done > 0


@pytest.mark.parametrize(
    ("reasons", "lengths", "are_known"),
    [
        ([["stop"], ["length", None]], [[0], [2**31 - 1, None]], (True, True)),
        ([[1], [2, 3]], [["a"], ["b", "c"]], (False, False)),
        ([["stop"], ["stop", "length"]], [[1.0], [2.5, 3.0]], (True, False)),
        ([[b"stop"], [b"stop", b"length"]], [[True], [False, True]], (False, False)),
        ([["a", "b"], ["stop"]], [[2**31], [-1, 1]], (False, False)),
        (["stop", "length"], [None, None], (False, False)),
    ],
)
def test_reasons_and_lengths_stay_known_where_they_fit_the_responses(tmp_path, reasons, lengths, are_known):
    responses = [["a"], ["b", "c"]]
    table = pa.table({"responses": responses, "finish_reasons": reasons, "response_lengths": lengths})
    groups = [groups_of(table)[row] for row in range(2)]
    unknown = [[None], [None, None]]
    assert [group.finish_reasons for group in groups] == (reasons if are_known[0] else unknown)
    assert [group.response_lengths for group in groups] == (lengths if are_known[1] else unknown)
    summarise(groups, ["test", "test"])
    write_output(tmp_path / "out.parquet", table, groups)
    assert pq.read_table(tmp_path / "out.parquet")["response_lengths"].to_pylist() == (
        lengths if are_known[1] else unknown
    )


# ---- Two evaluations of one output ----


REWARD = """
from pathlib import Path
import time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if (solution_str == "response") == {waits_at_work}:  # else while it is only tried
        Path({here!r}).touch()
        while not Path({go!r}).exists():
            time.sleep(0.01)
    return {score}
"""


class Scoring:
    """An `eval.py --score-only` that waits, with the reward function at work or only tried, until `go` is called."""

    def __init__(self, folder, name, *, score, waits_at_work):
        self.here, self._go = folder / f"{name}.here", folder / f"{name}.go"
        make_questions(folder / "in.parquet", count=2, start=0)
        table = pq.read_table(folder / "in.parquet").append_column("responses", pa.array([["response"]] * 2))
        pq.write_table(table, folder / "in.parquet")
        reward = REWARD.format(here=str(self.here), go=str(self._go), score=score, waits_at_work=waits_at_work)
        (folder / f"{name}.py").write_text(reward)
        self.words = [
            sys.executable, "eval.py", "--score-only", "--data.files", str(folder / "in.parquet"),
            "--output", str(folder / "out" / "out.parquet"), "--reward.path", str(folder / f"{name}.py"),
            "--reward.timeout-s", str(LIMIT_S), "--reward.num-workers", "1",
        ]  # fmt: skip
        self.process = subprocess.Popen(self.words, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()

    def until_it_waits(self):
        deadline = time.monotonic() + LIMIT_S
        while not self.here.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.stderr.read()
            time.sleep(0.01)
        return self

    def go(self):
        """Lets it end: its exit code and its error."""
        self._go.touch()
        error = self.process.communicate(timeout=LIMIT_S)[1]
        return self.process.returncode, error


def written(folder):
    """The one score in the files of the output, beside which nothing may be left."""
    assert {path.name for path in (folder / "out").iterdir()} == {"out.parquet", "out.json", "out.html"}
    mean = json.loads((folder / "out" / "out.json").read_text())["summary"]["overall"]["score_mean"]
    assert pq.read_table(folder / "out" / "out.parquet")["scores"].to_pylist() == [[mean]] * 2
    return mean


def test_an_output_that_is_being_written_is_refused_until_its_evaluation_has_ended_or_is_killed(tmp_path):
    with (
        Scoring(tmp_path, "first", score=0.25, waits_at_work=True) as first,
        Scoring(tmp_path, "second", score=0.5, waits_at_work=False) as second,
    ):
        first.until_it_waits()
        code, error = second.until_it_waits().go()
        assert code == 2 and "another evaluation writes here" in error and "choose another --output" in error
        assert first.go() == (0, "") and written(tmp_path) == 0.25
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    with Scoring(tmp_path, "killed", score=0.75, waits_at_work=True) as killed:
        killed.until_it_waits()
    with Scoring(tmp_path, "next", score=1.0, waits_at_work=True) as after:
        assert after.go() == (0, "") and written(tmp_path) == 1.0


def test_an_output_that_was_written_while_an_evaluation_began_is_not_lost(tmp_path):
    with Scoring(tmp_path, "late", score=0.5, waits_at_work=False) as late:
        late.until_it_waits()  # its options have been checked
        with Scoring(tmp_path, "early", score=0.25, waits_at_work=True) as early:
            assert early.go() == (0, "")
        code, error = late.go()
    assert code == 2 and "the output exists" in error and "--overwrite" in error
    assert written(tmp_path) == 0.25
