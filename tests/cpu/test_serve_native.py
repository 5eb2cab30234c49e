"""/create_embedding: what it accepts, what it answers, what it refuses and in which words."""

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from serve.app import ServeConfig
from serve.service import TextLimits
from tests.cpu.serve_engine import DIM, NOT_FINITE, TinyEngine, expected_array, expected_vectors, make_app, running

JSON_TYPE = "application/json; charset=utf-8"


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with running(make_app(TinyEngine())) as url, httpx.Client(base_url=url) as client:
        yield client


def embeddings(reply: httpx.Response) -> Any:
    assert reply.status_code == 200, reply.text
    return reply.json()["embeddings"]


def error(reply: httpx.Response) -> str:
    message = reply.json()
    assert list(message) == ["error"]
    assert reply.headers["content-type"] == JSON_TYPE
    text: str = message["error"]
    return text


@pytest.mark.parametrize(
    ("message", "texts"),
    [
        ({"text": "a"}, ["a"]),
        ({"texts": "a"}, ["a"]),
        ({"text": ["a", "b"]}, ["a", "b"]),
        ({"text": "last", "texts": ["first", "second"]}, ["first", "second", "last"]),
        ({"text": ""}, [""]),
        ({"texts": ["", "a", "a"]}, ["", "a", "a"]),
        ({"text": "nul \0 stays"}, ["nul \0 stays"]),
        ({"text": "ääkköset 日本 😀"}, ["ääkköset 日本 😀"]),
        ({"text": "a", "unknown": [{}]}, ["a"]),
        ({"text": "long " * 1000}, ["long " * 1000]),
    ],
)
def test_post(client: httpx.Client, message: dict[str, Any], texts: list[str]) -> None:
    assert embeddings(client.post("/create_embedding", json=message)) == expected_vectors(texts)


def test_reply_form(client: httpx.Client) -> None:
    reply = client.post("/create_embedding", json={"text": "a"})
    assert list(reply.json()) == ["embeddings", "model", "dimension"]
    assert reply.json()["model"] == "tiny-model"
    assert reply.json()["dimension"] == DIM
    assert reply.headers["content-type"] == JSON_TYPE
    assert "server" not in reply.headers


def test_floats_are_exact(client: httpx.Client) -> None:
    got = np.array(embeddings(client.post("/create_embedding", json={"text": "a"})), np.float32)
    assert got.tobytes() == expected_array(["a"]).tobytes()


def test_large_reply_keeps_the_order(client: httpx.Client) -> None:
    texts = [f"text {index}" for index in range(5000)]
    assert embeddings(client.post("/create_embedding", json={"texts": texts})) == expected_vectors(texts)


def test_content_type_is_not_checked(client: httpx.Client) -> None:
    reply = client.post("/create_embedding", content=b'{"text":"a"}', headers={"content-type": "text/plain"})
    assert embeddings(reply) == expected_vectors(["a"])


def test_chunked_body(client: httpx.Client) -> None:
    chunks = [b'{"te', b'xt":', b'"a"}']
    assert embeddings(client.post("/create_embedding", content=iter(chunks))) == expected_vectors(["a"])


@pytest.mark.parametrize("normalize", [True, False])
def test_normalize(client: httpx.Client, normalize: bool) -> None:
    want = expected_vectors(["a"], normalize=normalize)
    assert embeddings(client.post("/create_embedding", json={"text": "a", "normalize": normalize})) == want
    query = {"text": "a", "normalize": json.dumps(normalize)}
    assert embeddings(client.get("/create_embedding", params=query)) == want


