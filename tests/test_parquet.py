"""Claims about data files: good ones are read as they are, bad ones are refused with place and remedy."""

import os
import random
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lib.data.parquet import write_rows
from lib.data.paths import resolve_file
from lib.data.reading import read_rows, rows_from_dicts
from lib.data.rows import check_answer_kinds, count_overlap
from lib.data.schema import Keys
from lib.errors import UserError

FLAG = "--data.train-files"


def row(i=0, **changed):
    plain = {
        "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{i} + 1 = ?"}],
        "data_source": "arithmetic",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"index": i, "split": "train"},
    }
    return plain | changed


def prompt(*messages):
    return {"prompt": [dict(zip(("role", "content"), message, strict=True)) for message in messages]}


def answer(value):
    return {"reward_model": {"style": "rule", "ground_truth": value}}


def write(path, rows):
    write_rows(path, rows)
    return (str(path),)


def refusal(names, **options):
    with pytest.raises(UserError) as caught:
        read_rows(tuple(names), FLAG, **options)
    assert str(caught.value).count("; ") >= 2, f"parts are missing: {caught.value}"
    return str(caught.value)


def says(message, *parts):
    for part in parts:
        assert part in message, f"{part!r} is not in: {message}"


# ---- Good files ----


def test_rows_come_back_as_written_in_file_order(tmp_path):
    first = [row(i) for i in range(5)]
    second = [row(i, data_source="b", agent_name=None if i == 6 else "tool_agent") for i in range(5, 8)]
    names = write(tmp_path / "a.parquet", first) + write(tmp_path / "b.parquet", second)
    rows, warnings = read_rows(names, FLAG)
    expected = [{"agent_name": None} | {k: v for k, v in r.items() if k != "ability"} for r in first + second]
    assert [rows[i] for i in range(len(rows))] == expected and warnings == []
    assert list(rows.iter_prompts()) == [r["prompt"] for r in expected]
    assert [rows.sample(i, uid=i).agent_name for i in (0, 5, 6)] == [None, "tool_agent", None]
    assert rows.where(6) == f"{names[1]} row 1" and rows.data_sources() == {"arithmetic", "b"}


def test_files_may_differ_in_extra_info_and_lack_it(tmp_path):
    infos = [{"index": 0, "level": "easy"}, {"index": "seven", "tools": [1]}, None]
    rows = [row(extra_info=info) for info in infos[:2]] + [{k: v for k, v in row().items() if k != "extra_info"}]
    names = [name for i, r in enumerate(rows) for name in write(tmp_path / f"{i}.parquet", [r])]
    read, _ = read_rows(tuple(names), FLAG)
    assert [read[i]["extra_info"] for i in range(3)] == [infos[0], infos[1], {}]


def test_extra_info_may_be_json_as_text(tmp_path):
    infos = ['{"index": 0}', None, '{"index": "a", "more": [1, "b"]}']
    read, _ = read_rows(write(tmp_path / "a.parquet", [row(extra_info=info) for info in infos]), FLAG)
    assert [read[i]["extra_info"] for i in range(3)] == [{"index": 0}, {}, {"index": "a", "more": [1, "b"]}]


def test_large_view_dictionary_and_fixed_size_types_read_like_plain_ones(tmp_path):
    rows = [row(i) for i in range(4)]
    table = pa.Table.from_pylist(rows)
    message = pa.struct([("role", pa.dictionary(pa.int32(), pa.string())), ("content", pa.large_string())])
    for i, kind in enumerate((pa.large_list(message), pa.list_(message, 2))):
        odd = table.set_column(0, "prompt", table["prompt"].combine_chunks().cast(kind))
        odd = odd.set_column(1, "data_source", odd["data_source"].cast(pa.large_string()).dictionary_encode())
        pq.write_table(odd, tmp_path / f"{i}.parquet")
        read, _ = read_rows((str(tmp_path / f"{i}.parquet"),), FLAG)
        assert [read[k]["prompt"] for k in range(4)] == [r["prompt"] for r in rows]
        assert read[3]["data_source"] == "arithmetic"


def test_fields_that_only_other_messages_have_do_not_appear(tmp_path):
    messages = [{"role": "assistant", "content": "x", "name": "bob"}, {"role": "user", "content": "y"}]
    rows, _ = read_rows(write(tmp_path / "a.parquet", [row(prompt=messages)]), FLAG)
    assert rows[0]["prompt"] == messages


