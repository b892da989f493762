"""Claims about prompts: templates, length limits, custom datasets, and the order of the endless stream."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lib.config.flags import parse_args
from lib.data.parquet import write_rows
from lib.data.prompt_stream import PromptStream
from lib.data.prompts import DataConfig, check_data_files, tokenize
from lib.data.tokenizer import load_tokenizer, stop_token_ids
from lib.errors import UserError

TEMPLATE = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "<|im_start|>{{ message['role'] }}:{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% if enable_thinking is false %}<none>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A folder with a byte-level tokenizer: every ASCII character is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate(["<|im_end|>", "<|im_start|>", "<|eot|>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", "<|eot|>"]
    )
    tokenizer.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(model_dir)


def row(text, i=0, **changed):
    return {
        "prompt": [{"role": "user", "content": text}],
        "data_source": "arithmetic",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i},
    } | changed


def write(path, rows):
    write_rows(path, rows)
    return (str(path),)


def prompts_of(cfg, tokenizer, split="train"):
    return tokenize(cfg, check_data_files(cfg), tokenizer, split=split)


def refusal(call, *parts):
    with pytest.raises(UserError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


@pytest.fixture(scope="module")
def eleven(tokenizer, tmp_path_factory):
    """Eleven prompts, the answer of each its row."""
    names = write(tmp_path_factory.mktemp("eleven") / "a.parquet", [row(f"problem {i}", i) for i in range(11)])
    return prompts_of(DataConfig(train_files=names), tokenizer)


# ---- Config ----


def test_out_of_range_options_are_refused():
    for values, flag in [
        ({"max_prompt_len": 0}, "--data.max-prompt-len"),
        ({"max_prompt_len": -1}, "--data.max-prompt-len"),
        ({"train_max_samples": 0}, "--data.train-max-samples"),
        ({"dataset_path": "a.py"}, "--data.dataset-name"),
        ({"dataset_name": "A"}, "--data.dataset-path"),
        ({"chat_template_kwargs": {"tokenize": False}}, "tokenize"),
    ]:
        refusal(lambda values=values: DataConfig(**values), flag)


def test_files_and_template_variables_come_from_the_command_line():
    words = ["--train-files", "a b.parquet", "c.parquet", "--chat-template-kwargs", '{"enable_thinking": false}']
    cfg = parse_args(DataConfig(), words)
    assert cfg.train_files == ("a b.parquet", "c.parquet") and cfg.chat_template_kwargs == {"enable_thinking": False}


def test_the_checks_import_neither_transformers_nor_vllm(tmp_path):
    names = write(tmp_path / "a.parquet", [row("x")])
    script = (
        "import sys; from lib.data.prompts import DataConfig, check_data_files; "
        f"check_data_files(DataConfig(train_files={names!r})); "
        "assert not {'transformers', 'vllm', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parent.parent)


# ---- Files of both splits ----


def test_overlap_of_train_and_validation_is_a_warning_with_its_count(tmp_path):
    train = write(tmp_path / "t.parquet", [row(f"p{i}", i) for i in range(5)])
    val = write(tmp_path / "v.parquet", [row(f"p{i}", i) for i in (3, 4, 5)])
    (warning,) = check_data_files(DataConfig(train_files=train, val_files=val)).warnings
    assert warning.startswith("2 of the 3 validation prompts")


def test_a_file_given_twice_is_refused_under_any_spelling(tmp_path):
    (path,) = write(tmp_path / "t.parquet", [row("a")])
    (tmp_path / "link.parquet").symlink_to(path)
    for again in (path, f"{tmp_path}/../{tmp_path.name}/t.parquet", str(tmp_path / "link.parquet")):
        for flag, files in (("train", {}), ("val", {"train_files": write(tmp_path / "other.parquet", [row("b")])})):
            cfg = DataConfig(**files, **{f"{flag}_files": (path, again)})
            refusal(lambda cfg=cfg: check_data_files(cfg), "given twice", f"--data.{flag}-files", path, again)


def test_a_file_for_both_splits_is_a_warning_also_with_a_dataset_class(tmp_path):
    cfg = custom(tmp_path, DATASET)
    both = DataConfig(**{**vars(cfg), "val_files": cfg.train_files})
    assert check_data_files(cfg).warnings == ()
    (warning,) = check_data_files(both).warnings
    assert warning == f"{cfg.train_files[0]} is given both for training and for validation"


def test_answers_of_two_types_in_train_and_validation_are_refused(tmp_path):
    train = write(tmp_path / "t.parquet", [row("a")])
    val = write(tmp_path / "v.parquet", [row("b", reward_model={"style": "rule", "ground_truth": 3})])
    refusal(
        lambda: check_data_files(DataConfig(train_files=train, val_files=val)),
        f"{train[0]} has string",
        f"{val[0]} has int",
    )
    lists = write(tmp_path / "l.parquet", [row("b", reward_model={"style": "rule", "ground_truth": ["3", "three"]})])
    assert check_data_files(DataConfig(train_files=train, val_files=lists)).warnings == ()


def test_training_without_files_is_refused_and_validation_is_optional(tmp_path, tokenizer):
    refusal(lambda: check_data_files(DataConfig()), "--data.train-files")
    cfg = DataConfig(train_files=write(tmp_path / "t.parquet", [row("a")]))
    assert prompts_of(cfg, tokenizer, split="val").all_samples() == []


# ---- Tokenizer ----


def broken_copy(model_dir, tmp_path, **files):
    folder = tmp_path / "copy"
    folder.mkdir(exist_ok=True)
    for file in model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for name, text in files.items():
        (folder / name.replace("_json", ".json").replace("_jinja", ".jinja")).write_text(text)
    return folder


def test_a_missing_or_bad_template_is_refused_with_its_line(model_dir, tmp_path):
    bad = {
        "a\n{{ messages[0]['role' }}": ["template line 2"],
        "a\nb\n{{ raise_exception('only poems') }}": ["template line 3", "only poems"],
        "a\n{{ messages[0].x.y }}": ["template line 2", "has no attribute"],
        "{{ ''.__class__.__mro__ }}": ["template line 1", "unsafe"],
        "{# nothing #}": ["no tokens"],
    }
    for template, parts in bad.items():
        folder = broken_copy(model_dir, tmp_path, chat_template_jinja=template)
        refusal(lambda folder=folder: load_tokenizer(folder), "chat template", str(folder), *parts)
    (folder / "chat_template.jinja").unlink()
    refusal(lambda: load_tokenizer(folder), "no chat template", str(folder))


def test_a_tokenizer_that_does_not_load_is_refused(model_dir, tmp_path):
    refusal(
        lambda: load_tokenizer(broken_copy(model_dir, tmp_path, tokenizer_json='{"model":')),
        "the tokenizer does not load",
        str(tmp_path),
    )


@pytest.mark.parametrize(
    ("generation_config", "expected"),
    [(None, [0]), ({}, [0]), ({"eos_token_id": 2}, [0, 2]), ({"eos_token_id": [2, 0, 1]}, [0, 1, 2])],
)
def test_stop_ids_are_the_union_of_tokenizer_and_generation_config(tokenizer, tmp_path, generation_config, expected):
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert stop_token_ids(tokenizer, tmp_path) == expected


@pytest.mark.parametrize(
    "text", ['{"eos_token_id": "x"}', '{"eos_token_id": [true]}', '{"eos_token_id": 9999}', "[", "[]"]
)
def test_a_wrong_generation_config_is_refused(tokenizer, tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    refusal(lambda: stop_token_ids(tokenizer, tmp_path), "generation_config.json")


# ---- Tokenising ----


def test_prompt_ids_are_the_template_text_up_to_the_response(tmp_path, tokenizer):
    names = write(tmp_path / "a.parquet", [row("1 + 1", 7), row("é", 8), row("1 + 1", 9)])
    for kwargs, tail in (({}, ""), ({"enable_thinking": False}, "<none>")):
        prompts = prompts_of(DataConfig(train_files=names, chat_template_kwargs=kwargs), tokenizer)
        texts = [tokenizer.decode(sample.prompt_ids) for sample in prompts.all_samples()]
        contents = ["1 + 1", "é", "1 + 1"]
        assert texts == [f"<|im_start|>user:{c}<|im_end|><|im_start|>assistant:{tail}" for c in contents]
        assert prompts.all_samples()[0].prompt_ids[0] == 1, "special tokens must be one id"
        assert [(s.uid, s.ground_truth, s.extra_info) for s in prompts.all_samples()] == [
            (i, str(i + 7), {"index": i + 7}) for i in range(3)
        ]
        assert all(type(i) is int for i in prompts.all_samples()[1].prompt_ids) and prompts.warnings == ()


def test_a_template_variable_without_effect_is_a_warning(tmp_path, tokenizer):
    names = write(tmp_path / "a.parquet", [row("x")])
    cfg = DataConfig(train_files=names, chat_template_kwargs={"enable_thinkin": True, "enable_thinking": True})
    (warning,) = prompts_of(cfg, tokenizer).warnings
    assert "enable_thinkin has no effect" in warning


def test_a_row_that_the_template_refuses_is_named_with_the_template_line(tmp_path, tokenizer):
    tool = [{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}]
    names = write(tmp_path / "a.parquet", [row(f"{i}", i) for i in range(1500)] + [row("x", prompt=tool)])
    refusal(
        lambda: prompts_of(DataConfig(train_files=names), tokenizer),
        "row 1500",
        "template line 2",
        "no tools here",
        "user, tool",
    )


def test_a_row_of_which_the_template_makes_nothing_is_refused(model_dir, tmp_path):
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    plain = load_tokenizer(broken_copy(model_dir, tmp_path, chat_template_jinja=template))
    cfg = DataConfig(train_files=write(tmp_path / "a.parquet", [row("x"), row("")]))
    refusal(lambda: prompts_of(cfg, plain), "without tokens", "row 1")


LENGTHS = (3, 20, 10, 21)


def lengths_file(tmp_path):
    return write(tmp_path / "lengths.parquet", [row("abcdefghijklmnopqrstu"[:n], n) for n in LENGTHS])


def ids_of(tokenizer, n):
    text = f"<|im_start|>user:{'abcdefghijklmnopqrstu'[:n]}<|im_end|><|im_start|>assistant:"
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_overlong_prompts_are_dropped_and_counted(tmp_path, tokenizer):
    limit = len(ids_of(tokenizer, 10))
    cfg = DataConfig(train_files=lengths_file(tmp_path), max_prompt_len=limit, filter_overlong_prompts=True)
    prompts = prompts_of(cfg, tokenizer)
    assert [s.ground_truth for s in prompts.all_samples()] == ["3", "10"]
    assert [s.uid for s in prompts.all_samples()] == [0, 1]
    assert (prompts.num_filtered, prompts.num_truncated, prompts.longest) == (2, 0, limit + 11)
    assert f"2 of 4 prompts of --data.train-files have more than --data.max-prompt-len {limit}" in prompts.warnings[0]
    assert [s.prompt_ids for s in prompts.all_samples()] == [ids_of(tokenizer, 3), ids_of(tokenizer, 10)]


@pytest.mark.parametrize("limit_change", [0, -1])
@pytest.mark.parametrize("how", ["left", "right", "middle"])
def test_truncation_keeps_the_promised_tokens(tmp_path, tokenizer, how, limit_change):
    limit = len(ids_of(tokenizer, 10)) + limit_change
    prompts = prompts_of(
        DataConfig(train_files=lengths_file(tmp_path), max_prompt_len=limit, truncation=how), tokenizer
    )
    half = limit // 2
    for n, sample in zip(LENGTHS, prompts.all_samples(), strict=True):
        ids = ids_of(tokenizer, n)
        cut = {"left": ids[-limit:], "right": ids[:limit], "middle": ids[:half] + ids[half - limit :]}[how]
        assert sample.prompt_ids == (ids if len(ids) <= limit else cut)
        assert len(sample.prompt_ids) == min(len(ids), limit)
    assert prompts.num_truncated == (2 if limit_change == 0 else 3) and how in prompts.warnings[0]


def test_truncation_to_one_token_keeps_one(tmp_path, tokenizer):
    for how, place in (("left", -1), ("right", 0), ("middle", -1)):
        prompts = prompts_of(
            DataConfig(train_files=lengths_file(tmp_path), max_prompt_len=1, truncation=how), tokenizer
        )
        assert prompts.all_samples()[0].prompt_ids == [ids_of(tokenizer, 3)[place]]


def test_a_prompt_over_the_limit_stops_the_run_with_its_row_and_length(tmp_path, tokenizer):
    length = len(ids_of(tokenizer, 20))
    cfg = DataConfig(train_files=lengths_file(tmp_path), max_prompt_len=length - 1)
    flags = ("--data.max-prompt-len", "--data.filter-overlong-prompts", "--data.truncation")
    refusal(lambda: prompts_of(cfg, tokenizer), "row 1", str(length), str(length + 1), "1 more of 4", *flags)
    fits = DataConfig(train_files=lengths_file(tmp_path), max_prompt_len=length + 1)
    assert len(prompts_of(fits, tokenizer)) == 4


def test_all_prompts_over_the_limit_gives_counts_and_the_longest(tmp_path, tokenizer):
    cfg = DataConfig(train_files=lengths_file(tmp_path), max_prompt_len=5, filter_overlong_prompts=True)
    longest = len(ids_of(tokenizer, 21))
    refusal(lambda: prompts_of(cfg, tokenizer), "all 4 rows", str(longest), "--data.max-prompt-len 5")


def test_the_first_rows_are_used_with_max_samples(tmp_path, tokenizer):
    names = lengths_file(tmp_path)
    cfg = DataConfig(train_files=names, val_files=names, train_max_samples=3, val_max_samples=100)
    assert [s.ground_truth for s in prompts_of(cfg, tokenizer).all_samples()] == ["3", "20", "10"]
    assert len(prompts_of(cfg, tokenizer, split="val")) == 4


# ---- Custom dataset class ----

DATASET = """
import pyarrow.parquet as pq

