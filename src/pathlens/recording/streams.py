"""`record` and `RecordStream`: records of data sets within a memory budget; `snapshot`, and its inverse `rebuild`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from pathlens.budgets import human_bytes, resolve_budget
from pathlens.errors import BudgetError, NotFiniteError, PathlensError, RecordError, UngatedWarning
from pathlens.models import GatedNetwork
from pathlens.models.constructors import from_recipe, recipe
from pathlens.models.tracing import unwrapped
from pathlens.progress import ProgressBar
from pathlens.recording.independence import check_row_independence
from pathlens.recording.inputs import as_rows, row_numbers
from pathlens.recording.taking import Recorder, check_net, exact_gates
from pathlens.records import Record, Snapshot

#: bytes that a batch needs while it is computed, per byte of its record: activations, their gradients, copies;
#: measured at 2.3 (fully connected, one output) to 3.0 (convolutions, four outputs)
WORKING_FACTOR = 4
#: a batch this many times smaller than the budget is run at once; for others one row is measured first
SAFE_GROWTH = 1000


class RecordStream:
    """Records of rows, computed when needed from frozen weights and the inputs.

    The inputs are not copied; if they are changed in place, it refuses.

    Attributes
    ----------
    n, outputs, sites, layers, gate_label, untracked, has_sensitivities, ungated
        As in `Record`.
    kept : tuple of int
        Which outputs of the network are recorded; () means all.
    bytes_per_row, flops_per_row : int
        Memory of a row, and the cost of computing it.

    Examples
    --------
    >>> from pathlens import models
    >>> stream = record(models.relu(2, hidden=(4,), seed=0), torch.randn(10, 2), stream=True)
    >>> stream.rows(3, 7)
    Record(4 rows, 1 outputs, 1 gate sites (hard), 2 layers, torch.float32, 0.0 MiB)
    """

    def __init__(self, recorder: Recorder, probe: Record) -> None:
        try:
            net = copy.deepcopy(recorder.net)
        except RuntimeError as e:
            raise RecordError(f"record: the network cannot be copied, as a stream needs ({e}).") from e
        for p in net.parameters():
            p.grad = None
        self._recorder, self._version = replace(recorder, net=net), recorder.x._version
        self._first = probe
        self.n, self.outputs, self.kept = len(recorder.x), probe.outputs, probe.kept
        self.sites, self.layers = probe.sites, probe.layers
        self.bytes_per_row, self.flops_per_row = probe.bytes_per_row, probe.flops_per_row
        self.gate_label, self.untracked, self.ungated = probe.gate_label, probe.untracked, probe.ungated
        self.has_sensitivities = recorder.sensitivities

    @torch.inference_mode(False)
    def rows(self, lo: int, hi: int, output: int | None = None) -> Record:
        """Compute rows lo…hi; `output` keeps the sensitivities of one output only, which costs less."""
        if not 0 <= lo < hi <= self.n:
            raise RecordError(f"RecordStream: no rows {lo}:{hi}; it has {self.n}.")
        if output is not None and not 0 <= output < self.outputs:
            raise RecordError(f"RecordStream: no output {output}; it has {self.outputs}, numbered from 0.")
        self._check_inputs()
        if (lo, hi, output) == (0, 1, None):
            return self._first
        recorder = self._recorder.rows(lo, hi)
        if output is not None:
            recorder = replace(recorder, outputs=[(self.kept or range(self.outputs))[output]])
        return recorder.take()

    def _check_inputs(self) -> None:
        if self._recorder.x._version != self._version:
            raise RecordError(
                "RecordStream: the inputs were changed in place after they were given. Record a copy: "
                "record(net, X.clone())."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Frozen weights and the inputs, for a worker; refuses inputs that were changed in place."""
        self._check_inputs()
        return self.__dict__ | {"_recorder": replace(self._recorder, x=self._recorder.x.detach())}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._version = self._recorder.x._version  # a loaded tensor counts its changes from zero

    def __repr__(self) -> str:
        return (
            f"RecordStream({self.n} rows × {human_bytes(self.bytes_per_row)}, recomputed when needed: "
            f"{self.flops_per_row:.2e} flops a row, {self.outputs} outputs, {len(self.sites)} gate sites)"
        )


