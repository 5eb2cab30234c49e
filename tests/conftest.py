"""What the tests share: the real models, the corpus and an engine."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

# Before any test imports transformers: nothing here may ask a network for a model.
os.environ["HF_HUB_OFFLINE"] = "1"
# The reference tokenizers fork no process; without this they warn when a test starts a subprocess.
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest

from embed import Embed

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def models() -> Path:
    """The directory of the prepared real models."""
    directory = ROOT / "build" / "models"
    if not (directory / "minilm").is_dir():
        pytest.fail("the real models are not prepared: run `make models`", pytrace=False)
    return directory


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    """Texts in many scripts, and the awkward ones."""
    lines = (ROOT / "tests" / "corpus" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.fixture(scope="session")
def minilm(models: Path) -> Iterator[Embed]:
    """all-MiniLM-L6-v2, loaded. A test that changes its settings opens an engine of its own."""
    with Embed.open(models / "minilm") as engine:
        yield engine
