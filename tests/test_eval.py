"""eval.py: every response once, whatever happens; the same bytes from any ranks, model folder or checkpoint."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

import lib.evaluation.any_model
from eval import EvalScriptConfig
from lib.config.flags import parse_args
from lib.data.reading import read_rows
from lib.dist import SINGLE
from lib.errors import DamagedCheckpoint, UserError
from lib.evaluation.any_model import find_model, iter_weights, load_eval_prompts, what_defines_responses
from lib.evaluation.inputs import COLUMNS, Parts, parts_folder
from lib.storage.checkpoint_folder import hash_file, publish, stage
from tests.ranks import LIMIT_S, ONE_KILLED, ROOT, Job, torchrun
from tests.test_eval_files import DATA, ROLLOUT, group
from tests.tiny import make_model, make_questions, make_tokenizer

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] == 3:
        return None
    right = len(solution_str.encode()) % 3 == 0
    return {"score": 2.0 * right - 1, "acc": right, "pred": str(len(solution_str) % 4), "format": solution_str != ""}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with its tokenizer, questions, a reward function, and a checkpoint of the same weights in 3 shards."""
    folder = tmp_path_factory.mktemp("eval")
    make_model(folder / "model")
    make_tokenizer(folder / "model")
    make_questions(folder / "questions.parquet", count=20, start=0)
    (folder / "reward.py").write_text(REWARD)
    make_checkpoint(folder / "run", 4, folder / "model")
    return folder


def make_checkpoint(run, step, model):
    """A checkpoint as training leaves it: float32 shards split unevenly along the first dimension, manifest last."""
    staging = stage(run, step, "test")
    (staging / "actor" / "model").mkdir(parents=True)
    shutil.copytree(
        model, staging / "actor" / "huggingface", ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True
    )
    weights = load_file(model / "model.safetensors")
    for rank, (start, end) in enumerate([(0.0, 0.3), (0.3, 0.3), (0.3, 1.0)]):
        pieces = {}
        for name, weight in weights.items():
            begin = int(start * len(weight))
            pieces[name] = (weight[begin : int(end * len(weight))].contiguous(), [begin] + [0] * (weight.dim() - 1))
        offsets = {name: {"saved_offsets": offset} for name, (_, offset) in pieces.items()}
        file = staging / "actor" / "model" / f"shard-{rank}.safetensors"
        save_file({name: piece for name, (piece, _) in pieces.items()}, file,
                  metadata={"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"})  # fmt: skip
    (staging / "trainer.json").write_text("{}")
    files = {str(path.relative_to(staging)): hash_file(path) for path in staging.rglob("*") if path.is_file()}
    publish(staging, run / f"global_step_{step}", files, inventory={})


def words(folder, output, *more, model="model", n=4):
    return (
        "eval.py", "--model.path", str(folder / model), "--data.files", str(folder / "questions.parquet"),
        "--output", str(folder / output), "--data.max-prompt-len", "24", "--rollout.max-response-len", "12",
        "--rollout.n", str(n), "--rollout.temperature", "1.0", "--reward.path", str(folder / "reward.py"),
        "--reward.num-workers", "1", "--seed", "3", *more,
    )  # fmt: skip


def start(*arguments, env=None):
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip


def outputs(folder, name):
    return [(folder / name).with_suffix(suffix).read_bytes() for suffix in (".parquet", ".json", ".html")]


# ---- The whole command ----


@pytest.fixture(scope="module")
def one_process(folder):
    """With --overwrite, over what an evaluation left that differed in --rollout.n alone."""
    rollout = replace(ROLLOUT, n=2, temperature=1.0)
    model = find_model(str(folder / "model"), DATA, rollout, SINGLE)
    rows, _ = read_rows((str(folder / "questions.parquet"),), "--data.files")
    stop_ids, prompts = load_eval_prompts(DATA, model, rows, date="2024-02-03T04:05:06")
    state = what_defines_responses(rollout, model, prompts, stop_ids, dtype="float32", seed=3)
    left = Parts(parts_folder(folder / "one.parquet"), state, SINGLE, overwrite=False)
    left.add(group(0))
    left._file.close()
    left.log.close()
    return start(*words(folder, "one.parquet", "--overwrite"))


