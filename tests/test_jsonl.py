"""Claims about JSON lines, and about rows that are less than verl's schema: read as written, refused by line."""

import gzip
import json
import resource
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lib.data.jsonl import MAX_LINE_BYTES, read_columns
from lib.data.parquet import write_rows
from lib.data.prompts import DataConfig, Prompts, check_data_files
from lib.data.reading import read_rows, rows_from_dicts
from lib.data.rows import check_answer_kinds, count_overlap
from lib.data.schema import Keys
from lib.errors import UserError
from tests.test_parquet import BAD_ROWS, FLAG, answer, row, says

OWN = Keys(needs_grader=False)
BARE = {"prompt": "1 + 1 = ?", "answer": "2"}


def write(path, rows):
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return (str(path),)


def refusal(path, content, keys=None):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        read_rows((str(path),), FLAG, **({"keys": keys} if keys else {}))
    message = str(caught.value)
    assert message.count("; ") >= 2 and str(path) in message and "\n" not in message, message
    return message


def plain(**changed):
    return {name: value for name, value in row(**changed).items() if name != "ability"}


def all_of(rows):
    return [rows[place] for place in range(len(rows))]


# ---- Good files ----


def test_a_file_reads_as_parquet_of_the_same_rows_does(tmp_path):
    written = [row(i, agent_name=f"agent{i}" if i % 3 else None) for i in range(9000)]  # two batches
    lines, _ = read_rows(write(tmp_path / "a.jsonl", written), FLAG)
    write_rows(tmp_path / "a.parquet", written)
    columns, _ = read_rows((str(tmp_path / "a.parquet"),), FLAG)
    expected = [{name: value for name, value in each.items() if name != "ability"} for each in written]
    places = [0, 8191, 8192, 8999]
    assert [lines[place] for place in places] == [columns[place] for place in places] == [expected[i] for i in places]
    assert list(lines.iter_prompts()) == list(columns.iter_prompts()) == [each["prompt"] for each in expected]
    assert lines.data_sources() == columns.data_sources() == {"arithmetic"}
    assert lines.spread(7) == columns.spread(7) == lines.spread(7, data_source="arithmetic")
    assert lines.answer_kinds == columns.answer_kinds == ("string",)
    assert count_overlap(lines, columns) == count_overlap(columns, lines) == 9000
    table = lines.take([3, 8999], ["prompt", "data_source", "ability", "reward_model", "extra_info", "agent_name"])
    assert table.to_pylist() == [written[3], written[8999]]
    pq.write_table(table, tmp_path / "b.parquet")


def test_a_run_is_bound_to_what_the_files_say_not_to_their_kind(tmp_path):
    def fingerprint(rows):
        ids = [np.array([1, 2], np.int32)] * len(rows)
        counts = dict(num_filtered=0, num_truncated=0, longest=2, warnings=())
        return Prompts(rows=rows, kept=[*range(len(rows))], token_ids=ids, **counts).fingerprint

    def of_jsonl(rows):
        return fingerprint(read_rows(write(tmp_path / "a.jsonl", rows), FLAG)[0])

    rows = [row(i) for i in range(3)]
    write_rows(tmp_path / "a.parquet", rows)
    assert of_jsonl(rows) == fingerprint(read_rows((str(tmp_path / "a.parquet"),), FLAG)[0])
    changes = (answer("9"), {"data_source": "b"}, {"extra_info": {"index": "0"}})
    others = [[*rows[:2], rows[2] | change] for change in changes] + [rows[::-1]]
    assert len({of_jsonl(rows), *map(of_jsonl, others)}) == 5


def test_each_line_keeps_its_own_types(tmp_path):
    infos = [{"index": 0}, {"index": "seven", "tests": [1, "a", None, {"x": {}}]}, {}, None, {"big": 2**70, "f": 2.0}]
    calls = {"role": "assistant", "content": "", "tool_calls": [{"arguments": {"a": 1}}, {"arguments": {"b": "x"}}]}
    rows, _ = read_rows(write(tmp_path / "a.jsonl", [plain(extra_info=info) for info in infos]), FLAG)
    assert [each["extra_info"] for each in all_of(rows)] == [info or {} for info in infos]
    rows, _ = read_rows(write(tmp_path / "b.jsonl", [plain(prompt=[*plain()["prompt"], calls])]), FLAG)
    assert rows[0]["prompt"][2] == calls
    for truth in ([1, "a"], {"a": {}, "b": [1]}, 7, 7.5, True, "7"):
        rows, _ = read_rows(write(tmp_path / "c.jsonl", [plain(**answer(truth))]), FLAG)
        assert rows.sample(0, uid=0).ground_truth == truth


