"""Targets on the unit circle: a slow wave on the top half, a fast one on the bottom, and controls for that contrast."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pathlens.data.dataset import DataSet
from pathlens.errors import NotFiniteError, OptionError, ShapeError, unknown_name

Target = float | Callable[[Tensor], Tensor]

# Each control removes one of the two properties of the slow half: simplicity, and energy that is learnable early.
CIRCLE_CONTROLS: dict[str, dict[str, Any]] = {
    "trivial": {"top": 0.0},  # simplest target possible, and no energy to learn
    "offset": {"top": 12.0, "top_offset": 1.0},  # equally fast halves; only the top has energy learnable early
    "swapped": {"top": 12.0, "bottom": 1.0},  # the same contrast upside down: rules out anything tied to direction
}


def circle(
    points: int = 1024,
    *,
    top: Target = 1.0,
    bottom: Target = 12.0,
    top_amplitude: float = 1.0,
    bottom_amplitude: float = 1.0,
    top_offset: float = 0.0,
    bottom_offset: float = 0.0,
    noise: float = 0.0,
    seed: int = 0,
    test_points: int = 0,
    dtype: torch.dtype = torch.float32,
) -> DataSet:
    """Evenly spaced points on the unit circle with one target function per half.

    ``x_i = (cos θ_i, sin θ_i)``, ``θ_i = 2πi / points``, and ``y_i = a·sin(f θ_i) + b + noise·ε_i`` with frequency f,
    amplitude a and offset b of the half that contains θ_i; top is θ in [0, π). The defaults, sin θ and sin 12θ, are a
    reconstruction: the half-space paper shows the task but does not print its formula.

    Parameters
    ----------
    points : int
        Rows n.
    top, bottom : float or callable
        A frequency, or a function of the angles θ (float64, shape (k,)) that replaces sin(fθ). Frequency 0 is the
        zero function.
    top_amplitude, bottom_amplitude, top_offset, bottom_offset : float
        a and b of each half.
    noise : float
        Standard deviation of Gaussian noise on the training targets.
    seed : int
        Seed of the noise.
    test_points : int
        Rows of a noiseless test set, on evenly spaced angles half a step off, ``2π(i + ½) / test_points``.
    dtype : torch.dtype
        Everything is computed in float64 and rounded once.

    Returns
    -------
    DataSet
        x (n, 2), y (n, 1). Marks: ``theta`` (n,) float64, ``top`` (n,) bool.

    Examples
    --------
    >>> data = circle(8)
    >>> data.marks["top"].tolist()
    [True, True, True, True, False, False, False, False]
    >>> round(float(data.y[1, 0]), 4)  # sin(π/4)
    0.7071
    """
    if points < 1:
        raise OptionError(f"circle: points={points}, expected at least 1.")
    if test_points < 0:
        raise OptionError(f"circle: test_points={test_points}, expected 0 or more.")
    if not (math.isfinite(noise) and noise >= 0):
        raise OptionError(f"circle: noise={noise}, expected a finite number of at least 0.")
    halves = ((top, top_amplitude, top_offset, "top"), (bottom, bottom_amplitude, bottom_offset, "bottom"))

    def build(n: int, shift: float) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        index = torch.arange(n, dtype=torch.float64) + shift
        theta = index * (2 * math.pi / n)
        on_top = 2 * index < n  # on the index, not on the rounded angle: exact at θ = π
        y = torch.empty(n, dtype=torch.float64)
        for (target, amplitude, offset, half), mask in zip(halves, (on_top, ~on_top)):
            y[mask] = amplitude * _evaluate(target, theta[mask], half) + offset
        x = torch.stack((theta.cos(), theta.sin()), dim=1)
        return x, y[:, None], {"theta": theta, "top": on_top}

    x, y, marks = build(points, 0.0)
    if noise:
        y = y + noise * torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    info: dict[str, Any] = {
        "top": _name(top),
        "bottom": _name(bottom),
        "top_amplitude": top_amplitude,
        "bottom_amplitude": bottom_amplitude,
        "top_offset": top_offset,
        "bottom_offset": bottom_offset,
        "noise": noise,
        "seed": seed,
    }
    x_test, y_test, marks_test = build(test_points, 0.5) if test_points else (None, None, {})
    data = DataSet(x, y, x_test, y_test, name="circle", info=info, marks=marks, marks_test=marks_test)
    return data.to(dtype=dtype)


def circle_control(name: str, *, points: int = 1024, **options: Any) -> DataSet:
    """A circle whose targets separate 'simple' from 'learnable early'.

    ===========  ==============  ==========  ================================================
    name         top             bottom      what it removes
    ===========  ==============  ==========  ================================================
    ``trivial``  0               sin 12θ     the energy of the simple half
    ``offset``   sin 12θ + 1     sin 12θ     the difference in simplicity; top learnable early
    ``swapped``  sin 12θ         sin θ       the preferred direction
    ===========  ==============  ==========  ================================================

    Further options are those of `circle`, and override the control's own.

    Examples
    --------
    >>> data = circle_control("trivial", points=16)
    >>> bool((data.y[data.marks["top"]] == 0).all())
    True
    """
    if name not in CIRCLE_CONTROLS:
        raise unknown_name("circle control", name, CIRCLE_CONTROLS)
    data = circle(points, **{**CIRCLE_CONTROLS[name], **options})
    return replace(data, name=f"circle ({name})", info={**data.info, "control": name})


def _evaluate(target: Target, theta: Tensor, half: str) -> Tensor:
    if not callable(target):
        if not math.isfinite(target):
            raise OptionError(f"circle: the {half} frequency is {target}, expected a finite number or a function.")
        return torch.sin(target * theta)
    value = target(theta)
    if not isinstance(value, Tensor) or value.shape != theta.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ShapeError(
            f"circle: the {half} target returned {got}, expected a tensor of shape {tuple(theta.shape)} "
            "like its argument θ."
        )
    if not bool(torch.isfinite(value).all()):
        raise NotFiniteError(f"circle: the {half} target returned NaN or infinity. Check it on θ in [0, 2π).")
    return value.to(torch.float64)


def _name(target: Target) -> str:
    return getattr(target, "__name__", repr(target)) if callable(target) else f"sin({target:g}θ)"
