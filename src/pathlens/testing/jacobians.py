"""Reference versions of the network kernels for any module: Jacobians by autograd, paths by enumeration.

Slow, dense, float64, for tiny networks; shares no code with `kernels`. Networks given by weights are in reference.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.models import GatedNetwork
from pathlens.testing.reference import jacobian


def network_jacobian(net: nn.Module, X: Tensor, names: Sequence[str] | None = None) -> Tensor:
    """∂f/∂θ by reverse-mode autograd, (n, c, Q), over the named parameters (default: all that are trained).

    >>> network_jacobian(nn.Linear(2, 3, bias=False).double(), torch.ones(4, 2).double()).shape
    torch.Size([4, 3, 6])
    """
    everything = {k: v.detach() for k, v in net.named_parameters()}
    chosen = [k for k, p in net.named_parameters() if p.requires_grad] if names is None else list(names)
    rest = {k: v for k, v in everything.items() if k not in chosen}

    def f(parameters: list[Tensor]) -> Tensor:
        buffers = {k: b.clone() for k, b in net.named_buffers()}  # a forward may edit them, and its input
        out = torch.func.functional_call(net, {**buffers, **rest, **dict(zip(chosen, parameters))}, (X.clone(),))
        return out if out.ndim == 2 else out[:, None]

    with warnings.catch_warnings():  # some operations have no fast rule for batches of cotangents
        warnings.filterwarnings("ignore", message="There is a performance drop")
        return jacobian(f, [everything[k] for k in chosen])


def kernel_of_jacobians(left: Tensor, right: Tensor | None = None, outputs: str | int = "trace") -> Tensor:
    """Kernel of two Jacobians (n, c, Q): Σ_k J_k J_kᵀ, one output's, or full with row order (row, output).

    >>> J = torch.ones(2, 3, 1)
    >>> kernel_of_jacobians(J).shape, kernel_of_jacobians(J, outputs="full").shape
    (torch.Size([2, 2]), torch.Size([6, 6]))
    >>> float(kernel_of_jacobians(J, outputs=1)[0, 0])
    1.0
    """
    right = left if right is None else right
    if outputs == "trace":
        return torch.einsum("skq,tkq->st", left, right)
    if outputs == "full":
        return left.flatten(0, 1) @ right.flatten(0, 1).T
    assert isinstance(outputs, int)
    return left[:, outputs] @ right[:, outputs].T


# --- paths -----------------------------------------------------------------------------------------------------


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {k: p for k, p in module.named_parameters() if k.endswith("weight")}


def _plain_state(values: nn.Module) -> dict[str, Tensor]:
    """Parameters and running means at zero, running variances at one, other buffers as they are."""
    state, parameters = {}, dict(values.named_parameters())
    for k, v in values.state_dict().items():
        learned = k in parameters or k.endswith(("running_mean", "num_batches_tracked"))
        state[k] = torch.ones_like(v) if k.endswith("running_var") else torch.zeros_like(v) if learned else v
    return state


def _fixed(net: GatedNetwork, X: Tensor, hard: bool) -> tuple[nn.Module, list[Tensor], Tensor]:
    """The value network without batch-norm's ε, the gates on X as tensors, and the inputs of the value network."""
    caught: list[Tensor] = []
    values = copy.deepcopy(net.values).eval()
    for m in values.modules():
        if isinstance(m, nn.modules.batchnorm._BatchNorm):
            m.eps = 0.0
    with net.values.register_forward_pre_hook(lambda m, inputs: caught.append(inputs[0])):
        net(X)
    return values, list(net.gates(X, hard=hard).values()), caught[0].detach()


