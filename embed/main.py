"""The command line: `embed text` prints vectors, `embed serve` answers over HTTP.

Results go to standard output, everything else to standard error. Exit codes: 0 done, 1 a failure, in one line that
says what to do, 2 a command line that cannot be understood.
"""

import argparse
import ipaddress
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import orjson
from tqdm import tqdm

from embed.errors import EmbedError, ModelError, RequestError
from embed.model import EM_BATCH_MAX, Embed
from embed.models import POOL_MODES
from gkd.errors import GkdError

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen."""

    host: str
    port: int


class CommandError(Exception):
    """A failure outside the engine, in one line."""


def run() -> None:
    """The console entry point."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit code."""
    parser = _parser()
    if not argv:
        parser.print_help()
        return 0
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="embed: %(message)s", stream=sys.stderr)
    command: Callable[[argparse.Namespace], None] = arguments.command
    try:
        command(arguments)
    except (ModelError, GkdError) as error:
        return _fail(f"{arguments.model}: {error}")
    except (EmbedError, CommandError) as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader of standard output has gone, as `head` does; the interpreter would complain when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _fail(message: str) -> int:
    print(f"embed: error: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("model", help="a model directory, or the name of an installed model package: minilm")
    model.add_argument(
        "--maxseq", type=_positive_int, metavar="N", help="most tokens of a text; longer ones keep their head"
    )
    model.add_argument("--pool", choices=POOL_MODES, help="pooling, instead of what the model's files say")
    model.add_argument("--no-normalize", action="store_true", help="do not scale vectors to length 1")
    model.add_argument(
        "--gpu", type=int, default=-1, metavar="N", help="CUDA ordinal; -1, the default, is the best device"
    )
    model.add_argument("--dtype", choices=("f32", "f16", "bf16"), default="f32", help="precision of the computation")

    parser = argparse.ArgumentParser(prog="embed", description="Text to vectors.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="command")

    text = commands.add_parser("text", parents=[model], allow_abbrev=False, help="print the vector of each text")
    text.add_argument(
        "texts", nargs="+", metavar="text", help="a text; a single - reads one text a line from standard input"
    )
    text.add_argument("--json", action="store_true", help="a JSON object a line instead of comma-separated numbers")
    text.set_defaults(command=_text)

    serve = commands.add_parser("serve", parents=[model], allow_abbrev=False, help="answer over HTTP")
    serve.add_argument(
        "--addr",
        type=_address,
        default=Address(DEFAULT_HOST, DEFAULT_PORT),
        metavar="HOST:PORT",
        help=f"where to listen, IPv6 in brackets; default {DEFAULT_HOST}:{DEFAULT_PORT}",
    )
    token = serve.add_mutually_exclusive_group()
    token.add_argument("--token", type=_token, metavar="T", help="what clients have to show; visible in process lists")
    token.add_argument("--token-file", type=Path, metavar="F", help="a file that holds it; else EMBED_TOKEN is read")
    serve.add_argument(
        "--unload-after",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="give the device back after S idle seconds; 0, the default, keeps it",
    )
    serve.set_defaults(command=_serve)
    return parser


def _positive_int(value: str) -> int:
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return number


def _seconds(value: str) -> float:
    number = float(value)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds, got {value}")
    return number


def _address(value: str) -> Address:
    host, colon, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535 or not host:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got {value}")
    if ":" in host and not bracketed:
        raise argparse.ArgumentTypeError(f"an IPv6 address goes in brackets, as in [::1]:8000; got {value}")
    return Address(host[1:-1] if bracketed else host, int(port))


def _token(value: str) -> str:
    # A header carries visible ASCII unchanged, and nothing else for certain.
    if not value or not all("!" <= character <= "~" for character in value):
        raise argparse.ArgumentTypeError("a token has to be visible ASCII characters without spaces")
    return value


def _open(arguments: argparse.Namespace) -> Embed:
    """Loads the model with a progress bar on a terminal, and says on standard error what was loaded."""
    start_s = time.perf_counter()
    with tqdm(
        desc="loading", unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty(), file=sys.stderr
    ) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        engine = Embed.open(
            arguments.model,
            arguments.gpu,
            arguments.dtype,
            pool=arguments.pool,
            normalize=False if arguments.no_normalize else None,
            maxseq=arguments.maxseq,
            progress=show,
        )
    load_s = time.perf_counter() - start_s
    pooling = engine.pooling
    _note(
        f"{engine.name}: {engine.family}, {engine.num_layers} layers, {engine.dim} wide, "
        f"{pooling.mode} pooling{' (assumed)' if engine.pooling_assumed else ''}, "
        f"{'normalized' if pooling.normalize else 'not normalized'}, at most {engine.maxseq} tokens"
    )
    _note(
        f"{engine.name}: {_computation(engine)} on {engine.backend} ({engine.device_name}), "
        f"{engine.weights_bytes / 1e6:.1f} MB of weights, {engine.workspace_bytes / 1e6:.1f} MB of workspace, "
        f"loaded in {load_s:.2f} s"
    )
    if engine.pooling_assumed:
        _note(f"modules.json: not found; {pooling.mode} pooling is assumed, --pool says otherwise")
    if arguments.maxseq is not None and engine.maxseq < arguments.maxseq:
        _note(f"--maxseq {arguments.maxseq}: clamped to {engine.maxseq}, the model's position table")
    return engine


def _computation(engine: Embed) -> str:
    """The precision of an engine, and for f32 how it is computed."""
    if engine.uses_split:
        return "f32 by split operands on tensor cores"
    if engine.exceeds_split:
        return "plain f32 (a bound of this model does not fit split operands)"
    return "plain f32" if engine.dtype == "f32" else engine.dtype


def _note(message: str) -> None:
    print(f"embed: {message}", file=sys.stderr)


def _text(arguments: argparse.Namespace) -> None:
    with _open(arguments) as engine:
        texts: Iterable[str] = _lines() if arguments.texts == ["-"] else arguments.texts
        for chunk in _chunks(texts):
            for text, vector in zip(chunk, engine.encode(chunk), strict=True):
                # orjson writes the shortest digits that read back as the same float32.
                row = orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
                line = b'{"text":%b,"embedding":%b}' % (orjson.dumps(text), row) if arguments.json else row[1:-1]
                sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts)
    while chunk := list(itertools.islice(iterator, EM_BATCH_MAX)):
        yield chunk


def _lines() -> Iterator[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError:
            raise RequestError(f"standard input, line {number}: not valid UTF-8") from None


def _serve(arguments: argparse.Namespace) -> None:
    # Not at the top: `embed text` starts a quarter of a second sooner without an HTTP server.
    from serve.app import ServeConfig, create_app
    from serve.server import serve

    token = _read_token(arguments)
    address: Address = arguments.addr
    with ExitStack() as stack:
        engine = stack.enter_context(_open(arguments))
        config = ServeConfig(
            model_name=engine.name,
            normalize=engine.pooling.normalize,
            token=token,
            unload_after_s=arguments.unload_after,
        )

        def announce(url: str) -> None:
            print(f"embed: serving {engine.name} at {url}: POST /create_embedding, GET /health", flush=True)
            if token is None and not _is_loopback(address.host):
                _note(f"no token is set, and {url} can be reached from other machines: --token-file closes it")

        try:
            serve(create_app(engine, engine, config), address.host, address.port, on_listening=announce)
        except OSError as error:
            raise CommandError(f"--addr {address.host}:{address.port}: cannot listen: {error.strerror}") from None


def _read_token(arguments: argparse.Namespace) -> str | None:
    """The token of the flag, of the file without its line end, or of EMBED_TOKEN; None leaves the server open."""
    if arguments.token is not None:
        return str(arguments.token)
    if arguments.token_file is not None:
        try:
            source, value = f"--token-file {arguments.token_file}", arguments.token_file.read_text().rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"--token-file {arguments.token_file}: cannot be read: {error}") from None
    else:
        source, value = "EMBED_TOKEN", os.environ.get("EMBED_TOKEN", "")
        if not value:
            return None
    try:
        return _token(value)
    except argparse.ArgumentTypeError as error:
        raise CommandError(f"{source}: {error}") from None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
