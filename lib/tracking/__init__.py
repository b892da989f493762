"""What a run shows and leaves behind, except checkpoints: its folder, the terminal, metrics and their loggers."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    metrics="Metrics",
    run="Run TrackingConfig",
    run_folder="read_metrics",
    startup="StartupTimer",
)