def record(
    net: nn.Module,
    X: Any,
    *,
    rows: Any = None,
    outputs: int | Sequence[int] | None = None,
    sensitivities: bool = True,
    max_bytes: int | None = None,
    stream: bool | None = None,
) -> Record | RecordStream:
    """Gates, layer inputs and output sensitivities of a network on a batch.

    The network's weights, gradients, mode and hooks are not changed, nor is the random state. It runs on a copy of X.

    Parameters
    ----------
    net : GatedNetwork or any nn.Module
        In eval mode if it has batch-norm or dropout. It returns (n, c) or (n,), and keeps rows the first dimension of
        everything that its linear and convolutional layers read.
    X : Tensor, array, Dataset or DataLoader; (n, ...)
    rows : integer tensor, optional
        Example numbers, where gates come from a table; 0…n−1 otherwise.
    outputs : int or sequence of int, optional
        Record these outputs alone.
    sensitivities : bool
        False skips the backward pass: enough for gates and overlap kernels.
    max_bytes : int, optional
        Memory budget. A record that fits is materialised, otherwise a `RecordStream` is returned that recomputes rows.
        Default: half of the free memory.
    stream : bool, optional
        Return a stream (True) or a materialised record (False) for any size.

    Returns
    -------
    Record or RecordStream
        Both have `n`, `sites`, `layers` and `rows(lo, hi, output=k)`.

    Raises
    ------
    RecordError
        Batch-norm or dropout in train mode; an output of another shape; rows that are not the first dimension, or whose
        outputs depend on the other rows of the batch.
    BudgetError
        The budget does not hold one row.

    Warns
    -----
    UngatedWarning
        A plain module has other activations between its layers than ReLU and LeakyReLU: they have no gate sites. Layers
        and sensitivities are complete, so that `kernels.ntk` is exact.

    Notes
    -----
    Exact. One forward and c backward passes, without TF32 and autocast (`pathlens.linops.exact_precision`), and a
    forward pass of a few rows that shows whether rows are computed independently. The surrogate gradient of
    straight-through gates is not recorded.

    Examples
    --------
    >>> from pathlens import models
    >>> record(models.dlgn(2, hidden=(4, 4), seed=0), torch.randn(10, 2)).gates("relu1@0").shape
    torch.Size([10, 4])
    """
    recorder = _prepare(net, X, rows, outputs, sensitivities)
    made = _take(recorder, max_bytes, stream)
    if made.ungated:
        more = f" and {len(made.ungated) - 3} more" if len(made.ungated) > 3 else ""
        warnings.warn(
            f"record: no gates at {', '.join(made.ungated[:3])}{more}: only ReLU and LeakyReLU have gate sites. Layers "
            "and sensitivities are complete, and kernels.ntk(net, X) is exact; for gates and paths replace such units.",
            UngatedWarning,
            stacklevel=2,
        )
    return made


def recorded(
    net: nn.Module, X: Any, *, sensitivities: bool = True, max_bytes: int | None = None
) -> Record | RecordStream:
    """`record` without the warning on activations that have no gates."""
    return _take(_prepare(net, X, None, None, sensitivities), max_bytes, None)


@torch.inference_mode(False)
def _prepare(net: nn.Module, X: Any, rows: Any, outputs: int | Sequence[int] | None, sensitivities: bool) -> Recorder:
    """Check network and inputs."""
    net = unwrapped(net)
    check_net(net)
    x = as_rows(X, like=net)
    net = exact_gates(net)
    chosen = [int(outputs)] if isinstance(outputs, int | Integral) else outputs
    return Recorder(net, x, row_numbers(net, rows, x), chosen, sensitivities)


