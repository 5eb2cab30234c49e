"""Models by reference, through the real client, from a hub on this machine."""

import json
import os
import pty
import random
import resource
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from embed.hub import files_that_matter
from tests.local_hub import LocalHub, Repository
from tools.make_model import ModelSpec, make_model

NAME = "some-org/tiny.model"
ROOT = Path(__file__).resolve().parents[2]
TOKEN = "hf_TheSecretOfThisTest"
# The layout of BAAI/bge-m3.
BGE_M3_FILES = """
.gitattributes 1_Pooling/config.json README.md colbert_linear.pt config.json config_sentence_transformers.json
imgs/.DS_Store imgs/bm25.jpg imgs/long.jpg imgs/miracl.jpg modules.json onnx/Constant_7_attr__value onnx/config.json
onnx/model.onnx onnx/model.onnx_data onnx/sentencepiece.bpe.model onnx/special_tokens_map.json onnx/tokenizer.json
onnx/tokenizer_config.json pytorch_model.bin sentence_bert_config.json sentencepiece.bpe.model sparse_linear.pt
special_tokens_map.json tokenizer.json tokenizer_config.json
"""
BGE_M3 = BGE_M3_FILES.split()
NEVER_READ = (
    "README.md",
    "onnx/model.onnx",
    "onnx/config.json",
    "openvino/openvino_model.bin",
    "pytorch_model.bin",
    "tf_model.h5",
    "flax_model.msgpack",
    "rust_model.ot",
    "imgs/a.jpg",
    "sentencepiece.bpe.model",
    "model_O4.onnx",
)

Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "first", seed=0)


@pytest.fixture(scope="module")
def newer_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "second", seed=1)


@pytest.fixture(scope="module")
def old(directory: Path) -> bytes:
    """What `embed text` prints for the first model."""
    return run(directory)


@pytest.fixture(scope="module")
def new(newer_directory: Path) -> bytes:
    """The same for the second, which has other weights."""
    return run(newer_directory)


def run(model: Path) -> bytes:
    command = [sys.executable, "-m", "embed", "text", str(model), "a text"]
    return subprocess.run(command, capture_output=True, check=True).stdout


def write_model(path: Path, seed: int) -> Path:
    make_model(path, ModelSpec("xlm-roberta", num_layers=1, hidden_size=32, num_heads=2, max_positions=66, seed=seed))
    return path


