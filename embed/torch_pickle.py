"""What the pickle in a PyTorch file says about its tensors.

A pickle is a program that may call whatever it names. Here only the instructions are known that a file of tensors
consists of, the few names in them are data, and nothing is ever imported or called: there is no path from a file to
code. The standard library's unpickler with a `find_class` of ours would also refuse names, but its own machine trusts
lengths and indices: five bytes make it allocate gigabytes, and a tuple nested deeply enough ends the process.
"""

import pickle
import pickletools
import struct
from dataclasses import dataclass
from typing import Any, NoReturn

from embed.errors import WeightsError
from embed.stored import MAX_DIMENSIONS, quoted

_ORDERED_DICT = "collections.OrderedDict"
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"
_REBUILD_PARAMETER = "torch._utils._rebuild_parameter"
_STORAGE_TYPES = {
    "torch.FloatStorage": "F32",
    "torch.HalfStorage": "F16",
    "torch.BFloat16Storage": "BF16",
    "torch.DoubleStorage": "F64",
    "torch.LongStorage": "I64",
    "torch.IntStorage": "I32",
    "torch.ShortStorage": "I16",
    "torch.CharStorage": "I8",
    "torch.ByteStorage": "U8",
    "torch.BoolStorage": "BOOL",
}
_KNOWN_NAMES = {_ORDERED_DICT, _REBUILD_TENSOR, _REBUILD_PARAMETER, *_STORAGE_TYPES}

# Instructions by what they do; the numbers behind them in struct's notation.
_CONSTANTS: dict[bytes, Any] = {pickle.NONE: None, pickle.NEWTRUE: True, pickle.NEWFALSE: False, pickle.EMPTY_TUPLE: ()}
_NUMBERS = {pickle.BININT: "<i", pickle.BININT1: "<B", pickle.BININT2: "<H", pickle.BINFLOAT: ">d"}
_TEXTS = {pickle.SHORT_BINUNICODE: "<B", pickle.BINUNICODE: "<I", pickle.BINUNICODE8: "<Q"}
_PUTS = {pickle.BINPUT: "<B", pickle.LONG_BINPUT: "<I"}
_GETS = {pickle.BINGET: "<B", pickle.LONG_BINGET: "<I"}
_TUPLES = {pickle.TUPLE1: 1, pickle.TUPLE2: 2, pickle.TUPLE3: 3}

_INSTRUCTION_NAMES = {opcode.code: opcode.name for opcode in pickletools.opcodes}

