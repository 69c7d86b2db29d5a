"""neural-tangents as a peer: a separate environment, called through a subprocess and .npz files.

It needs an old JAX and an old numpy, so it is installed into a virtual environment outside the tree on first use. If
this fails, benchmarks print a message and continue without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("jax==0.4.25", "jaxlib==0.4.25", "tf2jax==0.3.6", "numpy<2", "scipy<1.13", "neural-tangents")
WORKER = Path(__file__).with_name("neural_tangents_worker.py")


def folder() -> Path:
    """Where the environment is: ``PATHLENS_PEER_VENV``, or a folder of the user's cache."""
    chosen = os.environ.get("PATHLENS_PEER_VENV")
    if chosen:
        return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "pathlens" / "neural-tangents"


@dataclass(frozen=True)
class Peer:
    """neural-tangents, ready to be called; or the reason why it is not."""

    python: Path | None
    note: str

    def call(self, job: dict[str, Any], arrays: dict[str, np.ndarray], timeout: float = 3600.0) -> dict[str, Any]:
        """Run one job in the other environment.

        Returns
        -------
        dict with ``seconds`` (implementation → best time), ``notes`` and arrays named ``kernel``; ``notes`` alone where
        the job could not be run.
        """
        if self.python is None:
            return {"seconds": {}, "notes": [self.note]}
        with tempfile.TemporaryDirectory() as place:
            given, made = Path(place, "job.npz"), Path(place, "result.npz")
            np.savez(given, job=json.dumps(job), **arrays)
            environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"TF_CPP_MIN_LOG_LEVEL": "3"}
            try:
                done = subprocess.run(
                    [str(self.python), str(WORKER), str(given), str(made)],
                    capture_output=True,
                    text=True,
                    timeout=timeout,
                    env=environment,
                )
            except subprocess.TimeoutExpired:
                return {"seconds": {}, "notes": [f"neural-tangents: no answer within {timeout:.0f} s"]}
            if done.returncode or not made.exists():
                said = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
                return {"seconds": {}, "notes": [f"neural-tangents failed: {said[0][:200]}"]}
            with np.load(made) as found:
                result = json.loads(str(found["report"]))
                result.update({k: found[k] for k in found.files if k != "report"})
        return result


def _works(python: Path) -> bool:
    try:
        done = subprocess.run([str(python), "-c", "import neural_tangents"], capture_output=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def neural_tangents(install: bool = True) -> Peer:
    """Find the environment, or make it (a minute or two, the first time)."""
    place = folder()
    python = place / "bin" / "python"
    if python.exists() and _works(python):
        return Peer(python, "")
    if not install:
        return Peer(None, "neural-tangents is not installed here")
    print(f"• installing neural-tangents into {place} (once)", flush=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True, capture_output=True, timeout=300)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES],
            check=True,
            capture_output=True,
            timeout=1800,
        )
    except (OSError, subprocess.SubprocessError) as error:
        status = getattr(error, "returncode", type(error).__name__)
        return Peer(None, f"neural-tangents could not be installed here (pip: {status}); its columns are empty")
    if not _works(python):
        return Peer(None, "neural-tangents was installed but does not import here; its columns are empty")
    return Peer(python, "")