def test_paths_with_home_spaces_and_unicode_work(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mes données" / "é x.parquet", [row()])
    assert len(read_rows(("~/mes données/é x.parquet",), FLAG)[0]) == 1
    monkeypatch.chdir(tmp_path / "mes données")
    assert len(read_rows(("../mes données/é x.parquet",), FLAG)[0]) == 1


def test_another_prompt_column_is_read_under_its_flag(tmp_path):
    rows = [{"question": row(i)["prompt"], **{k: v for k, v in row(i).items() if k != "prompt"}} for i in range(2)]
    read, _ = read_rows(write(tmp_path / "a.parquet", rows), FLAG, keys=Keys(prompt="question"))
    assert read[1]["prompt"] == row(1)["prompt"]


def test_a_repeated_extra_info_index_is_fine_and_media_columns_are_mentioned(tmp_path):
    rows = [row(i, extra_info={"index": 0}, images=["a.png"]) for i in range(3)]
    read, warnings = read_rows(write(tmp_path / "a.parquet", rows), FLAG)
    assert len(read) == 3 and len(warnings) == 1 and "images" in warnings[0]


def test_overlap_counts_validation_prompts_with_the_same_contents(tmp_path):
    train, _ = read_rows(write(tmp_path / "t.parquet", [row(i) for i in range(10)]), FLAG)
    val, _ = read_rows(write(tmp_path / "v.parquet", [row(i) for i in (3, 3, 9, 10, 11)]), FLAG)
    assert count_overlap(train, val) == 3 and count_overlap(val, train) == 2
    assert count_overlap(train, read_rows((), FLAG)[0]) == 0


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_texts_written_as_differences_are_read(tmp_path, encoding):
    """As DuckDB's COPY ... (FORMAT parquet, PARQUET_VERSION v2) writes each text that does not repeat."""
    rows = [row(i) for i in range(600)]
    texts = ("prompt.list.element.content", "reward_model.ground_truth")
    pq.write_table(
        pa.Table.from_pylist(rows), tmp_path / "a.parquet", column_encoding=dict.fromkeys(texts, encoding),
        use_dictionary=["prompt.list.element.role", "data_source", "reward_model.style", "extra_info.split"],
        write_page_checksum=True,
    )  # fmt: skip
    read, _ = read_rows((str(tmp_path / "a.parquet"),), FLAG)
    assert list(read.iter_prompts()) == [each["prompt"] for each in rows]
    assert read[599]["reward_model"] == rows[599]["reward_model"]


# ---- Files that are none ----


def test_a_missing_file_names_working_directory_and_nearest_name(tmp_path, monkeypatch):
    write(tmp_path / "data" / "train.parquet", [row()])
    monkeypatch.chdir(tmp_path)
    says(refusal(["data/trian.parquet"]), "data/trian.parquet", str(tmp_path), "did you mean data/train.parquet")
    says(refusal(["dat/train.parquet"]), "did you mean data")
    says(refusal(["data/zzz"]), "data holds train.parquet")
    says(refusal(["/no/such/place/x.parquet"]), "/no/such/place/x.parquet")
    says(refusal(["data/train.parquet/x"]), "no such file")


def test_what_is_no_file_on_disk_is_refused(tmp_path):
    write(tmp_path / "d" / "a.parquet", [row()])
    says(refusal([str(tmp_path / "d")]), "directory", "a.parquet")
    says(refusal([""]), "empty path")
    says(refusal(["hdfs://x/a.parquet"]), "remote")
    says(refusal(["x" * 5000]), "cannot be opened")
    os.mkfifo(tmp_path / "fifo")
    for name in ("/dev/null", "/dev/zero", str(tmp_path / "fifo")):  # the last two would be read for ever
        says(refusal([name]), "not a regular file")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    says(refusal([str(loop)]), "loop")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_refused(tmp_path):
    (name,) = write(tmp_path / "a.parquet", [row()])
    os.chmod(name, 0)
    says(refusal([name]), "cannot be opened", "Permission denied")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "empty file"),
        (b'[{"prompt": []}]', "JSON array"),
        (b"\xff\xfe{\x00", "UTF-16"),
        (b"\x28\xb5\x2f\xfd", "Zstandard"),
        (b"prompt,answer\n1,2\n", "CSV"),
        (b"<!DOCTYPE html><html>", "HTML"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "git lfs pull"),
        (b"\x1f\x8b\x08\x00", "gzip"),
        (b"\x80\x04\x95", "pickle"),
        (b"hello", "plain text"),
        (b"\x00\x01\x02", "binary"),
        (b"PA", "plain text"),
        (b"PAR1", "damaged parquet"),
        (b"PAR1 and a half", "truncated"),
        (b"PAR1\xff\xff\xff\xff\xff\xffPAR1", "damaged parquet"),
    ],
)
def test_files_of_another_kind_are_recognised(tmp_path, content, expected):
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    says(refusal([str(path)]), str(path), expected)


