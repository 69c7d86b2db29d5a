"""Estimators for scikit-learn: networks whose features are exactly intersections of half-spaces, and kernel machines.

>>> from pathlens import DLGNClassifier
"""

from pathlens.estimators.counterfactuals import Counterfactual
from pathlens.estimators.dlgn import DLGNClassifier, DLGNRegressor
from pathlens.estimators.explanations import PredictionExplanation, Rule, Rules
from pathlens.estimators.halfspaces import HalfSpaceModel, predict_from_export
from pathlens.estimators.kernel import PathKernelClassifier, PathKernelRegressor

__all__ = [
    "Counterfactual",
    "DLGNClassifier",
    "DLGNRegressor",
    "HalfSpaceModel",
    "PathKernelClassifier",
    "PathKernelRegressor",
    "PredictionExplanation",
    "Rule",
    "Rules",
    "predict_from_export",
]
