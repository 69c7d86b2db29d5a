"""Estimators for scikit-learn: networks whose features are exactly intersections of half-spaces, and kernel machines.

>>> from pathlens import DLGNClassifier
"""

from pathlens.estimators.dlgn import DLGNClassifier, DLGNRegressor
from pathlens.estimators.explanations import PredictionExplanation, Rule, Rules
from pathlens.estimators.export import predict_from_export
from pathlens.estimators.kernel import PathKernelClassifier, PathKernelRegressor
from pathlens.estimators.page import load_model_report, save_model_report, write_model_page
from pathlens.estimators.report import ModelReport, build_model_report

__all__ = [
    "DLGNClassifier",
    "DLGNRegressor",
    "ModelReport",
    "PathKernelClassifier",
    "PathKernelRegressor",
    "PredictionExplanation",
    "Rule",
    "Rules",
    "build_model_report",
    "load_model_report",
    "predict_from_export",
    "save_model_report",
    "write_model_page",
]
