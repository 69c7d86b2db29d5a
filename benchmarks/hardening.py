"""What hard gates cost, by method: train soft networks, harden each with every method, print and save a table.

Tasks: ``circle`` (DLGN-PWC 5×16 with gate biases, trained to loss .01), ``digits`` and ``fashion_mnist`` (dense DLGN),
``cifar10`` (five convolutions, global average pooling, one dense layer). A tenth of the training rows is held out for
choices; test rows are only scored. Run with
``python -m benchmarks.hardening cifar10 --device cuda --filters 26 --seeds 3 --data-root FOLDER``; ``--quick`` takes a
small subset and few epochs. It asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pathlens as pl
from pathlens.hardening import METHODS, Hardened
from pathlens.models import GatedNetwork
from pathlens.training import Keep, Stopping

TASKS = ("circle", "digits", "fashion_mnist", "cifar10")
#: per task: soft epochs and rate, hardening epochs and rate, batch size
SETTINGS: dict[str, dict[str, Any]] = {
    "circle": {"epochs": 1000, "lr": 1e-3, "harden_epochs": 200, "harden_lr": 2e-3, "batch_size": 32},
    "digits": {"epochs": 60, "lr": 2e-3, "harden_epochs": 30, "harden_lr": 2e-3, "batch_size": 32},
    "fashion_mnist": {"epochs": 20, "lr": 1e-3, "harden_epochs": 10, "harden_lr": 1e-3, "batch_size": 128},
    "cifar10": {"epochs": 60, "lr": 1e-3, "harden_epochs": 30, "harden_lr": 1e-3, "batch_size": 128},
}


def load(task: str, quick: bool) -> pl.data.DataSet:
    """The rows of a task, images standardised by their training pixels; quick: a subset."""
    if task == "circle":
        return pl.data.circle(1024, test_points=1024)
    if task == "cifar10":
        data = pl.data.cifar10(standardise=True)
    else:
        data = {"digits": pl.data.digits, "fashion_mnist": pl.data.fashion_mnist}[task](flatten=True, standardise=True)
    if not quick or len(data) <= 4000:
        return data
    assert data.x_test is not None and data.y_test is not None
    return replace(data.subsample(4000, seed=0), x_test=data.x_test[:2000], y_test=data.y_test[:2000])


def network(task: str, data: pl.data.DataSet, filters: int, width: int, piecewise_constant: bool) -> GatedNetwork:
    """The soft network of a task, β = 4."""
    if task == "circle":
        return pl.models.dlgn(2, (16,) * 5, piecewise_constant=True, bias=True)
    if task == "cifar10":
        kind = "dlgn_pwc" if piecewise_constant else "dlgn"
        return pl.gated_twin(pl.models.conv5(filters=filters, bias=True), kind, data.x[:2])
    options = {"piecewise_constant": piecewise_constant, "bias": True}
    return pl.models.dlgn(data.x.shape[1], (width,) * 4, 10, **options)


def test_score(net: GatedNetwork, data: pl.data.DataSet, device: str) -> float:
    """Accuracy on the test rows, or mean squared error."""
    assert data.x_test is not None and data.y_test is not None
    net = net.to(device).eval()
    with torch.no_grad():
        f = torch.cat([net(part.to(device)) for part in data.x_test.split(512)]).cpu()
    if data.task == "regression":
        return float((f - data.y_test).square().mean())
    return float((f.argmax(1) == data.y_test).double().mean())


def split(data: pl.data.DataSet) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Rows to train on, and a tenth held out."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    cut = len(data) // 10
    return (data.x[order[cut:]], data.y[order[cut:]]), (data.x[order[:cut]], data.y[order[:cut]])


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, harden with every method, print a table, return what was measured."""
    task, device = arguments.task, arguments.device
    if arguments.data_root:
        os.environ["PATHLENS_DATA"] = arguments.data_root
    s = dict(SETTINGS[task]) | {k: v for k in SETTINGS[task] if (v := getattr(arguments, k, None)) is not None}
    if arguments.quick and task != "circle":
        s |= {"epochs": min(s["epochs"], 10), "harden_epochs": min(s["harden_epochs"], 5)}
    data = load(task, arguments.quick)
    regression = data.task == "regression"
    rows, held = ((data.x, data.y), None) if regression else split(data)
    loss = "mse" if regression else "cross_entropy"
    pattern = network(task, data, arguments.filters, arguments.width, arguments.piecewise_constant)
    common: dict[str, Any] = {"batch_size": s["batch_size"], "device": device, "progress": arguments.progress}
    soft = pl.train(
        pattern,
        rows,
        loss=loss,
        epochs=s["epochs"],
        lr=s["lr"],
        seeds=range(arguments.seeds),
        scheduler="constant" if regression else "cosine",
        stopping=Stopping(loss_below=0.01) if regression else None,
        keep=Keep(losses=[0.01]) if regression else Keep(evaluate="running"),
        **common,
    )
    for net, trajectory in zip(soft.networks, soft):
        for moment in trajectory.moments:  # the others trained on until the last seed was there
            assert moment.snapshot is not None
            net.load_state_dict(moment.snapshot.state)
    results = []
    for seed, net in enumerate(soft.networks):
        for method in arguments.methods:
            made: Hardened = pl.harden(
                net,
                rows,
                method=method,
                validation=held,
                loss=loss,
                epochs=s["harden_epochs"],
                lr=s["harden_lr"],
                seed=seed,
                keep=None if regression else Keep(evaluate="running"),
                **common,
            )
            report = made.report
            score = "loss" if regression else "accuracy"
            row = {
                "seed": seed,
                "method": method,
                "kept": report.kept,
                "seconds": report.seconds,
                "agreement": report.agreement,
                "bound": report.bound.loss,
                "cells": report.bound.cells,
                "near": report.near,
                "soft_train": getattr(report.soft, score),
                "hard_train": getattr(report.hard, score),
                "soft_test": test_score(net, data, device),
                "hard_test": test_score(made.network, data, device),
            }
            results.append(row)
            scores = {k: f"{row[f'soft_{k}']:.4f} → {row[f'hard_{k}']:.4f}" for k in ("train", "test")}
            print(f"seed {seed} {method:<17}{scores}, {report.seconds:.0f} s", flush=True)
    summary = {}
    print(f"\n{task}: median over {arguments.seeds} seeds of the {'loss' if regression else 'accuracy'}")
    for method in arguments.methods:
        of = [r for r in results if r["method"] == method]
        keys = ("soft_train", "hard_train", "soft_test", "hard_test")
        summary[method] = {k: statistics.median(r[k] for r in of) for k in keys}
        differences = [r["hard_test"] / r["soft_test"] if regression else r["hard_test"] - r["soft_test"] for r in of]
        summary[method]["test_ratio" if regression else "test_difference"] = statistics.median(differences)
        print(f"  {method:<17}" + ", ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in summary[method].items()))
    others = {k: v for k, v in vars(arguments).items() if k not in {*s, "task", "data_root", "out", "progress"}}
    measured = {"task": task, "settings": s | others, "torch": torch.__version__, "summary": summary, "runs": results}
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(measured, indent=1, default=str) + "\n")
    return measured


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--filters", type=int, default=26)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--piecewise-constant", action="store_true")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--harden-epochs", type=int)
    parser.add_argument("--harden-lr", type=float)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--data-root", help="folder that holds the image sets; default: where pathlens looks for them")
    parser.add_argument("--out", help="JSON file for the results")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--progress", action="store_true")
    main(parser.parse_args())
