"""Files that are there whole or not at all, and documents that carry a checksum of themselves."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def write_atomically(path: Path, data: Any, confirm: Callable[[], None] = lambda: None) -> None:
    """Write bytes under a temporary name, fsync, rename, fsync the folder: a crash leaves the old file or the new one.

    ``confirm`` is asked just before the file takes its place, and may raise.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with open(temporary, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        confirm()
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last."""
    if os.name != "posix":  # elsewhere a folder cannot be opened, and a rename needs no such help
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with a checksum of itself.

    >>> unsealed(sealed({"a": 1}))
    {'a': 1}
    """
    plain = json.loads(json.dumps(content))
    return {**plain, "seal": hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()}


def unsealed(document: Any) -> dict[str, Any]:
    """What was sealed; a ValueError where its checksum is not that of the content."""
    content = {k: v for k, v in document.items() if k != "seal"} if isinstance(document, dict) else {}
    if not content or document.get("seal") != sealed(content)["seal"]:
        raise ValueError("its content does not have the checksum it carries")
    return content
