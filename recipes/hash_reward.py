"""A reward for random weights: a hash of the response, between 0 and 1, so that it differs within every group."""

import hashlib


def compute_score(data_source: str, solution_str: str, ground_truth: object, extra_info: dict) -> float:
    """A number in [0, 1) that depends on the response alone."""
    digest = hashlib.blake2b(solution_str.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") / 2**32
