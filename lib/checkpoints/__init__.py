"""A run's checkpoints: when one is due, what is in it, how all ranks write and read it."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    checkpointer="CheckpointConfig Checkpointer Progress Trained",
)