def test_byte_order_mark_windows_lines_blank_lines_and_a_last_line_without_end_are_read(tmp_path):
    lines = [json.dumps(plain(), ensure_ascii=False), "", "  ", json.dumps(plain(**answer("Grüße"))), ""]
    path = tmp_path / "a.jsonl"
    for content in ("\r\n".join(lines), "\n".join(lines), "\n".join(lines).rstrip()):
        path.write_bytes(b"\xef\xbb\xbf" + content.encode())
        rows, _ = read_rows((str(path),), FLAG)
        assert [each["reward_model"]["ground_truth"] for each in all_of(rows)] == ["1", "Grüße"]
        assert [rows.where(place) for place in range(2)] == [f"{path} line 1", f"{path} line 4"]


def test_the_content_decides_what_a_file_is_and_kinds_mix(tmp_path):
    (jsonl,) = write(tmp_path / "a.parquet", [plain()])
    write_rows(tmp_path / "b.jsonl", [row(1)])
    rows, _ = read_rows((jsonl, str(tmp_path / "b.jsonl")), FLAG)
    unnamed = {"agent_name": None}
    assert all_of(rows) == [plain() | unnamed, {name: row(1)[name] for name in plain()} | unnamed]
    assert [rows.where(place) for place in range(2)] == [f"{jsonl} line 1", f"{tmp_path / 'b.jsonl'} row 0"]
    assert rows.take([0, 1], ["prompt", "reward_model"]).num_rows == 2


def test_memory_holds_a_file_about_once(tmp_path):
    """Python's objects of 10,000 rows with 40 small messages each would take twenty times the file."""
    message = {"role": "user", "content": "a few words"}
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for i in range(10_000):
            file.write(json.dumps(plain(prompt=[message] * 40, **answer(str(i)))) + "\n")
    script = (
        "import resource, sys, pyarrow\nfrom lib.data.reading import read_rows\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"rows, _ = read_rows(({str(path)!r},), '--data.train-files')\n"
        "print(len(rows), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    told = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    num_rows, grown_kib = map(int, told.split())
    assert num_rows == 10_000 and grown_kib * 1024 < 5 * path.stat().st_size


# ---- Lines that are none ----


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b'{"prompt": "x", "answer": "', ["line 3 column 27", "no JSON", "Unterminated string", "mend the line"]),
        (b"{'prompt': 1}", ["line 3 column 2", "no JSON", "mend the line"]),
        (b'{"prompt": "x"} {"prompt": "y"}', ["line 3", "Extra data", "one whole object"]),
        (b'{"prompt": "a\x00b"}', ["line 3", "Invalid control character"]),
        (b"[1, 2]", ["line 3", "no object", "found a list"]),
        (b'"x"', ["line 3", "no object", "found text"]),
        (b"null", ["line 3", "no object", "found null"]),
        (b'{"prompt": "x", "answer": "2", "prompt": "y"}', ["line 3", "key twice", "'prompt'"]),
        (b'{"prompt": "x", "answer": {"a": 1, "a": 1}}', ["line 3", "key twice", "'a'"]),
        (b'{"prompt": "x", "answer": NaN}', ["line 3", "NaN", "finite"]),
        (b'{"prompt": "x", "answer": [1, -Infinity]}', ["line 3", "-Infinity", "finite"]),
        (b'{"prompt": "x", "answer": 1e999}', ["line 3", "1e999", "float64"]),
        (b'{"prompt": "x", "answer": ' + b"1" * 5000 + b"}", ["line 3", "cannot be read", "digits"]),
        (b'{"prompt": "x", "answer": ' + b"[" * 100_000, ["line 3", "cannot be read", "recursion"]),
        (b'{"prompt": "caf\xe9", "answer": "2"}', ["line 3", "not UTF-8", "0xe9 at 15", "iconv"]),
        (b'{"prompt": "x", "answer": "\\ud83d"}', ["line 3", "'answer'", "half of a surrogate"]),
        (b"\xef\xbb\xbf{}", ["line 3", "no JSON"]),  # a mark in the middle: two files put together
        (b'{"prompt": "' + b"x" * MAX_LINE_BYTES + b'"}', ["line 3", "too large", str(MAX_LINE_BYTES)]),
    ],
    ids=lambda value: str(value[:30]),
)
def test_a_line_that_cannot_be_read_is_named(tmp_path, line, parts):
    good = json.dumps(BARE).encode()
    content = b"\n".join([good, b"", line, good, b""])
    says(refusal(tmp_path / "a.jsonl", content, Keys(answer="answer", needs_grader=False)), *parts)