@pytest.fixture(scope="module")
def two_ranks(folder, one_process):
    """2 ranks, from the run folder's newest checkpoint."""
    return torchrun(2, *words(folder, "two.parquet", model="run"))


def test_the_output_has_the_inputs_rows_and_a_list_per_row(folder, one_process):
    assert one_process.returncode == 0, one_process.stdout + one_process.stderr[-3000:]
    before, after = (pq.read_table(folder / name) for name in ("questions.parquet", "one.parquet"))
    assert after.column_names == [*before.column_names, *COLUMNS]
    assert after.select(before.column_names).equals(before)
    for row in after.to_pylist():
        assert [len(row[name]) for name in COLUMNS] == [4] * 5
        for text, score, answer, reason, length in zip(*(row[name] for name in COLUMNS), strict=True):
            assert reason == ("length" if length == 12 else "stop") or (reason, length) == ("stop", 12)
            declined = row["extra_info"]["index"] == 3
            assert score == (None if declined else 1.0 if len(text.encode()) % 3 == 0 else -1.0)
            assert answer == (None if declined else str(len(text) % 4))
    assert len({tuple(row["responses"]) for row in after.to_pylist()}) > 15
    assert not parts_folder(folder / "one.parquet").exists()


def test_the_terminal_shows_the_evaluation_and_not_the_libraries(one_process):
    assert "0 of 20 prompts are finished already" in one_process.stdout
    assert "all 18 tensors were written" in one_process.stdout and "pass@4" in one_process.stdout
    for noise in ("INFO", "WARNING", "Warning", "Traceback", "nanobind"):
        assert noise not in one_process.stdout + one_process.stderr


def test_overwrite_takes_nothing_of_an_unfinished_evaluation_with_another_n(folder, one_process):
    assert "0 of 20 prompts are finished already" in one_process.stdout
    assert {len(found) for found in pq.read_table(folder / "one.parquet")["responses"].to_pylist()} == {4}


def test_ranks_and_the_kind_of_model_folder_change_no_byte(folder, one_process, two_ranks):
    assert two_ranks.returncode == 0, two_ranks.stdout + two_ranks.stderr[-3000:]
    one, two = outputs(folder, "one.parquet"), outputs(folder, "two.parquet")
    pages = [
        re.subn(rb"<dt>model</dt><dd>[^<]*/(\w+) \(float32, [^<]*</dd>", rb"\1", page) for page in (one[2], two[2])
    ]
    assert [count for _, count in pages] == [1, 1] and b"<dt>temperature</dt><dd>1</dd>" in one[2]
    assert re.sub(rb"(/|\n<dl>)model\b", rb"\1run", pages[0][0]) == pages[1][0]
    assert one[0] == two[0]
    one, two = (json.loads(text) for text in (one[1], two[1]))
    assert one["summary"] == two["summary"] and one["responses"]["prompts"] == two["responses"]["prompts"]
    assert one["summary"]["overall"]["num_unscored"] == 4 and one["summary"]["test"]["variable"] == "acc"


def test_scoring_alone_gives_the_scores_of_the_whole_run_without_a_model(folder, one_process):
    file = folder / "one.parquet"
    code = (
        "import sys; sys.argv[0] = 'eval.py'; import runpy; runpy.run_path('eval.py', run_name='__main__');"
        "assert not {'vllm', 'transformers'} & set(sys.modules)"
    )
    done = start("-c", code, "--score-only", "--data.files", str(file), "--output", str(folder / "again.parquet"),
                 "--reward.path", str(folder / "reward.py"))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "again.parquet").read_bytes() == file.read_bytes()
    one, again = (json.loads((folder / name).read_text())["summary"] for name in ("one.json", "again.json"))
    assert one == again


REVEALING = """
def compute_score(data_source, solution_str, ground_truth, extra_info, api_key):
    return {"score": 1.0, "pred": f"{api_key} \\ud83d"}
"""


