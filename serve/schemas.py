"""Request bodies of the wire formats, and what is said of a wrong one."""

import re
from typing import Annotated

import msgspec
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException

Texts = str | Annotated[list[str], msgspec.Meta(min_length=1)]


class NativeRequest(msgspec.Struct, frozen=True):
    """Body of POST /create_embedding."""

    texts: Texts | UnsetType = UNSET
    text: Texts | UnsetType = UNSET
    normalize: bool | UnsetType = UNSET

    def all_texts(self) -> list[str]:
        return [*_as_list(self.texts), *_as_list(self.text)]


_native = msgspec.json.Decoder(NativeRequest)


def decode_native(body: bytes) -> NativeRequest:
    try:
        # msgspec checks only the strings that it keeps; decoding first makes the whole body UTF-8.
        return _native.decode(body.decode())
    except msgspec.ValidationError as error:
        raise HTTPException(400, _explain(error)) from None
    except UnicodeDecodeError:
        raise HTTPException(400, "the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise HTTPException(400, "the body is not acceptable JSON: nested too deeply") from None


def _as_list(texts: Texts | UnsetType) -> list[str]:
    if texts is UNSET:
        return []
    return [texts] if isinstance(texts, str) else texts


_TYPE_MISMATCH = re.compile(r"Expected `(?P<expected>.+)`, got `(?P<got>.+?)`(?: - at `\$\.(?P<place>.+)`)?")
_NO_ITEMS = re.compile(r"Expected `array` of length >= 1 - at `\$\.(?P<place>.+)`")
_NOUNS = {
    "str": "a string",
    "bool": "a boolean",
    "str | array": "a string or an array of strings",
    "object": "an object",
}


def _explain(error: msgspec.ValidationError) -> str:
    """`texts[3]: expected a string, got int`; in msgspec's own words where they have another form."""
    if match := _TYPE_MISMATCH.fullmatch(str(error)):
        expected = _NOUNS.get(match["expected"], match["expected"])
        return f"{match['place'] or 'the body'}: expected {expected}, got {match['got']}"
    if match := _NO_ITEMS.fullmatch(str(error)):
        return f"{match['place']}: expected at least one string, got an empty array"
    return str(error)
