"""Paths that options name: found, and said what they are where they are not what was expected."""

import difflib
import os
import stat
from pathlib import Path

from lib.errors import UserError

DATA_FILES = ("*.parquet", "*.jsonl")


def resolve_file(name: str, flag: str) -> Path:
    """The path of an existing, readable, non-empty regular file, `~` expanded. Raises UserError otherwise."""
    if "://" in name:
        raise UserError(f"a remote path; {flag} {name}; found a URL, expected a local file; download the file first")
    path = Path(os.path.expanduser(name))
    try:
        info = path.stat() if name else None
        if info and stat.S_ISREG(info.st_mode):
            path.open("rb").close()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"no such file; {flag} {name}; nothing there, working directory {Path.cwd()}; {_nearest(path)}"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"the file cannot be opened; {flag} {name}; {reason}; check the path and its rights") from None
    if info is None:
        raise UserError(f"an empty path; {flag}; found '', expected a file; give the file's name")
    if stat.S_ISDIR(info.st_mode):
        kinds = ("*.py",) if flag.endswith("path") else DATA_FILES
        entries = sorted(entry.name for kind in kinds for entry in path.glob(kind))
        inside = ", ".join(entries[:5]) or f"no {' and no '.join(kinds)}"
        raise UserError(f"a directory, not a file; {flag} {name}; it holds {inside}; name the files themselves")
    if not stat.S_ISREG(info.st_mode):
        raise UserError(f"not a regular file; {flag} {name}; found a device, pipe or socket; give a file on disk")
    if info.st_size == 0:
        raise UserError(f"an empty file; {flag} {name}; found 0 bytes; write or copy the file again")
    return path


def _nearest(path: Path) -> str:
    """What the user may have meant: the nearest name in the deepest directory that exists."""
    while not path.parent.is_dir() and path.parent != path.parent.parent:
        path = path.parent
    try:
        names = sorted(os.listdir(path.parent))
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {path.parent / close[0]}?"
    return f"{path.parent} holds {', '.join(names[:5]) + (', ...' if len(names) > 5 else '') or 'nothing'}"


def data_format(path: Path, where: str) -> str:
    """`parquet` or `jsonl`, by the file's first bytes, whatever its name. Raises UserError for any other file.

    Text under a name that ends in .jsonl is taken for JSON lines, so that the line that is none is named.
    """
    with path.open("rb") as file:
        head = file.read(512)
    if head.startswith(b"PAR1"):
        return "parquet"
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"a git LFS pointer, not the data; {where}; found a pointer file; run git lfs pull")
    found = _looks_like(head)
    is_named_so = path.suffix.lower() in (".jsonl", ".ndjson", ".json")
    if found == JSON_LINES or (is_named_so and found in (PLAIN_TEXT, TABLE, BLANK)):
        return "jsonl"
    remedy = REMEDIES.get(found, "convert it to either (pandas: to_parquet, or to_json with lines=True)")
    raise UserError(
        f"neither a parquet file nor JSON lines; {where}; it looks like {found}, expected the bytes PAR1 or an object "
        f"{{...}} per line; {remedy}"
    )


JSON_LINES, PLAIN_TEXT, TABLE, BLANK = "JSON lines", "plain text", "a CSV or TSV table", "blank lines"
REMEDIES = {
    "a gzip file": "unpack it first (gunzip FILE)",
    "a Zstandard file": "unpack it first (unzstd FILE)",
    "a zip file": "unpack it first (unzip FILE)",
    "a JSON array": "write an object per line (jq -c '.[]' FILE > FILE.jsonl)",
    "UTF-16 text": "write it as UTF-8 (iconv -f UTF-16 -t UTF-8 FILE)",
}


def _looks_like(head: bytes) -> str:
    """What a file seems to be that is not parquet, from its first bytes."""
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    magics = {b"PARE": "an encrypted parquet file", b"\x1f\x8b": "a gzip file", b"PK\x03\x04": "a zip file"}
    magics |= {b"\x28\xb5\x2f\xfd": "a Zstandard file", b"\xff\xfe": "UTF-16 text", b"\xfe\xff": "UTF-16 text"}
    magics |= {b"ARROW1": "an Arrow IPC file", b"\x80": "a pickle", b"{": JSON_LINES, b"[": "a JSON array"}
    for magic, name in magics.items():
        if text.startswith(magic):
            return name
    if text[:1] == b"<":
        return "an HTML or XML page (a failed download?)"
    first_line = text.split(b"\n")[0]
    if any(byte < 9 for byte in head):
        return "binary data of another format"
    if not text:
        return BLANK
    return TABLE if b"," in first_line or b"\t" in first_line else PLAIN_TEXT
