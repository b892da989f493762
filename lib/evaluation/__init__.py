"""An evaluation: any model, its input, kept parts and output, scores and pages."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    compare="CompareConfig compare_runs",
    passk="pass_at_k",
    report="render_page summarise summary_table",
)
