"""Text to token ids: tokenizer.json through the `tokenizers` library, with limits of our own."""

from collections.abc import Sequence
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray

from embed.config import read_json_object
from embed.errors import RequestError, TokenizerError

FILE_NAME = "tokenizer.json"

# encode_batch_fast lets go of the GIL, and may not have it back at once: for a query of 15 us that took 100 us in a
# busy server.
_HOLD_GIL_CHARS = 500


class Tokenizer:
    """The tokenizer of a model directory. Read-only after load: any thread may use it."""

    def __init__(self, directory: Path, *, lowercase: bool = False) -> None:
        """`lowercase` puts texts into lower case first, as `do_lower_case` of sentence-transformers does."""
        self._lowercase = lowercase
        path = directory / FILE_NAME
        if not path.exists():
            raise TokenizerError(f"{FILE_NAME}: not found")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for whatever is wrong with the file
            raise TokenizerError(f"{FILE_NAME}: cannot be used: {error}") from None
        # Presets of the file: a fixed padding to 128 or a truncation to 512 would silently change the vectors.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._specials = self._read_specials()
        self._named_ids = self._read_named_ids(directory / "tokenizer_config.json")

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that stand for no text: those before and after one, padding, and the unknown."""
        return frozenset(self._specials) | self._named_ids

    @property
    def min_tokens(self) -> int:
        """Tokens of an empty text: the special ones."""
        return len(self._specials)

    def encode_batch(
        self, texts: Sequence[str], maxseq: int, prompt: str = ""
    ) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Packed ids of the texts, `prompt` before each, and the offset of each, (num_tokens,) and (num_texts + 1,).

        A text over `maxseq` tokens keeps its head and its last special token. Raises RequestError for an item that
        is no string or holds half of a surrogate pair.
        """
        ids, offsets, _ = self.encode_counted(texts, maxseq, prompt)
        return ids, offsets

    def encode_counted(
        self, texts: Sequence[str], maxseq: int, prompt: str = ""
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], list[int]]:
        """The same, and how many tokens each text had before it lost its end."""
        for index, text in enumerate(texts):
            # The library would take a pair of strings, too, and make one text of it.
            if not isinstance(text, str):
                raise RequestError(f"texts[{index}]: expected a string, got {type(text).__name__}")
        if prompt:
            texts = [prompt + text for text in texts]
        if self._lowercase:
            texts = [text.lower() for text in texts]
        try:
            if sum(map(len, texts)) <= _HOLD_GIL_CHARS:
                encodings = [self._tokenizer.encode(text) for text in texts]
            else:
                encodings = self._tokenizer.encode_batch_fast(texts)
        except (TypeError, UnicodeError):
            raise RequestError(_explain_texts(texts)) from None
        whole = [encoding.ids for encoding in encodings]
        lists = [ids if len(ids) <= maxseq else [*ids[: maxseq - 1], ids[-1]] for ids in whole]
        offsets = np.fromiter(accumulate(map(len, lists), initial=0), np.int64, len(lists) + 1)
        packed = np.fromiter(chain.from_iterable(lists), np.int32, int(offsets[-1]))
        return packed, offsets, [len(ids) for ids in whole]

    def _read_named_ids(self, path: Path) -> frozenset[int]:
        if not path.exists():
            return frozenset()
        named = (read_json_object(path).get(f"{name}_token") for name in ("cls", "eos", "pad", "unk"))
        contents = (token.get("content") if isinstance(token, dict) else token for token in named)
        ids = (self._tokenizer.token_to_id(content) for content in contents if isinstance(content, str))
        return frozenset(token for token in ids if token is not None)

    def _read_specials(self) -> list[int]:
        """The ids of an empty text. Truncation knows how to keep one special token at the end, and no more."""
        [empty] = self._tokenizer.encode_batch_fast([""])
        [letter] = self._tokenizer.encode_batch_fast(["a"])
        if len(empty.ids) != 2 or letter.ids[0] != empty.ids[0] or letter.ids[-1] != empty.ids[-1]:
            raise TokenizerError(
                f"{FILE_NAME}: expected one special token before a text and one after it, "
                f"got the ids {empty.ids} for an empty text"
            )
        return empty.ids


def _explain_texts(texts: Sequence[str]) -> str:
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"texts[{index}]: holds half of a surrogate pair, which is not a character"
    return "the texts cannot be tokenized"