def contents(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


@pytest.fixture
def hub(directory: Path) -> Iterator[LocalHub]:
    with LocalHub() as hub:
        repository = hub.repositories[NAME] = Repository()
        repository.commit({**dict.fromkeys(NEVER_READ, b"not read"), **contents(directory)})
        yield hub


@pytest.fixture
def environment(hub: LocalHub, tmp_path: Path) -> dict[str, str]:
    outer = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    return {**outer, "HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": hub.url}


@pytest.fixture
def embed(environment: dict[str, str]) -> Run:
    """`embed text` on one text; keywords are variables of its environment."""

    def embed_text(
        *arguments: object, cwd: Path | None = None, file_bytes: int | None = None, **variables: str
    ) -> subprocess.CompletedProcess[bytes]:
        def limit_files() -> None:
            if file_bytes is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

        return subprocess.run(
            [sys.executable, "-m", "embed", "text", *map(str, arguments), "a text"],
            capture_output=True,
            timeout=120,
            cwd=cwd,
            env={**environment, "PYTHONPATH": str(ROOT), **variables},
            preexec_fn=limit_files,
        )

    return embed_text


def vector(result: subprocess.CompletedProcess[bytes]) -> bytes:
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout


def error(result: subprocess.CompletedProcess[bytes]) -> str:
    """The one line that a failure says."""
    assert result.returncode == 1 and result.stdout == b""
    assert TOKEN not in result.stderr.decode()
    [line] = result.stderr.decode().splitlines()
    return line.removeprefix("embed: error: ")


def storage(environment: dict[str, str]) -> Path:
    return Path(environment["HF_HOME"]) / "hub" / ("models--" + NAME.replace("/", "--"))


def snapshot(environment: dict[str, str], hub: LocalHub) -> Path:
    return storage(environment) / "snapshots" / hub.repositories[NAME].branches["main"]


# Which files


def test_of_bge_m3_the_pickles_are_taken_and_nothing_of_other_runtimes(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Normalize"}]))
    assert files_that_matter(BGE_M3, tmp_path) == [
        "colbert_linear.pt",
        "config.json",
        "config_sentence_transformers.json",
        "modules.json",
        "pytorch_model.bin",
        "sentence_bert_config.json",
        "sparse_linear.pt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "1_Pooling/config.json",
    ]


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"], ["model.safetensors"]),
        (["a.safetensors", "model.safetensors.index.json"], ["a.safetensors", "model.safetensors.index.json"]),
        (["pytorch_model.bin", "pytorch_model.bin.index.json"], ["pytorch_model.bin"]),
        (["b.bin", "pytorch_model.bin.index.json"], ["b.bin", "pytorch_model.bin.index.json"]),
        (["model.fp16.safetensors", "model.onnx"], []),
        (["sparse_linear.pt", "sparse_linear.safetensors", "x_linear.pt"], ["sparse_linear.safetensors"]),
    ],
)
def test_weights_are_taken_once_and_an_index_names_its_files(
    tmp_path: Path, listed: list[str], expected: list[str]
) -> None:
    index = json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.bin", "z": "not-listed", "w": "../out"}})
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        (tmp_path / name).write_text(index)
    assert files_that_matter(listed, tmp_path) == expected


def test_a_vocabulary_is_taken_where_there_is_no_tokenizer_file(tmp_path: Path) -> None:
    assert files_that_matter(["vocab.txt", "tokenizer.json"], tmp_path) == ["tokenizer.json"]
    assert files_that_matter(["vocab.txt"], tmp_path) == ["vocab.txt"]


def test_a_module_has_weights_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "./0_Transformer/"}, {"path": "2_Dense"}]))
    listed = [f"{module}/{name}" for module in ("0_Transformer", "2_Dense", "3_Other") for name in BGE_M3]
    chosen = files_that_matter([*listed, "2_Dense/model.safetensors"], tmp_path)
    assert "0_Transformer/pytorch_model.bin" in chosen and "2_Dense/model.safetensors" in chosen
    assert "2_Dense/pytorch_model.bin" not in chosen and not any("3_Other" in name for name in chosen)


# Downloading


def test_first_use_downloads_what_matters_and_the_second_asks_nobody(
    directory: Path, old: bytes, hub: LocalHub, embed: Run
) -> None:
    first = embed(NAME)
    assert vector(first) == old
    assert hub.downloads() == sorted(contents(directory))
    assert all(line.startswith(f"embed: {NAME}: ") for line in first.stderr.decode().splitlines())
    hub.requests.clear()
    assert vector(embed(NAME)) == old
    assert vector(embed(f"{NAME}@main", HF_HUB_OFFLINE="1")) == old
    assert hub.requests == []


def test_refresh_asks_once_and_takes_what_is_newer(
    newer_directory: Path, old: bytes, new: bytes, hub: LocalHub, embed: Run
) -> None:
    assert vector(embed(NAME)) == old
    hub.requests.clear()
    assert vector(embed(NAME, "--refresh")) == old
    assert [request for request in hub.requests if NAME in request] == [f"GET /api/models/{NAME}/revision/main"]
    hub.repositories[NAME].commit(contents(newer_directory))
    hub.requests.clear()
    assert vector(embed(NAME)) == old and hub.requests == []
    assert vector(embed(NAME, "--refresh")) == new != old
    # What did not change is not downloaded again.
    assert hub.downloads() == ["model.safetensors"]
    hub.requests.clear()
    assert vector(embed(NAME)) == new and hub.requests == []