def test_flipped_bits_in_the_pages_are_found(tmp_path):
    (name,) = write(tmp_path / "a.parquet", [row(i) for i in range(50)])
    good = Path(name).read_bytes()
    metadata = pq.read_metadata(name).row_group(0)
    column = next(
        metadata.column(i) for i in range(metadata.num_columns) if "content" in metadata.column(i).path_in_schema
    )
    # Pages carry checksums, their headers do not: a flip there shows as another fault, or changes no value.
    expected, _ = read_rows((name,), FLAG)
    generator = random.Random(0)
    found = 0
    for _ in range(60):
        at = generator.randrange(column.dictionary_page_offset, column.dictionary_page_offset + 300)
        Path(name).write_bytes(good[:at] + bytes([good[at] ^ (1 << generator.randrange(8))]) + good[at + 1 :])
        try:
            rows, _ = read_rows((name,), FLAG)
            assert [rows[i] for i in range(50)] == [expected[i] for i in range(50)], f"a flip at {at} went unnoticed"
        except UserError:
            found += 1
    assert found >= 50


# ---- Columns ----


def test_missing_columns_are_named_all_at_once_with_a_remedy_that_fits(tmp_path):
    bare = [{"question": "1 + 1", "answer": 2, "\x1b[31m\n": 0}]
    message = refusal(write(tmp_path / "a.parquet", bare))
    says(message, "columns 'prompt' and 'data_source' and 'reward_model' are missing", "question, answer, '\\x1b[31m")
    says(
        message, "make 'prompt'", "--data.prompt-key", "add 'data_source'", "add 'reward_model', {style, ground_truth}"
    )
    others = [{"question": "x", "messages": row()["prompt"], "data_source": "a"}]
    message = refusal(write(tmp_path / "c.parquet", others))
    says(message, "columns 'prompt' and 'reward_model' are missing", "set --data.prompt-key messages, and add")
    for name in ("data_source", "reward_model"):
        rows = [{k: v for k, v in row().items() if k != name}]
        says(refusal(write(tmp_path / "b.parquet", rows)), f"'{name}'", "prompt, ")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("prompt", 7),
        ("prompt", ["1 + 1"]),
        ("prompt", [{"role": 1, "content": "x"}]),
        ("prompt", [{"role": "user", "content": ["x"]}]),
        ("prompt", [{"role": "user", "content": b"x"}]),
        ("data_source", 3),
        ("agent_name", 3),
        ("agent_name", {"name": "x"}),
        ("reward_model", "42"),
        ("reward_model", {"style": "rule"}),
        ("reward_model", {"style": "rule", "ground_truth": b"42"}),
        ("extra_info", 7),
        ("extra_info", "index 1"),
        ("extra_info", "[1]"),
    ],
)
def test_wrong_column_types_are_refused(tmp_path, column, value):
    message = refusal(write(tmp_path / "a.parquet", [row(**{column: value})]))
    says(message, f"column '{column}' has the wrong type", "expected")


def test_messages_without_a_role_field_are_refused(tmp_path):
    message = refusal(write(tmp_path / "a.parquet", [row(prompt=[{"from": "human", "content": "x"}])]))
    says(message, "role", "message 0", "from, content", "user, assistant")


def test_duplicate_column_names_are_named_at_top_and_inside(tmp_path):
    table = pa.Table.from_pylist([row()])
    names = [*table.column_names[:-1], "prompt"]
    pq.write_table(table.rename_columns(names), tmp_path / "a.parquet")
    says(refusal([str(tmp_path / "a.parquet")]), "duplicate", "prompt")
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["index", "index"])
    pq.write_table(table.set_column(4, "extra_info", twice), tmp_path / "b.parquet")
    says(refusal([str(tmp_path / "b.parquet")]), "duplicate", "extra_info.index")


def test_ground_truths_of_two_types_name_both_files(tmp_path):
    names = write(tmp_path / "a.parquet", [row(**answer("1"))]) + write(tmp_path / "b.parquet", [row(**answer(1))])
    rows, _ = read_rows(names, FLAG)
    with pytest.raises(UserError) as caught:
        check_answer_kinds(rows, FLAG)
    says(str(caught.value), f"{names[0]} has string", f"{names[1]} has int")


# ---- Rows ----