_MAX_PROTOCOL = 5


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """A run of elements that tensors are windows of."""

    dtype: str
    """As safetensors names it."""
    key: str
    """Names the entry of the file that holds it."""
    num_elements: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A window of a storage, as it is said to be: whether the storage has such a window is not known here.

    Offset and strides are in elements; all numbers are integers of 64 bits, with a sign.
    """

    storage: PickledStorage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Name:
    """What stands for a function or a class."""

    qualified: str


def read_pickle(content: bytes, file: str) -> dict[str, PickledTensor]:
    """The tensors of a pickled state_dict, by name; WeightsError, which begins with `file`, for anything else."""
    machine = _Machine(content, file)
    try:
        result = machine.run()
    except (IndexError, KeyError, struct.error, UnicodeDecodeError):
        machine.fail("is damaged")
    if not isinstance(result, dict):
        raise WeightsError(f"{file}: holds {_kind(result)}, expected tensors by name, a state_dict")
    for name, value in result.items():
        if not isinstance(value, PickledTensor):
            raise WeightsError(
                f"{file}: {quoted(name)} is {_kind(value)}, expected a tensor: save the state_dict alone"
            )
    return result


def _kind(value: Any) -> str:
    return "tensor" if isinstance(value, PickledTensor) else type(value).__name__.lstrip("_").lower()


class _Machine:
    """Runs the instructions over a stack of plain values. Loops over the input once, and never recurses."""

    def __init__(self, content: bytes, file: str) -> None:
        self._content = content
        self._file = file
        self._position = 0
        self._stack: list[Any] = []
        self._below_marks: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def fail(self, problem: str) -> NoReturn:
        raise WeightsError(f"{self._file}: its pickle {problem}, before byte {self._position} of {len(self._content)}")

    def run(self) -> Any:
        while (instruction := self._take(1)) != pickle.STOP:
            if instruction in _CONSTANTS:
                self._stack.append(_CONSTANTS[instruction])
            elif instruction in _NUMBERS:
                self._stack.append(self._number(_NUMBERS[instruction]))
            elif instruction in _TEXTS:
                self._stack.append(self._take(self._number(_TEXTS[instruction])).decode())
            elif instruction in _PUTS:
                self._memo[self._number(_PUTS[instruction])] = self._stack[-1]
            elif instruction in _GETS:
                self._stack.append(self._memo[self._number(_GETS[instruction])])
            elif instruction in _TUPLES:
                items = [self._stack.pop() for _ in range(_TUPLES[instruction])]
                self._stack.append(tuple(reversed(items)))
            else:
                self._step(instruction)
        return self._stack.pop()

    def _step(self, instruction: bytes) -> None:
        match instruction:
            case pickle.PROTO:
                if self._number("<B") > _MAX_PROTOCOL:
                    self.fail("is of an unknown protocol")
            case pickle.FRAME:
                self._take(8)  # a hint for reading ahead
            case pickle.MEMOIZE:
                self._memo[len(self._memo)] = self._stack[-1]
            case pickle.LONG1:
                self._stack.append(int.from_bytes(self._take(self._number("<B")), "little", signed=True))
            case pickle.EMPTY_DICT:
                self._stack.append({})
            case pickle.MARK:
                self._below_marks.append(self._stack)
                self._stack = []
            case pickle.TUPLE:
                items = self._pop_to_mark()
                self._stack.append(tuple(items))
            case pickle.SETITEM:
                value, key = self._stack.pop(), self._stack.pop()
                self._set_items([key, value])
            case pickle.SETITEMS:
                self._set_items(self._pop_to_mark())
            case pickle.GLOBAL:
                module, name = self._line(), self._line()
                self._push_name(module, name)
            case pickle.STACK_GLOBAL:
                name, module = self._stack.pop(), self._stack.pop()
                self._push_name(module, name)
            case pickle.BINPERSID:
                self._stack.append(self._storage(self._stack.pop()))
            case pickle.REDUCE:
                arguments, function = self._stack.pop(), self._stack.pop()
                self._stack.append(self._call(function, arguments))
            case pickle.BUILD:
                self._check_state(self._stack.pop(), self._stack[-1])
            case _:
                shown = _INSTRUCTION_NAMES.get(instruction.decode("latin-1"), instruction.hex())
                self.fail(f"has the instruction {shown}, which no file of tensors needs: refused, and not run")

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > len(self._content) - self._position:
            self.fail("is cut short")
        start = self._position
        self._position += num_bytes
        return self._content[start : self._position]

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return value

    def _line(self) -> str:
        end = self._content.find(b"\n", self._position)
        if end < 0:
            self.fail("is cut short")
        line = self._take(end - self._position).decode()
        self._take(1)
        return line

    def _pop_to_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below_marks.pop()
        return items

    def _push_name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            self.fail("is damaged")
        qualified = f"{module}.{name}"
        if qualified not in _KNOWN_NAMES:
            self.fail(f"names {quoted(qualified)}, which no file of tensors needs: refused, and not run")
        self._stack.append(_Name(qualified))

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        keys, values = items[::2], items[1::2]
        if not isinstance(target, dict) or len(keys) != len(values) or not all(isinstance(key, str) for key in keys):
            self.fail("has a mapping that is not from names")
        for key, value in zip(keys, values, strict=True):
            if key in target:
                self.fail(f"has {quoted(key)} twice")
            target[key] = value

    def _storage(self, persistent: Any) -> PickledStorage:
        match persistent:
            case ("storage", _Name(kind), str(key), str(), int(count)) if kind in _STORAGE_TYPES and _is_integer(count):
                return PickledStorage(_STORAGE_TYPES[kind], key, count)
            case _:
                self.fail("refers to something outside it that is no storage of a known type")

    def _call(self, function: Any, arguments: Any) -> Any:
        match function, arguments:
            case _Name(qualified=name), () if name == _ORDERED_DICT:
                return {}
            case _Name(qualified=name), (PickledTensor() as tensor, bool(), hooks) if name == _REBUILD_PARAMETER:
                if not hooks:
                    return tensor
            case _Name(qualified=name), (
                PickledStorage() as storage,
                offset,
                tuple() as shape,
                tuple() as strides,
                bool(),
                hooks,
                *metadata,
            ) if name == _REBUILD_TENSOR:
                # `metadata` marks a tensor whose values are another's, negated or conjugated.
                numbers = all(map(_is_integer, (offset, *shape, *strides)))
                short = len(shape) <= MAX_DIMENSIONS and len(strides) <= MAX_DIMENSIONS
                if numbers and short and not hooks and len(metadata) <= 1 and not any(metadata):
                    return PickledTensor(storage, offset, shape, strides)
        shown = quoted(function.qualified) if isinstance(function, _Name) else _kind(function)
        self.fail(f"calls {shown} in a way that makes no tensor: refused, and not run")

    def _check_state(self, state: Any, target: Any) -> None:
        # Versions of the modules: of no use here, but in every state_dict.
        if not isinstance(target, dict) or not isinstance(state, dict) or not state.keys() <= {"_metadata"}:
            self.fail(f"changes {_kind(target)} in a way that no file of tensors needs: refused, and not run")


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63
