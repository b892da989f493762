"""Every mistake of a user ends the whole command with one line that tells what, where and how to mend it.

What a check itself says is tested beside the check (test_parquet.py, test_model_files.py, test_scoring.py...); here are
the exit codes, the one line, the order (files before transformers is imported), and that all ranks end together.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lib.dist import SINGLE
from lib.errors import UserError
from lib.tracking.run import TrackingConfig, check_run
from tests.bad_input_worker import ACCEPTED
from tests.prefork import prefork
from tests.ranks import LIMIT_S, ROOT, torchrun
from tests.tiny import make_model, make_questions, make_tokenizer

OPTIONS = {
    "--model.path": "model",
    "--data.train-files": "train.parquet",
    "--data.val-files": "val.parquet",
    "--data.max-prompt-len": "24",
    "--rollout.max-response-len": "12",
    "--rollout.n": "4",
    "--rollout.max-num-seqs": "32",
    "--prompts-per-step": "4",
    "--mini-batch-size": "8",
    "--num-steps": "1",
    "--reward.path": "good.py",
    "--run-dir": "run",
}
"""A command line that is accepted. Values that name a file in the test's folder stand for its path."""

HEAD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    "


def make_files(folder: Path) -> Path:
    make_model(folder / "model")
    make_tokenizer(folder / "model")
    make_questions(folder / "train.parquet", count=20, start=0)
    make_questions(folder / "val.parquet", count=4, start=100)
    (folder / "good.py").write_text(HEAD + "return len(solution_str)\n")
    return folder


def command(folder: Path, changes: dict[str, str | list[str] | None]) -> list[str]:
    """The words of OPTIONS with changes; None: without this option; an option of no value: []."""
    words = []
    for option, value in (OPTIONS | changes).items():
        if value is not None:
            values = [value] if isinstance(value, str) else value
            ours = {"run", *(path.name for path in folder.iterdir())}
            words += [option, *(str(folder / value) if value in ours else value for value in values)]
    return words


# ---- One process ----


@dataclass(frozen=True)
class Case:
    """A command line with changes, made by `changes(folder)`, and what must come of it."""

    changes: Callable[[Path], dict]
    parts: tuple[str, ...]
    """What the line (or, if accepted, the output) must hold."""
    code: int = 2
    late: bool = False
    """Whether the mistake needs the tokenizer or the model's code to be seen."""
    env: dict[str, str] = field(default_factory=dict)


def flags(*words: str) -> Callable[[Path], dict]:
    """A change of options alone: flags("--seed", "-1")."""
    return lambda folder: dict(zip(words[::2], words[1::2], strict=True))


def data(change: Callable[[list[dict]], None]) -> Callable[[Path], dict]:
    """Training rows after the change."""

    def make(folder: Path) -> dict:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = pq.read_table(folder / "train.parquet").to_pylist()
        change(rows)
        pq.write_table(pa.Table.from_pylist(rows), folder / "changed.parquet")
        return {"--data.train-files": "changed.parquet"}

    return make


def raw(content: bytes) -> Callable[[Path], dict]:
    """A training file of these bytes."""

    def make(folder: Path) -> dict:
        (folder / "raw.parquet").write_bytes(content)
        return {"--data.train-files": "raw.parquet"}

    return make


def model(change: Callable[[Path], None]) -> Callable[[Path], dict]:
    """A model folder after the change."""

    def make(folder: Path) -> dict:
        shutil.copytree(folder / "model", folder / "other")
        change(folder / "other")
        return {"--model.path": "other"}

    return make


