"""Gated networks: gate functions, gate sources, templates, `gated_twin` and the named constructors."""

from pathlens.models.constructors import (
    dlgn,
    dlgn_shallow,
    dln,
    flnpf,
    frg,
    galu,
    gates_only,
    gdln,
    quadratic,
    relu,
    soft_galu,
    soft_relu,
)
from pathlens.models.encoding import PatchParts
from pathlens.models.gates import Gate, Hard, Open, Soft, StraightThrough
from pathlens.models.initialisation import Init
from pathlens.models.network import GatedNetwork
from pathlens.models.templates import (
    CircularConvNet,
    LocalisationNet,
    ResNet,
    conv5,
    gconv,
    mlp,
    resnet34,
    resnet110,
    vconv,
)
from pathlens.models.tracing import Site
from pathlens.models.twin import gated_twin

__all__ = [
    "CircularConvNet",
    "Gate",
    "GatedNetwork",
    "Hard",
    "Init",
    "LocalisationNet",
    "Open",
    "PatchParts",
    "ResNet",
    "Site",
    "Soft",
    "StraightThrough",
    "conv5",
    "dlgn",
    "dlgn_shallow",
    "dln",
    "flnpf",
    "frg",
    "galu",
    "gated_twin",
    "gates_only",
    "gconv",
    "gdln",
    "mlp",
    "quadratic",
    "relu",
    "resnet34",
    "resnet110",
    "soft_galu",
    "soft_relu",
    "vconv",
]