def test_an_output_has_no_secret_and_what_no_file_can_hold_as_an_escape(folder, tmp_path):
    """Responses and predictions with a key; half of a surrogate pair, as json.loads makes it of a model's text."""
    rows = pq.read_table(folder / "questions.parquet")
    responses = pa.array([["with canary-of-option", "canary-2f9c41d7"]] * len(rows))
    pq.write_table(rows.append_column("responses", responses), tmp_path / "in.parquet")
    (tmp_path / "reward.py").write_text(REVEALING)
    done = start("eval.py", "--score-only", "--data.files", str(tmp_path / "in.parquet"), "--output",
                 str(tmp_path / "out.parquet"), "--reward.path", str(tmp_path / "reward.py"), "--reward.kwargs",
                 '{"api_key": "canary-of-option"}', env={"HF_TOKEN": "canary-2f9c41d7"})  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(files := outputs(tmp_path, "out.parquet")) == 3 and not [data for data in files if b"canary" in data]
    [row] = pq.read_table(tmp_path / "out.parquet").slice(0, 1).to_pylist()
    assert row["responses"] == ["with [api_key]", "[HF_TOKEN]"] and row["predictions"] == ["[api_key] \\ud83d"] * 2
    assert "canary" not in done.stdout + done.stderr


@pytest.mark.slow
def test_greedy_responses_of_a_tensor_parallel_engine_are_those_of_one(folder):
    greedy = ("--rollout.temperature", "0", "--generate-only")
    for size, output in (("1", "tp1.parquet"), ("2", "tp2.parquet")):
        done = torchrun(2, *words(folder, output, *greedy, "--rollout.tensor-model-parallel-size", size, n=1))
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert outputs(folder, "tp1.parquet") == outputs(folder, "tp2.parquet")
    assert "scores" not in pq.read_schema(folder / "tp1.parquet").names


# ---- Killed and started again ----


def finished_uids(parts):
    """The uid of every whole line, in the files' order."""
    lines = [line for file in sorted(parts.glob("rank_*.jsonl")) for line in file.read_bytes().split(b"\n")[:-1]]
    return [json.loads(line.split(b" ", 1)[1])["uid"] for line in lines if line.endswith(b"}")]


def descendants(pid):
    """The process and all below it."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parents[int(entry)] = int(file.read().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    found = [pid]
    for process in found:
        found += [child for child, parent in parents.items() if parent == process]
    return found


def killed_after(command, parts, *, num_groups, delay_s):
    """Starts the command and kills all of it once so many groups are finished, and some time later."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    deadline = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if parts.exists() and len(finished_uids(parts)) >= num_groups:
            break
        time.sleep(0.002)
    time.sleep(delay_s)
    for pid in descendants(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return process.communicate(timeout=LIMIT_S)[0]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_killed_at_any_moment_and_started_again_equals_undisturbed_and_generates_nothing_twice(folder, num_ranks):
    make_questions(folder / "many.parquet", count=32, start=0)
    slow = ("--data.files", str(folder / "many.parquet"), "--rollout.max-response-len", "48", "--rollout.max-num-seqs",
            "4", "--rollout.ignore-eos", "True")  # fmt: skip
    undisturbed = start(*words(folder, f"whole_{num_ranks}.parquet", *slow))
    assert undisturbed.returncode == 0, undisturbed.stdout + undisturbed.stderr[-3000:]
    output = f"killed_{num_ranks}.parquet"
    parts = parts_folder(folder / output)
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}", "--standalone"]
    command = [*launcher, *words(folder, output, *slow)]
    generator, num_finished = random.Random(num_ranks), 0
    for num_groups in (0, generator.randint(1, 15), generator.randint(16, 28)):
        said = killed_after(command, parts, num_groups=num_groups, delay_s=generator.random() * 0.2)
        uids = finished_uids(parts)
        assert len(uids) == len(set(uids)) >= num_finished  # every group once, over all launches so far
        if "finished already" in said:
            assert f"{num_finished} of 32 prompts are finished already" in said
        num_finished = len(uids)
    assert 16 <= num_finished <= 32
    done = torchrun(num_ranks, *words(folder, output, *slow))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{num_finished} of 32 prompts are finished already" in done.stdout
    assert num_finished == 32 or f"generated {32 - num_finished} prompts x 4" in done.stdout
    assert outputs(folder, output) == outputs(folder, f"whole_{num_ranks}.parquet")


