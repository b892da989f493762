"""verl's configuration keys and what each is here: for the hint when one is pasted, and for docs/from_verl.md.

verl_keys.txt has a row for each key; `python -m lib.config.verl_keys` prints them as the page's tables.
"""

import re
from collections.abc import Collection
from pathlib import Path

NO_CRITIC = (
    "leave it out, or start train_ppo.py or a recipe of it: it is an option of PPO's critic, which this script has not"
)


ANY = "*"
"""In place of a default: no value of the key changes what is learned."""


def _read_sections() -> dict[str, dict[str, tuple[str, str, str]]]:
    """{section: {key: (option, default, note)}}, as verl_keys.txt has them."""
    sections = {}
    for section in Path(__file__).with_name("verl_keys.txt").read_text(encoding="utf-8").split("\n# ")[1:]:
        title, *lines = section.strip().split("\n")
        rows = ([field.strip() for field in line.split("|")] for line in lines)
        sections[title] = {key: (option, default, note) for key, option, default, note in rows}
    return sections


SECTIONS = _read_sections()
_ROWS = {key: row for rows in SECTIONS.values() for key, row in rows.items()}
VERL_KEYS: dict[str, tuple[str, str]] = {key: (option, note) for key, (option, _, note) in _ROWS.items()}
VERL_DEFAULTS: dict[str, str] = {key: default for key, (_, default, _) in _ROWS.items()}
"""What verl does where nothing is said, or ANY; of a key without an option: all values (`a or b`) that we do too."""

SYNONYMS = {
    "learning-rate": "--optim.lr",
    "batch-size": "--prompts-per-step",
    "num-generations": "--rollout.n",
    "group-size": "--rollout.n",
    "num-epochs": "--total-epochs",
    "epochs": "--total-epochs",
    "max-steps": "--num-steps",
    "beta": "--kl-loss-coef",
    "epsilon": "--loss.clip-low",
    "max-grad-norm": "--optim.clip-grad",
    "output-dir": "--run-dir",
    "model": "--model.path",
    "dataset": "--data.train-files",
    "tensor-parallel-size": "--rollout.tensor-model-parallel-size",
    "max-completion-length": "--rollout.max-response-len",
}
"""What other suites call an option: candidates for the nearest match, never accepted themselves."""

_ROOTS = ("actor_rollout_ref", "algorithm", "critic", "reward_model", "custom_reward_function", "trainer", "hydra")


def verl_hint(word: str, known: Collection[str] | None = None) -> str | None:
    """What to write instead of a word of a verl command (`+key=value`, `~key.key`, `--key`, `--key=value`).

    None: it is not verl's, or may be a value. `known`: the options that the script has, if only these may be named.
    """
    name = word.partition("=")[0].lstrip("+~")
    bare = name.lstrip("-")
    if "=" not in word and not re.match(r"--|~\w+\.", word):
        return None  # a value, not an option
    keys = (name, bare, f"actor_rollout_ref.{bare}")  # the last: main_generation has rollout.* and model.* alone
    key = next((key for key in keys if key in VERL_KEYS), bare)
    if key in VERL_KEYS:
        return _advice(*VERL_KEYS[key], known)
    same_last_part = {row for full, row in VERL_KEYS.items() if full.rpartition(".")[2] == bare}
    if len(same_last_part) == 1:  # `--train_batch_size`; `--path` could be anything
        return _advice(*same_last_part.pop(), known)
    if row := row_of(key):
        return _advice(*VERL_KEYS[row], known)
    if re.match(rf"({'|'.join(_ROOTS)})\.\w", key) or re.match(r"\+\+?\w+\.[\w.]+=", word):
        return "a verl key without a counterpart"
    return None


def row_of(key: str) -> str | None:
    """The key of the row that speaks for this one: its own, or that of the nearest above it."""
    parents = (key.rsplit(".", i)[0] for i in range(key.count(".") + 1))
    return next((parent for parent in parents if parent in VERL_KEYS), None)


def _advice(option: str, note: str, known: Collection[str] | None) -> str:
    if not option:
        return note
    section = option.partition(".")[0]
    if known is not None and option not in known:
        if section == "--critic":
            return NO_CRITIC
        has_critic = "--critic.warmup-steps" in known  # of which all advantages but one make no use
        if section in known and note.startswith(f"with {section} ") and not (section == "--advantage" and has_critic):
            return f"use {option} ({note})"
        if section in known:  # of a loss or an advantage that was not chosen
            return f"leave it out: the chosen {section} has no {option}"
        owner = re.match(r"\w+\.py|", note)[0] or "training"
        return f"leave it out: {option} is an option of {owner}"
    return f"use {option} ({note})" if note else f"use {option}"


def markdown() -> str:
    """The tables of docs/from_verl.md."""
    lines = []
    for title, rows in SECTIONS.items():
        lines += [f"## {title}", "", "| verl | here | verl's default | note |", "|---|---|---|---|"]
        for key, (option, default, note) in rows.items():
            here = f"`{option}`" if option else "-"
            lines.append(f"| `{key}` | {here} | {default.replace(ANY, 'any')} | {note} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