def test_a_last_line_that_was_cut_short_says_that_the_file_ends(tmp_path):
    whole = "".join(json.dumps(plain(**answer(str(i)))) + "\n" for i in range(3))
    for cut in (2, 30, 100):
        says(refusal(tmp_path / "a.jsonl", whole[:-cut]), "line 3", "the file ends within it: write or copy it again")
    read_rows((str(write(tmp_path / "a.jsonl", [plain()])[0]),), FLAG)


def test_a_line_without_end_is_refused_within_bounded_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "')
        file.truncate(20 * 1024**3)  # a hole: it takes no disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"a line is too large; --data.train-files .* line 1; found more than 67108864"):
        read_rows((str(path),), FLAG)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1_000_000  # KiB


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (gzip.compress(json.dumps(BARE).encode(), mtime=0), ["a gzip file", "gunzip"]),
        (json.dumps([BARE]), ["a JSON array", "jq -c"]),
        (json.dumps(BARE).encode("utf-16"), ["UTF-16", "iconv"]),
        ("prompt,answer\n1 + 1,2\n", ["line 1 column 1", "no JSON"]),
        ("\n \r\n\n", ["no rows", "blank lines"]),
        (b"\x00" * 100, ["binary data"]),
        (json.dumps(BARE, indent=1), ["line 1 column 2", "no JSON"]),
    ],
)
def test_files_of_another_kind_are_recognised_under_the_name(tmp_path, content, parts):
    says(refusal(tmp_path / "a.jsonl", content, OWN), *parts)
    if b"a gzip" in str(parts).encode():
        says(refusal(tmp_path / "a.jsonl.gz", content, OWN), *parts)


def test_a_folder_tells_the_files_that_it_holds(tmp_path):
    write(tmp_path / "b.jsonl", [plain()])
    write_rows(tmp_path / "a.parquet", [row()])
    with pytest.raises(UserError, match=r"a directory, not a file; .*; it holds a.parquet, b.jsonl; name the files"):
        read_rows((str(tmp_path),), FLAG)


# ---- Rows that are wrong ----


@pytest.mark.parametrize(("change", "parts"), BAD_ROWS)
def test_the_one_bad_row_of_many_is_named_by_its_line_in_the_words_for_parquet(tmp_path, change, parts):
    rows = [plain(index=i) for i in range(9_001)]
    rows[9000] |= change
    content = "".join(json.dumps(each) + "\n" for each in rows)
    expected = [part.replace("row 9000", "line 9001") for part in parts]
    if change == {"prompt": [None]}:
        expected = ["line 9001", "'prompt'", "null"]
    says(refusal(tmp_path / "a.jsonl", content), *expected)


@pytest.mark.parametrize(
    ("column", "value", "found"),
    [
        ("prompt", 7, "a number, 7"),
        ("prompt", {"role": "user"}, "an object"),
        ("prompt", ["1 + 1"], "text, '1 + 1'"),
        ("data_source", 3, "a number, 3"),
        ("agent_name", ["x"], "a list, ['x']"),
        ("reward_model", "42", "text, '42'"),
        ("extra_info", '{"index": 1}', "text"),
        ("extra_info", [1], "a list, [1]"),
    ],
)
def test_wrong_types_name_the_line(tmp_path, column, value, found):
    content = json.dumps(plain()) + "\n" + json.dumps(plain(**{column: value}))
    says(refusal(tmp_path / "a.jsonl", content), f"column '{column}' has the wrong type", "line 2", found, "expected")