class Helper: pass

class Mine:
    def __init__(self, *, data_files, tokenizer, config):
        self.rows = [row for file in data_files for row in pq.read_table(file).to_pylist()]
        assert tokenizer.eos_token == "<|im_end|>" and config.max_prompt_len == 512

    def __len__(self):
        return 2 * len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i // 2]
        return row if i % 2 == 0 else {**row, "prompt": [{"role": "user", "content": "again"}]}
"""


def custom(tmp_path, source, name="Mine"):
    (tmp_path / "mine.py").write_text(source)
    names = write(tmp_path / "a.parquet", [row("x", 0), row("y", 1)])
    return DataConfig(train_files=names, dataset_path=str(tmp_path / "mine.py"), dataset_name=name)


def test_a_dataset_class_makes_the_rows_of_both_splits(tmp_path, tokenizer):
    cfg = custom(tmp_path, DATASET)
    samples = prompts_of(cfg, tokenizer).all_samples()
    assert ["again" in tokenizer.decode(s.prompt_ids) for s in samples] == [False, True, False, True]
    assert [s.ground_truth for s in samples] == ["0", "0", "1", "1"]
    assert prompts_of(cfg, tokenizer, split="val").all_samples() == []
    both = DataConfig(**{**vars(cfg), "val_files": cfg.train_files})
    assert len(prompts_of(both, tokenizer, split="val")) == 4


def test_a_bad_dataset_file_is_refused_before_it_runs(tmp_path):
    marker = tmp_path / "ran"
    source = f"open({str(marker)!r}, 'w')\n" + DATASET
    refusal(lambda: check_data_files(custom(tmp_path, source, "Theirs")), "Helper, Mine", "Theirs", "mine.py")
    refusal(lambda: check_data_files(custom(tmp_path, "x = 1\nclass Mine(:\n")), "line 2", "mine.py")
    missing = DataConfig(dataset_path=str(tmp_path / "miné.py"), dataset_name="Mine")
    refusal(lambda: check_data_files(missing), "no such file", "--data.dataset-path", "did you mean")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("class Helper", "1 / 0\nclass Helper"), ["importing it", "ZeroDivisionError", "mine.py line 4"]),
        (("class Helper", "import nosuch\nclass Helper"), ["importing it", "nosuch", "mine.py line 4"]),
        (("class Helper", "exit(3)\nclass Helper"), ["importing it", "SystemExit"]),
        (("config):", "config, processor):"), ["making it", "processor"]),
        (("return 2 * len(self.rows)", "return 5"), ["row 4", "IndexError", "mine.py line 15"]),
        (("return 2 * len(self.rows)", "return 0"), ["no rows"]),
        (("return row if", "return [row] if"), ["row 0", "list", "expected dict"]),
        (('"role": "user"', '"role": "human"'), ["row 1", "message 0", "'human'"]),
        (('"again"', '"\\ud83d"'), ["row 1", "column 'prompt'", "half of a surrogate pair"]),
        (('{**row, "prompt"', '{**row, "data_source": "a\\x1b[31m\\n", "prompt"'), ["row 1", "'a\\x1b[31m\\n'"]),
        (("return row if", "return {'text': 1} if True or"), ["columns 'prompt' and 'data_source' and 'reward_model'"]),
        (
            (
                "return row if",
                "return {**row, 'extra_info': None} if i == 0 else {**row, 'extra_info': 'x'} if i == 3 else row if",
            ),
            ["row 3", "one type"],
        ),
    ],
)
def test_a_failing_dataset_class_is_refused_with_the_step_that_failed(tmp_path, tokenizer, change, parts):
    source = DATASET.replace(*change)
    assert source != DATASET
    refusal(lambda: prompts_of(custom(tmp_path, source), tokenizer), "mine.py", *parts)


# ---- Order ----


def rows_of(samples):
    return [int(sample.ground_truth) for sample in samples]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    restores=st.sets(st.integers(0, 11)),
    seed=st.integers(0, 2**63 - 1),
    shuffle=st.booleans(),
)
def test_any_split_with_restores_in_between_equals_one_pass(eleven, counts, restores, seed, shuffle):
    whole = PromptStream(eleven, seed=seed, shuffle=shuffle).next(sum(counts))
    stream, parts = PromptStream(eleven, seed=seed, shuffle=shuffle), []
    for i, count in enumerate(counts):
        if i in restores:
            state = json.loads(json.dumps(stream.state()))
            stream = PromptStream(eleven, seed=seed, shuffle=shuffle)
            stream.next(i)  # a used stream restores as well as a new one
            stream.restore(state)
        parts += stream.next(count)
    assert parts == whole
    assert [sample.uid for sample in whole] == list(range(sum(counts)))
    for start in range(0, len(whole) - 10, 11):
        assert sorted(rows_of(whole[start : start + 11])) == list(range(11)), "each row once an epoch"


def test_the_state_at_an_epoch_border_is_the_start_of_the_next_epoch(eleven):
    stream = PromptStream(eleven, seed=1)
    stream.next(22)
    assert (stream.state()["epoch"], stream.state()["place"]) == (2, 0)
    following, resumed = PromptStream(eleven, seed=1), PromptStream(eleven, seed=1)
    resumed.restore(stream.state())
    assert resumed.next(11) == following.next(33)[22:] and len(rows_of(stream.next(11))) == 11


def test_the_order_depends_on_seed_and_epoch_alone(eleven):
    orders = [rows_of(PromptStream(eleven, seed=seed).next(33)) for seed in (0, 1)]
    epochs = [tuple(order[i : i + 11]) for order in orders for i in (0, 11, 22)]
    assert len(set(epochs)) == 6
    np.random.seed(5)
    torch.manual_seed(5)
    before = (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert rows_of(PromptStream(eleven, seed=0).next(33)) == orders[0]
    assert (np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert rows_of(PromptStream(eleven, seed=0, shuffle=False).next(13)) == [*range(11), 0, 1]


def test_the_order_is_the_same_for_ever(eleven):
    # Written down once: a checkpoint made by one version must continue in the same order under another.
    assert rows_of(PromptStream(eleven, seed=7).next(33))[22:] == [10, 8, 6, 4, 0, 5, 7, 1, 3, 9, 2]


def test_every_row_is_equally_likely_in_every_place(eleven):
    counts = np.zeros((11, 11))
    order = np.array(rows_of(PromptStream(eleven, seed=3).next(2000 * 11))).reshape(2000, 11)
    for place in range(11):
        counts[place] = np.bincount(order[:, place], minlength=11)
    chi_squared = ((counts - 2000 / 11) ** 2 / (2000 / 11)).sum()
    assert chi_squared < 150, chi_squared  # 100 degrees of freedom: above 150 once in a thousand


def test_a_state_of_other_data_or_another_seed_is_refused(tmp_path, tokenizer, eleven):
    state = PromptStream(eleven, seed=1).state()
    refusal(lambda: PromptStream(eleven, seed=2).restore(state), "another seed", "found 2, expected 1")
    refusal(lambda: PromptStream(eleven, seed=1, shuffle=False).restore(state), "another shuffle")
    for change in ({"i": 11}, {"reward_model": {"style": "rule", "ground_truth": "5 "}}, {"text": "problem five"}):
        rows = [row(f"problem {i}", i) for i in range(11)]
        rows[5] = row(change.pop("text", "problem 5"), change.pop("i", 5), **change)
        other = prompts_of(DataConfig(train_files=write(tmp_path / "o.parquet", rows)), tokenizer)
        refusal(
            lambda other=other: PromptStream(other, seed=1).restore(state),
            "another fingerprint",
            eleven.fingerprint,
            other.fingerprint,
        )
