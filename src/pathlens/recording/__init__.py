"""From a network and a batch to a Record, a Snapshot or a Trajectory.

A function-mode tape records every `F.linear`, convolution and ReLU call, so that gated networks and plain modules are
handled by the same code, reused layers and functional calls included.
"""

from pathlens.models import GatedNetwork
from pathlens.recording.inputs import as_rows
from pathlens.recording.streams import RecordStream, rebuild, record, snapshot
from pathlens.recording.trajectory import Moment, Trajectory
from pathlens.records import Record, Snapshot

__all__ = [
    "GatedNetwork",
    "Moment",
    "Record",
    "RecordStream",
    "Snapshot",
    "Trajectory",
    "as_rows",
    "rebuild",
    "record",
    "snapshot",
]