def test_a_refresh_that_fails_leaves_the_old_version_in_use(
    newer_directory: Path, old: bytes, hub: LocalHub, embed: Run
) -> None:
    assert vector(embed(NAME)) == old
    hub.repositories[NAME].commit(contents(newer_directory))
    assert "cannot be written: File too large" in error(embed(NAME, "--refresh", file_bytes=100_000))
    hub.requests.clear()
    assert vector(embed(NAME)) == old and hub.requests == []


def test_a_revision_is_a_branch_a_tag_or_a_commit(
    newer_directory: Path, old: bytes, new: bytes, hub: LocalHub, embed: Run
) -> None:
    repository = hub.repositories[NAME]
    first = repository.branches["main"]
    repository.commit(contents(newer_directory), branch="v2.0")
    for revision, expected in (("v2.0", new), (first, old), (repository.branches["v2.0"], new), ("main", old)):
        assert vector(embed(f"{NAME}@{revision}")) == expected
    hub.requests.clear()
    result = embed(f"{NAME}@v2.0")
    assert vector(result) == new and hub.requests == []
    assert f"embed: {NAME}: " in result.stderr.decode() and "@v2" not in result.stderr.decode()


def test_a_download_that_is_cut_goes_on_where_it_stopped(
    directory: Path, hub: LocalHub, environment: dict[str, str]
) -> None:
    # The client keeps pieces of 10 MiB.
    files = {**contents(directory), "model.safetensors": random.Random(0).randbytes(25 << 20)}
    hub.repositories[NAME].commit(files)
    hub.cuts["model.safetensors"] = [12 << 20, 11 << 20]
    assert contents(resolve(NAME, environment)) == files
    assert hub.ranges == [f"bytes={10 << 20}-", f"bytes={20 << 20}-"]


def test_an_interrupted_download_ends_at_once_and_is_completed_by_the_next_start(
    old: bytes, hub: LocalHub, embed: Run, environment: dict[str, str]
) -> None:
    hub.pause_s = 120
    command = [sys.executable, "-m", "embed", "text", NAME, "a text"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr is not None
    while not hub.downloads():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and b"Traceback" not in errors
    hub.pause_s = 0
    assert vector(embed(NAME)) == old


def test_two_processes_at_once(directory: Path, old: bytes, hub: LocalHub, environment: dict[str, str]) -> None:
    hub.pause_s = 0.05
    command = [sys.executable, "-m", "embed", "text", NAME, "a text"]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in "ab"]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs == [old] * 2
    assert hub.downloads() == sorted(contents(directory))


def test_sharded_weights_are_downloaded_with_their_index(
    directory: Path, hub: LocalHub, environment: dict[str, str]
) -> None:
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    files = contents(directory)
    weights = files.pop("model.safetensors")
    files |= {shards[0]: weights, shards[1]: b"more", "pytorch_model.bin": b"not read"}
    files["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": shards[0], "b": shards[1]}}).encode()
    hub.repositories[NAME].commit(files)
    resolve(NAME, environment)
    assert hub.downloads() == sorted(set(files) - {"pytorch_model.bin"})
    hub.requests.clear()
    assert contents(resolve(NAME, environment)) == {name: files[name] for name in set(files) - {"pytorch_model.bin"}}
    assert hub.requests == []


def resolve(model: str, environment: dict[str, str]) -> Path:
    code = "import sys; from embed.hub import resolve; print(resolve(sys.argv[1]).directory)"
    command = [sys.executable, "-c", code, model]
    return Path(subprocess.run(command, env=environment, capture_output=True, check=True).stdout.decode().strip())


def test_a_terminal_shows_how_far_the_download_is(hub: LocalHub, environment: dict[str, str]) -> None:
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 120))
    command = [sys.executable, "-m", "embed", "text", NAME, "a text"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=end)
    os.close(end)
    shown = b""
    try:
        while piece := os.read(terminal, 4096):
            shown += piece
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(terminal)
    assert process.wait() == 0 and b"model.safetensors:  " in shown and b"Fetching" not in shown