def test_normalize_default_is_configured() -> None:
    with running(make_app(TinyEngine(), normalize=False)) as url, httpx.Client(base_url=url) as client:
        want = expected_vectors(["a"], normalize=False)
        assert embeddings(client.post("/create_embedding", json={"text": "a"})) == want
        assert embeddings(client.get("/create_embedding?text=a")) == want
        assert embeddings(client.get("/create_embedding?text=a&normalize=true")) == expected_vectors(["a"])


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b'{"text":"a"} tail', "the body is not JSON"),
        (b'{"text":"a\0b"}', "the body is not JSON"),
        (b'{"text":"\xff"}', "the body is not valid UTF-8"),
        (b'{"text":"a","other":"\xff"}', "the body is not valid UTF-8"),
        (b'{"text":"\xed\xa0\x80"}', "the body is not valid UTF-8"),
        (rb'{"text":"\ud800"}', "the body is not JSON"),
        (rb'{"text":"\ud800\ud800"}', "the body is not JSON"),
        (rb'{"text":"\udc00"}', "the body is not JSON"),
        (b'{"other":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"text":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'"a"', "the body: expected an object, got str"),
        (b"[]", "the body: expected an object, got array"),
        (b"{}", "no text"),
        (b'{"normalize":true}', "no text"),
        (b'{"texts":[]}', "texts: expected at least one string, got an empty array"),
        (b'{"texts":[],"text":"a"}', "texts: expected at least one string, got an empty array"),
        (b'{"texts":["a","b","c",1]}', "texts[3]: expected a string, got int"),
        (b'{"text":["a",null]}', "text[1]: expected a string, got null"),
        (b'{"text":[["a"]]}', "text[0]: expected a string, got array"),
        (b'{"text":[true]}', "text[0]: expected a string, got bool"),
        (b'{"text":3.5}', "text: expected a string or an array of strings, got float"),
        (b'{"text":null}', "text: expected a string or an array of strings, got null"),
        (b'{"text":{"a":"b"}}', "text: expected a string or an array of strings, got object"),
        (b'{"text":"a","normalize":1}', "normalize: expected a boolean, got int"),
        (b'{"text":"a","normalize":"true"}', "normalize: expected a boolean, got str"),
        (b'{"text":"a","normalize":null}', "normalize: expected a boolean, got null"),
        (b'{"text":"a","truncate":"yes"}', "truncate: expected a boolean, got str"),
        (b'{"text":"a","on_error":"skip"}', "on_error: expected `fail` or `null`, got 'skip'"),
        (b'{"text":"a","encoding_format":"hex"}', "encoding_format: expected `float` or `base64`, got 'hex'"),
    ],
)
def test_post_refuses(client: httpx.Client, body: bytes, message: str) -> None:
    reply = client.post("/create_embedding", content=body)
    assert reply.status_code == 400
    assert message in error(reply)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("text=a", "a"),
        ("text=&text=a&text=b", "a"),
        ("text=a+b%2Bc", "a b+c"),
        ("text=%F0%9F%98%80", "😀"),
        ("text=a%00b", "a\0b"),
        ("text=a&normalize=", "a"),
        ("text=a&unknown=1", "a"),
    ],
)
def test_get(client: httpx.Client, query: str, text: str) -> None:
    assert embeddings(client.get(f"/create_embedding?{query}")) == expected_vectors([text])


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("", "no text"),
        ("text=", "no text"),
        ("texts=a", "no text"),
        ("text=a&normalize=1", "normalize: expected `true` or `false`"),
        ("text=a&normalize=True", "normalize: expected `true` or `false`"),
        ("text=%FF", "the query string is not valid UTF-8"),
        ("text=%ED%A0%80", "the query string is not valid UTF-8"),
        ("text=a&other=%C3", "the query string is not valid UTF-8"),
    ],
)
def test_get_refuses(client: httpx.Client, query: str, message: str) -> None:
    reply = client.get(f"/create_embedding?{query}")
    assert reply.status_code == 400
    assert message in error(reply)


def test_head_is_get_without_the_body(client: httpx.Client) -> None:
    head, get = (client.request(method, "/create_embedding?text=a") for method in ("HEAD", "GET"))
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/create_embedding", "GET, HEAD, OPTIONS, POST"),
        ("/health", "GET, HEAD, OPTIONS"),
        ("/", "GET, HEAD, OPTIONS"),
        ("/health/ready", "GET, HEAD, OPTIONS"),
        ("/metrics", "GET, HEAD, OPTIONS"),
    ],
)
def test_methods(client: httpx.Client, path: str, allow: str) -> None:
    options = client.options(path)
    assert (options.status_code, options.content, options.headers["allow"]) == (204, b"", allow)
    refused = client.delete(path)
    assert (refused.status_code, refused.headers["allow"]) == (405, allow)
    assert "DELETE" in error(refused)


@pytest.mark.parametrize("path", ["/create_embedding/", "/health/", "/nothing", "/Health"])
def test_unknown_paths(client: httpx.Client, path: str) -> None:
    for method in ("GET", "OPTIONS", "POST"):
        reply = client.request(method, path)
        assert reply.status_code == 404
        assert error(reply)


def test_concurrent_answers_equal_serial_ones(client: httpx.Client) -> None:
    texts = [f"text {index} " * (index + 1) for index in range(64)]

    def embed(text: str) -> bytes:
        return client.post("/create_embedding", json={"text": text}).content

    serial = [embed(text) for text in texts]
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(embed, texts)) == serial


def test_base64(client: httpx.Client) -> None:
    for texts in (["a"], [f"text {index}" for index in range(3000)]):
        reply = client.post("/create_embedding", json={"texts": texts, "encoding_format": "base64"})
        rows = [np.frombuffer(base64.b64decode(row, validate=True), "<f4") for row in embeddings(reply)]
        assert np.array_equal(np.stack(rows), expected_array(texts))


LONG = "x" * (TinyEngine.maxseq - 1)  # a token too many, with the two special ones
FITTING = LONG[1:]


def test_truncation_is_told(client: httpx.Client) -> None:
    whole = client.post("/create_embedding", json={"texts": ["a", FITTING]}).json()
    assert list(whole) == ["embeddings", "model", "dimension"]
    cut = client.post("/create_embedding", json={"texts": ["a", LONG, "b", LONG]}).json()
    assert list(cut) == ["embeddings", "model", "dimension", "truncated"]
    assert cut["truncated"] == [1, 3]
    assert cut["embeddings"] == expected_vectors(["a", FITTING, "b", FITTING])
    got = client.get("/create_embedding", params={"text": LONG})
    assert got.json()["truncated"] == [0] and embeddings(got) == expected_vectors([FITTING])


