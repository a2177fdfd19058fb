"""Data sets: committed files are whole, damage is named, images keep their labels."""

import hashlib
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from minipipe import datasets
from minipipe.datasets import NAMES, Dataset, batches, load
from minipipe.models import resnet

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("make_data", DATA / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "train", "test", "shape"),
    [
        ("mnist", 8000, 2000, (1, 28, 28)),
        ("digits", 1437, 360, (1, 8, 8)),
        ("shapes", 6000, 1000, (3, 32, 32)),
    ],
)
def test_sets_are_normalised_and_balanced(name, train, test, shape):
    data = load(name)
    assert data.name == name and data.classes == 10
    assert data.train_inputs.shape == (train, *shape) and data.test_inputs.shape == (test, *shape)
    assert data.train_targets.shape == (train,) and data.test_targets.shape == (test,)
    assert data.train_inputs.dtype == data.test_inputs.dtype == torch.float32
    for targets in (data.train_targets, data.test_targets):
        assert targets.dtype == torch.int64
        counts = torch.bincount(targets, minlength=10)
        assert len(counts) == 10 and counts.min() > 0.8 * counts.max()
    assert abs(data.train_inputs.mean()) < 0.01 and abs(data.train_inputs.std() - 1) < 0.01


@pytest.mark.parametrize("name", ["mnist", "digits", "shapes"])
def test_limits_take_the_first_rows(name):
    few, more = load(name, train=20, test=5), load(name, train=30, test=10)
    assert len(few.train_targets) == 20 and len(few.test_inputs) == 5
    assert torch.equal(few.train_inputs, more.train_inputs[:20])
    assert torch.equal(few.test_targets, more.test_targets[:5])
    with pytest.raises(ValueError, match="test=-1; legal is at least 1 row"):
        load(name, test=-1)


def test_refusals_name_what_is_legal():
    with pytest.raises(ValueError, match="'imagenet'.*mnist, digits, shapes, cifar10, fashion"):
        load("imagenet")
    with pytest.raises(ValueError, match="train=8001, but mnist has 8000"):
        load("mnist", train=8001)


