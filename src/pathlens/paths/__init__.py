"""Paths of gated networks: how many are active, the largest, how far they cancel, and explanations that hold.

Everything takes a network and inputs. A path is a sequence of hidden units; nothing is enumerated.
"""

from pathlens.explanations import Explanation
from pathlens.paths.counting import count
from pathlens.paths.grouping import PathGroups, groups
from pathlens.paths.ranking import Cancellation, TopPaths, cancellation, strengths, top, values
from pathlens.paths.refitting import Refit, refit
from pathlens.paths.sparsity import Pruned, path_norm, prune
from pathlens.paths.starting import Inputs, inputs
from pathlens.paths.trees import GateRule, Tree, tree

__all__ = [
    "Cancellation",
    "Explanation",
    "GateRule",
    "Inputs",
    "PathGroups",
    "Pruned",
    "Refit",
    "TopPaths",
    "Tree",
    "cancellation",
    "count",
    "groups",
    "inputs",
    "path_norm",
    "prune",
    "refit",
    "strengths",
    "top",
    "tree",
    "values",
]
