"""Small random networks, drawn from a seed as the text of a module: what is printed of a failure can be run as it is.

A draft runs every line that it adds on two rows, so that shapes never have to be computed by hand; a line that does
not run is dropped. Nothing here knows Pathlens.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from network_reference import Reference
from torch import Tensor, nn

_UNITS = 160  # numbers per row that a tensor of a drawn network may have


@dataclass
class Drawn:
    """A network and rows for it."""

    seed: int
    text: str
    net: nn.Module
    x: Tensor
    y: Tensor

    @property
    def has_dropout(self) -> bool:
        return "dropout" in self.text.lower()


class Draft:
    """The forward of one module, line by line."""

    def __init__(self, rng: random.Random, x: Tensor, name: str, blocks: list[str]) -> None:
        self.rng, self.name, self.blocks = rng, name, blocks
        self.inits: list[str] = []
        self.lines: list[str] = []
        self.module = nn.Module()
        self.env: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "self": self.module, "x": x.clone()}
        self.live = ["x"]
        self.count = 0
        self.relus = 0
        self.layers: list[str] = []
        self.straight = False  # whether every step reads the newest variable

    # --- adding lines ------------------------------------------------------------------------------------------

    def attribute(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def variable(self, source: str) -> str:
        """The name that a result gets: often that of what it was made of."""
        if self.rng.random() < 0.6:
            return source
        return next((c for c in "abcdefghuvw" if c not in self.live), "z")

    def add(self, line: str, *inits: str, makes: tuple[str, ...] = ()) -> bool:
        """Run the lines and keep them; False, and nothing kept, where they do not run or make too much."""
        before = {k: v.clone() for k, v in self.env.items() if isinstance(v, Tensor)}
        try:
            with torch.no_grad():
                for text in inits:
                    exec(text, self.env)
                exec(line, self.env)
            for name in makes:
                t = self.env[name]
                # one position is left out only by flattening, so that rows stay first
                if t.ndim < 2 or t.ndim > 4 or t.shape[0] != 2 or t[0].numel() > _UNITS or 0 in t.shape:
                    raise ValueError(name)
        except (RuntimeError, ValueError, IndexError, TypeError, AssertionError, NotImplementedError):
            for text in inits:
                target = text.split(" = ")[0].removeprefix("self.")
                if target.isidentifier() and hasattr(self.module, target):
                    delattr(self.module, target)
            self.env.update(before)
            return False
        self.inits += inits
        self.lines.append(line)
        for name in makes:
            if name in self.live:
                self.live.remove(name)
            self.live.append(name)
        return True

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.env[name].shape[1:])

    def pick(self) -> str:
        """Mostly the newest variable."""
        return self.live[-1] if self.straight or self.rng.random() < 0.8 else self.rng.choice(self.live)

    def step(self) -> bool:
        draw = self.rng.choices([op for op, _ in _STEPS], [weight for _, weight in _STEPS])[0]
        return draw(self)

    # --- text --------------------------------------------------------------------------------------------------

    def text(self, returned: str) -> str:
        inits = ["super().__init__()", *self.inits]
        body = [*(line for line in self.lines if line != "pass"), f"return {returned}"]
        head = [f"class {self.name}(nn.Module):", "    def __init__(self):"]
        return "\n".join(
            [*head, *(" " * 8 + line for line in inits), "    def forward(self, x):", *(" " * 8 + b for b in body)]
        )


# --- what a step may do ------------------------------------------------------------------------------------------


def _number(rng: random.Random) -> str:
    return rng.choice(["0.5", "2", "-1.5", "0.75", "3"])


def weight(d: Draft) -> bool:
    """A layer with weights, of the kind that fits the tensor."""
    rng, v = d.rng, d.pick()
    shape = d.shape(v)
    out, bias = d.variable(v), rng.random() < 0.5
    if d.layers and rng.random() < 0.12:  # one that was called before
        again = rng.choice(d.layers)
        if rng.random() < 0.3:
            name = d.attribute("twice")
            return d.add(f"{out} = self.{name}({v})", f"self.{name} = self.{again}", makes=(out,))
        return d.add(f"{out} = self.{again}({v})", makes=(out,))
    name = d.attribute("fc" if len(shape) == 1 else "conv")
    if len(shape) == 1 or rng.random() < 0.05:
        made = rng.randint(2, 4)
        how = rng.random()
        if how < 0.75:
            done = d.add(
                f"{out} = self.{name}({v})", f"self.{name} = nn.Linear({shape[-1]}, {made}, bias={bias})", makes=(out,)
            )
            if done:
                d.layers.append(name)
            return done
        parameter = f"self.{name} = nn.Parameter(torch.randn({made}, {shape[-1]}))"
        if len(shape) > 1:
            return False
        call = rng.choice(
            [
                f"F.linear({v}, self.{name})",
                f"{v} @ self.{name}.t()",
                f"torch.matmul({v}, self.{name}.T)",
                f"torch.einsum('ni,oi->no', {v}, self.{name})",
            ]
        )
        return d.add(f"{out} = {call}", parameter, makes=(out,))
    groups = rng.choice([1, 1, 1, shape[0], 2])
    if shape[0] % groups:
        groups = 1
    made = groups * rng.randint(1, max(1, 4 // groups))
    options = {
        "stride": rng.choice([1, 1, 1, 2]),
        "padding": rng.choice([0, 1, 1, "'same'"]),
        "dilation": rng.choice([1, 1, 1, 2]),
        "groups": groups,
        "bias": bias,
        "padding_mode": rng.choice(["'zeros'"] * 4 + ["'circular'", "'reflect'", "'replicate'"]),
    }
    kernel = rng.choice([1, 2, 3, 3])
    if rng.random() < 0.06:
        dims = len(shape) - 1
        sizes = ", ".join(map(str, (made, shape[0] // groups, *(kernel,) * dims)))
        call = f"F.conv{dims}d({v}, self.{name}, padding={options['padding']}, groups={groups})"
        return d.add(f"{out} = {call}", f"self.{name} = nn.Parameter(torch.randn({sizes}))", makes=(out,))
    if len(shape) == 3 and rng.random() < 0.15:
        kernel = f"({kernel}, {rng.choice([1, 2])})"
    given = ", ".join(f"{k}={o}" for k, o in options.items() if o not in (1, 0, "'zeros'") or k == "bias")
    layer = f"nn.Conv{len(shape) - 1}d({shape[0]}, {made}, {kernel}, {given})"
    done = d.add(f"{out} = self.{name}({v})", f"self.{name} = {layer}", makes=(out,))
    if done:
        d.layers.append(name)
    return done


def relu(d: Draft) -> bool:
    rng, v = d.rng, d.pick()
    out = d.variable(v)
    how = rng.random()
    if how < 0.35:
        acts = [line for line in d.inits if "nn.ReLU(" in line or "nn.LeakyReLU(" in line]
        if acts and rng.random() < 0.4:
            name = rng.choice(acts).split(" = ")[0]
            done = d.add(f"{out} = {name}({v})", makes=(out,))
        else:
            name = d.attribute("act")
            kind = rng.choice(
                [
                    "nn.ReLU()",
                    "nn.ReLU()",
                    "nn.ReLU(inplace=True)",
                    "nn.LeakyReLU(0.1)",
                    "nn.LeakyReLU(0.2, inplace=True)",
                ]
            )
            done = d.add(f"{out} = self.{name}({v})", f"self.{name} = {kind}", makes=(out,))
    elif how < 0.75:
        call = rng.choice(
            [f"F.relu({v})", f"torch.relu({v})", f"{v}.relu()", f"F.relu(input={v})", f"F.leaky_relu({v}, 0.3)"]
        )
        done = d.add(f"{out} = {call}", makes=(out,))
    elif how < 0.92:
        call = rng.choice(
            [
                f"{v}.relu_()",
                f"F.relu({v}, inplace=True)",
                f"torch.relu_({v})",
                f"F.leaky_relu_({v}, 0.2)",
                f"F.relu_({v})",
            ]
        )
        done = d.add(f"{out} = {call}" if rng.random() < 0.5 else call, makes=(out if call == "" else v,))
    else:
        return d.add(f"unused = {rng.choice(['F.relu', 'torch.relu'])}({v})")
    d.relus += done
    return done


def norm(d: Draft) -> bool:
    v = d.pick()
    shape = d.shape(v)
    name, out = d.attribute("bn"), d.variable(v)
    affine = "" if d.rng.random() < 0.8 else ", affine=False"
    layer = f"nn.BatchNorm{max(1, len(shape) - 1)}d({shape[0]}{affine})"
    return d.add(f"{out} = self.{name}({v})", f"self.{name} = {layer}", makes=(out,))


def scale(d: Draft) -> bool:
    rng, v = d.rng, d.pick()
    out, number = d.variable(v), _number(rng)
    how = rng.random()
    if how < 0.3:
        line = rng.choice([f"{v} *= {number}", f"{v} /= {number}", f"{v}.mul_({number})", f"{v}.div_({number})"])
        return d.add(line, makes=(v,))
    if how < 0.7:
        call = rng.choice(
            [
                f"{v} * {number}",
                f"{number} * {v}",
                f"{v} / {number}",
                f"-{v}",
                f"torch.mul({v}, {number})",
                f"torch.div({v}, {number})",
                f"{v}.mul({number})",
            ]
        )
        return d.add(f"{out} = {call}", makes=(out,))
    name = d.attribute("scale")
    sizes = rng.choice(["", "1", f"{d.shape(v)[0]}" + ", 1" * (len(d.shape(v)) - 1)])
    tensor = f"torch.rand({sizes}) + 0.5" if sizes else f"torch.tensor({number}.0)".replace("5.0", "5")
    made = f"nn.Parameter({tensor})" if rng.random() < 0.5 else tensor
    init = f"self.{name} = {made}" if "Parameter" in made else f"self.register_buffer('{name}', {made})"
    return d.add(f"{out} = {v} {rng.choice('*/')} self.{name}", init, makes=(out,))


def shift(d: Draft) -> bool:
    rng, v = d.rng, d.pick()
    out, number = d.variable(v), _number(rng)
    how = rng.random()
    if how < 0.3:
        return d.add(rng.choice([f"{v} += {number}", f"{v} -= {number}", f"{v}.add_({number})"]), makes=(v,))
    if how < 0.6:
        call = rng.choice([f"{v} + {number}", f"{number} + {v}", f"{v} - {number}", f"{number} - {v}"])
        return d.add(f"{out} = {call}", makes=(out,))
    name = d.attribute("shift")
    sizes = rng.choice(["1", f"{d.shape(v)[0]}" + ", 1" * (len(d.shape(v)) - 1)])
    made = f"torch.randn({sizes})"
    parameter = rng.random() < 0.4
    init = f"self.{name} = nn.Parameter({made})" if parameter else f"self.register_buffer('{name}', {made})"
    return d.add(f"{out} = {v} {rng.choice('+-')} self.{name}", init, makes=(out,))


def join(d: Draft) -> bool:
    """Additions and concatenations of what is live."""
    rng, v = d.rng, d.pick()
    same = [w for w in d.live if w != v and d.shape(w) == d.shape(v)]
    if same and rng.random() < 0.65:
        w, out = rng.choice(same), d.variable(v)
        if rng.random() < 0.3:
            line = rng.choice([f"{v} += {w}", f"{v}.add_({w})", f"{v} -= {w}"])
            return d.add(line, makes=(v,))
        third = rng.choice([*same, v])
        call = rng.choice(
            [
                f"{v} + {w}",
                f"{w} + {v}",
                f"torch.add({v}, {w})",
                f"{v} - {w}",
                f"{v} + {w} + {third}",
                f"sum(({v}, {w}))",
                f"torch.add({v}, {w}, alpha=0.5)",
                f"{v}.add({w})",
            ]
        )
        return d.add(f"{out} = {call}", makes=(out,))
    near = [w for w in d.live if len(d.shape(w)) == len(d.shape(v)) and d.shape(w)[1:] == d.shape(v)[1:]]
    w, out = rng.choice(near), d.variable(v)
    call = rng.choice([f"torch.cat([{v}, {w}], 1)", f"torch.cat(({w}, {v}), dim=1)", f"torch.concat([{v}, {w}], 1)"])
    if d.shape(v) == d.shape(w) and rng.random() < 0.15:
        call = rng.choice([f"torch.stack([{v}, {w}], 1).flatten(1, 2)", f"torch.cat([{v}, {w}], -1)"])
    return d.add(f"{out} = {call}", makes=(out,))


def cut(d: Draft) -> bool:
    """Chunks, splits and slices."""
    rng, v = d.rng, d.pick()
    width = d.shape(v)[0]
    if width < 2:
        return False
    first, second = rng.sample([c for c in "abcdefgh" if c != v], 2)
    how = rng.random()
    if how < 0.6:
        sizes = [1, width - 1]
        call = rng.choice(
            [
                f"{v}.chunk(2, 1)",
                f"torch.chunk({v}, 2, dim=1)",
                f"torch.split({v}, {sizes}, 1)",
                f"{v}.split({sizes}, dim=1)",
            ]
        )
        return d.add(f"{first}, {second} = {call}", makes=(first, second))
    out = d.variable(v)
    call = rng.choice(
        [f"{v}[:, 1:]", f"{v}[:, :-1]", f"{v}[..., ::2]", f"{v}.narrow(1, 0, {width - 1})", f"{v}[..., 1:]"]
    )
    return d.add(f"{out} = {call}", makes=(out,))


def move(d: Draft) -> bool:
    """Rearrangements that keep every number."""
    rng, v = d.rng, d.pick()
    out, shape = d.variable(v), d.shape(v)
    calls = [
        f"torch.flip({v}, [1])",
        f"torch.roll({v}, 1, 1)",
        f"{v}.clone()",
        f"{v}.contiguous()",
        f"{v}.unsqueeze(1).squeeze(1)",
        f"torch.roll({v}, 1, -1)",
        f"{v}.flip(-1)",
    ]
    if len(shape) > 1:
        calls += [
            f"{v}.transpose(1, 2)",
            f"{v}.flatten(1)",
            f"torch.flatten({v}, 1)",
            f"{v}.reshape({v}.size(0), -1)",
            f"{v}.view({v}.shape[0], -1)",
            f"{v}.transpose(-1, -2)",
        ]
    if len(shape) == 3:
        calls += [f"{v}.permute(0, 2, 3, 1)", f"{v}.flatten(2)", f"torch.flip({v}, [2, 3])"]
    elif shape[0] % 2 == 0:
        calls += [f"{v}.unflatten(1, (2, {shape[0] // 2}))", f"{v}.reshape({v}.shape[0], 2, -1)"]
    return d.add(f"{out} = {rng.choice(calls)}", makes=(out,))


def pool(d: Draft) -> bool:
    rng, v = d.rng, d.pick()
    out, dims = d.variable(v), len(d.shape(v)) - 1
    if dims == 0:
        return False
    n = f"{dims}d"
    axes = "-1" if dims == 1 else "(2, 3)"
    how = rng.random()
    if how < 0.3:
        name = d.attribute("pool")
        kind = rng.choice(
            [
                f"nn.AvgPool{n}(2)",
                f"nn.AvgPool{n}(2, 1)",
                f"nn.AvgPool{n}(3, 2, padding=1)",
                f"nn.AdaptiveAvgPool{n}(1)",
                f"nn.AdaptiveAvgPool{n}(2)",
            ]
        )
        return d.add(f"{out} = self.{name}({v})", f"self.{name} = {kind}", makes=(out,))
    if how < 0.45:
        name = d.attribute("pool")
        kind = rng.choice([f"nn.MaxPool{n}(2)", f"nn.MaxPool{n}(2, 1)", f"nn.AdaptiveMaxPool{n}(1)"])
        return d.add(f"{out} = self.{name}({v})", f"self.{name} = {kind}", makes=(out,))
    call = rng.choice(
        [
            f"F.avg_pool{n}({v}, 2)",
            f"F.adaptive_avg_pool{n}({v}, 1)",
            f"{v}.mean({axes})",
            f"{v}.sum({axes})",
            f"{v}.mean(-1)",
            f"torch.mean({v}, dim=-1, keepdim=True)",
            f"{v}.mean(dim={axes}, keepdim=True)",
            f"{v}.mean(1)",
        ]
    )
    return d.add(f"{out} = {call}", makes=(out,))


def pad(d: Draft) -> bool:
    rng, v = d.rng, d.pick()
    out, dims = d.variable(v), len(d.shape(v)) - 1
    mode = rng.choice(["", "", ", mode='circular'", ", mode='reflect'", ", mode='replicate'", ", value=1.0"])
    sizes = rng.choice([(1, 1), (0, 1), (1, 0)]) * max(1, dims)
    if dims and rng.random() < 0.3:
        kind = rng.choice([f"nn.ZeroPad{dims}d(1)", f"nn.CircularPad{dims}d(1)", f"nn.ReflectionPad{dims}d(1)"])
        name = d.attribute("pad")
        return d.add(f"{out} = self.{name}({v})", f"self.{name} = {kind}", makes=(out,))
    return d.add(f"{out} = F.pad({v}, {sizes}{mode if dims else ''})", makes=(out,))


def idle(d: Draft) -> bool:
    """What changes nothing in eval mode, or is not used."""
    rng, v = d.rng, d.pick()
    out, name = d.variable(v), d.attribute("idle")
    how = rng.random()
    if how < 0.3:
        return d.add(f"{out} = self.{name}({v})", f"self.{name} = nn.Identity()", makes=(out,))
    if how < 0.5:
        return d.add(f"{out} = self.{name}({v})", f"self.{name} = nn.Dropout(0.3)", makes=(out,))
    if how < 0.65:
        return d.add(f"{out} = F.dropout({v}, 0.3, self.training)", makes=(out,))
    if how < 0.8:
        return d.add("pass", f"self.{name} = nn.Linear(3, 2)")
    return d.add(f"unused = self.{name}({v})", f"self.{name} = nn.ReLU()")


def block(d: Draft) -> bool:
    """A module of its own, or a sequence."""
    rng, v = d.rng, d.pick()
    shape, out = d.shape(v), d.variable(v)
    name = d.attribute("block")
    if len(shape) == 1 and rng.random() < 0.5:
        a, b = rng.randint(2, 4), rng.randint(2, 4)
        act = rng.choice(["nn.ReLU()", "nn.ReLU(inplace=True)", "nn.LeakyReLU(0.2)"])
        kind = f"nn.Sequential(nn.Linear({shape[0]}, {a}), {act}, nn.Linear({a}, {b}, bias=False))"
        done = d.add(f"{out} = self.{name}({v})", f"self.{name} = {kind}", makes=(out,))
        d.relus += done
        return done
    if len(shape) > 1 and rng.random() < 0.3:
        dims, w = len(shape) - 1, rng.randint(2, 4)
        act = rng.choice(["nn.ReLU()", "nn.ReLU(inplace=True)"])
        conv = f"nn.Conv{dims}d({shape[0]}, {w}, 3, padding=1, bias=False)"
        kind = f"nn.Sequential({conv}, nn.BatchNorm{dims}d({w}), {act})"
        done = d.add(f"{out} = self.{name}({v})", f"self.{name} = {kind}", makes=(out,))
        d.relus += done
        return done
    if d.name != "Net":
        return False
    inner = Draft(rng, d.env[v], f"Block{d.count}", d.blocks)
    for _ in range(rng.randint(2, 4)):
        inner.step()
    if not inner.lines:
        return False
    last = inner.live[-1]
    pair = len(inner.live) > 1 and rng.random() < 0.3
    text = inner.text(f"{last}, {inner.live[-2]}" if pair else last)
    exec(text, d.env)
    if pair:
        first, second = rng.sample([c for c in "abcdefgh" if c != v], 2)
        done = d.add(f"{first}, {second} = self.{name}({v})", f"self.{name} = {inner.name}()", makes=(second, first))
    else:
        done = d.add(f"{out} = self.{name}({v})", f"self.{name} = {inner.name}()", makes=(out,))
    if done:
        d.blocks.append(text)
        d.relus += inner.relus
        if rng.random() < 0.15:  # the same module once more
            d.add(f"{out} = self.{name}({d.live[-1]})" if not pair else "pass", makes=() if pair else (out,))
    return done


def branch(d: Draft) -> bool:
    """A second layer on the same tensor, so that there is something to join."""
    v = d.pick()
    shape = d.shape(v)
    name, out = d.attribute("side"), d.rng.choice([c for c in "abcdefgh" if c != v])
    if len(shape) == 1:
        layer = f"nn.Linear({shape[0]}, {shape[0]})"
    else:
        layer = f"nn.Conv{len(shape) - 1}d({shape[0]}, {shape[0]}, 3, padding=1)"
    line = f"{out} = self.{name}({v})"
    if d.rng.random() < 0.6:
        line = f"{out} = F.relu(self.{name}({v}))"
        d.relus += 1
    return d.add(line, f"self.{name} = {layer}", makes=(v, out))


_STEPS: list[tuple[Callable[[Draft], bool], float]] = [
    (weight, 6),
    (relu, 6),
    (norm, 1.0),
    (scale, 1.2),
    (shift, 1.0),
    (join, 2.5),
    (cut, 1.0),
    (move, 1.3),
    (pool, 0.8),
    (pad, 0.5),
    (idle, 0.7),
    (block, 1.0),
    (branch, 1.5),
]


# --- whole networks ----------------------------------------------------------------------------------------------


def _ending(d: Draft, outputs: int) -> str:
    """One tensor (n, c) or, seldom, (n,)."""
    rng, v = d.rng, d.live[-1]
    if len(d.shape(v)) > 1:
        dims = "(2, 3)" if len(d.shape(v)) == 3 else "2"
        d.add(
            rng.choice([f"{v} = {v}.flatten(1)", f"{v} = torch.flatten({v}, 1)", f"{v} = {v}.mean({dims})"]), makes=(v,)
        )
    if rng.random() < 0.9:
        name = d.attribute("out")
        bias = rng.random() < 0.6
        d.add(
            f"{v} = self.{name}({v})", f"self.{name} = nn.Linear({d.shape(v)[0]}, {outputs}, bias={bias})", makes=(v,)
        )
    return f"{v}.squeeze(1)" if d.shape(v) == (1,) and rng.random() < 0.15 else v


def _chain(d: Draft) -> None:
    """Dense layers and ReLUs in turn, so that functions that take these alone are asked often enough."""
    rng = d.rng
    d.straight = True
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.12:
            rng.choice([scale, shift, move, idle, norm])(d)
        weight(d)
        if rng.random() < 0.08:
            rng.choice([scale, norm, idle])(d)
        relu(d)


def _fill(net: nn.Module, generator: torch.Generator) -> None:
    """Random statistics and scales of batch-norm, which begin as one network in a thousand has them."""
    with torch.no_grad():
        for m in net.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                size = m.num_features
                m.running_mean.copy_(torch.randn(size, generator=generator))
                m.running_var.copy_(0.5 + torch.rand(size, generator=generator))
                if m.weight is not None:
                    m.weight.copy_(torch.randn(size, generator=generator))
                    m.bias.copy_(torch.randn(size, generator=generator))


def build(text: str, seed: int) -> nn.Module:
    """The module that a text describes, in float64 and eval mode, with weights from a seed."""
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F}
    exec(text, space)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = space["Net"]()
    net.double()
    _fill(net, torch.Generator().manual_seed(seed))
    return net.eval()


def _usable(net: nn.Module, x: Tensor) -> bool:
    """Whether it runs, trains, and depends on its input by way of a ReLU."""
    try:
        f = copy.deepcopy(net)(x.clone())
        given = [p for p in net.parameters() if p.requires_grad]
        if not given or not f.requires_grad or not bool(f.isfinite().all()) or float(f.detach().abs().max()) > 1e6:
            return False
        copy.deepcopy(net)(x.clone()).square().sum().backward()
        copy.deepcopy(net).train()(x.clone()).square().sum().backward()
        alone = torch.cat([copy.deepcopy(net)(x[i : i + 1].clone()) for i in range(len(x))])
        if f.shape[0] != len(x) or not torch.allclose(alone, f, rtol=1e-9, atol=1e-11):
            return False  # rows mix
        if not Reference(net).used(x):
            return False
    except (RuntimeError, ValueError, IndexError):
        return False
    return bool((f.detach() != f.detach()[:1]).any())


def draw(seed: int, form: str | None = None) -> Drawn:
    """The network of a seed; drafts that do not run, do not train or have no ReLU are drawn again.

    `form` is "chain" (dense layers and ReLUs in turn), or "flat", "sequence" or "image" for inputs of that kind.
    """
    rng = random.Random(seed)
    for attempt in range(1000):
        drawn_form = rng.choices(["chain", "flat", "sequence", "image"], [2, 3, 2, 3])[0]
        kind = form or drawn_form
        shape: tuple[int, ...] = (rng.randint(2, 4),)
        if kind == "sequence":
            shape = (rng.randint(1, 3), rng.randint(4, 6))
        elif kind == "image":
            shape = (rng.randint(1, 3), rng.randint(3, 5), rng.randint(3, 5))
        blocks: list[str] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            d = Draft(rng, torch.randn(2, *shape), "Net", blocks)
            if kind == "chain":
                _chain(d)
            else:
                wanted = rng.randint(3, 8)
                if rng.random() < 0.2:  # a normalisation of the input
                    if rng.random() < 0.5:
                        d.add(rng.choice(["x /= 2", "x -= 0.5", "x.sub_(0.5).div_(2)"]), makes=("x",))
                    else:
                        shift(d)
                        scale(d)
                if rng.random() < 0.7:
                    weight(d)
                for _ in range(40):
                    if len(d.lines) >= wanted:
                        break
                    d.step()
                if d.relus == 0:
                    weight(d)
                    relu(d)
            outputs = rng.randint(1, 3)
            returned = _ending(d, outputs)
            if d.layers and rng.random() < 0.15:
                d.add("pass", f"self.{rng.choice(d.layers)}.weight.requires_grad_(False)")
            text = "\n\n".join([*blocks, d.text(returned)]) + "\n"
        if d.relus == 0 or d.relus > 6:
            continue
        generator = torch.Generator().manual_seed(seed + attempt)
        x = torch.randn(rng.randint(2, 4), *shape, generator=generator, dtype=torch.float64)
        try:
            net = build(text, seed)
        except (RuntimeError, ValueError):
            continue
        if not _usable(net, x):
            continue
        f = net(x.clone()).detach()
        y = torch.randn(len(x), f.shape[1] if f.ndim == 2 else 1, generator=generator, dtype=torch.float64)
        if "BatchNorm" not in text and "dropout" not in text.lower() and rng.random() < 0.3:
            net.train()  # as a user leaves it where it makes no difference
        if rng.random() < 0.1 and _usable(net, x.clone().requires_grad_()):
            x.requires_grad_()
        return Drawn(seed, text, net, x, y)
    raise AssertionError(f"seed {seed}: no network in 1000 drafts")
