"""The events that the scripts put in order."""

import os
import sys

from lib.errors import UserError, error_line
from lib.rooms import OldPaths

try:
    os.getcwd()
except OSError as error:  # before torch is imported, which ends the process in such a folder
    gone = UserError(
        f"no working directory; where the command was started; {error.strerror}, expected a folder; cd to one"
    )
    print(error_line(gone), file=sys.stderr)
    raise SystemExit(gone.code) from error

sys.meta_path.append(OldPaths())
