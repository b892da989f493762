"""No secret of the environment or of a free-form option reaches a file, the terminal or a reward worker by accident."""

import dataclasses
import html
import json
import os
import shutil

import pytest

import lib.secret_values
from eval import EvalScriptConfig
from lib.algorithms.advantages import ADVANTAGES
from lib.config.as_json import to_json
from lib.config.flags import parse_cli
from lib.dist import SINGLE, init_distributed, shutdown_distributed
from lib.errors import UserError
from lib.launch.branch import changed_options
from lib.launch.resume import find_resume
from lib.rewards.scoring import RewardConfig
from lib.rewards.trial import check_reward
from lib.secret_values import blank, equal_but_for_blanks, is_secret_name, remember, secret_variables
from merge import MergeConfig, merge
from tests import checkpoint_worker
from tests.checkpoint_worker import config, train
from tests.test_scoring import rows, score_all, write
from tests.tiny import make_model, make_tokenizer
from train_grpo import GRPOConfig
from train_ppo import PPOConfig

CANARY = "canary-2f9c41d7"
ANOTHER = "canary-of-tomorrow"


@pytest.fixture(autouse=True)
def nothing_is_remembered(monkeypatch):
    monkeypatch.setattr(lib.secret_values, "_of_options", {})
    for name in secret_variables():
        monkeypatch.delenv(name)


def test_a_name_is_secret_by_a_whole_word_of_it():
    names = (
        "HF_TOKEN API_KEY api-key apiKey AWS_SECRET_ACCESS_KEY DB_PASS DB_PWD db.passwd PASSWORD SENTRY_DSN AUTH KEYS"
    )
    assert [name for name in names.split() if not is_secret_name(name)] == []
    names = (
        "PWD OLDPWD SSH_AUTH_SOCK GPG_KEY MONKEY KEYBOARD TOKENIZERS_PARALLELISM max_tokens COMPASS AUTHOR passes pwd"
    )
    assert [name for name in names.split() if is_secret_name(name)] == []


def test_a_short_value_or_a_path_is_no_secret(tmp_path, monkeypatch):
    for name, value in {
        "A_KEY": "7 signs",
        "B_KEY": str(tmp_path),
        "C_KEY": "8 signs!",
        "PWD": "somewhere/else",
    }.items():
        monkeypatch.setenv(name, value)
    assert secret_variables() == {"C_KEY": "8 signs!"}


def test_a_secret_is_blanked_however_it_is_written(monkeypatch):
    monkeypatch.setenv("A_KEY", 'first line\n"second" ü')
    monkeypatch.setenv("B_KEY", "first line")  # part of the other
    value = os.environ["A_KEY"]
    in_json = [json.dumps(value, ensure_ascii=ascii_only)[1:-1] for ascii_only in (True, False)]
    for text in (value, repr(value)[1:-1], *in_json, " ".join(value.split()), html.escape(value)):
        assert blank(f"<{text}>") == "<[A_KEY]>"
    assert blank([{value: "first line"}, (3, value)]) == [{"[A_KEY]": "[B_KEY]"}, [3, "[A_KEY]"]]
    assert blank("see postgres://me:hunter2@host/x and http://host:80/a@b") == (
        "see postgres://me:[password]@host/x and http://host:80/a@b"
    )


def test_every_secret_of_an_option_is_blanked_also_where_several_have_one_key(monkeypatch):
    monkeypatch.setenv("api_key", CANARY)
    kwargs = {"first": {"api_key": "key-of-the-first"}, "second": {"api_key": "key-of-the-second"}}
    cfg = GRPOConfig(reward=RewardConfig(kwargs=kwargs | {"keys": ("one-of-the-keys", "two-of-the-keys")}))
    blanked = {"first": {"api_key": "[api_key]"}, "second": {"api_key": "[api_key]"}, "keys": ["[keys]", "[keys]"]}
    assert to_json(cfg)["reward"]["kwargs"] == blanked
    remember(cfg)
    text = f"key-of-the-first key-of-the-second one-of-the-keys two-of-the-keys {CANARY}"
    assert blank(text) == "[api_key] [api_key] [keys] [keys] [api_key]"


def test_a_checkpoint_from_before_secrets_were_blanked_is_of_the_same_options():
    cfg = GRPOConfig(reward=RewardConfig(kwargs={"api_key": ANOTHER, "level": 1}))
    saved = to_json(cfg)
    saved["reward"]["kwargs"] = {"api_key": CANARY, "level": 2}
    assert changed_options(saved, cfg) == {"reward.kwargs.level": (2, 1)}