def test_shapes_follow_their_seed_and_can_be_learnt():
    data, again, other = (load("shapes", train=2000, test=500, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(data.train_inputs, again.train_inputs)
    assert not torch.equal(data.train_inputs, other.train_inputs)
    assert not torch.equal(data.train_inputs[:500], data.test_inputs)
    model = resnet(image=32, channels=3, width=16, depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for inputs, targets in batches(data, batch=64, steps=60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    with torch.no_grad():
        right = model(data.test_inputs).argmax(1) == data.test_targets
    assert right.float().mean() > 0.7


def test_committed_files():
    assert sum((DATA / f"{name}.npz").stat().st_size for name in ("mnist", "digits")) < 2e6
    for line in (DATA / "checksums.sha256").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((DATA / name).read_bytes()).hexdigest() == digest
        with np.load(DATA / name, allow_pickle=False) as arrays:
            assert set(arrays) == set(datasets.ARRAYS)
            assert all(arrays[key].dtype == np.uint8 for key in arrays)
    assert all((DATA / f"LICENSE-{name}.txt").read_text() for name in ("mnist", "digits"))


def test_make_writes_the_same_bytes_at_any_time_and_load_reads_them(make, tmp_path, monkeypatch):
    with np.load(DATA / "digits.npz") as stored:
        arrays = {key: stored[key] for key in datasets.ARRAYS}
    monkeypatch.setattr("time.time", lambda: 2e9)
    make.write(tmp_path, {"digits.npz": arrays})
    monkeypatch.undo()
    assert make.npz_bytes(arrays) == (tmp_path / "digits.npz").read_bytes()
    assert torch.equal(load("digits", tmp_path).train_inputs, load("digits").train_inputs)


def test_make_takes_rows_of_each_class_from_the_whole_file(make):
    labels = np.array([0, 1] * 10)
    assert make.evenly_spaced(labels, 2).tolist() == [0, 1, 10, 11]
    with pytest.raises(SystemExit, match="digits.csv.gz is not the original"):
        make.verified("digits.csv.gz", b"something else")


def copy_of(folder: Path) -> Path:
    shutil.copy(DATA / "checksums.sha256", folder)
    return Path(shutil.copy(DATA / "digits.npz", folder))


def test_root_and_environment(tmp_path, monkeypatch):
    copy_of(tmp_path)
    load("digits", root=tmp_path)
    monkeypatch.setenv("MINIPIPE_DATA", str(tmp_path))
    load("digits")
    with pytest.raises(FileNotFoundError, match="mnist.npz is missing"):
        load("mnist")


def test_a_damaged_or_missing_file_is_named(tmp_path):
    file = copy_of(tmp_path)
    content = bytearray(file.read_bytes())
    content[1000] ^= 1
    for damaged in (content, content[:5000], b""):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"digits\.npz is damaged.*data/make\.py"):
            load("digits", root=tmp_path)
    (tmp_path / "checksums.sha256").unlink()
    with pytest.raises(FileNotFoundError, match=r"checksums\.sha256 is missing.*data/make\.py"):
        load("digits", root=tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"digits\.npz is missing.*data/make\.py"):
        load("digits", root=tmp_path)


@pytest.mark.parametrize("name", ["cifar10", "fashion-mnist"])
def test_without_network_one_clear_error(name, tmp_path, monkeypatch):
    monkeypatch.setattr("urllib.request.urlopen", Mock(side_effect=OSError("no route to host")))
    with pytest.raises(RuntimeError, match=f"{name} could not be downloaded.*network") as caught:
        load(name, root=tmp_path)
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [("cifar10", "CIFAR10", (5, 32, 32, 3)), ("fashion-mnist", "FashionMNIST", (5, 28, 28))],
)
def test_downloaded_sets_have_the_same_form(name, kind, shape, tmp_path, monkeypatch):
    def fake(root, train, download):
        return SimpleNamespace(data=np.full(shape, 255 * train, np.uint8), targets=[0, 1, 2, 3, 4])

    monkeypatch.setattr(f"torchvision.datasets.{kind}", fake)
    data = load(name, root=tmp_path, train=3)
    channels = 3 if len(shape) == 4 else 1
    assert data.train_inputs.shape == (3, channels, *shape[1:3])
    assert data.train_inputs.min() > 1 and data.test_inputs.max() < 0
    assert data.test_targets.tolist() == [0, 1, 2, 3, 4] and data.name in NAMES


def counted(rows: int) -> Dataset:  # each image and label hold their row's number
    numbers = torch.arange(rows)
    images = numbers.float().view(-1, 1, 1, 1).expand(-1, 1, 2, 2)
    return Dataset("counted", images, numbers, images, numbers, rows)


@pytest.mark.parametrize(
    ("drop_last", "sizes"), [(True, [4, 4, 4, 4, 4]), (False, [4, 4, 2, 4, 4])]
)
def test_batches_keep_images_and_labels_together(drop_last, sizes):
    data, state = counted(10), torch.get_rng_state()
    found = list(batches(data, 4, 5, seed=3, drop_last=drop_last))
    assert [len(targets) for _, targets in found] == sizes
    for inputs, targets in found:
        assert torch.equal(inputs[:, 0, 0, 0].long(), targets)
    epoch = torch.cat([targets for _, targets in found[: 2 if drop_last else 3]])
    assert len(epoch.unique()) == len(epoch)
    assert torch.equal(torch.get_rng_state(), state)


def test_batches_are_the_same_on_every_rank_and_new_in_every_epoch():
    data = counted(12)
    first = [targets.tolist() for _, targets in batches(data, 4, 6, seed=1)]
    torch.rand(5)
    assert first == [targets.tolist() for _, targets in batches(data, 4, 6, seed=1)]
    assert first[:3] != first[3:] and first != [t.tolist() for _, t in batches(data, 4, 6, seed=2)]


def test_batches_refuse():
    data = counted(10)
    for batch in (0, 11):
        with pytest.raises(ValueError, match=f"batch={batch}; legal is 1 to 10"):
            batches(data, batch, 1)
    for steps in (None, -1, 2.5, "3"):
        with pytest.raises(ValueError, match=f"steps={steps!r}; legal is a whole number of at le"):
            batches(data, 4, steps)
    assert len(list(batches(data, 11, 2, drop_last=False))) == 2
    assert list(batches(data, 4, 0)) == []
