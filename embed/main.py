"""The command line: `embed text` prints vectors, `embed rerank` scores texts for a query, `embed serve` answers over
HTTP, `embed verify` compares vectors with recorded ones, `embed doctor` says what there is to compute with.

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

import numpy as np
import orjson
from tqdm import tqdm

from embed.errors import EmbedError, ModelError, RequestError
from embed.lexical import OUTPUTS, Embeddings
from embed.model import EM_BATCH_MAX, Embed
from embed.precision import PRECISIONS
from gkd.errors import GkdError
from gkd.ops.pool import POOL_MODES

DEFAULT_HOST = "127.0.0.1"
# Keys of sparse vectors are numbers.
_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
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
    logging.basicConfig(format="embed: %(message)s", stream=sys.stderr)
    for package in ("embed", "gkd", "serve"):  # of others' packages warnings: a hub's client tells of each request
        logging.getLogger(package).setLevel(logging.INFO)
    command: Callable[[argparse.Namespace], int | None] = arguments.command
    try:
        return command(arguments) or 0
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


def _fail(message: str) -> int:
    print(f"embed: error: {message}", file=sys.stderr)
    return 1


def _parser() -> argparse.ArgumentParser:
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument(
        "model",
        help="a model directory, the name of an installed model package: minilm, or org/name[@revision] on a model hub",
    )
    model.add_argument("--refresh", action="store_true", help="ask the model hub whether there is a newer version")
    model.add_argument(
        "--maxseq",
        type=_positive_int,
        metavar="N",
        help="most tokens of a text, or of a query and a text; longer ones are cut off",
    )
    model.add_argument(
        "--gpu", type=int, default=-1, metavar="N", help="CUDA ordinal; -1, the default, is the best device"
    )
    dtypes = [precision.value for precision in PRECISIONS]
    model.add_argument("--dtype", choices=dtypes, default="f32", help="precision of the computation")

    vectors = argparse.ArgumentParser(add_help=False, parents=[model])
    vectors.add_argument("--pool", choices=POOL_MODES, help="pooling, instead of what the model's files say")
    vectors.add_argument("--no-normalize", action="store_true", help="do not scale vectors to length 1")

    parser = argparse.ArgumentParser(
        prog="embed", description="Text to vectors, and scores of texts for a query.", allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    text = commands.add_parser("text", parents=[vectors], allow_abbrev=False, help="print the vector of each text")
    text.add_argument(
        "texts", nargs="+", metavar="text", help="a text; a single - reads one text a line from standard input"
    )
    prompt = text.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-name", metavar="NAME", help="the model's prompt of that name before each text")
    prompt.add_argument("--prompt", metavar="TEXT", help="this before each text, instead of the model's default prompt")
    text.add_argument(
        "--outputs",
        type=_outputs,
        metavar="LIST",
        help="some of dense,sparse,colbert, where the model has heads for them; a JSON object a line",
    )
    text.add_argument("--json", action="store_true", help="a JSON object a line instead of comma-separated numbers")
    text.set_defaults(command=_text)

    rerank = commands.add_parser(
        "rerank",
        parents=[model],
        allow_abbrev=False,
        help="print texts by a cross-encoder's score for a query, best first",
        description="Prints score, index and text of each text, best first, between tabs.",
    )
    rerank.add_argument("query", help="what the texts are scored for")
    rerank.add_argument(
        "texts", nargs="*", metavar="text", help="a text; with none, or a single -, one a line from standard input"
    )
    rerank.add_argument("--raw-scores", action="store_true", help="logits, without the model's activation")
    rerank.add_argument("--json", action="store_true", help="a JSON object a line instead of tabs")
    rerank.set_defaults(command=_rerank, pool=None, no_normalize=False)

    serve = commands.add_parser("serve", parents=[vectors], allow_abbrev=False, help="answer over HTTP")
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
    serve.add_argument(
        "--truncate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="cut texts of too many tokens where a request does not say; --no-truncate makes them errors",
    )
    limits = (
        ("--max-queue-tokens", 1 << 20, "refuse requests with 429 while so many tokens wait"),
        ("--max-body-bytes", 16 << 20, "of a request"),
        ("--max-texts", 16_384, "of a request"),
        ("--max-chars", 1_000_000, "of a text"),
    )
    for flag, default, purpose in limits:
        serve.add_argument(
            flag, type=_positive_int, default=default, metavar="N", help=f"{purpose}; by default {default}"
        )
    serve.add_argument(
        "--access-log", metavar="FILE", help="append a line of JSON for each request; - is standard error"
    )
    serve.add_argument(
        "--shutdown-delay",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="after SIGTERM, be not ready for S seconds before connections are refused; by default 0",
    )
    serve.add_argument(
        "--drain-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="then wait at most S seconds for the answers that are owed; by default 30",
    )
    serve.set_defaults(command=_serve)

    verify = commands.add_parser(
        "verify", parents=[vectors], allow_abbrev=False, help="compare the vectors of a corpus with recorded ones"
    )
    verify.add_argument(
        "--reference", type=Path, metavar="FILE", help="the recorded vectors; by default the model's in the user's data"
    )
    verify.add_argument("--record", action="store_true", help="write the reference instead of comparing with it")
    verify.set_defaults(command=_verify)

    doctor = commands.add_parser("doctor", allow_abbrev=False, help="say what there is to compute with")
    doctor.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    doctor.set_defaults(command=_doctor)
    return parser


def _outputs(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    for name in names:
        if name not in OUTPUTS:
            raise argparse.ArgumentTypeError(f"expected some of {','.join(OUTPUTS)}, got {value}")
    return names


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


def _open(arguments: argparse.Namespace, *, cross_encoder: bool = False) -> Embed:
    """Loads the model with a progress bar on a terminal, and says on standard error what was loaded.

    CommandError for a model of the other kind than the command is for.
    """
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
            refresh=arguments.refresh,
            progress=show,
        )
    load_s = time.perf_counter() - start_s
    if (engine.score_activation is not None) is not cross_encoder:
        with engine:
            raise CommandError(
                f"{engine.name} gives vectors and is no cross-encoder: `embed text` prints them"
                if cross_encoder
                else f"{engine.name} is a cross-encoder and gives no vectors: `embed rerank` scores texts for a query"
            )
    _note(
        f"{engine.name}: {engine.family}, {engine.num_layers} layers, {_result(engine)}, at most {engine.maxseq} tokens"
    )
    _note(
        f"{engine.name}: {_computation(engine)} on {engine.backend} ({engine.device_name}), "
        f"{engine.weights_bytes / 1e6:.1f} MB of weights, {engine.workspace_bytes / 1e6:.1f} MB of workspace, "
        f"loaded in {load_s:.2f} s"
    )
    if engine.pooling_assumed:
        modes = "+".join(engine.pooling.modes)
        _note(f"modules.json: not found; {modes} pooling is assumed, --pool says otherwise")
    if arguments.maxseq is not None and engine.maxseq < arguments.maxseq:
        _note(f"--maxseq {arguments.maxseq}: clamped to {engine.maxseq}, the model's position table")
    return engine


def _result(engine: Embed) -> str:
    """What an engine gives."""
    if engine.score_activation is not None:
        return f"cross-encoder, {engine.score_activation} of its logit"
    pooling = engine.pooling
    return (
        f"{engine.dim} wide, {'+'.join(pooling.modes)} pooling{' (assumed)' if engine.pooling_assumed else ''}, "
        f"{'normalized' if pooling.normalize else 'not normalized'}"
    )


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
            prompt = {"prompt_name": arguments.prompt_name, "prompt": arguments.prompt}
            if arguments.outputs is not None:
                _print_outputs(chunk, engine.encode(chunk, outputs=arguments.outputs, **prompt))
                continue
            vectors = engine.encode(chunk, **prompt)
            for text, vector in zip(chunk, vectors, strict=True):
                # orjson writes the shortest digits that read back as the same float32.
                row = orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
                line = b'{"text":%b,"embedding":%b}' % (orjson.dumps(text), row) if arguments.json else row[1:-1]
                sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


def _rerank(arguments: argparse.Namespace) -> None:
    with _open(arguments, cross_encoder=True) as engine:
        texts = list(_lines()) if arguments.texts in ([], ["-"]) else arguments.texts
        scores = engine.rerank(arguments.query, texts, raw_scores=arguments.raw_scores)
    for index in np.argsort(-scores, kind="stable").tolist():
        score, text = orjson.dumps(scores[index], option=orjson.OPT_SERIALIZE_NUMPY), texts[index]
        if arguments.json:
            line = b'{"index":%d,"score":%b,"text":%b}' % (index, score, orjson.dumps(text))
        else:
            line = b"%b\t%d\t%b" % (score, index, " ".join(text.splitlines()).encode())
        sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _print_outputs(texts: list[str], embeddings: Embeddings) -> None:
    named = {"dense": embeddings.dense, "sparse": embeddings.sparse, "colbert": embeddings.colbert}
    for index, text in enumerate(texts):
        line = {"text": text} | {name: of_texts[index] for name, of_texts in named.items() if of_texts is not None}
        sys.stdout.buffer.write(orjson.dumps(line, option=_JSON_OPTIONS) + b"\n")


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
    from serve.access import LogFile
    from serve.app import Application, ServeConfig
    from serve.body import BodyLimits
    from serve.server import serve
    from serve.service import TextLimits

    token = _read_token(arguments)
    address: Address = arguments.addr
    with ExitStack() as stack:
        engine = stack.enter_context(_open(arguments))
        config = ServeConfig(
            model_name=engine.name,
            normalize=engine.pooling.normalize,
            truncate=arguments.truncate,
            token=token,
            unload_after_s=arguments.unload_after,
            max_queue_tokens=arguments.max_queue_tokens,
            drain_s=arguments.drain_timeout,
            body=BodyLimits(max_bytes=arguments.max_body_bytes),
            texts=TextLimits(max_texts=arguments.max_texts, max_chars=arguments.max_chars),
            access_log=LogFile(_open_log(arguments.access_log, stack)) if arguments.access_log else None,
        )

        def announce(url: str) -> None:
            print(f"embed: serving {engine.name} at {url}: POST /create_embedding, GET /health", flush=True)
            if token is None and not _is_loopback(address.host):
                _note(f"no token is set, and {url} can be reached from other machines: --token-file closes it")

        try:
            serve(
                Application(engine, engine, config),
                address.host,
                address.port,
                on_listening=announce,
                shutdown_delay_s=arguments.shutdown_delay,
            )
        except OSError as error:
            raise CommandError(f"--addr {address.host}:{address.port}: cannot listen: {error.strerror}") from None


def _open_log(path: str, stack: ExitStack) -> int:
    """A descriptor to append to; `-` is standard error."""
    if path == "-":
        return sys.stderr.fileno()
    try:
        return stack.enter_context(open(path, "ab", buffering=0)).fileno()
    except OSError as error:
        raise CommandError(f"--access-log {path}: cannot be opened: {error.strerror}") from None


def _verify(arguments: argparse.Namespace) -> int:
    # Not at the top: no other command needs it.
    from embed import verify

    corpus = verify.read_corpus()
    with _open(arguments) as engine:
        path: Path = arguments.reference or verify.default_path(engine.name)
        if arguments.record:
            reference = verify.record_reference(engine, corpus)
            verify.write_reference(path, reference)
            _print([f"{path}: {len(corpus)} texts, {reference.origin.describe()}"])
            return 0
        reference = verify.read_reference(path)
        verify.check_comparable(reference, path, engine, corpus)
        _note(f"reference {path}: {reference.origin.describe()}")
        verdict = verify.compare(verify.embed_corpus(engine, corpus), engine.dtype, reference, corpus)
    _print(verdict.lines())
    return 0 if verdict.passed else 1


def _doctor(arguments: argparse.Namespace) -> int:
    # Not at the top: no other command needs it.
    from embed.doctor import diagnose

    diagnosis = diagnose()
    _print([orjson.dumps(diagnosis.as_json()).decode()] if arguments.json else diagnosis.lines())
    return 0 if diagnosis.ok else 1


def _print(lines: Iterable[str]) -> None:
    """Writes lines in UTF-8 whatever the locale is, and at once: a reader that has gone is noticed here."""
    sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
    sys.stdout.buffer.flush()


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