HANGING = """
import pathlib, time
def compute_score(**_):
    pathlib.Path(__file__).with_name("begun").touch()
    time.sleep(FOREVER)
"""


@pytest.mark.parametrize("late", [False, True])
def test_a_rank_that_is_killed_is_named_by_another_in_one_line(folder, tmp_path, late):
    """`late`: where the machine is busy, torchrun has asked for the exit status before the other rank looks."""
    (tmp_path / "reward.py").write_text(HANGING.replace("FOREVER", str(2 * LIMIT_S)))
    with Job(2, *words(folder, f"killed_{late}.parquet"), "--reward.path", str(tmp_path / "reward.py")) as running:
        running.until((tmp_path / "begun").exists)
        first, second = (running.pid_of_rank(rank) for rank in range(2))
        if late:
            os.kill(first, signal.SIGSTOP)
        os.kill(second, signal.SIGKILL)
        if late:
            running.until(lambda: not Path(f"/proc/{second}").exists())
            os.kill(first, signal.SIGCONT)
        assert running.wait() == 1
        [line] = [line for line in running.stderr.splitlines() if line.startswith("error[")]
        assert re.match(ONE_KILLED, line) and "it may have been memory" in line
        assert str(ROOT / "lib") not in running.stderr  # no traceback
        running.wait_for_all()


def test_a_log_that_cannot_be_written_is_told_with_the_options_of_an_evaluation(folder):
    parts = parts_folder(folder / "log.parquet")
    command = words(folder, "log.parquet", "--generate-only")
    killed_after([sys.executable, *command], parts, num_groups=0, delay_s=0.5)
    log = parts / "logs" / "rank_0.log"
    log.unlink(missing_ok=True)
    log.mkdir()
    done = start(*command)
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert done.returncode == 2 and f"cannot write the evaluation; {log}; Is a directory" in line
    assert "choose another --output" in line and "--run-dir" not in line


# ---- The model ----


def test_the_date_that_a_template_prints_is_kept_with_the_responses(folder, tmp_path):
    shutil.copytree(folder / "model", tmp_path / "clock")
    (tmp_path / "clock" / "chat_template.jinja").write_text("{{ strftime_now('%Y-%m-%dT%H:%M:%S') }}")
    rows, _ = read_rows((str(folder / "questions.parquet"),), "--data.files")
    dates = {}
    for path in (tmp_path / "clock", folder / "model"):
        model = find_model(str(path), DATA, ROLLOUT, SINGLE)
        stop_ids, prompts = load_eval_prompts(DATA, model, rows, date="2024-02-03T04:05:06")
        text = model.tokenizer.decode(prompts.all_samples()[0].prompt_ids)
        state = what_defines_responses(ROLLOUT, model, prompts, stop_ids, dtype="float32", seed=0)
        dates[text] = state.get("date")
    assert dates == {"2024-02-03T04:05:06": "2024-02-03T04:05:06", "whatis0": None}


def test_responses_are_finished_under_the_options_that_drew_them_on_any_machine(folder):
    model = find_model(str(folder / "model"), DATA, ROLLOUT, SINGLE)
    rows, _ = read_rows((str(folder / "questions.parquet"),), "--data.files")
    stop_ids, prompts = load_eval_prompts(DATA, model, rows, date="2024-02-03T04:05:06")

    def state(**changes):
        return what_defines_responses(replace(ROLLOUT, **changes), model, prompts, stop_ids, dtype="float32", seed=0)

    drawing = {"n": 2, "max_response_len": 9, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "stop": ("a",),
               "ignore_eos": True}  # fmt: skip
    for name, value in drawing.items():
        flag = f"--rollout.{name.replace('_', '-')}"
        assert state(**{name: value}) == {**state(), flag: list(value) if name == "stop" else value}
    assert state(gpu_memory_utilization=0.3, max_num_seqs=7, enforce_eager=True) == state()


