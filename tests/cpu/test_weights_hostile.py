"""Weights files that are cut short, that lie or that attack end in one line, and run, take or read nothing else."""

import builtins
import io
import json
import os
import pickle
import random
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save

from embed import WeightsError
from embed.checkpoint import Checkpoint
from embed.stored import FLOAT_TYPES, ITEM_BYTES

STATE = {
    "encoder.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "encoder.bias": torch.arange(4, dtype=torch.bfloat16),
    "encoder.turned": torch.arange(6, dtype=torch.float16).reshape(2, 3).T,
    "position_ids": torch.arange(5)[None],
}


def saved(state: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer, **options)
    return buffer.getvalue()


def read(path: Path) -> Checkpoint | str:
    """The checkpoint, whose tensors all lie in their file and can be looked at, or the message of its refusal."""
    try:
        checkpoint = Checkpoint(path, keep=False)
    except WeightsError as error:
        message = str(error)
        assert message.isprintable() and len(message) < 10_000, message
        assert path.name in message or "shard" in message
        return message
    for tensor in checkpoint.tensors.values():
        size = (path.parent / tensor.file).stat().st_size
        assert 0 <= tensor.start <= tensor.start + (tensor.num_bytes if tensor.strides is None else 0) <= size
        assert tensor.num_bytes <= size
        if tensor.dtype in ITEM_BYTES:
            assert tensor.num_bytes == ITEM_BYTES[tensor.dtype] * np.prod(tensor.shape, dtype=object)
        if tensor.dtype in FLOAT_TYPES:
            assert checkpoint.view(tensor).shape == tensor.shape
            checkpoint.view(tensor).tobytes()
    return checkpoint


def refusal(path: Path) -> str:
    result = read(path)
    assert isinstance(result, str), f"it was read: {result.tensors}"
    return result


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
        assert peak <= num_bytes
    finally:
        tracemalloc.stop()


# Pickles, put together by hand