# What cannot be had


def test_what_a_partial_copy_lacks_is_named_and_fetched(
    old: bytes, hub: LocalHub, embed: Run, environment: dict[str, str]
) -> None:
    assert vector(embed(NAME)) == old
    pooling = snapshot(environment, hub) / "1_Pooling" / "config.json"
    pooling.resolve().unlink()
    pooling.unlink()
    hub.requests.clear()
    offline = error(embed(NAME, HF_HUB_OFFLINE="1"))
    assert offline.startswith(f"{NAME}: HF_HUB_OFFLINE is set, and the cache in {environment['HF_HOME']}/hub lacks 1_P")
    assert offline.endswith(f"lacks 1_Pooling/config.json: unset it to download from {hub.host}")
    assert hub.requests == []
    refused = error(embed(NAME, HF_ENDPOINT="http://127.0.0.1:9"))
    assert "downloading from 127.0.0.1:9 failed: Connection refused" in refused
    assert refused.endswith("lacks 1_Pooling/config.json)")
    assert vector(embed(NAME)) == old and hub.downloads() == ["1_Pooling/config.json"]


def test_a_copy_that_another_program_made_is_compared_with_the_hub_once(
    old: bytes, hub: LocalHub, embed: Run, environment: dict[str, str]
) -> None:
    assert vector(embed(NAME)) == old
    [listing] = (storage(environment) / "trees").iterdir()
    listing.unlink()
    hub.requests.clear()
    assert vector(embed(NAME, HF_HUB_OFFLINE="1")) == old and hub.requests == []
    assert vector(embed(NAME)) == old and hub.downloads() == []
    hub.requests.clear()
    assert vector(embed(NAME)) == old and hub.requests == []
    # Without the modules the pooling would be a guess.
    listing.unlink()
    (snapshot(environment, hub) / "modules.json").unlink()
    assert "lacks modules.json: unset it" in error(embed(NAME, HF_HUB_OFFLINE="1"))


def test_offline_without_a_copy(hub: LocalHub, embed: Run) -> None:
    message = error(embed(NAME, HF_HUB_OFFLINE="1"))
    assert message.startswith(f"{NAME}: HF_HUB_OFFLINE is set, and the cache in ")
    assert message.endswith(f"lacks it: unset it to download from {hub.host}")
    assert "unset it to ask" in error(embed(NAME, "--refresh", HF_HUB_OFFLINE="1"))
    assert hub.requests == []


def test_a_private_repository_takes_a_token(old: bytes, hub: LocalHub, embed: Run) -> None:
    hub.repositories[NAME].token = TOKEN
    for variables, status in (({}, 401), ({"HF_TOKEN": TOKEN + "x"}, 404)):
        assert error(embed(NAME, **variables)) == (
            f"{NAME}: no such directory, and {hub.host} shows no such repository ({status}): "
            "check the name, or set HF_TOKEN to a token that may read it"
        )
    assert vector(embed(NAME, HF_TOKEN=TOKEN)) == old


def test_a_gated_repository_says_whose_terms(hub: LocalHub, embed: Run) -> None:
    hub.repositories[NAME].token = "another"
    hub.repositories[NAME].gated = True
    for variables in ({}, {"HF_TOKEN": TOKEN}):
        message = error(embed(NAME, **variables))
        assert message.startswith(f"{NAME}: gated by its authors: ") and hub.host in message and "HF_TOKEN" in message


