"""Rows from a dataset class in the user's own file.

The class is made once for training, and once for validation if that has files, with three keywords: `data_files` (list
of paths), `tokenizer`, and `config` (the DataConfig). It has `__len__`, and `__getitem__(i)` returns a dict in the
schema of the data files: {prompt, data_source, reward_model: {ground_truth, ...}, extra_info}. All rows are read at
start and pass the checks that rows of a file pass.
"""

import ast
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from lib.data.paths import resolve_file
from lib.data.reading import rows_from_dicts
from lib.data.rows import Rows
from lib.data.schema import Keys
from lib.errors import UserError

PATH_FLAG = "--data.dataset-path"


def check_dataset_class(name: str, class_name: str) -> None:
    """Raises UserError when the file does not parse or does not define the class. Runs no code of it."""
    path = resolve_file(name, PATH_FLAG)
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise UserError(
            f"the dataset file is not valid Python; {PATH_FLAG} {name}{line}; {error}; mend the file"
        ) from error
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    if class_name not in classes and not imported & {class_name, "*"}:
        raise UserError(
            f"no such class in the dataset file; {PATH_FLAG} {name}; found {', '.join(classes) or 'none'}, expected "
            f"{class_name}; change --data.dataset-name"
        )


def custom_rows(
    name: str, class_name: str, *, data_files: tuple[str, ...], files_flag: str, tokenizer: Any, config: Any, keys: Keys
) -> Rows:
    """The checked rows of the class for these files. Raises UserError with the step and the line that failed."""
    source = f"{name}:{class_name} ({files_flag})"
    files = [str(resolve_file(file, files_flag)) for file in data_files]
    path = resolve_file(name, PATH_FLAG).absolute()  # as tracebacks have it
    step, rows = "importing it", []
    try:
        dataset_class = _import_class(path, class_name)
        step = "making it"
        dataset = dataset_class(data_files=files, tokenizer=tokenizer, config=config)
        step = "its __len__"
        num_rows = len(dataset)
        for row in range(num_rows):
            step = f"row {row}"
            rows.append(dataset[row])
            if not isinstance(rows[-1], dict):
                raise TypeError(f"__getitem__ returned {type(rows[-1]).__name__}, expected dict")
    except (Exception, SystemExit) as error:  # whatever the user's code raises is the user's to see
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = f"{path} line {frames[-1].lineno}" if frames else str(path)
        raise UserError(
            f"the dataset class failed at {step}; {source}, {line}; {type(error).__name__}: {error}; mend the class"
        ) from error
    return rows_from_dicts(rows, source, keys=keys)


def _import_class(path: Path, class_name: str) -> Any:
    module_name = f"lockstep_dataset_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ImportError("not a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and pickle look the module up by name
    spec.loader.exec_module(module)
    return getattr(module, class_name)
