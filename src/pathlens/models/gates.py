"""Gate functions: how a pre-activation q becomes a gate value.

A hard gate is q > 0 everywhere in Pathlens. Soft gates have a gradient; straight-through gates are hard in the forward
and soft in the backward pass.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.errors import OptionError, unknown_name


class Gate(nn.Module, ABC):
    """A map from pre-activations q to gate values, elementwise.

    Subclasses implement `forward`; `gated` is q·G(q), a unit that is gated by its own pre-activation.
    """

    hard: bool = False  #: whether the gate is 1 where q > 0 and 0 elsewhere

    @abstractmethod
    def forward(self, q: Tensor) -> Tensor: ...

    def gated(self, q: Tensor, slope: float = 0.0) -> Tensor:
        """q·(α + (1−α)·G(q)), the self-gated unit; α is the slope of a leaky unit."""
        return q * leak(self(q), slope)

    @property
    def label(self) -> str:
        """What figures print beside a result that was computed with this gate."""
        return "hard" if self.hard else type(self).__name__.lower()


class Hard(Gate):
    """G(q) = 1 if q > 0 else 0; no gradient.

    >>> Hard()(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0., 0., 1.])
    """

    hard = True

    def forward(self, q: Tensor) -> Tensor:
        return (q > 0).to(q.dtype)

    def gated(self, q: Tensor, slope: float = 0.0) -> Tensor:
        return torch.relu(q) if slope == 0.0 else nn.functional.leaky_relu(q, slope)


def _number(what: str, value: float, positive: bool) -> float:
    """A finite number that is positive, or not negative."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        raise OptionError(f"{what} must be {'positive' if positive else 'at least 0'} and finite, got {value!r}.")
    return number


class _WithBeta(Gate):
    """Base of gates with a β. It is a buffer, so that a schedule can change it and stacked networks have one each."""

    beta: Tensor

    def __init__(self, beta: float) -> None:
        super().__init__()
        self.register_buffer("beta", torch.tensor(_number(f"{type(self).__name__} gate: beta", beta, positive=True)))

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={buffer.tolist()}" for name, buffer in self.named_buffers())


class Soft(_WithBeta):
    """G(q) = (1 + ε)·σ(βq), in (0, 1 + ε).

    >>> Soft(beta=4.0)(torch.tensor([0.0, 1.0]))
    tensor([0.5000, 0.9820])
    """

    hard = False
    epsilon: Tensor

    def __init__(self, beta: float = 4.0, epsilon: float = 0.0) -> None:
        super().__init__(beta)
        self.register_buffer("epsilon", torch.tensor(_number("Soft gate: epsilon", epsilon, positive=False)))
        self._scaled = float(epsilon) > 0

    def forward(self, q: Tensor) -> Tensor:
        g = torch.sigmoid(self.beta * q)
        return (1 + self.epsilon) * g if self._scaled else g

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        super()._load_from_state_dict(*args, **options)
        self._scaled = bool((self.epsilon > 0).any())

    @property
    def label(self) -> str:
        beta = self.beta.flatten()[0].item()
        return f"soft β={beta:g}" + (f", ε={self.epsilon.flatten()[0].item():g}" if self._scaled else "")


class StraightThrough(_WithBeta):
    """Forward 1(q > 0), backward the derivative of σ(βq).

    >>> q = torch.tensor([-1.0, 2.0], requires_grad=True)
    >>> g = StraightThrough(beta=4.0)(q); g.sum().backward(); g.detach(), q.grad > 0
    (tensor([0., 1.]), tensor([True, True]))
    """

    hard = True

    def __init__(self, beta: float = 4.0) -> None:
        super().__init__(beta)

    def forward(self, q: Tensor) -> Tensor:
        soft = torch.sigmoid(self.beta * q)
        return (q > 0).to(q.dtype) + (soft - soft.detach())

    @property
    def label(self) -> str:
        return f"hard (straight-through β={self.beta.flatten()[0].item():g})"


class Open(Gate):
    """G(q) = 1: every path is active, as in a deep linear network."""

    hard = True

    def forward(self, q: Tensor) -> Tensor:
        return torch.ones_like(q)

    def gated(self, q: Tensor, slope: float = 0.0) -> Tensor:
        return q

    @property
    def label(self) -> str:
        return "all open"


_BY_NAME: dict[str, type[Gate]] = {"hard": Hard, "soft": Soft, "straight_through": StraightThrough, "open": Open}


def make_gate(gate: str | Gate, beta: float = 4.0, epsilon: float = 0.0) -> Gate:
    """A gate from its name ("hard", "soft", "straight_through", "open"), or a copy of a gate.

    A copy, so that a schedule that changes β of one network does not change it in another.
    """
    if isinstance(gate, Gate):
        _check_hard(gate)
        return copy.deepcopy(gate)
    if isinstance(gate, type) and issubclass(gate, Gate):
        raise OptionError(f"Gate function: got the class {gate.__name__}. Give an instance: {gate.__name__}().")
    if gate not in _BY_NAME:
        raise unknown_name("gate function", gate, _BY_NAME)
    accepted = inspect.signature(_BY_NAME[gate]).parameters
    options = {"beta": beta, "epsilon": epsilon}
    return _BY_NAME[gate](**{name: value for name, value in options.items() if name in accepted})


def _check_hard(gate: Gate) -> None:
    """Raise an error if a gate calls itself hard and is not 1(q > 0), which regions and paths rely on."""
    if gate.hard and not isinstance(gate, Open):
        device = next((t.device for t in (*gate.parameters(), *gate.buffers())), torch.device("cpu"))
        q = torch.tensor([-3.0, -1.0, -0.3, -1e-3, 0.0, 1e-3, 0.3, 1.0, 3.0], device=device)
        if not torch.equal(gate(q).detach(), (q > 0).to(q.dtype)):
            raise OptionError(
                f"Gate function {type(gate).__name__}: hard = True means 1 where q > 0 and 0 elsewhere, and its values "
                "differ. Set hard = False."
            )


def gate_name(gate: Gate) -> str | None:
    """The gate's name in `make_gate`; None for a gate function that the user wrote."""
    return next((name for name, kind in _BY_NAME.items() if type(gate) is kind), None)


def leak(g: Tensor, slope: float) -> Tensor:
    """Turn a gate in {0, 1} into one in {α, 1}: LeakyReLU's gate."""
    return g if slope == 0.0 else slope + (1 - slope) * g