BAD_ROWS = [
    (prompt(("user", "a"), (None, "b")), ["row 9000", "message 1", "found None", "system, developer, user"]),
    (prompt(("user", "a"), ("user", "b"), ("human", "c")), ["row 9000", "message 2", "'human'", "assistant, tool"]),
    (prompt(("user", None)), ["row 9000", "message 0", "without content"]),
    ({"prompt": []}, ["row 9000", "without messages"]),
    ({"prompt": None}, ["row 9000", "without messages"]),
    ({"prompt": [None]}, ["row 9000", "message 0", "role"]),
    ({"prompt": [{"role": "user", "content": "x"}] * 10_001}, ["row 9000", "10001", "10000"]),
    ({"data_source": None}, ["row 9000", "data_source"]),
    ({"data_source": ""}, ["row 9000", "data_source"]),
    ({"data_source": "a\x1b[31m"}, ["row 9000", "data_source", "'a\\x1b[31m'"]),
    ({"data_source": "a\nerror[2] b"}, ["row 9000", "data_source", "'a\\nerror[2] b'"]),
    (answer(None), ["row 9000", "ground truth"]),
    ({"reward_model": None}, ["row 9000", "ground truth"]),
]


@pytest.mark.parametrize(("change", "parts"), BAD_ROWS)
def test_the_one_bad_row_of_many_is_named(tmp_path, change, parts):
    rows = [row(i) for i in range(10_000)]  # two read batches
    rows[9000] |= change
    says(refusal(write(tmp_path / "a.parquet", rows)), str(tmp_path / "a.parquet"), *parts)


@pytest.mark.parametrize(("change", "parts"), BAD_ROWS)
def test_a_bad_row_is_named_where_it_is_the_first(tmp_path, change, parts):
    rows = [row(0) | change, row(1)]
    says(refusal(write(tmp_path / "a.parquet", rows)), *(part.replace("row 9000", "row 0") for part in parts))


@pytest.mark.parametrize(
    ("first", "change", "message"),
    [
        ({}, answer(7), "a row does not fit the others; mine row 7; "),
        (answer(None), answer(7), "a row does not fit the others; mine row 7; "),
        ({}, {"extra_info": {"index": "7"}}, "a row does not fit the others; mine row 7; "),
        ({}, {"extra_info": {"index": 2**70}}, "a row does not fit the others; mine row 7; "),
        ({}, answer(None), "a row without ground truth; mine row 7 "),
        ({}, prompt(("human", "x")), "a message without a known role; mine row 7 "),
        ({}, answer("\ud83d"), "text that is not Unicode; mine row 7 "),
    ],
)
def test_the_bad_row_of_a_dataset_class_is_named(first, change, message):
    rows = [row(i) for i in range(10)]
    rows[0] |= first
    rows[7] |= change
    with pytest.raises(UserError) as caught:
        rows_from_dicts(rows, "mine")
    says(str(caught.value), message)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_ground_truth_that_is_nan_or_infinite_names_its_row(tmp_path, bad):
    says(refusal(write(tmp_path / "a.parquet", [row(**answer(x)) for x in (1.0, 2.0, bad)])), "row 2", str(bad))
    lists = [row(**answer(x)) for x in ([1.0], [2.0, 3.0], [4.0, bad])]
    says(refusal(write(tmp_path / "b.parquet", lists)), "row 2", str(bad))


def test_a_reward_model_needs_no_ground_truth(tmp_path):
    rows = [row(), row(reward_model={"style": "model", "ground_truth": None})]
    assert read_rows(write(tmp_path / "a.parquet", rows), FLAG)[0][1]["reward_model"]["ground_truth"] is None


@pytest.mark.parametrize("column", ["prompt", "data_source", "ability", "reward_model", "extra_info"])
def test_text_that_is_not_utf8_names_row_and_column(tmp_path, column):
    table = pa.Table.from_pylist([row(i) for i in range(3)])
    texts = ["fine", "marker", "fine"]
    data = "".join(texts).encode().replace(b"marker", b"bad \xff\xfe")
    offsets = np.array([0, 4, 10, 14], dtype=np.int32)
    bad = pa.StringArray.from_buffers(3, pa.py_buffer(offsets.tobytes()), pa.py_buffer(data))
    users = pa.array(["user"] * 3)
    message = pa.StructArray.from_arrays([users, bad], names=["role", "content"])
    columns = {
        "prompt": pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), message),
        "reward_model": pa.StructArray.from_arrays([bad], names=["ground_truth"]),
        "extra_info": pa.StructArray.from_arrays([bad], names=["split"]),
    }
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, columns.get(column, bad)), tmp_path / "a.parquet")
    says(refusal([str(tmp_path / "a.parquet")]), "not UTF-8", "row 1", f"'{column}'", "0xff")


