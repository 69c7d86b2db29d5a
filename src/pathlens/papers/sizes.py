"""The sizes of every experiment: one table, `quick` and `paper`, by the name that ``pathlens run`` takes.

``paper`` holds the paper's own numbers where it states them, else those of the authors' code, else what we chose; an
artifact whose sizes or number of seeds differ from it is marked REDUCED, and `perform` sees to it. ``seeds`` is how
many seeds a run takes unless told otherwise; quick takes as many as paper unless it says so. Plain values only; nothing
is imported.
"""

from __future__ import annotations

from typing import Any

__all__ = ["SIZES"]

# epochs per model; the paper shows the frozen network up to epoch 8000
_CIRCLE: dict[str, dict[str, Any]] = {
    "quick": {
        "points": 1024,
        "hidden": [16] * 5,
        "batch_size": 32,
        "lr": 5e-4,
        "epochs": {"relu": 400, "dlgn_pwc": 400, "frozen": 400},
    },
    "paper": {
        "points": 1024,
        "hidden": [16] * 5,
        "batch_size": 32,
        "lr": 5e-4,
        "epochs": {"relu": 1000, "dlgn_pwc": 1000, "frozen": 8000},
        "seeds": 5,
    },
}
# depths d count weight layers, as the paper does: d − 1 hidden ones
_DEPTHS = [2, 4, 6, 8, 12, 16, 20]
_MEMORISE: dict[str, dict[str, Any]] = {
    "quick": {"n": 200, "trained_depths": [2, 4, 8, 12, 20], "trained_widths": [25, 100], "epochs": 60},
    "paper": {"n": 200, "trained_depths": _DEPTHS, "trained_widths": [25, 100, 500], "epochs": 200, "seeds": 5},
}
_EIGHT: dict[str, Any] = {"inputs": 3, "kernel": 2, "convolutions": 3, "seeds": 5}
_BUNDLES: dict[str, Any] = {"positions": 8, "kernel": 3, "inputs": 8, "seeds": 5}
_TOY: dict[str, Any] = {"inputs": 2, "hidden": [3, 3]}
# what the note on localisation leaves open, and its public code ran: fresh batches of 1000, thousands of steps
_DESCENT: dict[str, dict[str, Any]] = {
    "quick": {"rows": 2000, "descent": 800},
    "paper": {"rows": 4000, "descent": 3000, "seeds": 5},
}
_FLOW: dict[str, Any] = {"inputs": 20, "rows": 500, "seeds": 5}