def test_every_kind_of_path_gives_the_same_weights(folder):
    expected = load_file(folder / "model" / "model.safetensors")
    fingerprints = {}
    for path in ("model", "run", "run/global_step_4", "run/global_step_4/actor"):
        model = find_model(str(folder / path), DATA, ROLLOUT, SINGLE)
        found = dict(iter_weights(model, torch.float32))
        assert {name for name in expected if name != "lm_head.weight"} == set(found)
        assert all(torch.equal(weight, expected[name]) for name, weight in found.items())
        fingerprints[path] = model.fingerprint
    assert len(set(fingerprints.values())) == 2  # a folder and a checkpoint have different files


def test_a_fingerprint_changes_with_any_weight(folder, tmp_path):
    before = find_model(str(folder / "model"), DATA, ROLLOUT, SINGLE).fingerprint
    copy = shutil.copytree(folder / "model", tmp_path / "model")
    assert find_model(str(copy), DATA, ROLLOUT, SINGLE).fingerprint == before
    (copy / "parts").mkdir()
    (copy / "model.safetensors").rename(copy / "parts" / "all.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(copy / "parts" / "all.safetensors"), "parts/all.safetensors")}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_model(str(copy), DATA, ROLLOUT, SINGLE).fingerprint != before  # the same weights in another file
    (copy / "parts" / "all.safetensors").rename(copy / "model.safetensors")
    (copy / "model.safetensors.index.json").unlink()
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    assert find_model(str(copy), DATA, ROLLOUT, SINGLE).fingerprint != before


def test_a_model_without_a_chat_template_is_refused_before_its_weights_are_hashed(folder, tmp_path, monkeypatch):
    copy = shutil.copytree(folder / "model", tmp_path / "copy", ignore=shutil.ignore_patterns("chat_template*"))
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    read = []
    monkeypatch.setattr(lib.evaluation.any_model, "hash_files", lambda *_: read.append(1))
    with pytest.raises(UserError, match="no chat template"):
        find_model(str(copy), DATA, ROLLOUT, SINGLE)
    assert not read


def test_a_head_that_is_not_the_embedding_it_is_tied_to_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder / "model", tmp_path / "copy")
    weights = load_file(copy / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    save_file(weights | {"lm_head.weight": head}, copy / "model.safetensors")
    find_model(str(copy), DATA, ROLLOUT, SINGLE)
    head[-1, -1] += 1
    save_file(weights | {"lm_head.weight": head}, copy / "model.safetensors")
    with pytest.raises(UserError, match="set tie_word_embeddings to false"):
        find_model(str(copy), DATA, ROLLOUT, SINGLE)


def test_damaged_checkpoints_are_named_and_an_older_whole_one_is_taken(folder, tmp_path):
    make_checkpoint(tmp_path / "run", 2, folder / "model")
    make_checkpoint(tmp_path / "run", 6, folder / "model")
    shard = tmp_path / "run" / "global_step_6" / "actor" / "model" / "shard-2.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    model = find_model(str(tmp_path / "run"), DATA, ROLLOUT, SINGLE)
    assert "global_step_2" in str(model.files.folder) and "shard-2.safetensors" in model.warnings[0]
    shard.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])  # of its full size: only its hash tells
    with pytest.raises(DamagedCheckpoint, match=r"shard-2\.safetensors"):
        find_model(str(tmp_path / "run" / "global_step_6"), DATA, ROLLOUT, SINGLE)
    shutil.rmtree(tmp_path / "run" / "global_step_2")
    shard.write_bytes(whole)
    (tmp_path / "run" / "global_step_6" / "trainer.json").unlink()  # which an evaluation does not read
    assert not find_model(str(tmp_path / "run"), DATA, ROLLOUT, SINGLE).warnings
    shard.write_bytes(whole[:-1])
    with pytest.raises(DamagedCheckpoint, match=r"shard-2\.safetensors"):
        find_model(str(tmp_path / "run"), DATA, ROLLOUT, SINGLE)
    shutil.rmtree(tmp_path / "run" / "global_step_6")
    (tmp_path / "run" / "status.json").write_text("{}")
    with pytest.raises(UserError, match="the run has no checkpoint"):
        find_model(str(tmp_path / "run"), DATA, ROLLOUT, SINGLE)


