"""The query string, read strictly."""

from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException
from starlette.requests import Request


def query_fields(request: Request) -> dict[str, str]:
    """The first value of each key that is not empty.

    Starlette's own reader would put U+FFFD for bytes that are not UTF-8, and the client would get the vector
    of another text.
    """
    query: bytes = request.scope["query_string"]
    try:
        pairs = parse_qsl(query.decode(), errors="strict")
    except UnicodeDecodeError:
        raise HTTPException(400, "the query string is not valid UTF-8") from None
    return dict(reversed(pairs))