def test_content_that_is_no_text_and_messages_without_fields_name_line_and_message(tmp_path):
    for messages, parts in (
        ([{"role": "user", "content": ["x"]}], ["without content", "message 0", "['x']"]),
        ([{"role": "user", "content": "x"}, {"role": 1, "content": "x"}], ["known role", "message 1", "found 1"]),
        ([{"from": "human", "content": "x"}], ["without role", "message 0", "from, content"]),
        ([{"role": "user"}], ["without content", "message 0", "found: role"]),
    ):
        content = json.dumps(plain()) + "\n" + json.dumps(plain(prompt=messages))
        says(refusal(tmp_path / "a.jsonl", content), "line 2", *parts)


def test_ground_truths_of_two_types_name_both_lines(tmp_path):
    content = "".join(json.dumps(plain(**answer(truth))) + "\n" for truth in ("1", "2", 3))
    says(refusal(tmp_path / "a.jsonl", content), "two types", "line 3", "a number", "text as in line 1")
    rows, _ = read_rows(write(tmp_path / "b.jsonl", [plain(**answer(truth)) for truth in (1, 2.5)]), FLAG)
    assert rows.answer_kinds == ("float",) and [each["reward_model"]["ground_truth"] for each in all_of(rows)] == [
        1,
        2.5,
    ]
    texts = write(tmp_path / "c.jsonl", [plain()])
    mixed, _ = read_rows((str(tmp_path / "b.jsonl"), *texts), FLAG)
    with pytest.raises(UserError, match=r"b.jsonl has float, .*c.jsonl has string"):
        check_answer_kinds(mixed, FLAG)


def test_missing_columns_name_the_line_and_what_to_give(tmp_path):
    message = refusal(tmp_path / "a.jsonl", json.dumps({"question": "1 + 1", "answer": 2, "\x1b[31m": 0}))
    says(
        message, "columns 'prompt' and 'data_source' and 'reward_model' are missing", "line 1", "question, answer, '\\x"
    )
    says(message, "--data.prompt-key", "--data.answer-key", "--reward.path FILE, neither")
    message = refusal(tmp_path / "a.jsonl", json.dumps({"chat": plain()["prompt"], "answer": 2}), OWN)
    says(message, "column 'prompt' is missing", "set --data.prompt-key chat")
    message = refusal(tmp_path / "a.jsonl", json.dumps(BARE), Keys(answer="anwser", needs_grader=False))
    says(message, "column 'anwser' is missing", "prompt, answer", "--data.answer-key")
    content = json.dumps(BARE) + "\n" + json.dumps({"prompt": "x"})
    says(refusal(tmp_path / "a.jsonl", content, Keys(answer="answer")), "data_source", "line 1")
    says(refusal(tmp_path / "a.jsonl", content, Keys(answer="answer", needs_grader=False)), "'answer'", "line 2")


def test_what_may_be_missing_is_in_every_row_or_in_none(tmp_path):
    text = {"prompt": "x"}
    for first, second in ((plain(), text), (text, plain()), (text, text | {"data_source": "a"})):
        content = json.dumps(first) + "\n" + json.dumps(second)
        says(refusal(tmp_path / "a.jsonl", content, OWN), "is in some rows alone", "line 2", "line 1", "data_source")


def test_duplicate_ids_name_both_lines_and_media_are_mentioned(tmp_path):
    names = write(tmp_path / "a.jsonl", [plain(id="x"), plain(id="y")]) + write(tmp_path / "b.jsonl", [plain(id="y")])
    with pytest.raises(UserError) as caught:
        read_rows(names, FLAG)
    says(str(caught.value), "duplicate id", "'y'", f"{names[0]} line 2", f"{names[1]} line 1")
    rows, warnings = read_rows(write(tmp_path / "c.jsonl", [plain(id=None, images=["a.png"]), plain(uid=7)]), FLAG)
    assert len(rows) == 2 and "images" in warnings[0]