@pytest.mark.parametrize(
    ("model", "variables", "message"),
    [
        ("some-org/other", {}, "no such directory, and HOST shows no such repository (401): check the name"),
        (f"{NAME}@v9", {}, "HOST has no revision v9 of it"),
        (f"{NAME}@{'0' * 40}", {}, f"HOST has no revision {'0' * 40} of it"),
        (NAME, {"HF_ENDPOINT": "http://user:pass@127.0.0.1:9"}, "no such directory, and downloading from 127.0.0.1:9 "),
        (NAME, {"HF_ENDPOINT": "http://no.such.host.invalid"}, "no such directory, and downloading from no.such.h"),
        (NAME, {"HF_HOME": "/dev/null/home"}, "/dev/null/home/hub cannot be written: Not a directory; HF_HOME says"),
        ("some--org/name", {}, "neither a directory nor the name of a repository: "),
        ("some-org/../name", {}, "no such directory, and no model package; known packages: minilm; a reference "),
        (f"{NAME}@../../main", {}, "no such directory, and no model package"),
        (f"{NAME}@", {}, "no such directory, and no model package"),
        ("one/two/three", {}, "no such directory, and no model package"),
    ],
)
def test_a_failure_is_one_line(hub: LocalHub, embed: Run, model: str, variables: dict[str, str], message: str) -> None:
    assert error(embed(model, **{"HF_TOKEN": ""} | variables)).startswith(
        f"{model}: {message.replace('HOST', hub.host)}"
    )


def test_a_full_disk(embed: Run, environment: dict[str, str]) -> None:
    # A limit on the size of files is as near to a full disk as a process may bring itself.
    cache = f"{environment['HF_HOME']}/hub"
    assert error(embed(NAME, file_bytes=100_000)) == (
        f"{NAME}: {cache} cannot be written: File too large; HF_HOME says where downloads go"
    )


@pytest.mark.parametrize("leading", ["../../../../../escaped", "/tmp/embed-test-escaped", "..\\..\\escaped"])
def test_names_that_lead_out_of_the_cache_are_not_followed(
    hub: LocalHub, embed: Run, environment: dict[str, str], tmp_path: Path, leading: str, directory: Path
) -> None:
    files = contents(directory)
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": leading}]
    files["modules.json"] = json.dumps(modules).encode()
    hub.repositories[NAME].commit({**files, f"{leading}/config.json": b"{}", "../../../../../config.json": b"{}"})
    assert error(embed(NAME))
    assert hub.downloads() == sorted(set(files) - {"1_Pooling/config.json"})
    outside = (path for path in tmp_path.rglob("*") if not path.is_relative_to(environment["HF_HOME"]))
    assert list(outside) == [] and not Path("/tmp/embed-test-escaped").exists()


def test_a_commit_that_is_no_hash_is_refused(hub: LocalHub, embed: Run, tmp_path: Path) -> None:
    repository = hub.repositories[NAME]
    repository.commits["../../escaped"] = repository.commits[repository.branches["main"]]
    repository.branches["main"] = "../../escaped"
    assert "does not answer as a model hub does: the commit is '../../escaped'" in error(embed(NAME))
    assert not list(tmp_path.rglob("escaped"))


# What is no reference


def test_a_directory_of_that_name_wins(
    newer_directory: Path, new: bytes, hub: LocalHub, embed: Run, tmp_path: Path
) -> None:
    (tmp_path / NAME).parent.mkdir()
    (tmp_path / NAME).symlink_to(newer_directory)
    assert vector(embed(NAME, cwd=tmp_path)) == new
    message = "a directory or a package, not a reference to a model hub: it cannot be refreshed"
    assert error(embed(NAME, "--refresh", cwd=tmp_path)) == f"{NAME}: {message}"
    assert error(embed("minilm", "--refresh")) == f"minilm: {message}"
    assert hub.requests == []


def test_a_start_from_a_directory_does_not_import_the_client(directory: Path) -> None:
    code = "import sys, embed.main; embed.Embed.open(sys.argv[1]).encode('a'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code, str(directory)], capture_output=True, text=True, check=True)
    packages = {name.partition(".")[0] for name in loaded.stdout.split()}
    assert "embed" in packages and not {"huggingface_hub", "httpx", "httpx2", "hf_xet", "requests"} & packages
