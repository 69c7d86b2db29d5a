"""The networks of one training: given ones, or copies that are initialised from seeds."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import nn

from pathlens.errors import EmptyDataError, OptionError
from pathlens.models.tracing import unwrapped
from pathlens.training.stack import gated_parts


def derive_seed(seed: int, purpose: str) -> int:
    """An independent seed for each purpose of one training."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:7], "big")


def make_members(
    net: nn.Module | Sequence[nn.Module],
    seed: int,
    seeds: Sequence[int] | None,
    settings: Sequence[Mapping[str, float]] | None,
    base: Mapping[str, float],
) -> tuple[list[nn.Module], list[dict[str, Any]]]:
    """The networks that are trained together, and the seed and settings of each; `base` are the common settings."""
    nets = [unwrapped(one) for one in (net if isinstance(net, Sequence) else [net])]
    for one in nets:
        if not isinstance(one, nn.Module):
            raise OptionError(f"train: expected a network or a list of them first, got {type(one).__name__}.")
        if next(one.parameters(), None) is None:
            raise OptionError(f"train: {type(one).__name__} has no parameters to train.")
    if isinstance(seeds, Integral):
        raise OptionError(f"train: seeds are a sequence, one network each, got {seeds}. Give range({seeds}).")
    if not isinstance(net, nn.Module):
        if seeds is not None or settings is not None:
            raise OptionError("train: give either a list of networks, or one network with seeds or settings.")
        if not nets:
            raise EmptyDataError("train: the list of networks is empty.")
        if len({id(one) for one in nets}) < len(nets):
            raise OptionError(
                "train: a network is in the list twice, and it can hold the weights of one training alone. Give copies "
                "of it, copy.deepcopy(net), or the network itself with seeds=…."
            )
    if seeds is None and settings is None:
        return nets, [_checked_settings({**base, "seed": int(seed) + i}) for i in range(len(nets))]
    members, chosen = [], []
    for setting in settings if settings is not None else ({},):
        for s in seeds if seeds is not None else (seed,):
            members.append(copy.deepcopy(nets[0]))
            initialise(members[-1], int(s))
            chosen.append(_checked_settings({**base, **setting, "seed": int(s)}))
            if "beta" in setting:
                _set_beta(members[-1], chosen[-1]["beta"])
    if not members:
        raise EmptyDataError("train: seeds and settings give no networks.")
    return members, chosen


def _checked_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of one network as Python numbers."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        try:
            found[name] = int(value) if name == "seed" else float(value)
        except (TypeError, ValueError) as error:
            raise OptionError(f"train: {name} must be a number, got {value!r}.") from error
        if name == "lr" and not value > 0:
            raise OptionError(f"train: the learning rate must be positive, got {value}.")
        if name not in ("seed", "beta") and not value >= 0:
            raise OptionError(f"train: {name} must be at least 0, got {value}.")
    return found


def _set_beta(net: nn.Module, beta: float) -> None:
    soft = [part.gate for _, part in gated_parts(net) if hasattr(part.gate, "beta")]
    if not soft:
        raise OptionError("train: a setting gives beta, but the network's gates are not soft.")
    for gate in soft:
        gate.beta.fill_(beta)  # type: ignore[operator]


def initialise(net: nn.Module, seed: int) -> None:
    """Draw a network's weights from a seed, in place: gated parts by their own rule, others by `reset_parameters`."""
    gated = [part for _, part in gated_parts(net)]
    inside = {m for part in gated for m in part.modules()}
    plain = [m for m in net.modules() if m not in inside and callable(_reset_method(m))]
    drawn = {p for m in (*plain, *gated) for p in m.parameters()}
    for name, p in net.named_parameters():
        if p.requires_grad and p not in drawn:
            raise OptionError(
                f"train: parameter '{name}' of shape {tuple(p.shape)} cannot be drawn from a seed: its module has no "
                "reset_parameters. Give it one, or give networks that you made: train([make(s) for s in seeds], …)."
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for m in reversed(plain):  # children first, so that the rule of a parent wins
            _reset_method(m)()
    for i, part in enumerate(gated):  # one seed for all would make parts of one shape equal
        part.reinitialise(seed if i == 0 else derive_seed(seed, f"part {i}"))


def _reset_method(module: nn.Module) -> Any:
    """The method that draws a module's own weights; some modules of torch have it with an underscore."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
