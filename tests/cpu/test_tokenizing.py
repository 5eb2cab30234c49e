"""What a text costs before it reaches a device: time in proportion to its length, and no memory that stays."""

import gc
import random
import resource
import time
from pathlib import Path

import pytest

from embed.tokenizer import Tokenizer

KINDS = ["letters", "hyphens", "base64", "cjk", "emoji"]


def one_word(kind: str, num_bytes: int) -> str:
    """A text without a space, of about so many bytes of UTF-8."""
    alphabet = {
        "letters": "abcdefghijklmnopqrstuvwxyz",
        "hyphens": "-",
        "base64": "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/",
        "cjk": "日本語文字列処理速度",
        "emoji": "😀👍🏽\u200d",
    }[kind]
    num_chars = num_bytes * len(alphabet) // len(alphabet.encode())
    return "".join(random.Random(num_chars).choices(alphabet, k=num_chars))


@pytest.fixture(scope="module", params=["minilm", "e5-small-bert", "e5-small-xlmr"])
def tokenizer(request: pytest.FixtureRequest, models: Path) -> Tokenizer:
    return Tokenizer(models / request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_of_a_megabyte_takes_linear_time(tokenizer: Tokenizer, kind: str) -> None:
    def fastest_s(num_bytes: int, tries: int) -> float:
        text, times_s = one_word(kind, num_bytes), []
        for _ in range(tries):
            start_s = time.process_time()
            tokenizer.encode_batch([text], 8192)
            times_s.append(time.process_time() - start_s)
        return min(times_s)

    small_s, large_s = fastest_s(100_000, 5), fastest_s(1_000_000, 2)
    # 100 kB of few tokens take about 7 ms, of which 1 MB's page faults and cache misses are half as much again.
    assert large_s <= 15 * max(small_s, 0.01) and large_s <= 2, (small_s, large_s)


def test_no_memory_stays_of_random_long_texts(models: Path) -> None:
    tokenizer, rng = Tokenizer(models / "e5-small-xlmr"), random.Random(7)

    def resident_bytes() -> int:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    after_tenth = 0
    for number in range(10_000):
        text = rng.randbytes(500).hex() + " " + str(number)
        tokenizer.encode_batch([text], 8192)
        if number == 999:
            after_tenth = resident_bytes()
    assert resident_bytes() <= max(1.02 * after_tenth, after_tenth + (8 << 20))
