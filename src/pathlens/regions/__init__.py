"""Half-spaces, path regions, and the exact partition of a slice into convex cells.

For networks with linear gates every gate is a half-space of the input space (`halfspaces`) and every path region a
polyhedron (`path_region`); planes and segments are cut into cells exactly for these and for ReLU networks (`slice2d`,
`segment1d`).
"""

from pathlens.regions.counterfactuals import Counterfactual
from pathlens.regions.halfspace_model import HalfSpaceModel
from pathlens.regions.halfspaces import Group, HalfSpaceGroups, HalfSpaces, Member, halfspaces
from pathlens.regions.partitions import Plane, Segment1D, SegmentRegion, Slice2D, SliceRegion
from pathlens.regions.polyhedra import Farkas, Interior, PathRegion, path_region
from pathlens.regions.slices import segment1d, slice2d
from pathlens.regions.summaries import SliceSummary

__all__ = [
    "Counterfactual",
    "Farkas",
    "Group",
    "HalfSpaceGroups",
    "HalfSpaceModel",
    "HalfSpaces",
    "Interior",
    "Member",
    "PathRegion",
    "Plane",
    "Segment1D",
    "SegmentRegion",
    "Slice2D",
    "SliceRegion",
    "SliceSummary",
    "halfspaces",
    "path_region",
    "segment1d",
    "slice2d",
]