# the authors' code where the papers are silent; 100 epochs are Experiment 5's
_BINARY_MNIST: dict[str, dict[str, Any]] = {
    "quick": {
        "width": 50,
        "hidden_layers": 5,
        "rows": 1500,
        "rows_test": 2000,
        "epochs": 30,
        "lr": 3e-4,
        "batch_size": 64,
        "examples": 100,
    },
    "paper": {
        "width": 100,
        "hidden_layers": 5,
        "rows": None,
        "rows_test": None,
        "epochs": 100,
        "lr": 1e-4,
        "batch_size": 64,
        "examples": 200,
        "seeds": 5,
    },
}
# the trainings of Table 2, two of which Figure 3 uses; sizes, rates and epochs as in the authors' code
_PATH_FEATURES: dict[str, dict[str, Any]] = {
    "quick": {
        "hidden": [64] * 5,
        "channels": [8, 8, 16, 16],
        "dense": [32, 32],
        "flat_data": "mnist",
        "flat_rows": 1500,
        "flat_rows_test": 2000,
        "image_data": "digits",
        "image_rows": 600,
        "image_rows_test": 360,
        "batch_size": 32,
        "rates": {
            "fc-sgd": 0.05,
            "fc-adam": 1e-3,
            "vconv-sgd": 0.05,
            "vconv-adam": 2e-3,
            "gconv-sgd": 0.1,
            "gconv-adam": 5e-3,
        },
        "epochs": {"fc-sgd": 10, "fc-adam": 10, "vconv-sgd": 6, "vconv-adam": 6, "gconv-sgd": 20, "gconv-adam": 20},
    },
    "paper": {
        "hidden": [128] * 5,
        "channels": [64, 64, 128, 128],
        "dense": [256, 256],
        "flat_data": "mnist",
        "flat_rows": None,
        "flat_rows_test": None,
        "image_data": "cifar10",
        "image_rows": None,
        "image_rows_test": None,
        "batch_size": 32,
        "rates": {
            "fc-sgd": 0.01,
            "fc-adam": 1e-4,
            "vconv-sgd": 0.01,
            "vconv-adam": 3e-4,
            "gconv-sgd": 0.01,
            "gconv-adam": 3e-4,
        },
        "epochs": {
            "fc-sgd": 300,
            "fc-adam": 100,
            "vconv-sgd": 80,
            "vconv-adam": 80,
            "gconv-sgd": 100,
            "gconv-adam": 200,
        },
        "seeds": 5,
    },
}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    # --- half-space: the circle, one training for four figures -----------------------------------------------------
    "hs.fig2": _CIRCLE,
    "hs.fig3": _CIRCLE,
    "hs.fig5": _CIRCLE,
    "hs.fig6": _CIRCLE,
    # --- half-space: the circle ------------------------------------------------------------------------------------
    "hs.fig1": {"quick": {}, "paper": {}},  # no randomness, and nothing to make smaller
    "hs.fig8": {"quick": {"points": 400}, "paper": {"points": 400, "seeds": 5}},
    # the next three look at the trainings of hs.fig2
    "hs.regions": {
        "quick": {
            **_CIRCLE["quick"],
            "box": 1.5,
            "regions": 150,
            "biased_hidden": [8] * 5,
            "biased_epochs": 60,
            "biased_lr": 2e-3,
        },
        "paper": {
            **_CIRCLE["paper"],
            "box": 1.5,
            "regions": 1000,
            "biased_hidden": [8] * 5,
            "biased_epochs": 300,
            "biased_lr": 2e-3,
        },
    },
    "hs.fig4": {scale: {**sizes, "kernel_points": n} for (scale, sizes), n in zip(_CIRCLE.items(), (128, 256))},
    "hs.spectral": {scale: {**sizes, "kernel_points": n} for (scale, sizes), n in zip(_CIRCLE.items(), (128, 256))},
    # of our own making: the summary names the tests and no sizes
    "hs.failures": {
        "quick": {
            "hidden": [16] * 5,
            "lr": 2e-3,
            "batch_size": 32,
            "steps": 1200,
            "points": 512,
            "inputs": 10,
            "bits": [4, 8, 10],
            "frequencies": [4, 12, 24],
            "samples": [64, 16, 8],
            "noise": 0.2,
            "easy_frequency": 4,
            "turns": 2,
            "turn_steps": [320, 80, 16],
            "seeds": 3,
        },
        "paper": {
            "hidden": [16] * 5,
            "lr": 1e-3,
            "batch_size": 32,
            "steps": 8000,
            "points": 1024,
            "inputs": 10,
            "bits": [2, 4, 6, 8, 9, 10],
            "frequencies": [4, 8, 12, 16, 24, 32, 48],
            "samples": [512, 128, 64, 32, 16, 8],
            "noise": 0.2,
            "easy_frequency": 4,
            "turns": 3,
            "turn_steps": [1920, 640, 320, 160, 64, 32],
            "seeds": 5,
        },
    },
    # --- half-space: modified Fashion-MNIST ------------------------------------------------------------------------
    "hs.fig7": {
        "quick": {
            "rows": 6000,
            "rows_test": 2000,
            "width": 64,
            "hidden_layers": 5,
            "epochs": 15,
            "batch_size": 32,
            "lr": 1e-3,
            "beta": 4.0,
            "measured": 300,
        },
        # rate, width and layers are the paper's; epochs, batch and β those of the public image code
        "paper": {
            "rows": 60000,
            "rows_test": 10000,
            "width": 128,
            "hidden_layers": 5,
            "epochs": 32,
            "batch_size": 128,
            "lr": 2e-4,
            "beta": 4.0,
            "measured": 2000,
            "seeds": 3,
        },
    },
    "hs.fig13": {
        "quick": {
            "rows": 6000,
            "rows_test": 2000,
            "width": 64,
            "hidden_layers": 5,
            "epochs": 15,
            "batch_size": 32,
            "lr": 1e-3,
            "beta": 4.0,
            "per_class": 50,
        },
        "paper": {
            "rows": 60000,
            "rows_test": 10000,
            "width": 128,
            "hidden_layers": 5,
            "epochs": 32,
            "batch_size": 128,
            "lr": 2e-4,
            "beta": 4.0,
            "per_class": 50,
            "seeds": 3,
        },
    },
    "hs.early": {
        "quick": {
            "points": 1024,
            "circle_epochs": 200,
            "circle_stages": [0, 1, 3, 10, 50, 200],
            "rows": 3000,
            "rows_test": 1000,
            "width": 64,
            "hidden_layers": 5,
            "epochs": 10,
            "stages": [0, 1, 3, 10],
            "batch_size": 32,
            "lr": 1e-3,
            "beta": 4.0,
            "kernel_rows": 1000,
        },
        "paper": {
            "points": 1024,
            "circle_epochs": 1000,
            "circle_stages": [0, 1, 3, 10, 50, 1000],
            "rows": 60000,
            "rows_test": 10000,
            "width": 128,
            "hidden_layers": 5,
            "epochs": 100,
            "stages": [0, 1, 3, 10, 50, 100],
            "batch_size": 128,
            "lr": 2e-4,
            "beta": 4.0,
            "kernel_rows": 5000,
            "seeds": 5,
        },
    },
    "hs.controls": {
        "quick": {
            "points": 1024,
            "circle_epochs": 100,
            "rows": 3000,
            "rows_test": 1000,
            "width": 64,
            "hidden_layers": 5,
            "epochs": 10,
            "batch_size": 32,
            "lr": 1e-3,
            "beta": 4.0,
            "measured": 1000,
        },
        "paper": {
            "points": 1024,
            "circle_epochs": 200,
            "rows": 60000,
            "rows_test": 10000,
            "width": 128,
            "hidden_layers": 5,
            "epochs": 32,
            "batch_size": 128,
            "lr": 2e-4,
            "beta": 4.0,
            "measured": 10000,
            "seeds": 5,
        },
    },
    "hs.remedies": {
        "quick": {
            "points": 1024,
            "circle_epochs": 150,
            "rows": 3000,
            "rows_test": 1000,
            "width": 64,
            "hidden_layers": 5,
            "epochs": 8,
            "batch_size": 32,
            "lr": 1e-3,
            "beta": 4.0,
            "measured": 1000,
            "probe": 64,
            "strength": 0.1,
        },
        "paper": {
            "points": 1024,
            "circle_epochs": 200,
            "rows": 60000,
            "rows_test": 10000,
            "width": 128,
            "hidden_layers": 5,
            "epochs": 32,
            "batch_size": 128,
            "lr": 2e-4,
            "beta": 4.0,
            "measured": 10000,
            "probe": 256,
            "strength": 0.1,
            "seeds": 5,
        },
    },
    # --- deep gated networks: image sets ---------------------------------------------------------------------------
    # neither epochs nor batch size are printed; 80 epochs are the authors' code for this network
    "dgn.exp6": {
        "quick": {
            "gates": ["soft", "straight_through"],
            "channels": [16, 16, 16, 16],
            "dense": [32, 32],
            "side": 8,
            "rows": 5000,
            "rows_test": 1000,
            "epochs": 4,
            "lr": 3e-3,
            "batch_size": 50,
        },
        "paper": {
            "gates": ["soft", "straight_through"],
            "channels": [64, 64, 128, 128],
            "dense": [256, 256],
            "side": 32,
            "rows": None,
            "rows_test": None,
            "epochs": 80,
            "lr": 3e-4,
            "batch_size": 128,
            "seeds": 5,
        },
    },
    "dgn.tab4": {
        "quick": {
            "betas": [1, 8],
            "epsilons": [0.1],
            "init": "default",
            "channels": [16, 16, 16, 16],
            "dense": [32, 32],
            "side": 8,
            "rows": 5000,
            "rows_test": 1000,
            "epochs": 4,
            "lr": 3e-3,
            "batch_size": 50,
        },
        "paper": {
            "betas": [1, 2, 4, 8, 12, 16, 20, 24],
            "epsilons": [0.1, 0.4],
            "init": "default",
            "channels": [64, 64, 128, 128],
            "dense": [256, 256],
            "side": 32,
            "rows": None,
            "rows_test": None,
            "epochs": 80,
            "lr": 3e-4,
            "batch_size": 128,
            "seeds": 5,
        },
    },
    # optimiser, epochs and batch size are not printed: the authors' later code for fully connected networks on MNIST
    "dgn.fig5": {
        "quick": {
            "tasks": ["mnist", "mnist_random_labels", "mnist_random_pixels"],
            "hidden": [128, 128, 64, 64, 32, 16],
            "rows": 1000,
            "rows_test": 2000,
            "epochs": 30,
            "lr": 1e-3,
            "batch_size": 50,
        },
        "paper": {
            "tasks": ["mnist", "mnist_random_labels", "mnist_random_pixels"],
            "hidden": [512, 512, 256, 256, 128, 64],
            "rows": None,
            "rows_test": None,
            "epochs": 100,
            "lr": 1e-4,
            "batch_size": 64,
            "seeds": 5,
        },
    },
    # one set of trainings for three figures
    "dgn.fig6": _BINARY_MNIST,
    "dgn.fig7": _BINARY_MNIST,
    "dgn.fig8": _BINARY_MNIST,
    # --- neural path features: image sets --------------------------------------------------------------------------
    # architectures, optimisers and models choose what a call trains; finished rows of earlier calls stay in the table
    "npk.tab2": {
        "quick": {
            **_PATH_FEATURES["quick"],
            "architectures": ["fc", "vconv", "gconv"],
            "optimisers": ["adam"],
            "models": ["frnpf_ii", "frnpf_di", "dnpfl", "flnpf", "relu"],
        },
        "paper": {
            **_PATH_FEATURES["paper"],
            "architectures": ["fc", "vconv", "gconv"],
            "optimisers": ["sgd", "adam"],
            "models": ["frnpf_ii", "frnpf_di", "dnpfl", "flnpf", "relu"],
        },
    },
    "npk.fig3": {
        "quick": {
            **_PATH_FEATURES["quick"],
            "stages": [2, 5, 10, 20],
            "value_epochs": 8,
            "kernel_epochs": [1, 3, 10],
            "per_class": [10, 20],
            "binary_hidden": [100] * 4,
            "binary_rows": 2000,
            "binary_epochs": 20,
            "binary_rate": 1e-3,
            "binary_batch_size": 64,
            "watched": 200,
            "nu_epochs": [0, 1, 2, 5, 10, 20],
        },
        "paper": {
            **_PATH_FEATURES["paper"],
            "stages": [10, 20, 30, 40, 50, 60],
            "value_epochs": 60,
            "kernel_epochs": [1, 2, 5, 10, 20, 50, 100],
            "per_class": [10, 20],
            "binary_hidden": [100] * 4,
            "binary_rows": None,
            "binary_epochs": 50,
            "binary_rate": 1e-4,
            "binary_batch_size": 64,
            "watched": 200,
            "nu_epochs": [0, 1, 2, 5, 10, 20, 30, 40, 50],
        },
    },
    # --- deep gated networks: synthetic data -----------------------------------------------------------------------
    "dgn.fig1": {
        "quick": {"n": 200, "depths": _DEPTHS, "widths": [25, 500]},
        "paper": {"n": 200, "depths": _DEPTHS, "widths": [25, 500], "seeds": 5},
    },
    "dgn.fig2": {
        "quick": {"depths": _DEPTHS, "runs": 20, "width": 500},
        "paper": {"depths": _DEPTHS, "runs": 20, "width": 500, "seeds": 5},
    },
    "dgn.fig3": _MEMORISE,
    "dgn.fig4": {
        "quick": {"galu_n": 100, "galu_width": 100, "galu_depths": [2, 4, 8, 12], "galu_epochs": 60},
        "paper": {"galu_n": 100, "galu_width": 100, "galu_depths": _DEPTHS, "galu_epochs": 200, "seeds": 5},
    },
    "dgn.fig9": {"quick": _EIGHT, "paper": _EIGHT},
    "dgn.fig10": {
        "quick": {"width": 100, "depths": [2, 4, 6, 8, 10], "steps": 30},
        "paper": {"width": 100, "depths": [2, 4, 6, 8, 10], "steps": 50, "seeds": 5},
    },
    "dgn.conv": {"quick": _BUNDLES, "paper": _BUNDLES},
    "dgn.subnetworks": {
        "quick": {
            "data": "digits, 4 against 7",
            "width": 32,
            "hidden_layers": 5,
            "epochs": 60,
            "lr": 1e-3,
            "watched": 40,
        },
        "paper": {
            "data": "MNIST, 4 against 7",
            "width": 100,
            "hidden_layers": 5,
            "epochs": 100,
            "lr": 1e-4,
            "watched": 200,
            "seeds": 5,
        },
    },
    "dgn.unfittable": {
        "quick": {"fit_width": 32, "fit_hidden_layers": 3, "fit_steps": 1500},
        "paper": {"fit_width": 100, "fit_hidden_layers": 3, "fit_steps": 5000, "seeds": 5},
    },
    # --- neural path features: the toy network, limits, memorising -------------------------------------------------
    "npk.fig1": {"quick": _TOY, "paper": _TOY},
    "npk.limits": {
        "quick": {
            "widths": [25, 50, 100, 200, 400],
            "draws": 8,
            "hidden_layers": 4,
            "inputs": 20,
            "data": "digits",
            "rows": 500,
            "rows_test": 360,
            "width": 100,
            "epochs": 30,
            "stages": [1, 5, 30],
            "image_data": "digits",
            "images": 60,
            "images_test": 120,
            "channels": [1, 16, 16, 16],
            "dense": [32],
        },
        "paper": {
            "widths": [25, 50, 100, 200, 400, 800, 1600],
            "draws": 8,
            "hidden_layers": 4,
            "inputs": 20,
            "data": "MNIST",
            "rows": 5000,
            "rows_test": 10000,
            "width": 100,
            "epochs": 60,
            "stages": [10, 20, 30, 40, 50, 60],
            "image_data": "CIFAR-10",
            "images": 1000,
            "images_test": 1000,
            "channels": [3, 64, 64, 128, 128],
            "dense": [256, 256],
            "seeds": 5,
        },
    },
    "npk.memorise": _MEMORISE,
    # --- localisation ----------------------------------------------------------------------------------------------
    "loc.activations": {
        "quick": {"steps": 800, "batch": 500},
        "paper": {"steps": 5000, "batch": 1000, "seeds": 5},
    },
    "loc.gdln": _DESCENT,
    "loc.flips": _DESCENT,
    "loc.dft": _DESCENT,
    "loc.location": {
        "quick": {"steps": 800, "batch": 500, "units": 50},
        "paper": {"steps": 5000, "batch": 1000, "units": 50, "seeds": 5},
    },
    "loc.flow": {"quick": _FLOW, "paper": _FLOW},
    "loc.evolving": {
        "quick": {"inputs": 40, "flow_rows": 300, "units": 10, "time": 40.0},
        "paper": {"inputs": 40, "flow_rows": 300, "units": 10, "time": 80.0, "seeds": 5},
    },
    "loc.gates": {
        "quick": {"inputs": 20, "gates": 4, "draws": 30, "gate_rows": 2000},
        "paper": {"inputs": 20, "gates": 4, "draws": 100, "gate_rows": 4000, "seeds": 5},
    },
}
