"""Inputs as one checked tensor of rows, and checks that a network accepts them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from pathlens.data.inputs import as_inputs
from pathlens.errors import DTypeError, EmptyDataError, NotFiniteError, PathlensError, RowIndexError, ShapeError
from pathlens.models import GatedNetwork
from pathlens.models.sources import GraphSource, ShallowSource, TableSource
from pathlens.models.tensors import require_dense
from pathlens.precision import exact_precision

_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def as_rows(X: Any, *, like: nn.Module | torch.dtype | None = None) -> Tensor:
    """The inputs of data in any form, as one checked tensor.

    Parameters
    ----------
    X : Tensor, array, nested list, DataSet, (X, y), Dataset or DataLoader
        n rows; targets are ignored. A Dataset or DataLoader is read to its end, in its own order.
    like : nn.Module or torch.dtype, optional
        Arrays, data sets and whole numbers take this dtype, or the module's, and everything takes the module's device;
        nothing is scaled. A tensor of another floating dtype is refused, since it would be rounded. For a module with
        an embedding, integers are indices and stay integers.

    Returns
    -------
    Tensor, shape (n, ...)
        Detached, finite, at least one row. An array is copied; a tensor only if its dtype or device changes.

    Examples
    --------
    >>> as_rows([[1, 2], [3, 4]])
    tensor([[1., 2.],
            [3., 4.]])
    """
    reference = next(like.parameters(), None) if isinstance(like, nn.Module) else None
    if reference is not None:
        check_weights(reference)
    dtype = like if isinstance(like, torch.dtype) else reference.dtype if reference is not None else None
    looks_up = isinstance(like, nn.Module) and any(isinstance(m, _EMBEDDINGS) for m in like.modules())
    items = isinstance(X, (DataLoader, Dataset))
    X = as_inputs(X)
    if isinstance(X, Tensor):
        x = require_dense(X, "Inputs").detach()
        if looks_up and _whole(x):
            dtype = x.dtype
        if not items and not x.is_floating_point():
            x = x.to(dtype or torch.float32)
        if not items and dtype is not None and x.dtype != dtype:
            raise DTypeError(f"Inputs are {x.dtype}, the network is {dtype}. Convert one of them, e.g. X.to({dtype}).")
    else:
        if looks_up and np.issubdtype(np.asarray(X).dtype, np.integer):
            dtype = torch.long
        x = _from_array(X, dtype)
    if dtype is not None:
        x = x.to(dtype)
    if x.ndim < 2:
        raise ShapeError(
            f"Inputs need a batch dimension: expected shape (n, ...), got {tuple(x.shape)}. For one row use X[None]."
        )
    if x.numel() == 0:
        raise EmptyDataError(f"Inputs are empty: shape {tuple(x.shape)}. Give at least one row.")
    # one sum detects NaN and infinity at a tenth of the cost; a sum of huge finite numbers is checked again
    if not bool(torch.isfinite(x.sum())) and not bool(torch.isfinite(x).all()):
        bad = int((~torch.isfinite(x)).flatten(1).any(1).nonzero()[0])
        raise NotFiniteError(f"Inputs contain NaN or infinity, first in row {bad}. Remove or impute such rows.")
    if x.is_inference():  # autograd refuses tensors made in inference mode
        x = x.clone()
    return x if reference is None else x.to(reference.device)


def computes_in(net: nn.Module, x: Tensor) -> torch.dtype:
    """The dtype in which a network computes on rows x: theirs, or for integer rows (embeddings) that of its weights."""
    return next(net.parameters()).dtype if _whole(x) else x.dtype


def _whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.dtype == torch.bool)


def check_weights(weight: Tensor) -> None:
    """Refuse complex weights, and weights on the meta device."""
    if weight.is_complex():
        raise DTypeError(
            f"The network's weights are {weight.dtype}, expected real numbers: gates and kernels of complex networks "
            "are not defined here. Split real and imaginary parts."
        )
    if weight.device.type == "meta":
        raise DTypeError(
            "The network is on the device 'meta', which holds shapes and no numbers. Load its weights first, e.g. "
            "net.to_empty(device='cpu'), then net.load_state_dict(state)."
        )


def _from_array(X: Any, dtype: torch.dtype | None) -> Tensor:
    try:
        array = np.asarray(X)
    except ValueError as e:
        raise ShapeError(f"Inputs: the rows of this {type(X).__name__} do not have one shape ({e}).") from e
    if not (np.issubdtype(array.dtype, np.floating) or np.issubdtype(array.dtype, np.integer) or array.dtype == bool):
        hint = " Convert it: X.toarray()." if hasattr(X, "toarray") else ""  # SciPy's sparse matrices
        raise DTypeError(f"Inputs must be real numbers, got an array of {array.dtype} ({type(X).__name__}).{hint}")
    if not array.dtype.isnative or array.dtype.itemsize > 8:  # torch has neither other byte orders nor long doubles
        array = array.astype(np.float64)
    # a copy: the array may be read-only, or change later without torch knowing; torch takes no negative strides
    return torch.from_numpy(np.array(array, order="C")).to(dtype or torch.float32)


@contextmanager
def accepting(x: Tensor, net: nn.Module, where: str, who: str = "the network") -> Iterator[None]:
    """While a network runs on rows x, turn torch's errors about shapes into a readable ShapeError.

    Parameters
    ----------
    where, who : str
        The public function and the role of the network, for messages.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:  # batch-norm raises the second
        if isinstance(error, (PathlensError, torch.OutOfMemoryError)):
            raise
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ShapeError(
            f"{where}: {who} does not accept inputs of shape {tuple(x.shape)}: {reason}.{first_reads(net)} Give rows "
            "of the shape that it was built for; behind an encoding, encoded inputs."
        ) from error


