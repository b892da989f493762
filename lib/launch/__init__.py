"""Before the first step: what defines a run, what it goes on from, and what fits together."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    checks="check_critic check_engines check_input check_same_config check_same_prompts",
    setup=(
        "Task build_engine load_actor load_frozen load_trained_critic make_checkpointer make_collector make_progress "
        "open_conversations open_run open_scorer read_task say_what_begins sync_and_compare"
    ),
    train_config="TrainConfig",
)