def test_truncation_may_be_an_error(client: httpx.Client) -> None:
    message = "texts[1]: 8193 tokens; at most 8192 are accepted, unless `truncate` is true"
    for reply in (
        client.post("/create_embedding", json={"texts": ["a", LONG], "truncate": False}),
        client.get("/create_embedding", params={"text": LONG, "truncate": "false"}),
    ):
        assert reply.status_code == 400
        assert error(reply) in (message, message.replace("[1]", "[0]"))
    assert embeddings(client.post("/create_embedding", json={"text": FITTING, "truncate": False}))
    with running(make_app(TinyEngine(), truncate=False)) as url, httpx.Client(base_url=url) as strict:
        assert strict.post("/create_embedding", json={"text": LONG}).status_code == 400
        assert strict.post("/create_embedding", json={"text": LONG, "truncate": True}).json()["truncated"] == [0]


def test_bad_texts_do_not_lose_the_others(client: httpx.Client) -> None:
    texts = ["a", None, LONG, 3, {"b": 1}, "", NOT_FINITE, ["c"], "d"]
    body = {"texts": texts, "on_error": "null", "truncate": False}
    reply = client.post("/create_embedding", json=body).json()
    assert reply["errors"] == [
        {"index": 1, "error": "expected a string, got null"},
        {"index": 2, "error": "8193 tokens; at most 8192 are accepted, unless `truncate` is true"},
        {"index": 3, "error": "expected a string, got int"},
        {"index": 4, "error": "expected a string, got object"},
        {"index": 6, "error": "not finite"},
        {"index": 7, "error": "expected a string, got array"},
    ]
    for encoding_format in ("float", "base64"):
        rows = embeddings(client.post("/create_embedding", json={**body, "encoding_format": encoding_format}))
        assert [row is None for row in rows] == [index in (1, 2, 3, 4, 6, 7) for index in range(9)]
    assert [row for row in reply["embeddings"] if row is not None] == expected_vectors(["a", "", "d"])
    fine = client.post("/create_embedding", json={"texts": ["a"], "on_error": "null"}).json()
    assert list(fine) == ["embeddings", "model", "dimension", "errors"] and fine["errors"] == []


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a"] * 4, "texts: 4 of them, at most 3 are accepted"),
        (["a", "x" * 11], "texts[1]: 11 characters, at most 10 are accepted"),
        (["ä" * 11], "texts[0]: 11 characters, at most 10 are accepted"),
    ],
)
def test_limits_have_names(texts: list[str], message: str) -> None:
    app = make_app(TinyEngine(), texts=TextLimits(max_texts=3, max_chars=10))
    with running(app) as url, httpx.Client(base_url=url) as client:
        reply = client.post("/create_embedding", json={"texts": texts})
        assert (reply.status_code, error(reply)) == (400, message)
        assert embeddings(client.post("/create_embedding", json={"texts": ["ä" * 10] * 3}))


TOKEN = "s3cret-ä"


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx.Client]:
    with running(make_app(TinyEngine(), token=TOKEN)) as url, httpx.Client(base_url=url) as client:
        yield client


@pytest.mark.parametrize("body", [b'{"text":"a"}', b"not JSON"])
@pytest.mark.parametrize(
    ("authorization", "query"),
    [
        (None, None),
        ("Bearer wrong", None),
        (f"Bearer {TOKEN}x", None),
        (f"bearer {TOKEN}", None),
        (f"Basic {TOKEN}", None),
        (None, "wrong"),
        (None, ""),
        (None, TOKEN + "x"),
        ("Bearer wrong", TOKEN),
    ],
)
def test_token_is_wanted(guarded: httpx.Client, authorization: str | None, query: str | None, body: bytes) -> None:
    headers = httpx.Headers([] if authorization is None else [("authorization", authorization)], encoding="utf-8")
    params = {} if query is None else {"token": query}
    reply = guarded.post("/create_embedding", content=body, headers=headers, params=params)
    assert reply.status_code == 401
    assert reply.headers["www-authenticate"] == "Bearer"
    assert error(reply) == "missing or wrong token"
    assert guarded.get("/create_embedding", headers=headers, params=params).status_code == 401


@pytest.mark.parametrize(
    ("headers", "params"),
    [
        ({"authorization": f"Bearer {TOKEN}"}, {}),
        ({}, {"token": TOKEN}),
        ({"authorization": "Basic abc"}, {"token": TOKEN}),
    ],
)
def test_token_is_accepted(guarded: httpx.Client, headers: dict[str, str], params: dict[str, str]) -> None:
    sent = httpx.Headers(headers, encoding="utf-8")
    post = guarded.post("/create_embedding", json={"text": "a"}, headers=sent, params=params)
    assert embeddings(post) == expected_vectors(["a"])
    get = guarded.get("/create_embedding", headers=sent, params={**params, "text": "a"})
    assert embeddings(get) == expected_vectors(["a"])


def test_empty_token_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="empty"):
        ServeConfig(model_name="tiny-model", token="")


def test_open_routes_want_no_token(guarded: httpx.Client) -> None:
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/").status_code == 200
    assert guarded.options("/create_embedding").status_code == 204