def call_on_copies(
    net: nn.Module, x: Tensor, rows: Tensor | None = None, parameters: Mapping[str, Tensor] | None = None
) -> Any:
    """Call a network on copies of rows x and of its buffers, since a user's forward may change both in place.

    Parameters
    ----------
    net : nn.Module
    x : Tensor, shape (n, ...)
    rows : integer tensor, shape (n,), optional
        Example numbers, where gates come from a table.
    parameters : mapping of str to Tensor, optional
        Instead of the network's own, by name.
    """
    inputs = (x.clone(),) if rows is None else (x.clone(), rows)
    instead = {id(buffer): buffer.clone() for buffer in net.buffers()}
    if parameters is not None:
        instead |= {id(own): parameters[name] for name, own in net.named_parameters()}
    return call_with(net, instead, inputs) if instead else net(*inputs)


def call_with(net: nn.Module, instead: Mapping[int, Tensor], inputs: tuple[Any, ...]) -> Any:
    """Call a network with other tensors in place of its own, by their ids; afterwards its own are restored.

    Every module is named once: if it had two names, torch would swap its tensors twice and restore the replacements.
    """
    slots = {}
    for path, module in net.named_modules():
        for name, t in (*module._parameters.items(), *module._buffers.items()):
            if t is not None:
                slots[f"{path}.{name}" if path else name] = instead.get(id(t), t)
    return torch.func.functional_call(net, slots, inputs, tie_weights=False)


@exact_precision()
def output_width(net: nn.Module, x: Tensor, where: str) -> int:
    """Number of outputs of a network on rows like those of x; refuses rows of a wrong shape."""
    probe = copy.deepcopy(net).to(x.device).eval()
    rows = torch.zeros(1, dtype=torch.long, device=x.device) if getattr(net, "needs_rows", False) else None
    with torch.no_grad(), accepting(x, net, where):
        out = call_on_copies(probe, x[:1], rows)
    if not isinstance(out, Tensor) or out.ndim != 2:
        got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ShapeError(
            f"{where}: the network must return (n, c), got {got} for one row of shape {tuple(x.shape[1:])}."
            f"{first_reads(net)}"
        )
    return int(out.shape[1])


def first_layer(net: nn.Module) -> nn.Module | None:
    """The first module with parameters, which reads the inputs; of a gated network, the first of the gate source."""
    start: nn.Module = net
    if isinstance(net, GatedNetwork):
        start = net.source if isinstance(net.source, (GraphSource, ShallowSource)) else net.values
    return next((m for m in start.modules() if any(True for _ in m.parameters(recurse=False))), None)


def first_reads(net: nn.Module) -> str:
    """A sentence for messages on which rows the first layer of a network reads; "" where it is unknown.

    >>> first_reads(nn.Sequential(nn.Flatten(), nn.Linear(3, 2)))
    ' Its first layer reads (n, 3).'
    """
    layer = first_layer(net)
    if isinstance(layer, nn.Linear):
        shape = f"{layer.in_features}"
    elif isinstance(layer, nn.Conv2d):
        shape = f"{layer.in_channels}, height, width"
    else:
        return ""
    return f" Its first layer reads (n, {shape})."


def row_numbers(net: nn.Module, rows: Any, x: Tensor) -> Tensor | None:
    """The example numbers of the rows of x, where gates come from a table; None otherwise."""
    source = net.source if isinstance(net, GatedNetwork) else None
    if not isinstance(source, TableSource):
        return None
    n = x.shape[0]
    ids = torch.arange(n, device=x.device) if rows is None else torch.as_tensor(rows, device=x.device)
    if ids.shape != (n,):
        raise ShapeError(f"record: rows has shape {tuple(ids.shape)}, expected ({n},): one number per row of X.")
    if ids.dtype == torch.bool or ids.dtype.is_floating_point or ids.dtype.is_complex:
        raise DTypeError(f"record: rows are {ids.dtype}, expected integers: the numbers of the examples.")
    size = int(next(source.buffers()).shape[0])
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise RowIndexError(
            f"record: no rows {int(ids.min())}…{int(ids.max())}; the table of gates has {size} examples. Give the "
            "numbers of these examples: record(net, X, rows=…)."
        )
    return ids.long()