@pytest.mark.slow
def test_a_parameter_that_no_weight_reaches_stops_the_evaluation(folder, tmp_path):
    code = (
        "import eval, lib.evaluation.any_model as m, sys; whole = m.iter_weights\n"
        "m.iter_weights = lambda *a: ((n, w) for n, w in whole(*a) if n != 'model.layers.1.mlp.down_proj.weight')\n"
        "eval.main(eval.parse_cli(eval.EvalScriptConfig()))\n"
    )
    done = start("-c", code, *words(folder, "poison.parquet")[1:])
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert done.returncode == 1 and "did not reach 1 of 18" in line and "model.layers.1.mlp.down_proj.weight" in line


# ---- What is refused ----


def refused(folder, *more, **changes):
    done = start(*words(folder, changes.pop("output", "refused.parquet"), *more, **changes))
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert done.returncode == int(line[6]), line
    assert line.count("; ") >= 2 and not list(folder.glob("refused*")), line
    return line


def test_bad_input_ends_with_one_line_before_anything_is_written(folder):
    assert "no such model folder" in refused(folder, model="modl")
    named = ("--turns.path", str(folder / "reward.py"), "--turns.name", "Game")
    assert "the turns' file has no such environment or tool" in refused(folder, *named)
    assert "column 'prompt' is missing" in refused(folder, "--data.files", str(_table(folder, ["data_source"])))
    copy = shutil.copytree(folder / "model", folder / "vocabulary", dirs_exist_ok=True)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    assert "found 200 tokens, expected at most vocab_size=100" in refused(folder, model="vocabulary")


def _table(folder, names):
    path = folder / "columns.parquet"
    pq.write_table(pq.read_table(folder / "questions.parquet").select(names), path)
    return path


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (("--rollout.temperature", "0"), ("--rollout.n 4", "set --rollout.temperature 1.0, or --rollout.n 1")),
        (("--generate-only", "--score-only"), ("nothing is left to do",)),
        (("--rollout.log-probs", "True"), ("only training has; --rollout.log-probs;",)),
        (("--rollout.partial-share", "0.5", "--rollout.sleep", "True"), ("--rollout.sleep, --rollout.partial-share;",)),
        (
            ("--rollout.max-continued", "3", "--rollout.max-log-probs-diff", "1"),
            ("--rollout.max-log-probs-diff, --rollout.max-continued;",),
        ),
        (("--seed", "-1"), ("--seed", "0 to 2**63")),
        (("--data.max-samples", "0"), ("--data.max-samples", "at least 1")),
        (("--data.max-prompt-len", "0"), ("--data.max-prompt-len", "at least 1")),
        (("--data.train-files", "x"), ("nearest is --data.files",)),
        (("--turns.name", "Game"), ("environments without their file", "give --turns.path FILE")),
        (("--turns.max-turns", "0"), ("--turns.max-turns", "at least 1")),
        (("--turns.path", "g.py", "--rollout.stop", "x"), ("a turn must end as", "found --rollout.stop,")),
        (("--turns.path", "g.py", "--rollout.ignore-eos", "True"), ("a turn must end as", "--rollout.ignore-eos,")),
        (("--turns.path", "g.py", "--score-only"), ("nothing is answered", "found --turns.path g.py")),
    ],
)
def test_options_that_do_not_fit_are_told_with_a_remedy(folder, options, parts):
    with pytest.raises(UserError) as caught:
        parse_args(EvalScriptConfig(), [*words(folder, "x.parquet")[1:], *options])
    assert all(part in str(caught.value) for part in parts), caught.value