def config(**entries) -> Callable[[Path], dict]:
    """A model folder with other entries in config.json."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return model(change)


def template(text: str) -> Callable[[Path], dict]:
    return model(lambda folder: (folder / "chat_template.jinja").write_text(text) and None)


def reward(text: str, **options: str) -> Callable[[Path], dict]:
    """A reward file, and further options."""

    def make(folder: Path) -> dict:
        (folder / "reward.py").write_text(text)
        return {"--reward.path": "reward.py"} | {f"--reward.{name}": value for name, value in options.items()}

    return make


def older_run(status: str, *more: str) -> Callable[[Path], dict]:
    def make(folder: Path) -> dict:
        (folder / "run").mkdir()
        (folder / "run" / "status.json").write_text(status)
        return {option: [] for option in more}

    return make


def odd_paths(folder: Path) -> dict:
    (folder / "ä b 🙂").mkdir()
    shutil.copytree(folder / "model", folder / "ä b 🙂" / "mödel")
    for name in ("train.parquet", "good.py"):
        shutil.copy(folder / name, folder / "ä b 🙂")
    home = "~/ä b 🙂"
    return {
        "--model.path": f"{home}/mödel",
        "--data.train-files": f"{home}/../ä b 🙂/train.parquet",
        "--reward.path": f"{home}/good.py",
        "--run-dir": f"{home}/rün",
    }


def prompts_of_another_node(folder: Path) -> dict:
    (folder / "node1").mkdir()
    make_questions(folder / "node1" / "train.parquet", count=20, start=1)
    return {"--data.train-files": "~/train.parquet"}


def another_head(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")


def first(row: dict) -> dict:
    return row["prompt"][0]


CASES = {
    # parquet files
    "P1-missing": Case(flags("--data.train-files", "/no/x.parquet"), ("no such file", "/no/x.parquet", "directory")),
    "P1-directory": Case(flags("--data.train-files", "model"), ("a directory, not a file", "--data.train-files")),
    "P3": Case(raw(b""), ("an empty file", "raw.parquet")),
    "P5": Case(raw(b'{"prompt": []}\n'), ("without messages", "raw.parquet line 1")),
    "P6": Case(raw(b"version https://git-lfs.github.com/spec/v1\n"), ("git lfs pull",)),
    "P8": Case(data(lambda rows: [row.pop("prompt") for row in rows]), ("'prompt' is missing", "--data.prompt-key")),
    "P10": Case(data(lambda rows: first(rows[7]).update(role="human")), ("row 7", "message 0", "'human'", "system")),
    "P11": Case(data(lambda rows: rows[7].update(prompt=[])), ("row 7", "without messages")),
    "P13": Case(
        lambda folder: {"--data.train-files": ["train.parquet", *data(as_numbers)(folder).values()]},
        ("train.parquet has string", "changed.parquet has int"),
    ),
    "P18-all": Case(
        flags("--data.max-prompt-len", "3", "--data.filter-overlong-prompts", "True"),
        ("all 20 rows have", "--data.max-prompt-len 3"),
        late=True,
    ),
    "P18-some": Case(
        data(lambda rows: first(rows[7]).update(content="x" * 30)),
        ("row 7", "30 tokens", "--data.max-prompt-len 24", "--data.filter-overlong-prompts True"),
        late=True,
    ),
    "P20": Case(
        data(lambda rows: [row.update(id=i // 2) for i, row in enumerate(rows)]), ("duplicate id", "row 0", "row 1")
    ),
    "P23": Case(data(lambda rows: first(rows[7]).update(content="x" * 50_000_000)), ("row 7", "too large")),
    "validation-empty": Case(flags("--data.val-files", ""), ("an empty path", "--data.val-files")),
    "swapped": Case(flags("--data.train-files", "model", "--model.path", "train.parquet"), ("a directory",)),
    # config and command line
    "C1": Case(flags("--learning_rat", "1"), ("unknown option", "nearest is --optim.lr")),
    "C1-verl": Case(flags("data.train_batch_size=256", []), ("--prompts-per-step",)),
    "C1-required": Case(flags("--model.path", None), ("no model is given", "--model.path")),
    "C6-tensor-parallel": Case(
        flags("--rollout.tensor-model-parallel-size", "2"), ("does not divide the 1 ranks", "use 1")
    ),
    "C8": Case(
        flags("--rollout.max-response-len", "240", "--max-tokens-per-gpu", "9999"),
        ("24 + --rollout.max-response-len 240 = 264", "max_position_embeddings=256"),
    ),
    "C13": Case(older_run('{"state": "failed", "step": 3}'), ("state failed at step 3", "--overwrite")),
    "run-dir-file": Case(flags("--run-dir", "good.py"), ("cannot write the run folder", "good.py")),
    "run-dir-empty": Case(flags("--run-dir", ""), ("not a usable path", "--run-dir")),
    "run-dir-full-disk": Case(flags("--run-dir", "/proc/run"), ("disk space", "0.00 GiB free")),
    "wandb": Case(flags("--tracking.wandb-project", "\n"), ("--tracking.wandb-project",)),
    # model folders
    "M1": Case(flags("--model.path", "/no/model"), ("no such model folder", "/no/model")),
    "M2": Case(model(lambda folder: (folder / "config.json").unlink()), ("no config.json", "other")),
    "M3": Case(config(architectures=["GPT2LMHeadModel"]), ("GPT2LMHeadModel", "Qwen3")),
    "M2-deep": Case(
        model(lambda folder: (folder / "config.json").write_text('{"a":' * 200_000) and None),
        ("not JSON that can be read", "config.json"),
    ),
    "M3-type": Case(config(model_type="llama"), ("Qwen3ForCausalLM and 'llama'", "'qwen3'")),
    "M3-activation": Case(config(hidden_act="no_such"), ("cannot build the model", "no_such"), late=True),
    "M5": Case(
        model(lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin")),
        ("pickled", "convert"),
    ),
    "M7": Case(model(lambda folder: os.truncate(folder / "model.safetensors", 20_000)), ("truncated", "20000 bytes")),
    "M8": Case(config(intermediate_size=97), ("gate_proj", "[96, 64]", "[97, 64]"), late=True),
    "M12": Case(config(vocab_size=100), ("more tokens than the embedding has rows", "vocab_size=100")),
    "M12-head": Case(model(another_head), ("lm_head.weight", "set tie_word_embeddings to false"), late=True),
    "M-fifo": Case(model(lambda folder: os.mkfifo(folder / "vocab.txt")), ("vocab.txt", "found a FIFO")),
    "M13-none": Case(model(lambda folder: (folder / "chat_template.jinja").unlink()), ("no chat template",), late=True),
    "M13-syntax": Case(template("{{ messages }\n"), ("chat template fails", "template line 1"), late=True),
    "M13-raises": Case(template("\n{{ raise_exception('no, no') }}"), ("no, no", "template line 2"), late=True),
    "M15": Case(
        model(lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": "x"}') and None),
        ("eos_token_id", "found x"),
        late=True,
    ),
    "M18": Case(config(quantization_config={"quant_method": "fp8"}), ("quantised",)),
    "tokenizer-none": Case(model(lambda folder: (folder / "tokenizer.json").unlink()), ("no tokenizer",)),
    # reward code
    "R1": Case(flags("--reward.path", "/no/reward.py"), ("no such file", "--reward.path /no/reward.py")),
    "R2": Case(reward("def score(a):\n    return 1\n"), ("no function compute_score", "found score"), 4),
    "R2-name-alone": Case(flags("--reward.path", None, "--reward.name", "f"), ("--reward.path", "--reward.name f")),
    "R3": Case(reward("import no_such_package\n"), ("does not import", "no_such_package"), 4),
    "R5": Case(reward(HEAD + "return 1 / 0\n"), ("row 0", "ZeroDivisionError", "reward.py:2"), 4),
    "R5-validation": Case(
        reward(HEAD + "return 1 / (extra_info['index'] - 100 or not solution_str)\n"),
        ("val.parquet row 0", "The answer is 0.", "ZeroDivisionError"),
        4,
    ),
    "R7-text": Case(reward(HEAD + "return 'good'\n"), ("'good' (str)", "a finite number"), 4),
    "R7-nan": Case(reward(HEAD + "return float('nan')\n"), ("nan (float)", "a finite number"), 4),
    "R9-import": Case(reward("import os\nos._exit(3)\n"), ("exited with code 3", "reward.py"), 4),
    "R9-call": Case(reward(HEAD + "import os; os._exit(3)\n"), ("exited with code 3", "row 0"), 4),
    "R10": Case(reward(HEAD + "while True: pass\n", **{"timeout-s": "0.5"}), ("timed out after 0.5 s",), 4),
    "R-metric": Case(
        flags("--filter-groups.enable", "True", "--filter-groups.metric", "accuracy"),
        ("returns no number 'accuracy'", "--filter-groups.metric", "expected one of score;"),
    ),
    "R-keys": Case(
        flags("--advantage", "gdpo", "--advantage.reward-keys", "format"),
        ("returns no number 'format'", "--advantage.reward-keys", "expected one of score;"),
    ),
    "R-keys-penalty": Case(
        flags("--advantage", "gdpo", "--advantage.reward-keys", "acc", "--overlong.buffer-len", "2"),
        ("change the score, which is not learned from", "--overlong.buffer-len 2", "add score to the keys"),
    ),
    "R-metric-text": Case(
        lambda folder: (
            reward(HEAD + "return {'score': 1, 'acc': True, 'pred': '7'}\n")(folder)
            | flags("--filter-groups.enable", "True", "--filter-groups.metric", "pred")(folder)
        ),
        ("returns no number 'pred'", "expected one of acc, score;"),
    ),
    "R-source": Case(flags("--reward.path", None), ("no built-in grader", "'test'", "--reward.path")),
    # launch
    "L3-half": Case(flags(), ("RANK=0, WORLD_SIZE=unset", "torchrun"), env={"RANK": "0"}),
    "L3-size": Case(flags(), ("RANK=unset, WORLD_SIZE=4", "torchrun"), env={"WORLD_SIZE": "4"}),
    "L3-rank": Case(flags(), ("RANK=3, WORLD_SIZE=2",), env={"RANK": "3", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}),
    "L3-port": Case(
        flags(),
        ("MASTER_PORT={busy_port}", "in use", "another port"),
        env={
            **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"},
            "MASTER_PORT": "{busy_port}",
        },
    ),
    "L3-address": Case(
        flags(),
        ("MASTER_ADDR=no.such.host", "rank 1 of 2"),
        env={
            **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "no.such.host"},
            "MASTER_PORT": "29500",
        },
    ),
    # accepted
    "R-metric-sometimes": Case(
        lambda folder: (
            reward(HEAD + "return {'score': 1, 'acc': True} if solution_str else 0\n")(folder)
            | flags("--filter-groups.enable", "True", "--filter-groups.metric", "acc")(folder)
        ),
        ("until 4 groups differ in acc",),
        ACCEPTED,
    ),
    "L1-plain-python": Case(flags(), ("on 1 x cpu",), ACCEPTED),
    "L10-home": Case(flags(), (), ACCEPTED, env={"HOME": "/proc/none"}),
    "C3": Case(flags("--optim.lr", "1e-6", "--eval.temperature", "1e0"), (), ACCEPTED),
    "C13-overwrite": Case(older_run("{}", "--overwrite"), (), ACCEPTED),
    "C18": Case(odd_paths, ("rün",), ACCEPTED, env={"HOME": "{folder}"}),
    "P18-policy": Case(
        lambda folder: (
            data(lambda rows: first(rows[7]).update(content="x" * 30))(folder) | {"--data.truncation": "left"}
        ),
        ("1 of 20 prompts of --data.train-files", "truncated (left)"),
        ACCEPTED,
    ),
    "P20-overlap": Case(
        flags("--data.val-files", "train.parquet"),
        ("train.parquet is given both for training and for validation", "20 of the 20 validation prompts also occur"),
        ACCEPTED,
    ),
    "M15-union": Case(
        model(lambda folder: (folder / "generation_config.json").write_text('{"eos_token_id": [5, 0]}') and None),
        ("responses end at '<|end|>' (0), ", "(5)"),
        ACCEPTED,
    ),
}


def as_numbers(rows: list[dict]) -> None:
    for row in rows:
        row["reward_model"]["ground_truth"] = int(row["reward_model"]["ground_truth"])


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """The files of a command line that is accepted."""
    return make_files(tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def busy_port():
    with socket.socket() as server:
        server.bind(("0.0.0.0", 0))
        server.listen()
        yield str(server.getsockname()[1])


@pytest.fixture(scope="module")
def results(good, busy_port, tmp_path_factory) -> dict[str, dict]:
    """What came of every case, each in a folder of its own."""
    root = tmp_path_factory.mktemp("cases")
    commands = {}
    for name, case in CASES.items():
        folder = shutil.copytree(good, root / name)
        words = command(folder, case.changes(folder))
        env = {key: value.format(folder=folder, busy_port=busy_port) for key, value in case.env.items()}
        commands[name] = {"words": words, "env": env, "is_accepted": case.code == ACCEPTED}
    done = subprocess.run(
        [sys.executable, "-m", "tests.bad_input_worker"], input=json.dumps(commands), cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.code != ACCEPTED])
def test_a_mistake_ends_the_command_with_one_line_that_tells_what_where_and_how(name, results, busy_port):
    case, result = CASES[name], results[name]
    assert result["code"] == case.code, result
    assert result["stdout"] == ""
    [line] = result["stderr"].splitlines()
    assert line.startswith(f"error[{case.code}] ") and line.count("; ") >= 2, line
    assert all(part.format(busy_port=busy_port) in line for part in case.parts), line
    assert ("transformers" in result["imported"]) == case.late and "vllm" not in result["imported"]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.code == ACCEPTED])
def test_what_only_looks_odd_is_accepted_and_told(name, results):
    case, result = CASES[name], results[name]
    assert result["code"] == ACCEPTED and result["stderr"] == "", result
    assert all(part in result["stdout"] for part in case.parts), result["stdout"]


def test_debug_shows_the_traceback_too(good):
    words = ["train_grpo.py", *command(good, {"--data.train-files": "/no/x.parquet"}), "--debug"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and "Traceback" in done.stderr and "resolve_file" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error[2] no such file")


def test_a_working_directory_that_is_gone_is_told_before_torch_ends_the_process(tmp_path):
    (tmp_path / "gone").mkdir()
    script = f'cd "{tmp_path}/gone" && rmdir "{tmp_path}/gone" && exec "$@"'
    words = ["sh", "-c", script, "-", sys.executable, str(ROOT / "train_grpo.py"), "--help"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error[2] no working directory; ") and len(done.stderr.splitlines()) == 1


def test_the_check_of_the_run_folder_makes_nothing(tmp_path):
    for run_dir, needed_gib in ((tmp_path / "a" / "b", 0.1), (tmp_path / "c", 1e9)):
        try:
            check_run(run_dir, TrackingConfig(), SINGLE, overwrite=True, needed_gib=needed_gib)
        except UserError as error:
            assert f"expected at least {needed_gib:.2f} GiB" in str(error)
        else:
            assert needed_gib == 0.1
    assert list(tmp_path.iterdir()) == []


# ---- Two ranks ----

UNDER_TORCHRUN = {"C-slow-rank-0", "R5"}
"""A late rank, and a code of its own: torchrun itself waits, and reports. The other cases are forks."""

ON_RANK = """
import os, runpy, sys, time
if os.environ["RANK"] == "{rank}":
    {action}
