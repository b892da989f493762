"""vLLM inside this process: sampling, sleep and wake, and the policy's weights in it."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    engine="RolloutConfig RolloutEngine Sampling request_seed training_sampling",
    mismatch="Mismatch",
    weight_sync="WeightSync names_to_check",
)
