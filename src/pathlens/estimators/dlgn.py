"""`DLGNClassifier` and `DLGNRegressor`: deep linearly gated networks behind scikit-learn's interface.

A fitted estimator keeps the hard half-spaces and their values alone, so that it explains exactly what it predicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from pathlens.errors import EmptyDataError, LabelError, OptionError, ShapeError, unknown_name
from pathlens.estimators.explanations import PredictionExplanation, Rules, explain_rows, plot_rules, rules_of
from pathlens.estimators.files import load_estimator, save_estimator
from pathlens.estimators.fitting import fit, split_indices
from pathlens.estimators.page import save_model_report, write_model_page
from pathlens.estimators.recipes import resolve_recipe
from pathlens.estimators.report import build_model_report
from pathlens.estimators.tables import check_range, validate_table
from pathlens.estimators.weights import TargetsMixin, read_classes
from pathlens.indexing import as_number
from pathlens.models import GatedNetwork
from pathlens.pages import page_path
from pathlens.regions.counterfactuals import Counterfactual, Goal, counterfactual
from pathlens.regions.halfspace_model import HalfSpaceModel


def _as_table(x: Any) -> Any:
    """One row as a table: a list or array as a matrix, a row of a pandas table with its column names."""
    if hasattr(x, "to_frame"):
        return x.to_frame().T
    return x if hasattr(x, "columns") else np.atleast_2d(np.asarray(x, dtype=np.float64))


def _check_margin(margin: Any) -> float:
    if not (isinstance(margin, Real) and 0 <= float(margin) < np.inf):
        raise OptionError(f"counterfactual: margin must be a finite number of at least 0, got {margin!r}.")
    return float(margin)


def _feature_indices(chosen: Any, names: list[str]) -> list[int]:
    """Indices of one or several features, given by name or index."""
    out = []
    for feature in [chosen] if isinstance(chosen, str | Integral) else chosen:
        if isinstance(feature, str):
            if feature not in names:
                raise unknown_name("feature", feature, names)
            out.append(names.index(feature))
        elif isinstance(feature, Integral) and 0 <= int(feature) < len(names):
            out.append(int(feature))
        else:
            raise OptionError(f"counterfactual: there is no feature {feature}; they are 0 to {len(names) - 1}.")
    return out


@dataclass(eq=False, repr=False)
class _BaseDLGN(TransformerMixin, BaseEstimator):
    """Parameters and methods of both estimators; `DLGNClassifier` describes the parameters."""

    hidden: tuple[int, ...] = (64, 64)
    _: KW_ONLY
    piecewise_constant: bool = False
    epochs: int | str = "auto"
    batch_size: int | str | None = "auto"
    learning_rate: float = 5e-3
    weight_decay: float | str = "auto"
    beta: tuple[float, float] = (4.0, 1000.0)
    hardening: str = "auto"
    n_restarts: int = 1
    early_stopping: bool = False
    validation_fraction: float = 0.1
    patience: int = 20
    random_state: Any = None
    verbose: bool = False

    # --- fitting -----------------------------------------------------------------------------------------------

    def _fit(self, X: np.ndarray, Y: np.ndarray, weights: np.ndarray, classes: int | None) -> Self:
        """Fit on rows of positive weight; Y holds labels 0 … classes − 1, or targets (n, c)."""
        random = check_random_state(self.random_state)
        seed = int(random.randint(2**31 - 1))
        validation = None
        if self.early_stopping:
            X, Y, weights, validation = self._split(X, Y, weights, classes, seed)
        recipe = resolve_recipe(self, len(X), weights.sum(), seed)
        fitted = fit(X, Y, weights, classes, recipe, validation)
        self.model_: HalfSpaceModel = fitted.model
        self.n_iter_ = fitted.epochs
        self.hardening_ = fitted.hardening
        self.weight_decay_ = fitted.weight_decay
        self.loss_ = fitted.hard_loss
        self.soft_loss_ = fitted.soft_loss
        return self

    def _split(self, X: np.ndarray, Y: np.ndarray, weights: np.ndarray, classes: int | None, seed: int) -> Any:
        if not (isinstance(self.validation_fraction, Real) and 0 < self.validation_fraction < 1):
            raise OptionError(
                f"{type(self).__name__}: validation_fraction must be between 0 and 1, got {self.validation_fraction!r}."
            )
        held = max(1, round(len(X) * self.validation_fraction))
        if held >= len(X):
            raise EmptyDataError(
                f"{type(self).__name__}: early_stopping needs at least 2 rows, got n_samples={len(X)}."
            )
        a, b = split_indices(Y, classes, held, seed)
        return X[a], Y[a], weights[a], (X[b], Y[b], weights[b])

    # --- predicting ----------------------------------------------------------------------------------------------

    def _check_rows(self, X: Any) -> np.ndarray:
        check_is_fitted(self)
        return check_range(self, validate_table(self, X, reset=False), self.model_.centre, self.model_.spread)

    def model_outputs(self, X: Any) -> np.ndarray:
        """The outputs f that `explain` decomposes, (n, c).

        For two classes the log-odds of the second (n, 1), for more classes centred logits, for regression the targets.
        """
        rows = self._check_rows(X)
        return self.model_.outputs(rows)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row, or predicted targets, (n,) or (n, c) as in `fit`."""
        return self.decode_predictions(self.model_outputs(X))

    def transform(self, X: Any) -> np.ndarray:
        """Gate bits: 1.0 where a half-space contains a row, (n, Σ w_l), layer by layer."""
        rows = self._check_rows(X)
        return np.concatenate(self.model_.bits(rows), axis=1).astype(np.float64)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """Names of the columns of `transform`: ``gate1_0`` is unit 0 of layer 1."""
        check_is_fitted(self)
        names = [f"gate{layer}_{i}" for layer, w in enumerate(self.model_.hidden, start=1) for i in range(w)]
        return np.asarray(names, dtype=object)

    def _feature_names(self) -> list[str]:
        return [str(n) for n in getattr(self, "feature_names_in_", [f"x{j}" for j in range(self.n_features_in_)])]

    def decode_predictions(self, f: np.ndarray) -> np.ndarray:
        """Class labels or targets from outputs f (n, c)."""
        raise NotImplementedError

    def _choose_outputs(self, outputs: np.ndarray, of: Any) -> tuple[tuple[str, ...], np.ndarray, float]:
        """Names of the outputs, the output that explains each row, and the sign with which it does."""
        raise NotImplementedError

    # --- explaining ----------------------------------------------------------------------------------------------

    def rules(self, *, digits: int = 3, terms: int | None = 6, top: int | None = None) -> Rules:
        """The half-spaces in the units of the data, most important first, as readable inequalities.

        Parameters
        ----------
        digits : int
            Significant digits of the text; the rules' ``normal`` and ``offset`` are not rounded.
        terms : int or None
            Features per rule in the text; None shows all.
        top : int, optional
            Only the most important ones.

        Returns
        -------
        Rules
            Half-spaces that contain all training rows, or none, are left out.
        """
        check_is_fitted(self)
        return rules_of(self.model_, self._feature_names(), digits, terms, top, hasattr(self, "feature_names_in_"))

    def explain(self, X: Any, *, layer: int | None = None, of: Any = None) -> PredictionExplanation:
        """Each prediction as an exact sum of contributions of last-layer half-spaces, and a bias.

        Half-spaces that contain the same training rows are one term. The repr prints the relative error of the sum and
        the cancellation. Memory n·c·w numbers; time O(c·w²) for each row, and by features for each gate that switches
        between the means and a row.

        Parameters
        ----------
        X : (n, d)
        layer : int, optional
            Split by the half-spaces of this layer instead, counted from 1 as in `rules`; later biases are a separate
            term. 0 splits by features: the contribution of each along the segment from the means r of training to the
            row x, with f(r) as the first term. Inside a cell feature j contributes ∂f/∂x_j times its change; where a
            gate with normal n switches, f jumps, and the jump is divided in proportion to n_j (x_j − r_j).
        of : optional
            The class, or the index of the target, to explain; by default the predicted class (the second of two
            classes), or the first target.
        """
        rows = self._check_rows(X)
        outputs = self.model_.outputs(rows)
        labels, chosen, sign = self._choose_outputs(outputs, of)
        return explain_rows(self.model_, rows, outputs, self._feature_names(), labels, chosen, sign, layer)

    def plot_halfspaces(self, *, top: int = 20, ax: Any = None) -> Any:
        """The most important half-spaces as rows of a picture, features as columns; returns matplotlib axes."""
        return plot_rules(self.rules(top=top), self.model_.spread, self._feature_names(), ax)

    def plot_explanation(self, x: Any, *, k: int = 8, layer: int | None = None, of: Any = None, ax: Any = None) -> Any:
        """The largest contributions to the prediction of one row, x of shape (d,) or (1, d); returns the axes.

        `layer` and `of` are those of `explain`.
        """
        return self.explain(_as_table(x), layer=layer, of=of).plot(0, k, ax)

    def _counterfactual(
        self, x: Any, wanted: Any, within: Any, keep: Any, whole: Any, seconds: float
    ) -> Counterfactual:
        """`wanted(f)` returns the goal for a row with outputs f, and its description."""
        check_is_fitted(self)
        if not (isinstance(seconds, Real) and seconds > 0):
            raise OptionError(f"counterfactual: seconds must be positive, got {seconds!r}.")
        names = self._feature_names()
        fixed = _feature_indices(keep, names)
        integers = None if isinstance(whole, str) and whole == "auto" else _feature_indices(whole, names)
        row = self._check_rows(_as_table(x))
        if len(row) != 1:
            raise ShapeError(f"counterfactual: expected one row, got {len(row)}. Call it once for each row.")
        for j in integers or ():
            if row[0, j] != np.floor(row[0, j]):
                raise OptionError(
                    f"counterfactual: feature {names[j]!r} must be an integer, but is {row[0, j]:g} in x."
                )
        rows = None if within is None else self._check_rows(within)
        goal, what = wanted(self.model_.outputs(row)[0])
        point, *distances = counterfactual(self.model_, row[0], goal, what, rows, fixed, integers, float(seconds))
        before, after = (self.decode_predictions(self.model_.outputs(r[None]))[0] for r in (row[0], point))
        return Counterfactual(row[0], point, before, after, *distances, tuple(names), self.model_.spread)

    def report(
        self,
        X: Any,
        y: Any,
        out: str | Path,
        *,
        within: Any = None,
        top: int = 12,
        seconds: float = 5.0,
        title: str = "",
        note: str = "",
        others: Sequence[Mapping[str, Any]] = (),
    ) -> Path:
        """Write a page about the model, evaluated and explained on held-out rows; returns its path.

        The page shows the score and that of the simplest prediction, the influence of each feature, the most
        important half-spaces, and a few explained rows, each with the smallest change that gives another prediction.
        It is written from a `ModelReport`, which is saved as a JSON file of the same name.

        Parameters
        ----------
        X : (n, d), y : (n,)
            Held-out rows and their true targets.
        out : path
            A file that ends in ``.html``, or a folder, where ``index.html`` is written.
        within : (n, d), optional
            Training rows: counterfactuals stay within their ranges, as in `counterfactual`.
        top : int
            Number of features and half-spaces shown.
        seconds : float
            Time limit of each of up to four counterfactuals.
        title, note : str
            The heading, and a remark after the number of rows.
        others : sequence of mappings
            Scores of other models for comparison: ``{"what": "a tree", "score": tree.score(X, y)}``.
        """
        report = build_model_report(
            self, X, y, within=within, top=top, seconds=seconds, title=title, note=note, others=others
        )
        page = page_path(out)
        return write_model_page(save_model_report(report, page.with_suffix(".json")), page)

    def export(self) -> dict[str, Any]:
        """The model as a plain dict of numpy arrays, from which `predict_from_export` predicts with numpy alone."""
        check_is_fitted(self)
        model = self.model_
        return {
            "normals": list(model.normals),
            "offsets": list(model.offsets),
            "weights": list(model.weights),
            "biases": list(model.biases),
            "feature_names": self._feature_names(),
            "classes": getattr(self, "classes_", None),
            "one_target": getattr(self, "_one_target", True),
        }

    def network(self) -> GatedNetwork:
        """The same function as a hard-gated float64 network on raw inputs, for `pl.record`, kernels, paths, regions.

        Its gates read x directly (the product of the linear gate layers was taken); for two classes its one output is
        the log-odds.
        """
        check_is_fitted(self)
        return self.model_.network()

    # --- files -------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write `path`.safetensors and `path`.json: nothing in them is code, and edits are noticed."""
        check_is_fitted(self)
        save_estimator(self, path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote; refuses files that were truncated, edited, or hold another kind of estimator."""
        return load_estimator(cls, path)


@dataclass(eq=False, repr=False, kw_only=True)
class DLGNClassifier(ClassifierMixin, _BaseDLGN):
    """Classifier whose features are exactly intersections of half-spaces: a deep linearly gated network.

    Training starts with soft gates σ(β·q) and raises β to `beta[1]`, as `hardening` selects; then the values are
    trained alone on the hard gates q > 0. Predictions are those of the hard network:
    h_l = 1(N_l x + o_l > 0) ⊙ (U_l h_{l−1} + b_l).
    Inputs are standardised inside; every half-space is reported in the units of the data.

    Parameters
    ----------
    hidden : tuple of int
        Half-spaces per layer.
    piecewise_constant : bool
        One value per cell of the half-spaces instead of an affine function of x (DLGN-PWC).
    epochs : int or "auto"
        Epochs of a phase that learns the data; a hardening phase after it takes half as many, the values alone a tenth.
        "auto" is 60, adjusted to between 300 and 1,200 steps, and at least 20.
    batch_size : int, "auto" or None
        "auto" is 64 rows, None all rows. Where all rows are in one batch, a row of weight k equals k copies of it.
    learning_rate : float
        Initial learning rate of AdamW; it falls to zero along a cosine.
    weight_decay : float or "auto"
        "auto" is 2500 / (sum of the weights), between 1.5 and 10, times (widest layer) / 64. From 100 rows on, this and
        3, 1/3, 1/10 and 1/30 times it train on four fifths of the rows, and the one with the lowest squared error (of
        probabilities or targets) on the others fits all rows. Where a fifth has fewer than 500 rows, several of them
        are held out in turn, until they have 500 rows or all five were held out.
    beta : (float, float)
        Sharpness of the gates at the start and at the end.
    hardening : {"auto", "follow", "anneal"}
        * "follow": soft gates learn the data; then β grows while the network learns to predict what the soft one
          predicted. Sharp gates can memorise noise, and here they never see it.
        * "anneal": β grows while the data are learned. Sharp gates fit what soft ones cannot.
        * "auto": "follow" where targets are noisy, that is, where a soft network is wrong on more than a twentieth of
          the training rows, or an annealed one leaves more than a quarter of a real target's variance; else "anneal".
    n_restarts : int
        Networks trained at once from different seeds; with "follow" all harden towards what the soft ones predict on
        average. The one with the lowest training loss (validation loss with `early_stopping`) is kept.
    early_stopping : bool
        Hold out `validation_fraction` of the rows and stop when their loss has not improved for `patience` epochs.
    class_weight : dict, "balanced" or None
        Factors on the weights of the rows of each class, as in scikit-learn; classes that a dict leaves out have 1.
        "balanced" gives every class the same sum of weights: its factor is (sum of the sample weights) / (number of
        classes × that sum in the class). A fit with class weights is the fit with the weights that they make, in all
        that counts weights: the loss, held-out losses, means and standard deviations, importances.
    random_state : int, RandomState or None
        An int makes fits reproducible.
    verbose : bool
        Show a progress bar.

    Attributes
    ----------
    classes_ : (c,)
    model_ : HalfSpaceModel
        The fitted half-spaces and values.
    loss_, soft_loss_ : float
        Training loss of the hard network, and of the network after the first phase: cross-entropy, or squared error in
        units of the targets' variance.
    hardening_ : {"follow", "anneal"}
        The method used.
    weight_decay_ : float
        The value used.
    n_iter_, n_features_in_, feature_names_in_
        As in scikit-learn.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> X, y = load_iris(return_X_y=True, as_frame=True)
    >>> flowers = DLGNClassifier(hidden=(8, 8), epochs=60, random_state=0).fit(X, y)
    >>> flowers.score(X, y) > 0.9
    True
    >>> print(flowers.explain(X[:1]))  # doctest: +ELLIPSIS
    Explanation of 1 rows by ... groups of half-spaces: sums are exact (relative error ...
    """

    class_weight: Mapping[Any, float] | str | None = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DLGNClassifier:
        """Fit to rows X (n, d) and class labels y (n,) of any type; rows of weight zero count as absent."""
        X, labels, weights, self.classes_ = read_classes(self, X, y, sample_weight)
        return self._fit(X, labels, weights, len(self.classes_))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities, (n, c), columns in the order of ``classes_``."""
        f = self.model_outputs(X)
        if f.shape[1] == 1:
            f = np.concatenate([np.zeros_like(f), f], axis=1)
        p = np.exp(f - f.max(axis=1, keepdims=True))
        return p / p.sum(axis=1, keepdims=True)

    def decode_predictions(self, f: np.ndarray) -> np.ndarray:
        """Class labels (n,) from outputs f (n, c)."""
        return self.classes_[(f[:, 0] > 0).astype(int) if f.shape[1] == 1 else f.argmax(axis=1)]

    def counterfactual(
        self,
        x: Any,
        target: Any = None,
        *,
        within: Any = None,
        keep: Any = (),
        whole: Any = "auto",
        margin: float = 0.0,
        seconds: float = 10.0,
    ) -> Counterfactual:
        """The smallest change of a row that gives it another class, and a proof of how small it could be.

        Distances are Σ_j |change of feature j| / (its standard deviation in training), so that few features change.
        The new values are rounded away from x to few decimals, so that the printed values have the other prediction;
        this adds at most a thousandth to the distance.

        Parameters
        ----------
        x : (d,) or (1, d)
        target : label, optional
            The class to reach; any other than that of x if not given.
        within : (n, d), optional
            Rows such as those of training. No feature leaves the range that it has there and in x, neighbouring columns
            of 0 and 1 of which each row has exactly one, a category, keep exactly one, and the search starts from these
            rows.
        keep : feature or sequence of features
            Names or indices of those that must not change.
        whole : "auto" or sequence of features
            Features that must be integers, besides the categories; "auto" are those that are integers in all of
            `within` and in x.
        margin : float
            How far beyond the decision boundary to go, in units of the decision function: the new class is to be at
            least exp(margin) times as probable as each other class, or, without `target`, as the class of x. Of two
            classes it then has a probability of at least 1 / (1 + exp(−margin)): 0.73 with 1, 0.9 with 2.2. With 0
            the row is just beyond the boundary.
        seconds : float
            Time limit of the search and the proof. With many hundred features it may be exceeded by a second.

        Returns
        -------
        Counterfactual
            With its `distance`, and the lower bound `at_least`. If the proof was finished they are equal up to rounding
            of the values; `unrounded` is the distance without it.

        Notes
        -----
        The solver is HiGHS, which is part of scipy. Version 1.12 (scipy 1.17) has a print that no option switches off:
        with integer features, a line that ends in ``tmpSolver.run();`` sometimes appears on the standard output. It can
        be ignored.

        Examples
        --------
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True, as_frame=True)
        >>> flowers = DLGNClassifier(hidden=(8,), epochs=60, random_state=0).fit(X, y)
        >>> other = flowers.counterfactual(X[50:51], 2, within=X, keep="sepal width (cm)")
        >>> other.after == 2, other.nearest, "sepal width (cm)" in other.changes
        (np.True_, True, False)
        """

        beyond = _check_margin(margin)

        def wanted(f: np.ndarray) -> tuple[Goal, str]:
            now = int(np.flatnonzero(self.classes_ == self.decode_predictions(f[None])[0])[0])
            names = [repr(label) for label in self.classes_.tolist()]  # 'no', where numpy writes np.str_('no')
            asked = None if target is None else self._number_of("counterfactual", target)
            if asked == now:
                raise OptionError(f"counterfactual: the row is predicted {names[now]} already.")
            by = f" with a margin of {beyond:g}" if beyond else ""
            if len(f) == 1:
                return Goal(np.array([[1.0 - 2 * now]]), np.full(1, beyond)), names[1 - now] + by
            eye, low = np.eye(len(f)), np.full(len(f) - 1, beyond)
            if asked is not None:  # above all others; otherwise any above what is predicted now
                return Goal(np.delete(eye[asked] - eye, asked, axis=0), low), names[asked] + by
            return Goal(np.delete(eye - eye[now], now, axis=0), low, any_of=True), f"other than {names[now]}{by}"

        return self._counterfactual(x, wanted, within, keep, whole, seconds)

    def decision_function(self, X: Any) -> np.ndarray:
        """`model_outputs` in scikit-learn's shape: the log-odds of the second class (n,), or centred logits (n, c)."""
        f = self.model_outputs(X)
        return f[:, 0] if f.shape[1] == 1 else f

    def _choose_outputs(self, outputs: np.ndarray, of: Any) -> tuple[tuple[str, ...], np.ndarray, float]:
        k = None if of is None else self._number_of("explain", of)
        if len(self.classes_) == 2:  # both have one output
            chosen = np.zeros(len(outputs), dtype=int)
            return (f"log-odds of {self.classes_[1 if k is None else k]}",), chosen, -1.0 if k == 0 else 1.0
        labels = tuple(f"logit of {label}" for label in self.classes_)
        return labels, outputs.argmax(axis=1) if k is None else np.full(len(outputs), k), 1.0

    def _number_of(self, who: str, label: Any) -> int:
        """Where a class is in ``classes_``."""
        found = [k for k in range(len(self.classes_)) if self.classes_[k] == label]
        if not found:
            known = ", ".join(str(known) for known in self.classes_)
            raise LabelError(f"{who}: no class {label!r}; there are {known}.")
        return found[0]


class DLGNRegressor(TargetsMixin, _BaseDLGN):
    """Regressor whose features are exactly intersections of half-spaces: a deep linearly gated network.

    As `DLGNClassifier`, with squared error; the target is standardised inside and predictions are in its units. One
    target or several.

    Parameters
    ----------
    hidden, piecewise_constant, epochs, batch_size, learning_rate, weight_decay, beta, hardening, n_restarts, \
early_stopping, validation_fraction, patience, random_state, verbose
        As in `DLGNClassifier`.

    Examples
    --------
    >>> import numpy as np
    >>> X = np.random.default_rng(0).uniform(-1, 1, (200, 2))
    >>> hat = DLGNRegressor(hidden=(8, 8), epochs=60, random_state=0).fit(X, np.abs(X[:, 0]))
    >>> hat.score(X, np.abs(X[:, 0])) > 0.9
    True
    """

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> DLGNRegressor:
        """Fit to rows X (n, d) and targets y (n,) or (n, c); rows of weight zero count as absent."""
        return self._fit(*self._read_targets(X, y, sample_weight), None)

    def counterfactual(
        self,
        x: Any,
        *,
        at_least: float | None = None,
        at_most: float | None = None,
        within: Any = None,
        keep: Any = (),
        whole: Any = "auto",
        margin: float = 0.0,
        seconds: float = 10.0,
    ) -> Counterfactual:
        """The smallest change of a row that brings its prediction to a value, for models of one target.

        Parameters
        ----------
        at_least, at_most : float
            What the prediction has to reach: one of the two.
        margin : float
            How far beyond that value the prediction is to be, in the units of the target.
        x, within, keep, whole, seconds
            As in `DLGNClassifier.counterfactual`.

        Examples
        --------
        >>> import numpy as np
        >>> X = np.random.default_rng(0).uniform(-1, 1, (200, 2))
        >>> hat = DLGNRegressor(hidden=(8, 8), epochs=60, random_state=0).fit(X, np.abs(X[:, 0]))
        >>> other = hat.counterfactual(X[0], at_least=0.9, within=X)
        >>> bool(other.after >= 0.9), other.nearest
        (True, True)
        """
        if (at_least is None) == (at_most is None):
            raise OptionError("counterfactual: give either at_least or at_most.")
        sign, value = (1.0, at_least) if at_most is None else (-1.0, at_most)
        if not (isinstance(value, Real) and np.isfinite(value)):
            raise OptionError(f"counterfactual: at_least and at_most are finite numbers, got {value!r}.")
        bound = float(value) + sign * _check_margin(margin)

        def wanted(f: np.ndarray) -> tuple[Goal, str]:
            what = f"{'at least' if sign > 0 else 'at most'} {bound:g}"
            if len(f) != 1:
                raise OptionError(f"counterfactual: the model has {len(f)} targets. Fit one to the target in question.")
            if sign * f[0] >= sign * bound:
                raise OptionError(f"counterfactual: the row is predicted {f[0]:g}, which is {what} already.")
            return Goal(np.array([[sign]]), np.array([sign * bound])), what

        return self._counterfactual(x, wanted, within, keep, whole, seconds)

    def _choose_outputs(self, outputs: np.ndarray, of: Any) -> tuple[tuple[str, ...], np.ndarray, float]:
        c = outputs.shape[1]
        labels = ("prediction",) if c == 1 else tuple(f"target {k}" for k in range(c))
        return labels, np.full(len(outputs), 0 if of is None else as_number(of, c, "targets")), 1.0