@torch.inference_mode(False)
def _take(recorder: Recorder, max_bytes: int | None, stream: bool | None) -> Record | RecordStream:
    """A record or a stream, depending on the memory budget unless `stream` decides."""
    net, x, n = recorder.net, recorder.x, len(recorder.x)
    budget = resolve_budget(max_bytes, x.device)
    if not stream and x.nbytes * SAFE_GROWTH <= budget:
        whole = recorder.take_within(budget // WORKING_FACTOR)
        if whole is not None:
            return whole
    try:
        probe = recorder.rows(0, 1).take()
    except NotFiniteError:
        check_row_independence(net, x)  # a standard deviation over the batch is NaN for one row
        raise
    row = probe.nbytes
    if WORKING_FACTOR * row > budget:
        raise BudgetError(
            f"record: one row needs about {human_bytes(WORKING_FACTOR * row)}, the budget is {human_bytes(budget)}. "
            "Raise max_bytes, or record fewer outputs."
        )
    if stream is None:
        stream = n * row > budget // 2
    if not stream and WORKING_FACTOR * row * n > budget:
        spare = max(budget - n * row, budget // 2)
        return _assemble(recorder, max(1, min(n, spare // (WORKING_FACTOR * row))))
    check_row_independence(net, x)
    return RecordStream(recorder, probe) if stream else recorder.take()


def _assemble(recorder: Recorder, batch: int) -> Record:
    """The record of all rows, taken batch by batch, so that nothing is held twice."""
    n = len(recorder.x)
    whole: Record | None = None
    with ProgressBar("recording", n) as meter:
        for lo in range(0, n, batch):
            part = recorder.rows(lo, lo + batch).take()
            whole = whole or _empty_like(part, n)
            if [part.layers, *part.tensors()] != [whole.layers, *whole.tensors()]:
                raise RecordError(
                    f"record: the network runs other layers on rows {lo}…{lo + part.n - 1} than on the rows before. "
                    "Control flow that depends on the data cannot be recorded batch by batch: raise max_bytes, or "
                    "record such rows apart."
                )
            whole.chain = whole.chain and part.chain
            for target, t in zip(whole.tensors().values(), part.tensors().values()):
                target[lo : lo + part.n] = t
            meter.advance(part.n)
    check_row_independence(recorder.net, recorder.x)
    assert whole is not None
    return whole


def _empty_like(part: Record, n: int) -> Record:
    """A record of n rows to be filled; tensors that are one in the part (x, read by two layers) stay one."""
    made: dict[tuple[Any, ...], Tensor] = {}

    def empty(t: Tensor) -> Tensor:
        key = (t.data_ptr(), t.shape, t.stride(), t.dtype)
        if key not in made:
            # in the memory layout of the part, so that filling it needs no transposition
            inner = sorted(range(1, t.ndim), key=t.stride, reverse=True)
            made[key] = torch.empty_permuted((n, *t.shape[1:]), [0, *inner], dtype=t.dtype, device=t.device)
        return made[key]

    return part.map(empty)


def snapshot(net: nn.Module) -> Snapshot:
    """Copies of the weights of a network and, of one from `pathlens.models`, how it is built.

    >>> from pathlens import models
    >>> snapshot(models.relu(2, hidden=(4,), seed=0))
    Snapshot(relu: 2 tensors, 12 numbers)
    """
    net = unwrapped(net)
    description = {"kind": type(net).__name__}
    if isinstance(net, GatedNetwork):
        description = net.describe() | {"recipe": recipe(net)}
    return Snapshot({k: v.detach().clone() for k, v in net.state_dict().items()}, description)


def rebuild(snapshot: Snapshot, *, like: nn.Module | None = None) -> nn.Module:
    """The network of a snapshot, with exactly the same weights.

    Parameters
    ----------
    snapshot : Snapshot
        Taken just now, of a trajectory's moment, or loaded from a file.
    like : nn.Module, optional
        A network of the same architecture with any weights; it is copied, with its mode and device. Networks from the
        named constructors of `pathlens.models` do not need it, except `gdln`, and are returned on the CPU.

    Raises
    ------
    RecordError
        If the snapshot does not contain how to build its network and `like` is missing, or has other weights.

    Examples
    --------
    >>> from pathlens import models
    >>> net = models.dlgn(2, hidden=(4,), seed=0)
    >>> rebuild(snapshot(net))
    GatedNetwork(dlgn: gates from separate linear network, soft β=4; value input x; trains both; 1 sites; 20 parameters)
    """
    if not isinstance(snapshot, Snapshot):
        raise RecordError(
            f"rebuild: expected a Snapshot, got {type(snapshot).__name__}. Load one with Snapshot.load(path), or take "
            "moment.snapshot of a trajectory."
        )
    kind, how = snapshot.description.get("kind", "module"), snapshot.description.get("recipe")
    if like is None and how is None:
        raise RecordError(
            f"rebuild: the snapshot has the weights of a network of kind '{kind}', and not how to build it. Give a "
            "network of the same architecture, with any weights: rebuild(snapshot, like=net)."
        )
    if like is None:
        try:
            return from_recipe(how or {}, snapshot.state)
        except (KeyError, TypeError, RuntimeError, PathlensError) as error:
            raise RecordError(
                f"rebuild: the snapshot does not contain how to build its network of kind '{kind}' ({error}). Give a "
                "network of the same architecture: rebuild(snapshot, like=net)."
            ) from error
    if not isinstance(like, nn.Module):
        raise RecordError(f"rebuild: like must be an nn.Module, got {type(like).__name__}.")
    net = copy.deepcopy(unwrapped(like))
    own = net.state_dict()
    for name in dict.fromkeys((*snapshot.state, *own)):
        has, needs = (_describe(state.get(name)) for state in (snapshot.state, own))
        if has != needs:
            raise RecordError(
                f"rebuild: the snapshot of kind '{kind}' has {has} as '{name}', and the {type(like).__name__} that was "
                f"given has {needs}. Give a network of the same architecture."
            )
    net.load_state_dict(snapshot.state)
    for key, value in (net.describe() if isinstance(net, GatedNetwork) else {}).items():
        if key in snapshot.description and snapshot.description[key] != value:  # options that weights do not show
            raise RecordError(
                f"rebuild: the snapshot is of a network with {key} {snapshot.description[key]!r}, and the one that was "
                f"given has {key} {value!r}. Give a network of the same architecture."
            )
    return net


def _describe(t: Tensor | None) -> str:
    return "nothing" if t is None else f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}"
