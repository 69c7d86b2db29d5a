"""`DataSet`: rows and targets of a data set, checked, with a description of their origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from pathlens.errors import (
    DTypeError,
    EmptyDataError,
    LabelError,
    NotFiniteError,
    OptionError,
    ShapeError,
    unknown_name,
)

Task = Literal["regression", "classification"]


@dataclass(frozen=True, eq=False, repr=False)
class DataSet:
    """Rows and targets for training, optionally for testing, checked when made and never changed after.

    Regression targets always have shape (n, c), the shape of a network's output, so that a loss cannot broadcast
    (n, 1) against (n,); a given (n,) becomes (n, 1). Class labels have shape (n,) and dtype int64.

    Parameters
    ----------
    x : Tensor, shape (n, ...)
        Inputs of floating dtype, at least two axes. NumPy arrays are copied.
    y : Tensor, shape (n, c) or (n,)
        Targets: floating for regression, integers in 0..classes-1 for classification.
    x_test, y_test : Tensor, optional
        The same for rows held out.
    name : str
        Shown by ``repr``.
    task : {"regression", "classification"}
    classes : int, optional
        Number of classes; needed for classification only.
    info : mapping
        How the set was made: options, source, statistics. Not per row.
    marks, marks_test : mapping of str to Tensor with n rows
        Facts about single rows (the angle on the circle, whether a row is simple); they follow their rows through
        `subsample`, `only` and `to`.

    Notes
    -----
    The checks read x once: O(n d) time, no copy.

    Examples
    --------
    >>> import torch
    >>> data = DataSet(torch.randn(6, 2), torch.tensor([0, 1, 0, 1, 0, 1]), name="toy", task="classification",
    ...                classes=2)
    >>> data
    DataSet 'toy': classification, 2 classes
      train x (6, 2) float32, y (6,) int64
    >>> len(data), data.d, data.c
    (6, 2, 2)
    >>> data.subsample(2, seed=0).y.sort().values
    tensor([0, 1])
    """

    x: Tensor
    y: Tensor
    x_test: Tensor | None = None
    y_test: Tensor | None = None
    name: str = "unnamed"
    task: Task = "regression"
    classes: int | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    marks: Mapping[str, Tensor] = field(default_factory=dict)
    marks_test: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"DataSet {self.name!r}"
        if self.task not in ("regression", "classification"):
            raise OptionError(f"{where}: task is {self.task!r}, expected 'regression' or 'classification'.")
        if self.task == "classification" and (not isinstance(self.classes, Integral) or self.classes < 1):
            raise OptionError(f"{where}: classes is {self.classes!r}, expected a positive integer. Pass classes=…")
        if self.task == "regression" and self.classes is not None:
            raise OptionError(f"{where}: classes is {self.classes!r} for regression. Leave it out.")
        if (self.x_test is None) != (self.y_test is None):
            raise ShapeError(f"{where}: x_test and y_test come together; one of them is None.")
        x, y = _rows(where, "", self.x, self.y, self.task, self.classes)
        if self.classes is not None:
            self._put(classes=int(self.classes))  # of NumPy, as the largest label of an array plus one is
        self._put(x=x, y=y, info=dict(self.info), marks=_marks(where, "marks", self.marks, len(x)))
        if self.x_test is None or self.y_test is None:
            if self.marks_test:
                raise ShapeError(f"{where}: marks_test is given without test rows.")
            self._put(marks_test={})
            return
        x_test, y_test = _rows(where, "_test", self.x_test, self.y_test, self.task, self.classes)
        if x_test.shape[1:] != x.shape[1:] or y_test.shape[1:] != y.shape[1:]:
            raise ShapeError(
                f"{where}: a test row has x {tuple(x_test.shape[1:])}, y {tuple(y_test.shape[1:])}, expected "
                f"x {tuple(x.shape[1:])}, y {tuple(y.shape[1:])} as in the training rows."
            )
        self._put(x_test=x_test, y_test=y_test, marks_test=_marks(where, "marks_test", self.marks_test, len(x_test)))

    def _put(self, **values: Any) -> None:
        for key, value in values.items():  # the dataclass is frozen for users; construction is the one exception
            object.__setattr__(self, key, value)

    def __len__(self) -> int:
        return len(self.x)

    @property
    def d(self) -> int:
        """Input dimension: numbers in one row of x."""
        return self.x[0].numel()

    @property
    def c(self) -> int:
        """Outputs a network needs: classes, or columns of y."""
        return self.classes if self.classes is not None else self.y.shape[1]

    def __repr__(self) -> str:
        kind = self.task if self.classes is None else f"{self.task}, {self.classes} classes"
        lines = [f"DataSet {self.name!r}: {kind}", "  train " + _describe(self.x, self.y)]
        if self.x_test is not None and self.y_test is not None:
            lines.append("  test  " + _describe(self.x_test, self.y_test))
        if self.marks:
            lines.append("  marks " + ", ".join(sorted(self.marks)))
        short = [f"{k}={v}" for k, v in self.info.items() if isinstance(v, str | int | float | bool)]
        if short:
            lines.append("  info  " + ", ".join(short))
        return "\n".join(lines)

    def subsample(
        self, n: int | None = None, seed: int = 0, *, per_class: int | None = None, n_test: int | None = None
    ) -> DataSet:
        """A random part of the training rows, in their order; for classes, in the classes' proportions.

        Parameters
        ----------
        n : int, optional
            Rows to keep. Class k keeps its share n·n_k/len, rounded by largest remainder.
        seed : int
            The same seed and the same set give the same rows.
        per_class : int, optional
            Instead of `n`: exactly this many rows of each class that occurs.
        n_test : int, optional
            Test rows to keep, drawn in the same way; all of them if None.

        Examples
        --------
        >>> import torch
        >>> data = DataSet(torch.randn(100, 3), torch.arange(100) % 4, task="classification", classes=4)
        >>> data.subsample(per_class=3).y.bincount()
        tensor([3, 3, 3, 3])
        """
        if (n is None) == (per_class is None):
            raise OptionError(
                f"DataSet {self.name!r}: subsample takes either n or per_class; got n={n!r}, per_class={per_class!r}."
            )
        if per_class is not None and self.task != "classification":
            raise OptionError(f"DataSet {self.name!r}: per_class needs classes; this is regression. Pass n.")
        generator = torch.Generator().manual_seed(seed)
        keep = self._draw(self.y, n, per_class, generator)
        keep_test: Any = slice(None)
        if n_test is not None:
            if self.y_test is None:
                raise OptionError(f"DataSet {self.name!r}: n_test={n_test}, but there are no test rows.")
            keep_test = self._draw(self.y_test, n_test, None, generator)
        return self._take(keep, keep_test, info={**self.info, "subsample_of": len(self), "subsample_seed": seed})

    def _take(self, keep: Any, keep_test: Any, **changes: Any) -> DataSet:
        """Some training rows and some test rows, with their marks, and with other fields changed."""
        taken: dict[str, Any] = {}
        for suffix, index in (("", keep), ("_test", keep_test)):
            for name in ("x" + suffix, "y" + suffix):
                rows = getattr(self, name)
                taken[name] = None if rows is None else rows[index]
            marks = getattr(self, "marks" + suffix)
            taken["marks" + suffix] = {key: value[index] for key, value in marks.items()}
        return replace(self, **(taken | changes))

    def _draw(self, y: Tensor, n: int | None, per_class: int | None, generator: torch.Generator) -> Tensor:
        if self.task == "regression":
            groups = [torch.arange(len(y), device=y.device)]
        else:
            groups = [(y == k).nonzero().squeeze(1) for k in y.unique().tolist()]
        sizes = [len(rows) for rows in groups]
        wanted, most = (int(n or 0), len(y)) if per_class is None else (per_class, min(sizes))
        if not 1 <= wanted <= most:
            each = "" if per_class is None else " per class"
            raise OptionError(f"DataSet {self.name!r}: {wanted} rows{each} wanted, expected 1 to {most}.")
        counts = _shares(sizes, wanted) if per_class is None else [wanted] * len(groups)
        kept = [
            rows[torch.randperm(len(rows), generator=generator)[:count].to(rows.device)]
            for rows, count in zip(groups, counts)
        ]
        return torch.cat(kept).sort().values

    def only(self, *classes: int | str) -> DataSet:
        """The rows of some classes, in their order, with labels 0, 1, … in the order in which the classes are named.

        Parameters
        ----------
        classes : int or str
            Labels, or names as in ``info["label_names"]`` where there are any.

        Examples
        --------
        >>> import torch
        >>> data = DataSet(torch.randn(6, 2), torch.tensor([0, 1, 2, 0, 1, 2]), name="animals", task="classification",
        ...                classes=3, info={"label_names": ("ant", "bee", "cat")})
        >>> two = data.only("cat", "ant")
        >>> two.name, two.y, two.info["label_names"]
        ('animals, cat against ant', tensor([1, 0, 1, 0]), ('cat', 'ant'))
        """
        where = f"DataSet {self.name!r}"
        if self.task != "classification" or self.classes is None:
            raise OptionError(f"{where}: only({', '.join(map(repr, classes))}) needs classes; this is regression.")
        names = tuple(self.info.get("label_names", ()))
        kept: list[int] = []
        for given in classes:
            if isinstance(given, str) and names and given not in names:
                raise unknown_name("class", given, names)
            label = names.index(given) if given in names else given
            if not isinstance(label, Integral) or not 0 <= label < self.classes:
                raise LabelError(f"{where}: there is no class {given!r}; labels are 0 to {self.classes - 1}.")
            kept.append(int(label))
        if not kept or len(set(kept)) < len(kept):
            raise OptionError(f"{where}: only takes different classes, one or more, got {classes!r}.")
        number = torch.full((self.classes,), -1, device=self.y.device)
        number[kept] = torch.arange(len(kept), device=self.y.device)

        def relabel(y: Tensor | None) -> Any:
            return (None, None) if y is None else (number[y] >= 0, number[y][number[y] >= 0])

        (keep, y), (keep_test, y_test) = relabel(self.y), relabel(self.y_test)
        kept_names = tuple(names[k] if names else str(k) for k in kept)
        return self._take(
            keep,
            keep_test,
            y=y,
            y_test=y_test,
            classes=len(kept),
            name=f"{self.name}, {' against '.join(kept_names)}",
            info={**self.info, "label_names": kept_names},
        )

    def to(self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> DataSet:
        """The same rows in another floating dtype (inputs and regression targets) or on another device.

        Examples
        --------
        >>> import torch
        >>> DataSet(torch.ones(2, 1), torch.ones(2)).to(dtype=torch.float64).y.dtype
        torch.float64
        """
        if dtype is not None and not dtype.is_floating_point:
            raise DTypeError(f"DataSet {self.name!r}: to(dtype={dtype}), expected a floating dtype.")

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

        return replace(
            self,
            x=move(self.x),
            y=move(self.y),
            x_test=None if self.x_test is None else move(self.x_test),
            y_test=None if self.y_test is None else move(self.y_test),
            marks={key: value.to(device=device) for key, value in self.marks.items()},
            marks_test={key: value.to(device=device) for key, value in self.marks_test.items()},
        )


def _describe(x: Tensor, y: Tensor) -> str:
    x_dtype, y_dtype = (str(t.dtype).removeprefix("torch.") for t in (x, y))
    place = "" if x.device.type == "cpu" else f" on {x.device}"
    return f"x {tuple(x.shape)} {x_dtype}, y {tuple(y.shape)} {y_dtype}{place}"


def _shares(sizes: list[int], n: int) -> list[int]:
    """n split in proportion to `sizes` by largest remainder; no share exceeds its size."""
    total = sum(sizes)
    counts = [n * size // total for size in sizes]
    by_remainder = sorted(range(len(sizes)), key=lambda k: (-(n * sizes[k] % total), k))
    for k in by_remainder[: n - sum(counts)]:
        counts[k] += 1
    return counts


def _tensor(where: str, label: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if not isinstance(value, Tensor):
        raise DTypeError(f"{where}: {label} is a {type(value).__name__}, expected a torch tensor or a NumPy array.")
    return value.detach()


def _rows(where: str, suffix: str, x: Any, y: Any, task: Task, classes: int | None) -> tuple[Tensor, Tensor]:
    x_name, y_name = "x" + suffix, "y" + suffix
    x, y = _tensor(where, x_name, x), _tensor(where, y_name, y)
    if x.ndim < 2:
        raise ShapeError(
            f"{where}: {x_name} has shape {tuple(x.shape)}, expected (n, d) or more axes. "
            f"For one feature pass {x_name}[:, None]."
        )
    if x.numel() == 0 or y.numel() == 0:
        raise EmptyDataError(
            f"{where}: {x_name} has shape {tuple(x.shape)}, {y_name} {tuple(y.shape)}; expected at "
            "least one row and one column."
        )
    if len(x) != len(y):
        raise ShapeError(f"{where}: {x_name} has {len(x)} rows, {y_name} has {len(y)}. Pass one target per row.")
    if x.device != y.device:
        raise DTypeError(f"{where}: {x_name} is on {x.device}, {y_name} on {y.device}. Put both on one device.")
    if not x.is_floating_point():
        raise DTypeError(f"{where}: {x_name} has dtype {x.dtype}, expected a floating dtype. Pass {x_name}.float().")
    _finite(where, x_name, x)
    if task == "regression":
        if not y.is_floating_point():
            raise DTypeError(
                f"{where}: {y_name} has dtype {y.dtype}, expected a floating dtype. "
                f"Pass {y_name}.float(), or task='classification'."
            )
        if y.ndim > 2:
            raise ShapeError(f"{where}: {y_name} has shape {tuple(y.shape)}, expected (n,) or (n, c).")
        _finite(where, y_name, y)
        return x, y.reshape(len(y), -1)
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise LabelError(f"{where}: {y_name} has dtype {y.dtype}, expected integer labels. Pass {y_name}.long().")
    if y.ndim != 1:
        raise ShapeError(
            f"{where}: {y_name} has shape {tuple(y.shape)}, expected (n,). For one-hot rows pass {y_name}.argmax(1)."
        )
    lo, hi = int(y.min()), int(y.max())
    if lo < 0 or hi >= (classes or 0):
        raise LabelError(
            f"{where}: {y_name} holds labels {lo} to {hi}, expected 0 to {(classes or 0) - 1}. "
            "Renumber them, or pass the right classes=."
        )
    return x, y.long()


def _finite(where: str, label: str, value: Tensor) -> None:
    lo, hi = torch.aminmax(value)  # NaN and infinity both show in the extremes, and nothing is allocated
    if not bool(torch.isfinite(lo) & torch.isfinite(hi)):
        bad = int((~torch.isfinite(value)).sum())
        raise NotFiniteError(
            f"{where}: {label} of shape {tuple(value.shape)} holds {bad} NaN or infinite numbers. "
            "Drop or impute those rows."
        )


def _marks(where: str, label: str, marks: Mapping[str, Any], n: int) -> dict[str, Tensor]:
    checked = {key: _tensor(where, f"{label}[{key!r}]", value) for key, value in marks.items()}
    for key, value in checked.items():
        if value.ndim == 0 or len(value) != n:
            raise ShapeError(f"{where}: {label}[{key!r}] has shape {tuple(value.shape)}, expected {n} rows.")
    return checked
