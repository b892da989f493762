"""Before the first step: what defines a run, what it goes on from, and what fits together."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    checks=(
        "check_critic check_engines check_input check_same_config check_same_prompts data_sources describe "
        "load_prompts try_reward"
    ),
    train_config="TrainConfig",
)
