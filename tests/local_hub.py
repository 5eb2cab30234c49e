"""A model hub on this machine: what `huggingface_hub` asks of one, over HTTP, with a record of every request."""

import hashlib
import json
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

_ROUTE = re.compile(
    r"/api/models/(?P<info>[^/]+/[^/]+)/revision/(?P<info_revision>.+)"
    r"|/api/models/(?P<tree>[^/]+/[^/]+)/tree/(?P<tree_revision>.+)"
    r"|/(?P<file>[^/]+/[^/]+)/resolve/(?P<file_revision>[^/]+)/(?P<path>.+)"
)
_CHUNK_BYTES = 1 << 16


@dataclass
class Repository:
    """What a repository holds at each commit, and who may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Puts the files on a branch; the commit's hash."""
        commit = hashlib.sha1(json.dumps([len(self.commits), sorted(files)]).encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit


class LocalHub:
    """A hub that listens while its `with` block runs."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[str] = []
        """`METHOD path` of each request, in order."""
        self.ranges: list[str] = []
        """The Range header of each request that had one."""
        self.cuts: dict[str, list[int]] = {}
        """For a file's path, after how many bytes each of the next downloads of it is cut."""
        self.pause_s = 0.0
        """How long to wait after each 64 KiB of a file."""
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    def downloads(self) -> list[str]:
        """The paths of the files whose content was asked for, sorted."""
        gets = (_ROUTE.fullmatch(request.removeprefix("GET ")) for request in self.requests)
        return sorted(route["path"] for route in gets if route is not None and route["path"])

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LocalHub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if "Range" in self.headers:
            self.hub.ranges.append(self.headers["Range"])
        route = _ROUTE.fullmatch(path)
        if route is None:
            return self._refuse(404, "")
        name = route["info"] or route["tree"] or route["file"]
        revision = route["info_revision"] or route["tree_revision"] or route["file_revision"]
        repository = self.hub.repositories.get(name)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if repository is None or (repository.token is not None and repository.token != token):
            # The real hub tells a stranger no more of a private repository than of one that is not there.
            gated = repository is not None and repository.gated
            code = "GatedRepo" if gated else "RepoNotFound"
            return self._refuse(403 if gated and token else 404 if token else 401, code)
        commit = repository.branches.get(revision, revision)
        files = repository.commits.get(commit)
        if files is None:
            return self._refuse(404, "RevisionNotFound")
        if route["info"]:
            siblings = [{"rfilename": path} for path in files]
            return self._send_json({"id": name, "modelId": name, "sha": commit, "siblings": siblings})
        if route["tree"]:
            sizes = {path: (len(content), _etag(content)) for path, content in files.items()}
            return self._send_json(
                [{"type": "file", "path": path, "size": size, "oid": oid} for path, (size, oid) in sizes.items()]
            )
        if route["path"] not in files:
            return self._refuse(404, "EntryNotFound")
        self._send_file(commit, route["path"], files[route["path"]])

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"{code} as the hub says it")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self, commit: str, path: str, content: bytes) -> None:
        start = int(self.headers["Range"].removeprefix("bytes=").removesuffix("-")) if "Range" in self.headers else 0
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{_etag(content)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.cuts.get(path)
        end = start + cuts.pop(0) if cuts else len(content)
        for begin in range(start, min(end, len(content)), _CHUNK_BYTES):
            self.wfile.write(content[begin : min(begin + _CHUNK_BYTES, end)])
            time.sleep(self.hub.pause_s)
        if end < len(content):
            self.close_connection = True


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