# ---- Less than verl's schema, in every kind of file ----


def as_parquet(path, rows):
    write_rows(path.with_suffix(".parquet"), rows)
    return (str(path.with_suffix(".parquet")),)


@pytest.mark.parametrize("save", [write, as_parquet, None], ids=["jsonl", "parquet", "class"])
def test_a_text_an_answer_key_and_nothing_else_are_enough_with_a_reward_of_ones_own(tmp_path, save):
    def read(rows, keys):
        if save is None:
            return rows_from_dicts(rows, "mine", keys=keys)
        return read_rows(save(tmp_path / "a", rows), FLAG, keys=keys)[0]

    said = [{"role": "user", "content": "1 + 1 = ?"}]
    [got] = all_of(read([BARE], Keys(answer="answer", needs_grader=False)))
    plainest = {"prompt": said, "data_source": "own", "extra_info": {}, "agent_name": None}
    assert got == {**plainest, "reward_model": {"ground_truth": "2"}}
    [got] = all_of(read([{"prompt": "1 + 1 = ?"}], OWN))
    assert got == {**plainest, "reward_model": {"ground_truth": None}}
    [got] = all_of(read([BARE | {"data_source": "a", "agent_name": "b"}], Keys(answer="answer")))
    assert (got["data_source"], got["reward_model"], got["agent_name"]) == ("a", {"ground_truth": "2"}, "b")
    [got] = all_of(read([{"q": "x", "sum": {"of": [1, 2]}}], Keys(prompt="q", answer="sum", needs_grader=False)))
    assert got["reward_model"] == {"ground_truth": {"of": [1, 2]}} and got["prompt"][0]["content"] == "x"
    [got] = all_of(read([plain(answer="9")], Keys(answer="answer")))
    assert got["reward_model"] == {"ground_truth": "9"}
    with pytest.raises(UserError, match=r"a row without ground truth; .* column 'answer'"):
        read([BARE, BARE | {"answer": None}], Keys(answer="answer", needs_grader=False))
    with pytest.raises(UserError, match=r"a prompt without messages; .* column 'prompt'"):
        read([BARE, BARE | {"prompt": None}], OWN)


def test_the_options_reach_both_splits(tmp_path):
    (train,) = write(tmp_path / "a.jsonl", [{"q": "1 + 1", "a": "2"}, {"q": "1 + 2", "a": "3"}])
    (val,) = as_parquet(tmp_path / "b", [{"q": "1 + 1", "a": "2"}])
    cfg = DataConfig(train_files=(train,), val_files=(val,), prompt_key="q", answer_key="a")
    files = check_data_files(cfg, needs_grader=False)
    assert [files.train[1]["reward_model"], files.val[0]["reward_model"]] == [
        {"ground_truth": "3"},
        {"ground_truth": "2"},
    ]
    assert files.warnings == ("1 of the 1 validation prompts also occur in the training data",)
    with pytest.raises(UserError, match=r"column 'data_source' is missing; --data.train-files .*a.jsonl line 1"):
        check_data_files(cfg)


# ---- All columns, for the output of an evaluation ----


def test_all_columns_keep_their_types_and_what_has_none_becomes_text(tmp_path):
    rows = [
        {"a": 1, "b": 1, "c": {"x": 1}, "d": {}, "e": "s", "f": 2**70},
        {"a": 2.5, "b": "x", "c": {"y": [2]}, "e": None},
    ]
    table, as_text = read_columns(*write(tmp_path / "a.jsonl", rows) and (tmp_path / "a.jsonl", "here"))
    assert as_text == ["b", "d", "f"]
    assert table.to_pylist() == [
        {"a": 1.0, "b": "1", "c": {"x": 1, "y": None}, "d": "{}", "e": "s", "f": str(2**70)},
        {"a": 2.5, "b": '"x"', "c": {"x": None, "y": [2]}, "d": None, "e": None, "f": None},
    ]
    pq.write_table(table, tmp_path / "a.parquet")
    assert pa.types.is_floating(table.schema.field("a").type)
