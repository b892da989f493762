"""Rewards for tests/sampling_worker.py: some prompts have a signal, some responses fail. Row N asks "what is N"."""

import hashlib


def unit(text):
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") / 2**32


def of_all(data_source, solution_str, ground_truth, extra_info):
    return unit(solution_str)


def of_even_rows(data_source, solution_str, ground_truth, extra_info):
    return unit(solution_str) if extra_info["index"] % 2 == 0 else 1.0


def of_every_eighth_row(data_source, solution_str, ground_truth, extra_info):
    return unit(solution_str) if extra_info["index"] % 8 == 0 else -1.0


def of_none(data_source, solution_str, ground_truth, extra_info):
    return 1.0 if extra_info["index"] % 3 == 0 else 0.0


def but_for_the_first_row(data_source, solution_str, ground_truth, extra_info):
    return unit(solution_str) if extra_info["index"] else 0.0


def with_acc(data_source, solution_str, ground_truth, extra_info):
    number = unit(solution_str)
    return {"score": number, "acc": number > 0.7, "pred": solution_str[:1]}


def that_fails_for_some(data_source, solution_str, ground_truth, extra_info):
    number = unit(solution_str)
    if 0.4 < number < 0.5:
        raise ValueError("no such answer")
    return None if 0.5 < number < 0.6 else float(number > 0.6)


def in_stages(data_source, solution_str, ground_truth, extra_info):
    """Of the training rows no signal in 0 to 7, one group's in 8 to 15, all but row 19 from there on."""
    row = extra_info["index"]
    has_signal = extra_info["split"] == "val" or row == 8 or (row >= 16 and row != 19)
    return {"score": unit(solution_str) if has_signal else 0.5, "acc": has_signal}


calls = []


def that_fails_twice_for_row_7(data_source, solution_str, ground_truth, extra_info):
    """The first two responses of row 7 fail, the rest of its group has a signal."""
    calls.extend([7] if extra_info["index"] == 7 else [])
    if extra_info["index"] == 7 and len(calls) <= 2:
        raise ValueError("row 7")
    return unit(solution_str) if extra_info["index"] else 0.0


def that_fails(data_source, solution_str, ground_truth, extra_info):
    raise ValueError("always")
