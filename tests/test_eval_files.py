"""The files of an evaluation: the parts that a killed one left, the output's place, the columns of responses."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eval import EvalScriptConfig
from lib import eval_scores, launch
from lib.config import parse_args
from lib.data import DataConfig
from lib.dist import SINGLE
from lib.errors import UserError
from lib.eval_files import EvalDataConfig, Group, Parts, check_output, parts_folder, read_input
from lib.eval_model import find_model
from lib.parquet import read_rows
from lib.rollout import RolloutConfig
from lib.scoring import RewardConfig
from lib.train_config import TrainConfig
from tests.tiny import make_questions

DATA, ROLLOUT = EvalDataConfig(max_prompt_len=24), RolloutConfig(max_response_len=12)


# ---- Parts ----


STATE = {"--rollout.n": 2, "model": "abc"}


def group(uid, **changes):
    known = dict(responses=["a\n☃", "b"], finish_reasons=["stop", "length"], response_lengths=[1, 2])
    return Group(uid=uid, **{**known, **changes})


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
            lambda limit=limit: eval_scores.try_reward(RewardConfig(), EvalDataConfig(max_samples=limit), rows),
            lambda train=train: launch.try_reward(train, rows, rows),
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
