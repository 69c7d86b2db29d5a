"""The other side of `peers`: runs inside the neural-tangents environment, imports jax and does not import this package.

``python neural_tangents_worker.py job.npz result.npz`` reads weights and inputs, computes a kernel in several ways, and
writes the fastest time of each and one of the kernels. Compilation is left out of the timings.
"""

import json
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


def forward(layers, params, x):
    """The same network as the torch one: `layers` lists its steps."""
    h, at = x, 0
    for step in layers:
        if step == "relu":
            h = jax.nn.relu(h)
        elif step == "pool":
            h = jnp.mean(h, axis=(2, 3))
        else:
            weight, bias = params[at]
            at += 1
            if step == "conv":
                h = jax.lax.conv_general_dilated(h, weight, (1, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW"))
                h = h if bias is None else h + bias[None, :, None, None]
            else:
                h = h @ weight.T
                h = h if bias is None else h + bias
    return h


def timed(task, repeats, patience=30.0):
    """Shortest time of a task, and its result."""
    best, spent, out = float("inf"), 0.0, None
    for _ in range(repeats):
        start = time.perf_counter()
        out = jax.block_until_ready(task())
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
        if spent > patience:
            break
    return best, out


def empirical(job, data):
    """Trace kernel (mean over outputs) of a given network by each implementation, whole and in batches."""
    import neural_tangents as nt

    params = []
    for i in range(job["weights"]):
        bias = data.get(f"b{i}")
        params.append((jnp.asarray(data[f"w{i}"]), None if bias is None else jnp.asarray(bias)))
    x = jnp.asarray(data["x"])

    def f(p, inputs):
        return forward(job["layers"], p, inputs)

    n = x.shape[0]

    def make(implementation, batch, rows):
        fn = nt.empirical_ntk_fn(f, trace_axes=(-1,), vmap_axes=0, implementation=implementation)
        return nt.batch(fn, batch_size=batch, device_count=0) if batch and rows > batch else jax.jit(fn)

    # A quarter of the rows tells what the whole would take; those near the best are then run whole.
    seconds, notes, kernel, expected = {}, [], None, {}
    for implementation in (1, 2, 3):
        for batch in job["batches"]:
            name = f"implementation {implementation}" + (f", batches of {batch}" if batch else "")
            part = max(n // 4, 1) if not batch else min(max(n // 4 // batch, 1) * batch, n)
            try:
                probe = partial(make(implementation, batch, part), x[:part], None, params)
                jax.block_until_ready(probe())  # compiles
                expected[name] = timed(probe, 1)[0] * (n / part) ** 2, implementation, batch
            except Exception as error:  # the peer's failures are results too
                notes.append(f"neural-tangents, {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    for name, (guess, implementation, batch) in expected.items():
        if guess > job["limit"] or guess > 3 * min(value for value, _, _ in expected.values()):
            notes.append(f"neural-tangents, {name}: not run whole, about {guess:.2g} s by a quarter of the rows")
            continue
        try:
            whole = partial(make(implementation, batch, n), x, None, params)
            jax.block_until_ready(whole())
            seconds[name], out = timed(whole, job["repeats"])
            kernel = np.asarray(out)
        except Exception as error:
            notes.append(f"neural-tangents, {name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
    return seconds, notes, kernel


def infinite(job, data):
    """Analytic kernel, in the scaling that Pathlens uses: sums over inputs, not means."""
    jax.config.update("jax_enable_x64", True)
    import neural_tangents as nt
    from neural_tangents import stax

    root2 = 2**0.5
    steps = []
    if job["kind"] == "infinite dense":
        for _ in range(job["hidden_layers"]):
            steps += [stax.Dense(1, W_std=root2), stax.Relu()]
    else:
        for _ in range(job["hidden_layers"]):
            steps += [stax.Conv(1, (3, 3), padding="SAME", W_std=root2), stax.Relu()]
        steps.append(stax.GlobalAvgPool() if job["pool"] == "gap" else stax.Flatten())
    kernel_fn = stax.serial(*steps, stax.Dense(1, W_std=1.0))[2]
    x = np.asarray(data["x"], dtype=np.float64) * data["x"].shape[1] ** 0.5
    x = x if x.ndim == 2 else np.moveaxis(x, 1, -1)
    fast = jax.jit(lambda a: kernel_fn(a, None, "ntk"))
    if job.get("batch"):
        fast = nt.batch(lambda a, b, get: kernel_fn(a, b, "ntk"), batch_size=job["batch"], device_count=0)

        def task():
            return fast(x, None, "ntk")
    else:

        def task():
            return fast(x)

    jax.block_until_ready(task())
    took, out = timed(task, job["repeats"])
    return {"analytic": took}, [], np.asarray(out)


def main(given, made):
    with np.load(given) as file:
        data = {k: file[k] for k in file.files}
    job = json.loads(str(data.pop("job")))
    seconds, notes, kernel = (empirical if job["kind"] == "empirical" else infinite)(job, data)
    arrays = {} if kernel is None else {"kernel": kernel}
    np.savez(made, report=json.dumps({"seconds": seconds, "notes": notes}), **arrays)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
