"""Models whose every byte depends on a version number, so that a mix of two versions is seen."""

import numpy as np


def weights(version, nbytes=1 << 18):
    """Return a model of a version; some tensors are larger than a small bucket."""
    rng = np.random.default_rng(version)
    return {
        "embed": rng.integers(0, 256, (nbytes // 256, 128), dtype=np.uint8),
        "layer.0.w": rng.random((37, 11)).astype(np.float32),
        "layer.0.t": rng.random((40, 30)).astype(np.float32).T,
        "layer.1.w": rng.integers(0, 2**60, nbytes // 32, dtype=np.int64),
        "norm": rng.random(7),
        "scalar": np.array(rng.random()),
        "empty": np.empty((0, 3), np.float32),
    }


def assign(model, version):
    """Overwrite a model in place with the weights of a version."""
    for name, array in weights(version, nbytes_of(model)).items():
        model[name][...] = array


def nbytes_of(model):
    return model["embed"].shape[0] * 256


def holds(model, version):
    """True if every byte of a model is that of a version."""
    wanted = weights(version, nbytes_of(model))
    return all(model[name].tobytes() == wanted[name].tobytes() for name in wanted)


def holding(model, candidates):
    """Return which of some versions a model holds whole, or None."""
    return next((version for version in candidates if holds(model, version)), None)
