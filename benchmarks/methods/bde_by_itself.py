"""A package for sampled networks, sklearn-contrib-bde, with the network and the lengths that it publishes.

It pins other versions of what we need, so it has an interpreter of its own, and this file imports nothing of ours:

    BDE_PYTHON benchmarks/methods/bde_by_itself.py DATA.npz ROW.json
"""

import json
import sys
import time

import numpy as np

#: Layers, members and the lengths of sampling are published; the others are those of its README's example, with epochs
#: and patience for early stopping of our own choice.
SETTINGS = {
    "n_members": 10,
    "hidden_layers": [16, 16, 16, 16],
    "epochs": 1000,
    "patience": 20,
    "validation_split": 0.15,
    "lr": 1e-3,
    "weight_decay": 1e-4,
    "warmup_steps": 50_000,
    "n_samples": 10_000,
    "n_thinning": 10,
}


def main(data: str, path: str, seed: int = 0) -> None:
    from bde import BdeRegressor
    from bde.loss import GaussianNLL

    arrays = dict(np.load(data))
    X, y, X_test, y_test = (arrays[key].astype(np.float32) for key in ("X", "y", "X_test", "y_test"))
    began, wall = time.process_time(), time.perf_counter()
    regressor = BdeRegressor(**SETTINGS, loss=GaussianNLL(), seed=seed)
    regressor.fit(x=X, y=y.reshape(-1, 1))
    raw = np.asarray(regressor.predict(X_test, raw=True), float)
    mean, sd = (np.asarray(x, float).ravel() for x in regressor.predict(X_test, mean_and_std=True))
    row = {
        "nll": float(np.mean(0.5 * ((y_test - mean) / sd) ** 2 + np.log(sd) + 0.5 * np.log(2 * np.pi))),
        "rmse": float(np.sqrt(np.mean((y_test - mean) ** 2))),
        "draws": list(raw.shape),
        "core_seconds": time.process_time() - began,
        "seconds": time.perf_counter() - wall,
    }
    with open(path, "w") as stream:
        json.dump(row, stream)


if __name__ == "__main__":
    main(*sys.argv[1:3])
