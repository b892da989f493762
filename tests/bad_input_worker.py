"""Runs `train_grpo.py`, or recipes, with many command lines, each in a fork of this process: torch is imported once.

Standard input: JSON, {name: {words, env, recipe, is_accepted}}; optional are recipe, the name of its module, and
is_accepted: that case will need transformers, which is imported once for all of them, behind the others. Standard
output: JSON, {name: {code, stdout, stderr, imported}}.
"""

import importlib
import json
import os
import signal
import sys
import tempfile
import traceback

import lib.launch.setup
import train_grpo  # noqa: F401 (what the forks import)

ACCEPTED = 77
"""Code of a run whose input passed every check: it ends where it would build the engine, half a minute of work."""
LIMIT_S = 600  # of a case: only against hanging
LATE = ("transformers", "transformers.models.auto.tokenization_auto", "transformers.models.qwen3.modeling_qwen3")
HEAVY = ("transformers", "vllm", "pyarrow")


def end_accepted(*_, **__):
    os._exit(ACCEPTED)


def run(words: list[str], env: dict[str, str], recipe: str | None) -> int:
    """The exit code of the script's last line, or the recipe's."""
    os.environ.update(env)
    sys.argv = ["train_grpo.py", *words]
    lib.launch.setup.RolloutEngine = end_accepted
    signal.alarm(LIMIT_S)
    try:
        script = importlib.import_module(recipe or "train_grpo")
        script.main(script.parse_cli(script.config if recipe else script.GRPOConfig()))
    except SystemExit as exit_:
        return exit_.code
    except BaseException:
        traceback.print_exc()
    return 1


def in_fork(words: list[str], env: dict[str, str], recipe: str | None = None) -> dict:
    files = [tempfile.TemporaryFile("w+", errors="replace") for _ in range(3)]  # noqa: SIM115 (read below)
    child = os.fork()
    if child == 0:
        os.setsid()
        os.dup2(files[0].fileno(), 1)
        os.dup2(files[1].fileno(), 2)
        code = run(words, env, recipe)
        os.write(files[2].fileno(), json.dumps([name for name in HEAVY if name in sys.modules]).encode())
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for file in files:
        file.seek(0)
    stdout, stderr, imported = (file.read() for file in files)
    return {"code": code, "stdout": stdout, "stderr": stderr, "imported": json.loads(imported or "[]")}


if __name__ == "__main__":
    cases, found = json.load(sys.stdin), {}
    for name, case in sorted(cases.items(), key=lambda item: item[1].get("is_accepted", False)):
        if case.pop("is_accepted", False):
            for library in LATE:
                importlib.import_module(library)
            assert len(os.listdir("/proc/self/task")) == 1, "a fork would lack a thread"
        found[name] = in_fork(**case)
    print(json.dumps(found))
