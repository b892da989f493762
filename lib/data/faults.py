"""What can be wrong with a row, in words: the same for a row of parquet, a line of JSON and a row of a dataset class.

`at` says where the row is (`--data.train-files FILE row 7`, `... line 8`), `column` under which name.
"""

import json
from collections.abc import Sequence

from lib.errors import UserError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 10_000
MAX_CELL_BYTES = 32 * 1024**2
MESSAGES = "a list of {role, content} messages"
PROMPT = f"a text, or {MESSAGES}"


def short(value: object) -> str:
    """A value for a message, at most 200 characters."""
    text = " ".join(str(value).split()) if isinstance(value, Exception) else repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def listed(names: Sequence[str]) -> str:
    """Names for a message, at most 200 characters; what a terminal would obey is escaped."""
    text = ", ".join(name if name.isprintable() else repr(name) for name in names)
    return text if len(text) <= 200 else text[:197] + "..."


def is_unicode(value: object) -> bool:
    """Whether UTF-8 can hold all text in it: JSON's \\ud83d alone is half of a character."""
    try:
        json.dumps(value, ensure_ascii=False, default=str, skipkeys=True).encode()
    except UnicodeEncodeError:
        return False
    return True


# ---- Columns ----


def missing_columns(
    missing: Sequence[str],
    names: Sequence[str],
    messages: Sequence[str],
    *,
    prompt: str,
    needs_grader: bool,
    where: str,
) -> UserError:
    """Names all of them, and how to come by each. `messages`: the columns that hold messages."""
    whats = {"data_source": "a name that selects the reward function", "reward_model": "{style, ground_truth}"}
    remedies = [f"add '{name}', {whats[name]}, to each row" for name in missing if name in whats]
    if prompt in missing:
        what = f"set --data.prompt-key {messages[0]}" if messages else f"make '{prompt}', {PROMPT}"
        remedies.insert(0, what + ("" if messages else ", or name such a column by --data.prompt-key"))
    if left := [name for name in missing if name not in (*whats, prompt)]:
        remedies.append(f"give --data.answer-key one of the columns, not {left[0]}")
    text = ", and ".join(remedies)
    if "reward_model" in missing:
        text += " (or name the column that holds the answer by --data.answer-key)"
    if needs_grader and {"data_source", "reward_model"} & set(missing):
        text += (
            "; with a reward function of your own, --reward.path FILE, neither data_source nor reward_model is needed"
        )
    are = "column {} is missing" if len(missing) == 1 else "columns {} are missing"
    return UserError(
        f"{are.format(' and '.join(map(repr, missing)))}; {where}; columns found: {listed(names) or 'none'}; {text}"
    )


def wrong_type(at: str, column: str, found: str, expected: str) -> UserError:
    """`found` is the type, with the value where a row is named."""
    return UserError(
        f"column '{column}' has the wrong type; {at}; found {found}, expected {expected}; write the column so"
    )


def two_kinds_of_answers(at: str, column: str, found: str, expected: str) -> UserError:
    return UserError(
        f"ground truths of two types; {at} column '{column}'; found {found}, expected {expected}; give all of them one "
        "type"
    )


# ---- Prompts ----


def too_large(at: str, column: str, size: int) -> UserError:
    return UserError(
        f"a cell is too large; {at} column '{column}'; found {size} bytes, expected at most {MAX_CELL_BYTES}; shorten "
        "it or drop the row"
    )


def no_messages(at: str, column: str) -> UserError:
    return UserError(
        f"a prompt without messages; {at} column '{column}'; found null or an empty list, expected at least 1 message; "
        "drop the row"
    )


def too_many_messages(at: str, column: str, count: int) -> UserError:
    return UserError(
        f"a prompt with too many messages; {at} column '{column}'; found {count}, expected at most {MAX_MESSAGES}; "
        "drop the row"
    )


def message_lacks_field(at: str, number: int, name: str, found: Sequence[str]) -> UserError:
    return UserError(
        f"messages without {name}; {at} message {number}; fields found: {listed(found) or 'none'}, expected role (one "
        f"of {', '.join(ROLES)}) and content; add the field"
    )


def unknown_role(at: str, column: str, number: int, found: object) -> UserError:
    return _message(at, column, number, "a message without a known role", found, f"one of {', '.join(ROLES)}")


def no_content(at: str, column: str, number: int, found: object) -> UserError:
    return _message(at, column, number, "a message without content", found, "a string")


def _message(at: str, column: str, number: int, what: str, found: object, expected: str) -> UserError:
    return UserError(
        f"{what}; {at} column '{column}' message {number}; found {short(found)}, expected {expected}; mend or drop the "
        "row"
    )


# ---- What grades it ----


def no_data_source(at: str) -> UserError:
    return UserError(
        f"a row without data_source; {at}; found null or '', expected the name that selects the reward function; fill "
        "it in"
    )


def unprintable_data_source(at: str, found: str) -> UserError:
    """It names metrics, and stands in the terminal and on pages."""
    return UserError(
        f"a data_source with a character that cannot be shown; {at}; found {short(found)}, expected printable text in "
        "one line; rename it in every row"
    )


def no_answer(at: str, column: str) -> UserError:
    return UserError(
        f"a row without ground truth; {at} column '{column}'; found null, expected an answer; fill it in ('' if your "
        "reward function needs none), or drop the row"
    )


def no_number(at: str, column: str, found: float) -> UserError:
    return UserError(
        f"a ground truth that is no number; {at} column '{column}'; found {found}, expected a finite number; mend or "
        "drop the row"
    )
