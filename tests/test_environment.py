"""environment.yml as conda reads it: Python and pip from conda-forge, all else by pip. conda itself
is not run."""

import re
from importlib.metadata import metadata, requires
from pathlib import Path

import yaml  # comes with jupyter
from packaging.specifiers import SpecifierSet

FILE = Path(__file__).parents[1] / "environment.yml"
TEXT = FILE.read_text(encoding="utf-8")
ENVIRONMENT = yaml.safe_load(TEXT)


def test_conda_gives_python_and_pip_alone():
    assert ENVIRONMENT["name"] == "minipipe"
    assert ENVIRONMENT["channels"] == ["conda-forge", "nodefaults"]
    python, pip, by_pip = ENVIRONMENT["dependencies"]
    assert re.fullmatch(r"python=\d+\.\d+", python) and pip == "pip"
    assert list(by_pip) == ["pip"]


def test_its_python_is_one_that_the_project_takes():
    version = ENVIRONMENT["dependencies"][0].removeprefix("python=")
    assert SpecifierSet(metadata("minipipe")["Requires-Python"]).contains(version)


def test_pip_installs_this_project_as_the_test_command_does():
    (part,) = ENVIRONMENT["dependencies"][2]["pip"]
    assert part == "-e .[test]"
    assert "test" in metadata("minipipe").get_all("Provides-Extra")
    readme = (FILE.parent / "README.md").read_text(encoding="utf-8")
    assert "pip install -e '.[test]'" in readme
    assert "conda env create -f environment.yml && conda activate minipipe" in readme


def test_the_packages_named_in_the_comment_come_through_pyproject():
    comment = " ".join(line.lstrip("# ") for line in TEXT.splitlines() if line.startswith("#"))
    base = {re.match(r"[\w-]+", each)[0] for each in requires("minipipe") if "extra" not in each}
    for name in ("torch", "jupyter", "matplotlib", "torchvision"):
        assert re.search(rf"\b{name}\b", comment) and name in base
