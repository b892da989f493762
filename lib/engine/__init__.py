"""vLLM inside this process: sampling, sleep and wake, and the policy's weights in it."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    engine="RolloutEngine request_seed",
    function_proof="prove_function",
    mismatch="Mismatch",
    rollout_config="EngineConfig RolloutConfig Sampling SamplingConfig training_sampling",
    weight_sync="WeightSync names_to_check",
)
