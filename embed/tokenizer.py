"""Text to token ids: tokenizer.json through the `tokenizers` library, with limits of our own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from embed.config import read_json_object
from embed.errors import RequestError, TokenizerError

FILE_NAME = "tokenizer.json"

# encode_batch_fast lets go of the GIL, and may not have it back at once: for a query of 15 us that took 100 us in a
# busy server.
_HOLD_GIL_CHARS = 500

# transformers' tokenizers that give token types where tokenizer_config.json does not list the model's inputs; without a
# name it is the model's own, and those of the other families have one type.
_WITH_TOKEN_TYPES = (None, "BertTokenizer", "BertTokenizerFast")


@dataclass(frozen=True, slots=True)
class _PairTemplate:
    """What stands around the two texts of a pair."""

    ids: tuple[list[int], list[int], list[int]]
    """Special tokens before the first text, between the two, and after the second."""
    types: tuple[list[int], list[int], list[int]]
    """Their token types."""
    text_types: tuple[int, int]

    @property
    def num_specials(self) -> int:
        return sum(map(len, self.ids))

    def fill(self, first: list[int], second: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
        """Ids and token types of a pair, cut off as `longest_first` of `tokenizers` does: the longer text first, and
        once both are of one length the two in turn."""
        room = max_tokens - self.num_specials
        if len(first) + len(second) > room:
            shorter = min(len(first), len(second), room // 2)
            longer = room - shorter
            first, second = (
                (first[:shorter], second[:longer]) if len(first) <= len(second) else (first[:longer], second[:shorter])
            )
        before, between, after = self.ids
        ids = [*before, *first, *between, *second, *after]
        before, between, after = self.types
        of_first, of_second = self.text_types
        return ids, [*before, *[of_first] * len(first), *between, *[of_second] * len(second), *after]


class Tokenizer:
    """The tokenizer of a model directory. Read-only after load: any thread may use it."""

    def __init__(self, directory: Path, *, lowercase: bool = False, pairs: bool = False) -> None:
        """`lowercase` puts texts into lower case first, as `do_lower_case` of sentence-transformers does; with `pairs`
        it is for pairs of texts."""
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
        config_path = directory / "tokenizer_config.json"
        config = read_json_object(config_path) if config_path.exists() else {}
        self._named_ids = self._read_named_ids(config)
        self._pair = self._read_pair_template(config) if pairs else None

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that stand for no text: those before and after one, padding, and the unknown."""
        return frozenset(self._specials) | self._named_ids

    @property
    def min_tokens(self) -> int:
        """Tokens of an empty text, or of a pair of them: the special ones."""
        return len(self._specials) if self._pair is None else self._pair.num_specials

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
        encoded = self._encode(texts, "texts[{}]", prompt)
        lists = [ids if len(ids) <= maxseq else [*ids[: maxseq - 1], ids[-1]] for ids in encoded]
        return _packed(lists), _offsets(lists), [len(ids) for ids in encoded]

    def encode_pairs(
        self, query: str, texts: Sequence[str], maxseq: int, prompt: str = ""
    ) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]:
        """Packed ids and token types of the pairs of the query, `prompt` before it, with each text, (num_tokens,) both,
        and the offset of each pair, (num_texts + 1,).

        A pair over `maxseq` tokens is cut off as transformers does by `longest_first`. Raises RequestError as
        `encode_batch`, also for the query.
        """
        assert self._pair is not None, "the tokenizer was not opened for pairs"
        [first] = self._encode([query], "query", prompt, specials=False)
        seconds = self._encode(texts, "texts[{}]", specials=False)
        pairs = [self._pair.fill(first, second, maxseq) for second in seconds]
        ids = [ids for ids, _ in pairs]
        return _packed(ids), _packed(types for _, types in pairs), _offsets(ids)

    def _encode(self, texts: Sequence[str], name: str, prompt: str = "", specials: bool = True) -> list[list[int]]:
        """The ids of each text, with the special tokens or without; `name` is that of an item in messages."""
        for index, text in enumerate(texts):
            # The library would take a pair of strings, too, and make one text of it.
            if not isinstance(text, str):
                raise RequestError(f"{name.format(index)}: expected a string, got {type(text).__name__}")
        if prompt:
            texts = [prompt + text for text in texts]
        if self._lowercase:
            texts = [text.lower() for text in texts]
        try:
            if sum(map(len, texts)) <= _HOLD_GIL_CHARS:
                encodings = [self._tokenizer.encode(text, add_special_tokens=specials) for text in texts]
            else:
                encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=specials)
        except (TypeError, UnicodeError):
            raise RequestError(_explain_texts(texts, name)) from None
        return [encoding.ids for encoding in encodings]

    def _read_named_ids(self, config: dict[str, Any]) -> frozenset[int]:
        named = (config.get(f"{name}_token") for name in ("cls", "eos", "pad", "unk"))
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

    def _read_pair_template(self, config: dict[str, Any]) -> _PairTemplate:
        """From a pair of letters: which of its tokens are of which text is what the library says."""
        [pair] = self._tokenizer.encode_batch_fast([("a", "a")])
        owners = [(owner, len(list(run))) for owner, run in groupby(pair.sequence_ids)]
        if [owner for owner, _ in owners] != [None, 0, None, 1, None]:
            raise TokenizerError(
                f"{FILE_NAME}: expected special tokens before, between and after a pair of texts, "
                f"got the ids {pair.ids} for a pair of letters"
            )
        inputs = config.get("model_input_names")
        typed = "token_type_ids" in inputs if inputs else config.get("tokenizer_class") in _WITH_TOKEN_TYPES
        types = pair.type_ids if typed else [0] * len(pair.ids)
        first, between, second, after = accumulate(length for _, length in owners[:-1])
        return _PairTemplate(
            (pair.ids[:first], pair.ids[between:second], pair.ids[after:]),
            (types[:first], types[between:second], types[after:]),
            (types[first], types[second]),
        )


def _packed(lists: Iterable[list[int]]) -> NDArray[np.int32]:
    return np.fromiter(chain.from_iterable(lists), np.int32)


def _offsets(lists: Sequence[list[int]]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lists) + 1, np.int64)
    np.cumsum([len(ids) for ids in lists], out=offsets[1:])
    return offsets


def _explain_texts(texts: Sequence[str], name: str) -> str:
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            return f"{name.format(index)}: holds half of a surrogate pair, which is not a character"
    return "the texts cannot be tokenized"