def weight_set_features(net: GatedNetwork, X: Tensor, hard: bool = True, output: int = 0) -> Tensor:
    """φ_x(b) for every set b of weights with at most one of each layer, (n, number of sets).

    The output is linear in each layer's weights, so that φ is found from outputs with one weight of a layer at 1 and
    the others at 0 (or all at 0), and differences. Enumerates ∏_l (weights of layer l + 1) networks.

    >>> from pathlens import models
    >>> phi = weight_set_features(models.dln(2, hidden=(3,)).double(), torch.eye(2).double())
    >>> phi @ phi.T
    tensor([[3., 0.],
            [0., 3.]], dtype=torch.float64)
    """
    values, gates, entered = _fixed(net, X, hard)
    state, weights = _plain_state(values), _weights(values)
    sizes = [p.numel() for p in weights.values()]

    def outputs(*choice: Tensor) -> Tensor:
        changed = dict(state)
        for (name, p), which in zip(weights.items(), choice):
            changed[name] = (torch.arange(1, p.numel() + 1) == which).to(p.dtype).reshape(p.shape)
        return torch.func.functional_call(values, changed, (entered, *gates))[:, output]

    grid = torch.cartesian_prod(*[torch.arange(s + 1) for s in sizes]).reshape(-1, len(sizes))
    table = torch.func.vmap(outputs, chunk_size=4096)(*grid.T)
    table = table.reshape(*(s + 1 for s in sizes), len(X)).detach()
    for axis in range(len(sizes)):  # difference to the network without the layer
        nothing = table.narrow(axis, 0, 1)
        table = torch.cat([nothing, table.narrow(axis, 1, sizes[axis]) - nothing], dim=axis)
    return table.reshape(-1, len(X)).T


def _direct(
    net: GatedNetwork, X: Tensor
) -> tuple[list[Tensor], dict[tuple[int, int], Tensor], list[Tensor], list[Tensor]]:
    """Hard gates, and connections between the units of sites with no site between them, all weights one."""
    values, gates, entered = _fixed(net, X[:1], True)
    state = _plain_state(values)
    for name in _weights(values):
        state[name] = torch.ones_like(state[name])
    shapes = [g.shape for g in gates]

    def run(x: Tensor, *hidden: Tensor) -> tuple[Tensor, ...]:
        read: list[Tensor] = []

        def cut(h: Tensor, q: Tensor, slope: float) -> Tensor:
            read.append(q.flatten())
            return h

        out = torch.func.functional_call(values, state, (x, *[functools.partial(cut, h) for h in hidden]))
        return (*read, out[:, 0])

    points = (torch.ones_like(entered), *[torch.ones(s, dtype=X.dtype) for s in shapes])
    blocks: Any = torch.func.jacrev(run, argnums=tuple(range(len(points))))(*points)

    def routes(block: Tensor) -> Tensor:
        matrix = block.reshape(block.shape[0], -1)
        least = float(matrix[matrix != 0].abs().min()) if bool((matrix != 0).any()) else 1.0
        return (matrix / min(least, 1.0)).round().long()  # pooling divides by the size of its window

    count = len(shapes)
    between = {(i, j): routes(blocks[j][1 + i]) for i, j in itertools.combinations(range(count), 2)}
    starts = [(routes(blocks[j][0]) != 0).any(1) for j in range(count)]
    ends = [routes(blocks[count][1 + i])[0] for i in range(count)]
    bits = [g.flatten(1).bool() for g in net.gates(X, hard=True).values()]
    return bits, between, starts, ends


def count_shared_paths(net: GatedNetwork, X: Tensor) -> Tensor:
    """Λ by walking every path of hidden units that is active for both of two inputs, (n, n) integers.

    >>> from pathlens import models
    >>> count_shared_paths(models.dln(2, hidden=(3, 4)).double(), torch.eye(2).double())
    tensor([[12, 12],
            [12, 12]])
    """
    bits, between, starts, ends = _direct(net, X)

    def walk(site: int, unit: int, active: list[list[bool]]) -> int:
        total = int(ends[site][unit])
        for after in range(site + 1, len(bits)):
            column = between[site, after][:, unit]
            for target in column.nonzero()[:, 0].tolist():
                if active[after][target]:
                    total += int(column[target]) * walk(after, target, active)
        return total

    out = torch.zeros(len(X), len(X), dtype=torch.long)
    for s, t in itertools.combinations_with_replacement(range(len(X)), 2):
        active = [(b[s] & b[t]).tolist() for b in bits]
        out[s, t] = out[t, s] = sum(
            walk(site, unit, active)
            for site in range(len(bits))
            for unit in starts[site].nonzero()[:, 0].tolist()
            if active[site][unit]
        )
    return out