def integer(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return pickle.LONG1 + bytes([size]) + value.to_bytes(size, "little", signed=True)


def text(value: str) -> bytes:
    encoded = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def sizes(values: tuple[int, ...]) -> bytes:
    return pickle.MARK + b"".join(map(integer, values)) + pickle.TUPLE


def name(qualified: str) -> bytes:
    module, _, attribute = qualified.rpartition(".")
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def storage(kind: str = "torch.FloatStorage", key: str = "0", count: int = 12) -> bytes:
    parts = text("storage") + name(kind) + text(key) + text("cpu") + integer(count)
    return pickle.MARK + parts + pickle.TUPLE + pickle.BINPERSID


HOOKS = name("collections.OrderedDict") + pickle.EMPTY_TUPLE + pickle.REDUCE


def tensor(
    of: bytes | None = None,
    offset: int = 0,
    shape: tuple[int, ...] = (3, 4),
    strides: tuple[int, ...] = (4, 1),
    rest: bytes = pickle.NEWFALSE + HOOKS,
) -> bytes:
    arguments = (storage() if of is None else of) + integer(offset) + sizes(shape) + sizes(strides) + rest
    return name("torch._utils._rebuild_tensor_v2") + pickle.MARK + arguments + pickle.TUPLE + pickle.REDUCE


def state(value: bytes, key: str = "w") -> bytes:
    return b"\x80\x02" + pickle.EMPTY_DICT + text(key) + value + pickle.SETITEM + pickle.STOP


def archive(content: bytes, entries: dict[str, bytes] | None = None, compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as target:
        target.writestr("x/data.pkl", content)
        for entry, value in ({"x/data/0": bytes(48)} if entries is None else entries).items():
            target.writestr(entry, value)
    return buffer.getvalue()


def test_what_is_put_together_here_is_read(tmp_path: Path) -> None:
    """So that what the cases below change is why they are refused."""
    entries = {"x/data/0": bytes(48), "x/version": b"3\n"}
    (tmp_path / "x.bin").write_bytes(archive(state(tensor()), entries))
    result = read(tmp_path / "x.bin")
    assert isinstance(result, Checkpoint) and result.tensors["w"].shape == (3, 4)
    loaded = torch.load(tmp_path / "x.bin", weights_only=True)
    assert torch.equal(loaded["w"], torch.zeros(3, 4))


class Call:
    """Pickled, it calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("call", "shown"),
    [
        (Call(os.system, "touch ran"), "system"),
        (Call(builtins.eval, "open('ran', 'w')"), "eval"),
        (Call(os.mkdir, "ran"), "mkdir"),
    ],
    ids=["os.system", "eval", "mkdir"],
)
def test_code_is_named_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, shown: str, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (call, {"w": call}, {call: 1}):
        pickled = pickle.dumps(content, protocol)
        (tmp_path / "x.bin").write_bytes(archive(pickled))
        message = refusal(tmp_path / "x.bin")
        # Protocols 0 and 1 begin with what torch.save never writes.
        assert ("refused, and not run" in message and shown in message) or protocol < 2
    assert not (tmp_path / "ran").exists()


GLOBALS = ["os.system", "posix.system", "builtins.eval", "builtins.exec", "subprocess.Popen", "torch.load"]
GLOBALS += ["torch._utils._rebuild_tensor", "torch.storage._load_from_bytes", "collections.Counter", "pickle.loads"]


@pytest.mark.parametrize("qualified", GLOBALS)
def test_names_are_refused_wherever_they_stand(tmp_path: Path, qualified: str) -> None:
    path = tmp_path / "x.bin"
    module, _, attribute = qualified.rpartition(".")
    stacked = text(module) + text(attribute) + pickle.STACK_GLOBAL
    for code in (name(qualified), stacked):
        for content in (
            b"\x80\x02" + code + pickle.STOP,
            state(code),
            state(tensor(of=code)),
            state(tensor(rest=pickle.NEWFALSE + code)),
            state(code + pickle.EMPTY_TUPLE + pickle.REDUCE),
            b"\x80\x02" + HOOKS + code + pickle.BUILD + pickle.STOP,
        ):
            path.write_bytes(archive(content))
            assert f"names `{qualified}`, which no file of tensors needs: refused, and not run" in refusal(path)


# Enough for the C stack of what recurses, as the hash and the comparison of tuples do.
DEPTH = 200_000

BAD_PICKLES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is cut short"),
    "no end": (state(tensor())[:-1], "is cut short"),
    "an unknown protocol": (b"\x80\x06N.", "is of an unknown protocol"),
    "an unknown instruction": (b"\x80\x02\xff.", "has the instruction ff"),
    "inst": (b"\x80\x02(ios\nsystem\n.", "has the instruction INST"),
    "obj": (b"\x80\x02(" + name("collections.OrderedDict") + b"o.", "has the instruction OBJ"),
    "newobj": (b"\x80\x02" + name("collections.OrderedDict") + b")\x81.", "has the instruction NEWOBJ"),
    "ext": (b"\x80\x02\x82\x01.", "has the instruction EXT1"),
    "persid": (b"\x80\x02P0\n.", "has the instruction PERSID"),
    "bytearray of a terabyte": (b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".", "has the instruction BYTEARRAY8"),
    "text of a terabyte": (b"\x80\x04\x8d" + struct.pack("<Q", 1 << 40) + b".", "is cut short"),
    "memo of four thousand million": (state(tensor() + b"r\xff\xff\xff\xff" + b"j\xfe\xff\xff\xff"), "is damaged"),
    "a memo that is not there": (state(b"h\x07"), "is damaged"),
    "nothing on the stack": (b"\x80\x02R.", "is damaged"),
    "no mark": (b"\x80\x02t.", "is damaged"),
    "a stack below the mark": (b"\x80\x02}X\1\0\0\0w(s.", "is damaged"),
    "text that is not UTF-8": (b"\x80\x02X\1\0\0\0\xff.", "is damaged"),
    "a name that is no text": (b"\x80\x02NN\x93.", "is damaged"),
    "a name over two lines": (b"\x80\x02" + text("os\nx") + text("system\x1b[0m") + b"\x93.", r"`os\nx.system\x1b[0m`"),
    "a long name": (b"\x80\x02c" + b"a" * 100_000 + b"\nb\n.", "`" + "a" * 200 + "...`"),
    "no state": (b"\x80\x02N.", "holds nonetype, expected tensors by name"),
    "a number": (state(b"K\x07"), "`w` is int, expected a tensor"),
    "a function": (state(name("torch.FloatStorage")), "`w` is name, expected a tensor"),
    "a storage": (state(storage()), "`w` is pickledstorage, expected a tensor"),
    "a name twice": (b"\x80\x02}" + (text("w") + tensor() + b"s") * 2 + b".", "has `w` twice"),
    "itself": (b"\x80\x02}q\0" + text("w") + b"h\0s.", "`w` is dict"),
    "a mapping from tuples": (b"\x80\x02})K\1s.", "not from names"),
    "half an item": (b"\x80\x02}(" + text("w") + b"u.", "not from names"),
    "items of no mapping": (b"\x80\x02N" + text("w") + b"Ns.", "not from names"),
    "a call of a storage type": (state(name("torch.FloatStorage") + b")R"), "calls `torch.FloatStorage`"),
    "a call of a tensor": (state(tensor() + b")R"), "calls tensor"),
    "a call of a number": (state(b"K\1)R"), "calls int"),
    "a call with no tuple": (state(name("collections.OrderedDict") + b"NR"), "calls `collections.OrderedDict`"),
    "a filled OrderedDict": (state(name("collections.OrderedDict") + b"K\1\x85R"), "calls `collections.OrderedDict`"),
    "a tensor of nothing": (state(name("torch._utils._rebuild_tensor_v2") + b")R"), "makes no tensor"),
    "a parameter of a number": (
        state(name("torch._utils._rebuild_parameter") + b"K\1\x88" + HOOKS + b"\x87R"),
        "calls `torch._utils._rebuild_parameter`",
    ),
    "hooks": (state(tensor(rest=b"\x89K\1")), "makes no tensor"),
    "a conjugate": (state(tensor(rest=b"\x89" + HOOKS + b"}" + text("conj") + b"\x88s")), "makes no tensor"),
    "too many arguments": (state(tensor(rest=b"\x89" + HOOKS + b"NN")), "makes no tensor"),
    "a state of a tensor": (state(tensor() + b"}b"), "changes tensor"),
    "a state of a function": (state(name("torch._utils._rebuild_parameter") + b"}b"), "changes name"),
    "a state with slots": (b"\x80\x02" + HOOKS + b"N}\x86b.", "changes dict"),
    "a state of other attributes": (b"\x80\x02" + HOOKS + b"}" + text("items") + b"Nsb.", "changes dict"),
    "a persistent number": (state(b"K\1Q"), "no storage of a known type"),
    "a persistent name": (state(storage(kind="collections.OrderedDict")), "no storage of a known type"),
    "a storage of a negative size": (state(tensor(storage(count=-12))), "has 48 bytes, expected -12 times 4"),
    "a storage of a true size": (
        state(b"(" + text("storage") + name("torch.FloatStorage") + text("0") + text("cpu") + b"\x88tQ"),
        "no storage of a known type",
    ),
    "a storage of a gigantic size": (state(tensor(storage(count=1 << 62))), "has 48 bytes, expected"),
    "a storage of an endless size": (state(tensor(storage(count=1 << 2000))), "no storage of a known type"),
    "another type": (state(tensor(storage("torch.DoubleStorage"))), "has 48 bytes, expected 12 times 8"),
    "a key that leads away": (state(tensor(storage(key="../data.pkl"))), "storage `../data.pkl`, which the file lacks"),
    "an absolute key": (state(tensor(storage(key="/etc/passwd"))), "storage `/etc/passwd`, which the file lacks"),
    "another key": (state(tensor(storage(key="1"))), "storage `1`, which the file lacks"),
    "a key in other digits": (state(tensor(storage(key="٠"))), "which the file lacks"),
    "a negative offset": (state(tensor(offset=-1)), "`w` is malformed"),
    "an offset": (state(tensor(offset=1)), "is no part of its storage, which has 12 elements"),
    "a gigantic offset": (state(tensor(offset=1 << 62)), "is no part of its storage"),
    "an endless offset": (state(tensor(offset=1 << 2000)), "makes no tensor"),
    "negative strides": (state(tensor(offset=11, strides=(-4, -1))), "`w` is malformed"),
    "a negative size": (state(tensor(shape=(-3, -4))), "`w` is malformed"),
    "gigantic strides": (state(tensor(strides=(1 << 61, 1))), "is no part of its storage"),
    "a gigantic shape": (state(tensor(shape=(1 << 31, 1 << 31))), "is no part of its storage"),
    "a gigantic shape of one value": (state(tensor(shape=(1 << 40,), strides=(0,))), "is no part of its storage"),
    "a gigantic shape of nothing": (state(tensor(shape=(0, 1 << 62), strides=(1, 1))), "is no part of its storage"),
    "nothing from behind the end": (state(tensor(offset=13, shape=(0,), strides=(1,))), "is no part of its storage"),
    "fewer strides": (state(tensor(strides=(1,))), "`w` is malformed"),
    "many dimensions": (state(tensor(shape=(1,) * 33, strides=(1,) * 33)), "makes no tensor"),
    "deep tuples": (state(b"N" + b"\x85" * DEPTH), "`w` is tuple"),
    "a deep key": (b"\x80\x02}N" + b"\x85" * DEPTH + b"Ns.", "not from names"),
    "deep marks": (b"\x80\x02" + b"(" * DEPTH + b".", "is damaged"),
    "a deep number": (state(tensor() + b"N" + b"\x85" * DEPTH + b"R"), "calls tensor"),
    "a pickle of megabytes": (b"\x80\x02" + b"N" * (1 << 20) + b".", "`data.pkl` has 1048579 bytes"),
}


@pytest.mark.parametrize("case", BAD_PICKLES)
def test_a_pickle_that_says_something_else_is_refused(tmp_path: Path, case: str) -> None:
    content, message = BAD_PICKLES[case]
    (tmp_path / "x.bin").write_bytes(archive(content))
    with nullcontext() if "deep" in case else at_most(8 << 20):
        assert message in refusal(tmp_path / "x.bin")


# Zips


def patch(content: bytes, mark: bytes, at: int, form: str, *values: int) -> bytes:
    """Overwrites fields of each record that begins with `mark`."""
    result, position = bytearray(content), content.find(mark)
    assert position >= 0
    while position >= 0:
        struct.pack_into(form, result, position + at, *values)
        position = content.find(mark, position + 1)
    return bytes(result)


CENTRAL, END = b"PK\1\2", b"PK\5\6"
GOOD = archive(state(tensor()))


def overlapping() -> bytes:
    """Both entries of the directory have the place of the first."""
    return patch(GOOD, CENTRAL, 42, "<I", 0)


def renamed(old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new)
    return GOOD.replace(old, new)


BAD_ZIPS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "neither a zip nor a pickle"),
    "an empty zip": (archive(b"")[-22:], "neither a zip"),
    "only a beginning": (GOOD[:40], "a zip without a whole directory"),
    "cut short": (GOOD[:-30], "a zip without a whole directory"),
    "no directory": (GOOD[:-22] + END + bytes(18), "a zip with 0 entries `data.pkl`"),
    "a directory of gigabytes": (patch(GOOD, END, 12, "<II", 0xFFFFFFF0, 0), "a zip without a whole directory"),
    "compressed": (archive(state(tensor()), compression=zipfile.ZIP_DEFLATED), "is compressed or encrypted"),
    "encrypted": (patch(GOOD, CENTRAL, 8, "<H", 1), "is compressed or encrypted"),
    "an unknown version": (patch(GOOD, CENTRAL, 6, "<B", 99), "a zip without a whole directory"),
    "overlapping": (overlapping(), "overlap"),
    "sizes that differ": (patch(GOOD, CENTRAL, 20, "<II", 48, 4 << 20), "ends at byte"),
    "gigantic sizes": (patch(GOOD, CENTRAL, 20, "<II", 0xFFFFFFF0, 0xFFFFFFF0), "cut short or damaged"),
    "gigantic offsets": (patch(GOOD, CENTRAL, 42, "<I", 0xFFFFFFF0), "where none does"),
    "zip64 sizes that are not there": (patch(GOOD, CENTRAL, 20, "<II", 0xFFFFFFFF, 0xFFFFFFFF), "cut short or damaged"),
    "no pickle": (renamed(b"x/data.pkl", b"x/data.pkx"), "a zip with 0 entries `data.pkl`"),
    "two pickles": (archive(state(tensor()), {"y/data.pkl": b"."}), "a zip with 2 entries `data.pkl`"),
    "one name twice": (renamed(b"x/data/0", b"x/data\x000"), "which the file lacks"),
    "big-endian": (archive(state(tensor()), {"x/data/0": bytes(48), "x/byteorder": b"big"}), "is not `little`"),
    "a strange order": (archive(state(tensor()), {"x/data/0": bytes(48), "x/byteorder": b""}), "is not `little`"),
    "too short a storage": (archive(state(tensor()), {"x/data/0": bytes(47)}), "has 47 bytes, expected 12 times 4"),
    "too long a storage": (archive(state(tensor()), {"x/data/0": bytes(52)}), "has 52 bytes, expected 12 times 4"),
    "no storage": (archive(state(tensor()), {}), "storage `0`, which the file lacks"),
    "a storage beside": (archive(state(tensor()), {"x/data/../0": bytes(48)}), "storage `0`, which the file lacks"),
    "a storage elsewhere": (
        archive(state(tensor(storage(key="../0"))), {"x/data/../0": bytes(48)}),
        "storage `../0`, which the file lacks",
    ),
    "a tar": (bytes(257) + b"ustar" + bytes(300), "in the form of PyTorch before 1.6"),
    "a pickle": (pickle.dumps({}), "in the form of PyTorch before 1.6"),
    "a safetensors file": (save({"w": np.zeros(3)}), "neither a zip nor a pickle"),
}


@pytest.mark.parametrize("case", BAD_ZIPS)
def test_a_zip_that_is_not_as_torch_writes_it_is_refused(tmp_path: Path, case: str) -> None:
    content, message = BAD_ZIPS[case]
    (tmp_path / "x.bin").write_bytes(content)
    with at_most(4 << 20):
        assert message in refusal(tmp_path / "x.bin")


def test_two_entries_of_one_name(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        content = io.BytesIO(GOOD)
        with zipfile.ZipFile(content, "a") as target:
            target.writestr("x/data/0", bytes(48))
    (tmp_path / "x.bin").write_bytes(content.getvalue())
    assert "two entries of the same name" in refusal(tmp_path / "x.bin")


def test_a_zip_of_the_form_for_large_files(tmp_path: Path) -> None:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as target:
        for entry, value in (("x/data.pkl", state(tensor())), ("x/data/0", np.arange(12, dtype="<f4").tobytes())):
            with target.open(entry, "w", force_zip64=True) as file:
                file.write(value)
    (tmp_path / "x.bin").write_bytes(content.getvalue())
    result = read(tmp_path / "x.bin")
    assert isinstance(result, Checkpoint)
    assert np.array_equal(result.view(result.tensors["w"]), np.arange(12).reshape(3, 4))


def test_a_pipe_or_a_directory_is_no_file(tmp_path: Path) -> None:
    for file in ("x.bin", "x.safetensors", "x.safetensors.index.json"):
        os.mkfifo(tmp_path / file)
        assert refusal(tmp_path / file) == f"{file}: not a file that holds bytes"
        (tmp_path / file).unlink()
        (tmp_path / file).mkdir()
        assert refusal(tmp_path / file) == f"{file}: not a file that holds bytes"


# safetensors


def safetensors(header: Any, data: bytes = bytes(48)) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def entry(dtype: Any = "F32", shape: Any = (3, 4), begin: Any = 0, end: Any = 48) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BAD_HEADERS: dict[str, tuple[bytes, str]] = {
    "overlap": (safetensors({"a": entry(), "b": entry()}), "`b` begins at byte"),
    "half overlap": (safetensors({"a": entry(), "b": entry(shape=[6], begin=24)}), "`b` begins at byte"),
    "a hole": (safetensors({"a": entry(shape=[3], end=12), "b": entry(shape=[6], begin=24)}), "`b` begins at byte"),
    "a hole before": (safetensors({"a": entry(shape=[9], begin=12)}), "`a` begins at byte"),
    "a rest": (safetensors({"a": entry()}, bytes(49)), "the last tensor ends at byte"),
    "no tensor": (safetensors({}), "the last tensor ends at byte"),
    "a name twice": (safetensors(b'{"a": {}, "a": {}}'), "the header has `a` twice"),
    "a key twice": (safetensors(b'{"a": {"dtype": "F32", "dtype": "I8"}}'), "the header has `dtype` twice"),
    "a size of 2^70": (safetensors({"a": entry(shape=[0, 1 << 70])}), "`a` is malformed"),
    "gigantic sizes of nothing": (safetensors({"a": entry(shape=[0, 1 << 40, 1 << 40], end=0)}, b""), "its entry says"),
    "an end of 5000 digits": (safetensors(b'{"a": {"shape": [' + b"9" * 5000 + b"]}}"), "not valid JSON"),
    "many dimensions": (safetensors({"a": entry(shape=[1] * 40)}), "`a` is malformed"),
    "text as shape": (safetensors({"a": entry(shape="34")}), "`a` is malformed"),
    "truth as shape": (safetensors({"a": entry(shape=[True])}), "`a` is malformed"),
    "a fraction": (safetensors({"a": entry(end=48.0)}), "`a` is malformed"),
    "no type": (safetensors({"a": entry(dtype=None)}), "`a` is malformed"),
    "a list": (safetensors({"a": [1, 2, 3]}), "`a` is malformed"),
    "a name over two lines": (safetensors({"a\nb\ud800": 1}), r"`a\nb\ud800` is malformed"),
    "a long name": (safetensors({"a" * 100_000: 1}), "`" + "a" * 200 + "...` is malformed"),
    "depth": (safetensors(b'{"a":' * 100_000), "not valid JSON"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_safetensors_header_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    content, message = BAD_HEADERS[case]
    (tmp_path / "x.safetensors").write_bytes(content)
    assert message in refusal(tmp_path / "x.safetensors")


# Anything at all


def mutated(content: bytes, rng: random.Random) -> bytes:
    """A few bytes, bits, numbers or stretches of it are others."""
    result = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(result) + 1)
        match rng.randrange(7):
            case 0:
                result[at : at + 1] = bytes([rng.randrange(256)])
            case 1 if at < len(result):
                result[at] ^= 1 << rng.randrange(8)
            case 2:
                del result[at : at + rng.choice((1, 2, 8, 50))]
            case 3:
                result[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case 4:
                size = rng.choice((2, 4, 8))
                number = rng.choice((0, 1, (1 << 8 * size - 1) - 1, 1 << 8 * size - 1, (1 << 8 * size) - 1))
                result[at : at + size] = number.to_bytes(size, "little")
            case 5:
                begin = rng.randrange(len(result) + 1)
                result[at:at] = result[begin : begin + rng.choice((1, 4, 20))]
            case 6 if rng.random() < 0.3:
                del result[at:]
    return bytes(result)


def mutated_json(value: Any, rng: random.Random) -> Any:
    """A JSON value with one of the values in it, or a name, another."""
    others: tuple[Any, ...] = (None, True, -1, 0, 1 << 63, 1e30, "", "F32", "BF16", "../x", [], {}, [[]], {"a": 1})
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        changed = mutated_json(value[key], rng)
        return {k: v for k, v in value.items() if k != key} | {rng.choice((key, key, key, "new")): changed}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        return [*value[:at], mutated_json(value[at], rng), *value[at + 1 :]]
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 4, 1 << 40))
    return rng.choice(others)


def test_mutations_of_a_safetensors_file(tmp_path: Path) -> None:
    rng, path = random.Random(1), tmp_path / "x.safetensors"
    arrays: dict[str, Any] = {
        "a": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b": np.ones(4, np.float16),
        "c": np.arange(3),
    }
    good = save(arrays)
    (length,) = struct.unpack_from("<Q", good)
    header = json.loads(good[8 : 8 + length])
    messages = set()
    for idx in range(600):
        if idx % 2:
            path.write_bytes(mutated(good, rng))
        else:
            path.write_bytes(safetensors(mutated_json(header, rng), good[8 + length :]))
        result = read(path)
        messages.add(result if isinstance(result, str) else "read")
    assert "read" in messages and len(messages) > 50


def test_mutations_of_an_index(tmp_path: Path) -> None:
    rng, path = random.Random(2), tmp_path / "shards.safetensors.index.json"
    weight_map: dict[str, str] = {}
    for shard in ("shard1.safetensors", "shard2.safetensors"):
        arrays = {f"{shard[:6]}.{kind}": np.ones((2, 3), np.float32) for kind in ("weight", "bias")}
        (tmp_path / shard).write_bytes(save(arrays))
        weight_map |= dict.fromkeys(arrays, shard)
    index = {"metadata": {"total_size": 96}, "weight_map": weight_map}
    good = json.dumps(index).encode()
    messages = set()
    for idx in range(400):
        path.write_bytes(mutated(good, rng) if idx % 2 else json.dumps(mutated_json(index, rng)).encode())
        result = read(path)
        if isinstance(result, Checkpoint):
            assert {name: tensor.file for name, tensor in result.tensors.items()} == weight_map
        messages.add(result if isinstance(result, str) else "read")
    assert "read" in messages and len(messages) > 30


def test_mutations_of_a_zip(tmp_path: Path) -> None:
    rng, path, good = random.Random(3), tmp_path / "x.bin", saved(STATE)
    directory = good.index(CENTRAL)
    messages = set()
    for idx in range(600):
        # Most of the bytes are values and padding.
        content = good[:directory] + mutated(good[directory:], rng) if idx % 2 else mutated(good, rng)
        path.write_bytes(content)
        result = read(path)
        messages.add(result if isinstance(result, str) else "read")
    assert "read" in messages and len(messages) > 20


INSTRUCTIONS = [bytes([value]) for value in range(256)]


def mutated_pickle(content: bytes, rng: random.Random) -> bytes:
    """As `mutated`, or with other instructions in it: of those that are known, or any."""
    if rng.random() < 0.4:
        return mutated(content, rng)
    known = [b")", b"}", b"N", b"\x88", b"(", b"t", b"\x85", b"\x86", b"R", b"b", b"s", b"u", b"Q", b"h\x03", b"q\x07"]
    known += [integer(-1), integer(1 << 40), text("w"), name("os.system"), name("torch.HalfStorage"), HOOKS, tensor()]
    at = rng.randrange(len(content))
    return content[:at] + rng.choice(rng.choice((known, INSTRUCTIONS))) + content[at + rng.randrange(2) :]


@pytest.mark.parametrize("protocol", [2, 4])
def test_mutations_of_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    """What is still read is what torch reads in it, where torch does."""
    monkeypatch.setattr(os, "system", lambda _: pytest.fail("run"))
    with zipfile.ZipFile(io.BytesIO(saved(STATE, pickle_protocol=protocol))) as source:
        entries = {info.filename: source.read(info) for info in source.infolist()}
    good = entries.pop("archive/data.pkl")
    rng, path = random.Random(protocol), tmp_path / "x.bin"
    messages, compared = set(), 0
    for _ in range(600):
        with zipfile.ZipFile(path, "w") as target:
            target.writestr("archive/data.pkl", mutated_pickle(good, rng))
            for entry_name, value in entries.items():
                target.writestr(entry_name, value)
        result = read(path)
        messages.add(result if isinstance(result, str) else "read")
        if isinstance(result, str):
            continue
        try:
            theirs = torch.load(path, weights_only=True)
        except Exception:
            continue
        assert theirs.keys() == result.tensors.keys()
        for key, tensor in result.tensors.items():
            assert tuple(theirs[key].shape) == tensor.shape
            if tensor.dtype in FLOAT_TYPES:
                values = theirs[key].contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                assert values == result.view(tensor).tobytes()
                compared += 1
    # Of the two, torch's reader without code knows only protocol 2.
    assert (compared > 30 or protocol > 2) and len(messages) > 30
