"""Pages to look at, each in one file that needs no server, network or framework: style, charts, samples."""

from lib.rooms import exports

__all__, __getattr__ = exports(
    __name__,
    charts="Series line_chart stacked_chart",
    page="render",
)
