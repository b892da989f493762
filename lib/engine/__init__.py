"""vLLM inside this process: sampling, sleep and wake, and the policy's weights in it."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    engine="RolloutConfig RolloutEngine Sampling request_seed training_sampling",
    weight_sync="WeightSync check_log_probs_diff names_to_check",
)