@pytest.mark.parametrize(
    "cfg", [GRPOConfig(advantage=ADVANTAGES["gdpo"]()), PPOConfig(), EvalScriptConfig(output="x"), MergeConfig()]
)
def test_no_field_of_our_own_config_is_blanked(cfg, monkeypatch):
    monkeypatch.setenv("PWD", os.getcwd())
    monkeypatch.setenv("OLDPWD", "/somewhere/else")

    def worded(value):
        """The config with a text in every field that can be one."""
        fields = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            if dataclasses.is_dataclass(old):
                fields[field.name] = worded(old)
            elif not isinstance(old, dict):
                fields[field.name] = ("score and more",) if isinstance(old, tuple) else "score and more"
        new = object.__new__(type(value))
        new.__dict__.update(value.__dict__, **fields)  # without its checks
        return new

    def texts(value):
        children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [value] if isinstance(value, str) else [text for child in children for text in texts(child)]

    found = texts(blank(to_json(remember(worded(cfg)))))
    assert len(found) > 5 and not [text for text in found if text.startswith("[")]


def test_a_run_a_resume_and_a_merge_keep_a_secret_of_the_environment_and_of_an_option(tmp_path, monkeypatch, capfd):
    model = make_model(tmp_path / "model")
    make_tokenizer(model)
    monkeypatch.setenv("PWD", os.getcwd())
    monkeypatch.setenv("JUDGE_PASSWORD", "of-the-judge")
    monkeypatch.chdir(tmp_path)
    reward = checkpoint_worker.REWARD

    def reveal(secret):
        monkeypatch.setenv("HF_TOKEN", secret)
        monkeypatch.setattr(checkpoint_worker, "REWARD", f"{reward} of {secret}")
        monkeypatch.setattr(checkpoint_worker, "EXTRAS", {"acc": 0.1, "note": f"with {secret}"})

    def options(num_steps, secret, *words):
        kwargs = {"judge": {"api_key": secret, "url": "https://me:of-the-judge@host"}, "n": 3, "key": "acc"}
        words = ("--reward.kwargs", json.dumps(kwargs), "--tracking.name", f"of {os.environ['HF_TOKEN']}", *words)
        return config(model, "--run-dir", "run", "--num-steps", num_steps, "--checkpoint.every", 1, *words)

    reveal(CANARY)
    cfg = remember(options(1, "key-" + CANARY))
    assert cfg.reward.kwargs["judge"]["api_key"] == "key-" + CANARY
    train(cfg, init_distributed())
    trainer = json.loads((tmp_path / "run" / "global_step_1" / "trainer.json").read_text())
    assert trainer["collectors"][0]["carried"][0][0]["score"]["extras"]["note"] == "with [HF_TOKEN]"
    assert trainer["reward"].endswith(" of [HF_TOKEN]")
    saved = trainer["config"]
    judge = {"api_key": "[api_key]", "url": "https://me:[password]@host"}
    assert saved["reward"]["kwargs"] == {"judge": judge, "n": 3, "key": "acc"}
    assert saved["tracking"]["name"] == "of [HF_TOKEN]"
    reveal(ANOTHER)
    again = remember(options(2, "key-" + ANOTHER))
    assert set(train(again, init_distributed())["losses"]) == {2}
    assert again.reward.kwargs["judge"]["api_key"] == "key-" + ANOTHER
    with pytest.raises(UserError, match=r"reward\.kwargs\.judge\.url was .* and is ") as refused:
        find_resume(options(3, "x", "--reward.kwargs", '{"judge": {"url": "https://me:of-the-judge@other"}}'), SINGLE)
    actor = tmp_path / "run" / "global_step_2" / "actor"
    merge(MergeConfig(local_dir=str(actor), target_dir="merged", test_hf_dir=None))
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    shutil.rmtree(model)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    told = "".join(capfd.readouterr()).encode() + str(refused.value).encode()
    for secret in (CANARY, ANOTHER, "of-the-judge"):
        assert not [path for path in files if secret.encode() in path.read_bytes()]
        assert secret.encode() not in told.replace(b"of-the-judge@other", b"")  # blanked where the line is printed


