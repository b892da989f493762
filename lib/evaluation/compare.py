"""`python eval.py --compare RUN RUN`: the curves of several runs on one page, without a model, a GPU or torchrun."""

from dataclasses import dataclass
from pathlib import Path

from lib.config.reporting import reporting_errors
from lib.errors import UserError
from lib.storage.writing import write_whole
from lib.tracking.report import compare_page


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Which runs lie over one another on a page, and where it is written."""

    compare: tuple[str, ...] = ()
    """Folders of 2 to 8 runs, finished or not."""
    output: str = "compare.html"
    """HTML file to write, in place of what is there."""
    debug: bool = False
    """Show tracebacks also for errors that are the input's."""


def compare_runs(cfg: CompareConfig) -> None:
    """Writes the page; a LockstepError ends it with one line and its exit code."""
    with reporting_errors(debug=cfg.debug):
        page = compare_page([Path(folder).expanduser() for folder in cfg.compare])
        output = Path(cfg.output).expanduser()
        if output.suffix != ".html":
            raise UserError(
                f"not a page's name; --output {cfg.output}; found the ending {output.suffix!r}, expected .html; give "
                "another name, or leave it out for compare.html"
            )
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_whole(output, page.encode(errors="backslashreplace"))
        except OSError as error:
            raise UserError(
                f"cannot write the page; --output {output}; {error.strerror or error}, expected a folder that can be "
                "written; give another place"
            ) from None
        print(f"written: {output.resolve()}")