def test_a_file_without_rows_is_refused(tmp_path):
    pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), tmp_path / "a.parquet")
    says(refusal([str(tmp_path / "a.parquet")]), "no rows")


def test_duplicate_ids_are_refused_across_files(tmp_path):
    names = write(tmp_path / "a.parquet", [row(id="x"), row(id="y")]) + write(tmp_path / "b.parquet", [row(id="y")])
    says(refusal(names), "duplicate id", "'y'", f"{names[0]} row 1", f"{names[1]} row 0")
    says(refusal(write(tmp_path / "c.parquet", [row(uid=1), row(uid=1)])), "duplicate uid", "row 0", "row 1")
    assert len(read_rows(write(tmp_path / "d.parquet", [row(id=None), row(id=None)]), FLAG)[0]) == 2


def test_a_huge_cell_names_its_row_within_bounded_memory(tmp_path):
    # 4,000 rows share one 40 MB text, which parquet stores once: reading it naively needs 160 GB.
    script = f"""
        import pyarrow as pa, pyarrow.parquet as pq
        texts = pa.DictionaryArray.from_arrays(pa.array([0] * 5 + [1] * 3995, pa.int32()), ["x", "y" * 40_000_000])
        messages = pa.StructArray.from_arrays([pa.array(["user"] * 4000), texts], names=["role", "content"])
        prompts = pa.ListArray.from_arrays(pa.array(range(4001), pa.int32()), messages)
        rewards = pa.array([{{"ground_truth": "1"}}] * 4000)
        table = pa.table({{"prompt": prompts, "data_source": ["a"] * 4000, "reward_model": rewards}})
        pq.write_table(table, {str(tmp_path / "a.parquet")!r}, store_schema=False)  # read back as plain strings
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    says(refusal([str(tmp_path / "a.parquet")]), "row 5", "'prompt'", "40000000", "33554432")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KiB


# ---- Custom rows and writing ----


def test_rows_of_a_custom_dataset_pass_the_same_checks():
    good = rows_from_dicts([row(0), row(1)], "mine.py:Mine")
    assert good[1]["prompt"] == row(1)["prompt"] and good.where(1) == "mine.py:Mine row 1"
    for bad, parts in [
        ([row(), row(prompt=[{"role": "human", "content": "x"}])], ["mine.py:Mine row 1", "'human'"]),
        ([row(), row(**answer(3))], ["mine.py:Mine row 1", "one type"]),
        ([row(extra_info=None), *[row(i) for i in range(1, 7)], row(extra_info={"index": "x"})], ["row 7", "one type"]),
        ([row(), row(extra_info={"index": 2**70})], ["row 1", "too large"]),
        ([row(), row(data_source=None)], ["row 1", "data_source"]),
        ([{"text": "x"}], ["'prompt'", "text"]),
        ([row(), row(**prompt(("user", "hi \ud83d")))], ["mine.py:Mine row 1", "'prompt'", "half of a surrogate"]),
        ([row(data_source="\udc80"), row()], ["row 0", "'data_source'", "half of a surrogate"]),
        ([row(), row() | {"\ud83d": 1}], ["row 1", "half of a surrogate"]),
        ([row(), row() | {"tags": np.array(["\ud83d"])}], ["row 1", "'tags'", "half of a surrogate"]),
        ([{"text": "x", "answer": "y"}], ["'prompt' and 'data_source' and 'reward_model' are missing"]),
        ([row(), row(data_source="a\x1b[31m")], ["mine.py:Mine row 1", "'a\\x1b[31m'"]),
        ([row(), row(data_source="a\nb")], ["mine.py:Mine row 1", "'a\\nb'"]),
        ([], ["no rows"]),
    ]:
        with pytest.raises(UserError) as caught:
            rows_from_dicts(bad, "mine.py:Mine")
        says(str(caught.value), *parts)


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path):
    (name,) = write(tmp_path / "a.parquet", [row(1)])
    with pytest.raises(pa.ArrowException):
        write_rows(tmp_path / "a.parquet", [row(1), row(**answer(object()))])
    assert os.listdir(tmp_path) == ["a.parquet"] and read_rows((name,), FLAG)[0][0]["prompt"] == row(1)["prompt"]


def test_resolving_expands_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.py").write_text("1")
    assert resolve_file("~/x.py", "--reward.path") == tmp_path / "x.py"