sys.path.insert(0, {root!r})
sys.argv[0] = "train_grpo.py"
runpy.run_path({root!r} + "/train_grpo.py", run_name="__main__")
"""


def on_rank(folder: Path, rank: int, action: str) -> str:
    """A script that does something on one rank before it is train_grpo.py."""
    path = folder / "on_rank.py"
    path.write_text(ON_RANK.format(rank=rank, action=action, root=str(ROOT)))
    return str(path)


@pytest.mark.parametrize(
    ("changes", "code", "parts", "rank_and_action"),
    [
        pytest.param(
            flags("--optim.lr", "-1"), 2, ("--optim.lr is out of range",), (0, "time.sleep(4)"), id="C-slow-rank-0"
        ),
        pytest.param(
            flags("--rollout.tensor-model-parallel-size", "3"), 2, ("the 2 ranks", "use 1 or 2"), None, id="C6"
        ),
        pytest.param(raw(b"a,b\n"), 2, ("CSV", "raw.parquet"), None, id="P5"),
        pytest.param(template("{{ raise_exception('no, no') }}"), 2, ("no, no", "line 1"), None, id="M13"),
        pytest.param(reward(HEAD + "return 1 / 0\n"), 4, ("ZeroDivisionError",), None, id="R5"),
        pytest.param(
            flags(), 2, ("different options", "hashes"), (1, "sys.argv += ['--optim.lr', '1e-3']"), id="L5-differ"
        ),
        pytest.param(
            flags("--data.val-files", "~/val.parquet"), 2, ("no such file", "~/val.parquet", "on rank 1"),
            (1, "os.environ['HOME'] = '/proc'"), id="L6-one-rank-lacks-a-file",
        ),
        pytest.param(
            prompts_of_another_node, 2, ("different prompts", "found fingerprints"),
            (1, "os.environ['HOME'] += '/node1'"), id="L6-other-prompts-on-one-rank",
        ),
        pytest.param(older_run('{"state": "finished", "step": 9}'), 2, ("finished at step 9",), None, id="C13"),
    ],
)  # fmt: skip
def test_all_ranks_end_together_with_the_code_and_one_of_them_tells_why(
    good, tmp_path, request, changes, code, parts, rank_and_action
):
    folder = shutil.copytree(good, tmp_path / "files")
    words = command(folder, changes(folder))
    script = on_rank(folder, *rank_and_action) if rank_and_action else "train_grpo.py"
    if request.node.callspec.id in UNDER_TORCHRUN:
        done = torchrun(2, script, *words, HOME=str(folder))
        codes = list(map(int, re.findall(r"exitcode  : (-?\d+)", done.stderr)))
    else:
        done = prefork(2, script, *words, HOME=str(folder))
        codes = done.codes
    assert codes == [code] * 2, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert line.startswith(f"error[{code}] ") and line.count("; ") >= 2
    assert all(part in line for part in parts), line
    assert str(ROOT / "lib") not in done.stderr.replace(line, "") and done.stdout == "", done.stderr
    assert not (folder / "run").exists() or list((folder / "run").iterdir()) == [folder / "run" / "status.json"]
