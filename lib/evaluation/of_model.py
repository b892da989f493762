"""What an evaluation takes from the run that trained its model, or from the model, where the command line is silent.

Of a run or a checkpoint: how prompts are made and where responses end, what answers between turns, and what scores
them. Of any other model: the lengths that fit it, where the defaults do not.
"""

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from lib.config.words import normal
from lib.dist import World
from lib.engine.rollout_config import RolloutConfig
from lib.errors import UserError
from lib.evaluation.inputs import EvalDataConfig
from lib.rewards.scoring import RewardConfig
from lib.rewards.trial import code_hash
from lib.secret_values import has_blanks
from lib.storage.model_folder import longest_sequence
from lib.storage.model_source import find_actor
from lib.turns.config import TurnsConfig

TAKEN = {
    "data": ("prompt_key", "answer_key", "max_prompt_len", "chat_template_kwargs", "control_tokens"),
    "rollout": ("max_response_len", "stop"),
    "turns": tuple(field.name for field in fields(TurnsConfig)),
    "reward": tuple(field.name for field in fields(RewardConfig)),
}
"""Section -> the options that are taken from a run. Those of the reward belong to its file, and those of the turns to
theirs: with another --reward.path, or --turns.path, none is."""

OF_ROWS = ("prompt_key", "answer_key")
"""Of the section data, what also says how responses are scored that are there already."""
WITHOUT_FILE = {"turns": "None: single turns", "reward": "None: the built-in graders"}
"""Section -> what is used without its file; trainer.json has a line about that file, with its hash, under the section's
name."""
Values = dict[str, dict[str, Any]]
"""{section: {field: value}}."""


class HasSections(Protocol):
    """The sections of an evaluation's config that its model decides."""

    data: EvalDataConfig
    rollout: RolloutConfig
    turns: TurnsConfig
    reward: RewardConfig


Sections = TypeVar("Sections", bound=HasSections)


def complete(
    cfg: Sections, argv: Sequence[str], path: str, world: World, *, samples: bool, scores: bool
) -> tuple[Sections, str | None]:
    """The config with what the model at `path` decides of it, but for the options in argv, and a line that tells.

    `samples`, `scores`: what the evaluation does. Raises UserError where the run's reward or environments cannot be
    used. Executed by all ranks together.
    """
    given = {normal(word.partition("=")[0]) for word in argv if word.startswith("--")}

    def find() -> tuple[Values, str]:
        actor, _ = find_actor(path, "--model.path")
        if actor is None:
            return (_lengths_that_fit(cfg, path, given) if samples else {}), f"the model {path}"
        return _of_run(actor.parent, given, samples=samples, scores=scores)

    values, source = world.on_rank_0(find)
    changed = {
        section: {
            name: value
            for name, value in of_section.items()
            if _option(section, name) not in given and value != getattr(getattr(cfg, section), name)
        }
        for section, of_section in values.items()
    }
    told = [_in_words(_option(section, name), it) for section, of in changed.items() for name, it in of.items()]
    cfg = replace(cfg, **{section: replace(getattr(cfg, section), **of) for section, of in changed.items() if of})
    return cfg, f"taken from {source}: {' '.join(told)}" if told else None


# ---- From a run ----


def _of_run(checkpoint: Path, given: set[str], *, samples: bool, scores: bool) -> tuple[Values, str]:
    """What its config says, and where that stands."""
    try:
        trainer = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
        config = {section: dict(trainer["config"].get(section, {})) for section in TAKEN}
        notes = {section: str(trainer.get(section, "")) for section in WITHOUT_FILE}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}, str(checkpoint)  # an `actor` folder of its own
    sections = ["data"] + ["rollout"] * samples
    for section, is_used in (("turns", samples), ("reward", scores)):
        if is_used and not {f"--{section}.path", f"--{section}.name"} & given:
            sections.append(section)
    values: Values = {}
    for section in sections:
        names = OF_ROWS if section == "data" and not samples else TAKEN[section]
        found = {name: config[section][name] for name in names if name in config[section]}
        values[section] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    used = [section for section in WITHOUT_FILE if section in values]
    changed = [it for it in used if _has_changed(it, values[it], checkpoint, notes[it], given)]
    since = "".join(f", whose {section} file has changed since" for section in changed)
    return values, f"the run of {checkpoint}{since}"


def _has_changed(section: str, values: Mapping[str, Any], checkpoint: Path, note: str, given: set[str]) -> bool:
    """Whether the file of the run's reward, or turns, is another now. Raises UserError for one that cannot be used."""
    option = f"--{section}.kwargs"
    if has_blanks(values.get("kwargs", {})) and option not in given:
        raise UserError(
            f"the run's {option} were given a secret, which a run does not keep; {checkpoint}; found "
            f"{option} {shlex.quote(json.dumps(values['kwargs']))}, expected the secret itself; give {option}"
        )
    path = values.get("path")
    if path is None:
        return False
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"the file of the run's {section} is not there; {checkpoint}; found no {path} in {Path.cwd()}, expected "
            f"the file that the run was started with; start where the run was, or give --{section}.path FILE "
            f"({WITHOUT_FILE[section]}){', or --generate-only' * (section == 'reward')}"
        )
    return code_hash(note) not in (None, hashlib.sha256(file.read_bytes()).hexdigest()[:16])


def _option(section: str, name: str) -> str:
    return f"--{section}.{name.replace('_', '-')}"


def _in_words(option: str, value: Any) -> str:
    """As a command line has it: `--rollout.stop '###' 'END'`."""
    words = [json.dumps(value)] if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
    return " ".join((option, *(shlex.quote(str(word)) for word in words)))


# ---- From a model ----


def _lengths_that_fit(cfg: HasSections, path: str, given: set[str]) -> Values:
    """Lengths that the model takes, where the defaults are too long: of those that are not given, equal parts."""
    limit = longest_sequence(path)
    prompt, response = cfg.data.max_prompt_len, cfg.rollout.max_response_len
    if limit is None or prompt + response <= limit:
        return {}
    if "--rollout.max-response-len" in given:
        prompt = min(prompt, limit - response)
    elif "--data.max-prompt-len" in given:
        response = min(response, limit - prompt)
    else:
        prompt = min(prompt, limit // 2)
        response = min(response, limit - prompt)
    if min(prompt, response) < 1:
        return {}  # refused with the model's own limit
    return {"data": {"max_prompt_len": prompt}, "rollout": {"max_response_len": response}}
