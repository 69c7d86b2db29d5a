"""Files that somebody else made: refused with a clear error, at once, and without taking the memory they ask for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("foreign_files.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory are those of Linux")
def test_foreign_files_are_refused_at_once_and_within_bounds(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True)
    cases: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, (done.returncode, cases[-1:], done.stderr[-3000:])
    assert len(cases) > 60
    for one in cases:
        name, outcome = one["name"], one["outcome"]
        if name.split()[0] in ("doctor,", "check,", "check"):  # these return a state
            assert outcome in ("'corrupt'", "['corrupt']", "'absent'"), one
        else:
            assert one["refused"], one
        assert "import, pickle" not in name or "md5 is" in outcome, "the checksum decides"
        assert one["seconds"] < 5, one
        assert one["peak"] < 100 << 20, one
