"""The overlap kernel Λ and the neural path kernel of gated networks.

For fully connected networks they are products of Gram matrices, built here; for convolutional and residual networks
they are computed by `recursion`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pathlens.errors import RecordError
from pathlens.kernels.recursion import path_kernel
from pathlens.kernels.sources import Sides, Source, factors, probe, resolve
from pathlens.kernels.wiring import Wiring
from pathlens.linops import Factor, GramSum
from pathlens.precision import exact_precision
from pathlens.recording import GatedNetwork
from pathlens.records import Layer, Record


@exact_precision()
def overlap(
    source: Source | nn.Module,
    X: Any = None,
    Y: Any = None,
    *,
    soft: bool = False,
    include_inputs: bool = False,
    max_bytes: int | None = None,
) -> GramSum:
    """Overlap kernel Λ: the number of paths that are active for both inputs.

    Λ(s, t) = Σ_π ∏_l g_{π_l}(s) g_{π_l}(t) over paths π, sequences of connected hidden units. In a fully connected
    network this is ∏_l Σ_i g_{l,i}(s) g_{l,i}(t), one factor per gate site.

    Parameters
    ----------
    source : Record, RecordStream or nn.Module
        A record of the rows, or the network together with ``X``. A record does not contain how layers are wired: give
        convolutional networks and networks with shortcuts as ``overlap(net, X)``, and such plain modules as
        ``overlap(gated_twin(net, "relu", example=X[:2]), X)``, which is the same network.
    X : (n, ...) or Record, optional
        Inputs (recorded without a backward pass) or their record, if ``source`` is a network.
    Y : (m, ...), Record or RecordStream, optional
        A second set of inputs: the result is the n × m kernel between both.
    soft : bool
        Use the network's own (soft or leaky) gate values instead of the hard bits q > 0.
    include_inputs : bool
        Count the input node as part of a path, as the NPF papers do: d times as many in a fully connected network.
        Operations on the input before the first layer are followed; a record does not contain them, and raises.
    max_bytes : int, optional
        Memory that may be allocated in addition to the factors.

    Returns
    -------
    GramSum of shape (n, n) or (n, m). Fully connected with hard gates: ``exact_counts()`` gives integers.

    Notes
    -----
    Exact. Fully connected: n·m·Σ_l 2w_l operations; with numba 32 bits are counted at a time. Otherwise n·m·Σ_l 2C_lP_l
    operations, with P positions and C channels, in float64, so that counts are exact up to 2⁵³. Paths through different
    positions are different paths, even if they use the same weights; a shortcut is a connection like any other; biases
    start no path. If outputs have different paths (after a gate or a convolution), the kernel, like `npk`, is the mean
    over outputs.
    Half-space paper, section 3.2; NPF paper, Definition 2.2.

    Examples
    --------
    >>> from pathlens import models
    >>> X = torch.tensor([[1.0, 0.0], [0.8, 0.1], [-1.0, 0.0]])
    >>> K = overlap(models.dlgn(2, hidden=(8, 8), seed=0), X)
    >>> K.exact_counts()  # without biases the gates of −x are the opposite of those of x
    array([[ 6,  6,  0],
           [ 6,  6,  0],
           [ 0,  0, 30]])
    """
    sides = resolve("overlap", source, X, Y, sensitivities=False, max_bytes=max_bytes)
    wiring = _wiring(sides)
    if wiring is not None and not (wiring.chain and (wiring.reads_input or not include_inputs)):
        return path_kernel(wiring, sides, "walks" if include_inputs else "paths", soft, "overlap", max_bytes)
    made = factors(sides, partial(_matrices, "overlap", soft=soft, inputs=False, wired=wiring is not None))
    # if all factors are bool, the kernel has the dtype of the network
    bits = all(left.dtype == torch.bool for left, _ in made.values())
    dtype = probe(sides.rows).f.dtype if bits else None
    terms = [[Factor(site, *pair) for site, pair in made.items()]]
    K = GramSum.from_factors(terms, dtype=dtype, name="overlap", max_bytes=max_bytes)
    return K * float(_number_of_inputs(sides)) if include_inputs else K


@exact_precision()
def npk(
    source: Source | nn.Module, X: Any = None, Y: Any = None, *, soft: bool = False, max_bytes: int | None = None
) -> GramSum:
    """Neural path kernel: inner products of path features, H(s, t) = Σ_b φ_s(b) φ_t(b).

    A feature φ_x(b) is the sum of x(input node)·(gates along the path) over all paths with the same weights b. In a
    fully connected network no two paths share all weights, and H = Σ∘Λ with the Gram matrix Σ of the inputs of the
    first layer (of ones, for a piecewise constant network): fixed operations before it (a normalisation by numbers or
    buffers, flips, padding) are part of x. Paths start before batch-norm and parameters that act on x.
    Between random values of variance σ², E[f_s f_t] = σ^{2D} H on D weight layers.

    Parameters
    ----------
    source, X, Y, soft, max_bytes
        As for `overlap`.

    Returns
    -------
    GramSum of shape (n, n) or (n, m).

    Notes
    -----
    Exact. Convolutions share weights between positions, so that H needs the kernel between every position p of s and
    q of t:

    R_0(p, q) = Σ_c x_s(c, p) x_t(c, q),  R_l(p, q) = [Σ_c g_{l,s}(c, p) g_{l,t}(c, q)]·Σ_k R_{l−1}(p + k, q + k),

    with H = P⁻² Σ_{pq} R_L(p, q) after global average pooling and H = Σ_p R_L(p, p) after flattening (which needs only
    p = q throughout). It costs n·m·Σ_l P_l²(2C_l + k_l) operations, or n·m·Σ_l P_l(2C_l + k_l) after flattening.
    A convolution with G groups of channels (depthwise: G = C) has one R per group, with Σ_c over the channels that the
    group reads, and G·k_l for k_l in the cost; all G are in memory at once only if another grouped convolution, or
    more than one layer, reads them. Shortcuts add the fields of their branches; batch-norm counts as one weight per
    channel, biases start no path. Max-pooling, layers used twice, and records of networks with batch-norm or parameters
    on the input raise. NPF paper, Lemma 2.1; DGN paper, Lemma 4.1.

    Examples
    --------
    >>> from pathlens import models
    >>> X = torch.tensor([[1.0, 0.0], [1.0, 0.5], [-1.0, 0.0]])
    >>> npk(models.dlgn(2, hidden=(8, 8), seed=0), X).diagonal()
    tensor([ 6.0000, 11.2500, 30.0000])
    """
    sides = resolve("npk", source, X, Y, sensitivities=False, max_bytes=max_bytes)
    wiring = _wiring(sides)
    if wiring is not None and wiring.reused is not None:
        raise wiring.reused
    if wiring is not None and not wiring.chain:
        return path_kernel(wiring, sides, "npk", soft, "npk", max_bytes)
    made = factors(sides, partial(_matrices, "npk", soft=soft, inputs=True, wired=wiring is not None))
    terms = [[Factor(site, *pair) for site, pair in made.items()]]
    return GramSum.from_factors(terms, name="npk", max_bytes=max_bytes)


# --- the fully connected form ------------------------------------------------------------------------------------


def _wiring(sides: Sides) -> Wiring | None:
    """The wiring of the value network; None for a record or a plain module."""
    if not isinstance(sides.net, GatedNetwork):
        return None
    return Wiring(sides.net, probe(sides.rows).x)


def _value_layers(rec: Record) -> list[Layer]:
    return [layer for layer in rec.layers if layer.part != "gate"]


def _first_layer(rec: Record) -> Layer:
    return _value_layers(rec)[0]


def _number_of_inputs(sides: Sides) -> int:
    """Number of inputs of a network whose first layer reads exactly its inputs."""
    rec = sides.rows if isinstance(sides.rows, Record) else probe(sides.rows)
    layer = _first_layer(rec)
    read, x = rec.layer_inputs[layer.name][0], rec.x.flatten(1)
    # a piecewise constant network reads ones
    if read.shape != x.shape or not (torch.equal(read, x) or bool((read == 1).all())):
        raise RecordError(
            f"overlap: layer '{layer.name}' reads a function of the input, and the record does not contain of how many "
            "inputs. Call overlap(net, X, include_inputs=True) on a gated network; for a plain module use "
            'gated_twin(net, "relu", example=X[:2]).'
        )
    return layer.inputs


def check_chain(what: str, rec: Record, wired: bool = False) -> None:
    """Raise unless a record is that of a chain of dense layers and gates.

    If the wiring of the network is known (`wired`), values are not compared with gates: a batch-norm between layers
    changes values, but no path.
    """
    layers = _value_layers(rec)
    remedy = f'Call {what}(net, X) on a gated network; for a plain module use gated_twin(net, "relu", example=X[:2]).'
    if not rec.sites:
        raise RecordError(
            f"{what}: the record has no gate sites (no ReLU or LeakyReLU was called), so there are no paths to compare."
            " kernels.ntk(net, X) works for any activation."
        )
    for site in rec.sites:
        if rec.bits[site].ndim != 2:
            raise RecordError(
                f"{what}: the gates at site '{site}' have shape {tuple(rec.bits[site].shape)}, expected (n, width): "
                f"the network is convolutional, and a record does not contain how its layers are wired. {remedy}"
            )
    widths = [rec.bits[site].shape[1] for site in rec.sites]
    made = [layer.outputs for layer in layers[:-1]]
    if made != widths or any(layer.calls != (None,) for layer in layers):
        raise RecordError(
            f"{what}: gate sites have widths {widths}, the layers before the last {made}: the network is not a chain "
            f"of dense layers and gates. {remedy}"
        )
    if wired:
        return
    for site, layer in zip(rec.sites, layers[1:]):
        h = rec.layer_inputs[layer.name][0]
        open_only = site not in rec.soft and not rec.gate_label.startswith("soft")
        if h.shape != rec.bits[site].shape or (open_only and _passes_closed(h, rec.bits[site])):
            raise RecordError(
                f"{what}: layer '{layer.name}' reads something that the gates of site '{site}' have not switched, such "
                f"as a shortcut, a bias after the gate or another nonlinearity. {remedy}"
            )
    if not rec.chain:
        raise RecordError(
            f"{what}: there are operations between or after the layers and gates of this record, such as a shortcut or "
            f"batch-norm, and a record does not contain how its network is wired. {remedy}"
        )


def _passes_closed(h: Tensor, bits: Tensor) -> bool:
    """Whether a value is not zero although its gate is closed."""
    if h.device.type == "cpu":  # NumPy compares many times faster than torch
        return bool(np.greater(h.numpy() != 0, bits.numpy()).any())
    return bool((h.ne(0) & ~bits).any())


def _matrices(what: str, rec: Record, soft: bool, inputs: bool, wired: bool) -> dict[str, Tensor]:
    """Factor name → (n, r): hard bits (or soft values) of every site, and the input of the first value layer."""
    check_chain(what, rec, wired)
    found: dict[str, Tensor] = {}
    if inputs:
        if rec.learned_entry and not wired:
            raise RecordError(
                f"{what}: parameters or batch-norm act on the input before the first layer. Paths start before them, "
                f"which a record does not contain. Call {what}(net, X) on a gated network; for a plain module use "
                'gated_twin(net, "relu", example=X[:2]).'
            )
        found["x"] = rec.layer_inputs[_first_layer(rec).name][0]
    for site in rec.sites:
        found[site] = rec.soft[site] if soft and site in rec.soft else rec.bits[site]
    return found