def test_a_blanked_value_is_equal_to_whatever_stands_there_now():
    assert equal_but_for_blanks("[api_key]", "anything") and equal_but_for_blanks("a [HF_TOKEN] b", "a x\ny b")
    assert equal_but_for_blanks(["a", "[api_key]"], ["a", "b"]) and equal_but_for_blanks({"a": 1}, {"a": 1})
    assert equal_but_for_blanks([{"url": "https://me:[password]@host"}], [{"url": "https://me:hunter2@host"}])
    for saved, value in (
        ("[api_key]", None),
        ("[best]", "x"),
        ("a [HF_TOKEN] b", "a x c"),
        (["a"], ["a", "b"]),
        ([{"a": "[api_key]"}], [{"a": "x", "b": "y"}]),
        ([{"a": "x"}], [{"a": "y"}]),
        (1, 2),
    ):
        assert not equal_but_for_blanks(saved, value)


def test_an_error_line_shows_no_secret(monkeypatch, capfd):
    shutdown_distributed()  # an error leaves the process group, and `init_distributed` would not know
    monkeypatch.setenv("HF_TOKEN", CANARY)
    for words in (
        ["--reward.kwargs", f"{{'api_key': '{ANOTHER}'}}"],  # not JSON
        ["--reward.kwargs", f"{{api_key:{ANOTHER}}}"],  # as a shell passes {"api_key":"..."} on
        ["--reward.kwargs", "{api_key:", f"{ANOTHER}}}"],
        [f'--reward.kwargs=["{ANOTHER}"]'],
        ["--reward.kwargs", f'{{"api_key": "{ANOTHER}}}'],
        [f"reward.api_key={ANOTHER}"],
        ["--reward.kwargs", f'{{"api_key": "{ANOTHER}", "data_source": "none of its names"}}'],
        ["--rollout.n", CANARY],
        ["--model.path", f"https://me:{ANOTHER}@host/model", "--no-such", CANARY, "--reward.num-workers", "x"],
    ):
        with pytest.raises(SystemExit, match="2"):
            parse_cli(GRPOConfig(), words)
        line = capfd.readouterr().err
        assert line.startswith("error[2] ") and CANARY not in line and ANOTHER not in line, line
    parse_cli(GRPOConfig(), ["--reward.kwargs", f'{{"api_key": "{ANOTHER}"}}'])  # from now on it is known
    assert blank(f"with {ANOTHER}") == "with [api_key]"


REVEAL = """
import os
def compute_score(data_source, solution_str, ground_truth, extra_info, api_key):
    names = ("HF_TOKEN", "JUDGE_KEY", "PATH")
    print("prints", *(os.environ.get(name) for name in names), api_key)
    if solution_str == "fail":
        raise ValueError(f"with {api_key}")
    return {"score": 1.0, "seen": " ".join(name for name in names if name in os.environ), "key": api_key}
"""


def test_reward_workers_get_no_secret_but_what_is_handed_over_and_their_log_has_none(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", CANARY)
    monkeypatch.setenv("JUDGE_KEY", ANOTHER)
    cfg = RewardConfig(path=write(tmp_path, REVEAL), kwargs={"api_key": "key-of-option"}, num_workers=1)
    line = check_reward(cfg, {"mine"}, rows("1"))
    assert line.endswith("; warning: its workers do not get HF_TOKEN, JUDGE_KEY: --reward.env NAME ... hands over")
    handed = dataclasses.replace(cfg, env=("JUDGE_KEY",))
    assert check_reward(handed, {"mine"}, rows("1")).endswith("do not get HF_TOKEN: --reward.env NAME ... hands over")
    for each, seen in ((cfg, "PATH"), (handed, "JUDGE_KEY PATH")):
        [score, failed] = score_all(each, ["", "fail"], log_path=tmp_path / "log")
        assert (score.extras["seen"], score.extras["key"]) == (seen, "key-of-option")
        assert "with [api_key]" in failed.error
    assert (tmp_path / "log").read_text().splitlines() == [
        *[f"prints None None {os.environ['PATH']} [api_key]"] * 2,
        *[f"prints None [JUDGE_KEY] {os.environ['PATH']} [api_key]"] * 2,
    ]
    with pytest.raises(UserError, match=r"--reward\.env NONE; found no NONE on this node"):
        check_reward(dataclasses.replace(cfg, env=("NONE",)), {"mine"}, rows("1"))
