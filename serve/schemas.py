"""Request bodies of the wire formats, and what is said of a wrong one."""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.exceptions import HTTPException

# Items of another type are the request's error, or, where the client asks for it, their own.
Texts = str | Annotated[list[Any], msgspec.Meta(min_length=1)]


class NativeRequest(msgspec.Struct, frozen=True):
    """Body of POST /create_embedding."""

    texts: Texts | UnsetType = UNSET
    text: Texts | UnsetType = UNSET
    normalize: bool | UnsetType = UNSET
    truncate: bool | UnsetType = UNSET
    on_error: Literal["fail", "null"] = "fail"
    encoding_format: Literal["float", "base64"] = "float"

    def all_texts(self) -> list[Any]:
        return [*_as_list(self.texts), *_as_list(self.text)]


_native = msgspec.json.Decoder(NativeRequest)


def decode_native(body: bytes) -> NativeRequest:
    try:
        # msgspec checks only the strings that it keeps; decoding first makes the whole body UTF-8.
        message = _native.decode(body.decode())
    except msgspec.ValidationError as error:
        raise HTTPException(400, _explain(error)) from None
    except UnicodeDecodeError:
        raise HTTPException(400, "the body is not valid UTF-8") from None
    except msgspec.DecodeError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    except RecursionError:
        raise HTTPException(400, "the body is not acceptable JSON: nested too deeply") from None
    if message.on_error == "fail":
        for name in ("texts", "text"):
            for index, item in enumerate(_as_list(getattr(message, name))):
                if not isinstance(item, str):
                    raise HTTPException(400, f"{name}[{index}]: expected a string, got {json_type(item)}")
    return message


def json_type(value: object) -> str:
    """What a parsed value was in JSON, in msgspec's words."""
    return _JSON_TYPES.get(type(value), type(value).__name__)


_JSON_TYPES = {type(None): "null", list: "array", dict: "object"}


def _as_list(texts: Texts | UnsetType) -> list[Any]:
    if texts is UNSET:
        return []
    return [texts] if isinstance(texts, str) else texts


_TYPE_MISMATCH = re.compile(r"Expected `(?P<expected>.+)`, got `(?P<got>.+?)`(?: - at `\$\.(?P<place>.+)`)?")
_NOT_ONE_OF = re.compile(r"Invalid enum value (?P<got>.+) - at `\$\.(?P<place>.+)`")
_NO_ITEMS = re.compile(r"Expected `array` of length >= 1 - at `\$\.(?P<place>.+)`")
_CHOICES = {"on_error": ("fail", "null"), "encoding_format": ("float", "base64")}
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
    if match := _NOT_ONE_OF.fullmatch(str(error)):
        expected = " or ".join(f"`{value}`" for value in _CHOICES[match["place"]])
        return f"{match['place']}: expected {expected}, got {match['got']}"
    if match := _NO_ITEMS.fullmatch(str(error)):
        return f"{match['place']}: expected at least one string, got an empty array"
    return str(error)
