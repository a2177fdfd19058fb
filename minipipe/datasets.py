"""Image data sets as tensors, and batches that are the same on every rank.

    data = load("mnist")                                           # committed, no network needed
    for inputs, targets in batches(data, batch=64, steps=100, seed=0): …

`mnist` and `digits` lie in the repository's `data/` (licences and origin in data/README.md),
`shapes` is drawn by code, `cifar10` and `fashion-mnist` are downloaded through torchvision.
"""

from __future__ import annotations

import hashlib
import io
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minipipe.arguments import whole_number

PIXELS = {  # largest value, then mean and deviation once that is 1
    "mnist": (255, 0.1309, 0.3081),
    "digits": (16, 0.3054, 0.3755),
    "shapes": (255, 0.3292, 0.2441),
    "cifar10": (255, 0.4734, 0.2516),
    "fashion-mnist": (255, 0.2860, 0.3530),
}
NAMES = tuple(PIXELS)
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class Dataset:
    """Images and labels for training and for testing.

    inputs: float32 [rows, channels, height, width], about mean 0 and deviation 1 over the training
    set; targets: int64 [rows], 0 … classes − 1.
    """

    name: str
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: int


def load(
    name: str,
    root: str | os.PathLike | None = None,
    train: int | None = None,
    test: int | None = None,
    seed: int = 0,
) -> Dataset:
    """The data set `name`, one of NAMES, its files checked against their SHA-256.

    root: the folder with its files; without it the environment variable MINIPIPE_DATA, the
    repository's data/, then the installed package's. train, test: only the first rows, that many
    (`shapes` draws any number, else 6,000 and 1,000). seed: of the drawn shapes. ValueError for an
    unknown name or more rows than there are, FileNotFoundError or ValueError naming a missing or
    damaged file, RuntimeError where a download fails.
    """
    if name not in NAMES:
        raise ValueError(f"no data set {name!r}; legal names are {', '.join(NAMES)}")
    for argument, rows in (("train", train), ("test", test)):
        if rows is not None and rows < 1:
            raise ValueError(f"{argument}={rows}; legal is at least 1 row, or None for all")
    if name == "shapes":
        arrays = [*_shapes(train or 6000, [seed, 0]), *_shapes(test or 1000, [seed, 1])]
    else:
        arrays = (_committed if name in ("mnist", "digits") else _downloaded)(name, root)
    largest, mean, deviation = PIXELS[name]
    tensors = []
    parts = (("train", train, *arrays[:2]), ("test", test, *arrays[2:]))
    for argument, rows, images, labels in parts:
        if rows is not None and rows > len(images):
            raise ValueError(f"{argument}={rows}, but {name} has {len(images)} such rows")
        images = images if images.ndim == 4 else images[:, None]
        inputs = torch.from_numpy(images[:rows].astype(np.float32))
        tensors.append(inputs.div_(largest).sub_(mean).div_(deviation))
        tensors.append(torch.from_numpy(labels[:rows].astype(np.int64)))
    return Dataset(name, *tensors, classes=10)


def _committed(name: str, root) -> list[np.ndarray]:
    """The four arrays of `<name>.npz`, after its SHA-256 was compared with checksums.sha256."""
    file = f"{name}.npz"
    restore = (
        "Restore the folder with `git checkout -- data` in a clone or by installing minipipe "
        "again, or make it with `python data/make.py` (needs npm, pip and a network)"
    )
    installed = Path(sysconfig.get_path("data")) / "share" / "minipipe" / "data"
    chosen = root or os.environ.get("MINIPIPE_DATA")
    beside = Path(__file__).resolve().parents[1] / "data"
    folders = [Path(chosen)] if chosen else [beside, installed]
    folder = next((folder for folder in folders if (folder / file).is_file()), None)
    if folder is None:
        places = " or ".join(str(folder) for folder in folders)
        raise FileNotFoundError(f"{file} is missing in {places}. {restore}")
    try:
        lines = (folder / "checksums.sha256").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise FileNotFoundError(f"checksums.sha256 is missing in {folder}. {restore}") from None
    expected = next((line.split()[0] for line in lines if line.split()[1:] == [file]), None)
    content = (folder / file).read_bytes()
    if hashlib.sha256(content).hexdigest() != expected:
        raise ValueError(
            f"{folder / file} is damaged: its SHA-256 is not the one in checksums.sha256. {restore}"
        )
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return [arrays[key] for key in ARRAYS]


def _downloaded(name: str, root) -> list[np.ndarray]:
    """The four arrays of a torchvision set, downloaded into the folder unless it is there."""
    import torchvision

    kind = getattr(torchvision.datasets, "CIFAR10" if name == "cifar10" else "FashionMNIST")
    folder = root or os.environ.get("MINIPIPE_DATA") or Path.home() / ".cache" / "minipipe"
    try:
        sets = [kind(str(folder), train=part, download=True) for part in (True, False)]
    except Exception as error:  # torchvision raises whatever urllib, the disk or a checksum raise
        raise RuntimeError(
            f"{name} could not be downloaded to {folder} ({type(error).__name__}: {error}). Load "
            "it on a machine with a network, copy that folder here and give it as root or "
            "MINIPIPE_DATA; mnist, digits and shapes need no network"
        ) from None
    arrays = []
    for part in sets:
        images = np.asarray(part.data)
        arrays += [images.transpose(0, 3, 1, 2) if images.ndim == 4 else images]
        arrays += [np.asarray(part.targets)]
    return arrays


def _shapes(count: int, seed: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images [count, 3, 32, 32] and labels; the first ones do not depend on `count`."""
    random = np.random.default_rng(seed).random((count, 11), dtype=np.float32)
    noise = np.random.default_rng([*seed, 1])
    parts = [_draw(rows, noise) for rows in np.array_split(random, range(256, count, 256))]
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def _draw(random: np.ndarray, noise: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """A coloured shape on a darker ground for each row of 11 numbers from 0 to 1, and its label.

    Classes: circle, ring, square, diamond, triangle, plus, cross, star, half disc, crescent.
    """
    random = random.T[..., None, None]
    labels = (random[0, :, 0, 0] * 10).astype(np.uint8)
    radius, angle = 7 + 6 * random[1], 0.5 * random[2] - 0.25
    y, x = np.mgrid[:32, :32].astype(np.float32)[:, None] - 15.5 + (random[3:5] - 0.5) * 8
    u = (x * np.cos(angle) + y * np.sin(angle)) / radius
    v = (y * np.cos(angle) - x * np.sin(angle)) / radius
    r, far, near = np.hypot(u, v), np.maximum(abs(u), abs(v)), np.minimum(abs(u), abs(v))
    depth = [  # how deep inside the shape a pixel lies, in radii
        1 - r,
        0.25 - abs(r - 0.75),
        0.8 - far,
        1.05 - far - near,
        0.5 - np.maximum(v, 0.866 * abs(u) - 0.5 * v),
        np.minimum(0.95 - far, 0.28 - near),
        np.minimum(1.2 - far - near, 0.28 - (far - near) * 0.707),
        0.6 + 0.35 * np.sin(5 * np.arctan2(v, u) + 0.5 * np.pi) - r,
        np.minimum(1 - r, v + 0.15),
        np.minimum(1 - r, np.hypot(u - 0.45, v) - 0.7),
    ]
    inside = np.clip(np.choose(labels[:, None, None], depth) * radius + 0.5, 0, 1)[:, None]
    ground, colour = np.moveaxis(random[5:11].reshape(2, 3, -1, 1, 1), 2, 1)
    image = 0.45 * ground * (1 - inside) + (0.5 + 0.5 * colour) * inside
    image += 0.04 * noise.standard_normal(image.shape, np.float32)
    return (np.clip(image, 0, 1) * 255).astype(np.uint8), labels


def batches(
    dataset: Dataset, batch: int, steps: int, seed: int = 0, drop_last: bool = True
) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` training batches (inputs [batch, …], targets [batch]), the same ones on every rank.

    Each epoch is shuffled anew by a generator of its own, images and labels by the same order, and
    no row comes twice in an epoch. drop_last: whether an epoch's last, smaller batch is left out.
    ValueError for a batch below 1 or, with drop_last, above the number of rows, and for steps that
    are no whole number of at least 0.
    """
    whole_number(0, steps=steps)
    rows = len(dataset.train_targets)
    if not hasattr(batch, "__index__") or batch < 1 or (drop_last and batch > rows):
        raise ValueError(f"batch={batch}; legal is 1 to {rows}, the rows of {dataset.name}")
    generator = torch.Generator().manual_seed(seed)

    def chosen() -> Iterator[Tensor]:
        while True:
            for part in torch.randperm(rows, generator=generator).split(batch):
                if len(part) == batch or not drop_last:
                    yield part

    return ((dataset.train_inputs[i], dataset.train_targets[i]) for i in islice(chosen(), steps))
