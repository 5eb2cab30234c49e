"""Kernel sources: where they are, and everything that a kernel's text reaches."""

import re
from dataclasses import dataclass
from pathlib import Path

from gkd.errors import CompileError

# Quoted only: <cusim_ptx.h> is for the CPU emulator, and no header of CUDA is included at all.
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A kernel's text and its headers, read once: what is hashed is what is compiled."""

    name: str
    """The kernel's: it was read from <name>.cu."""
    text: str
    headers: tuple[tuple[str, str], ...]
    """(name, text) of each header reachable from the text, sorted; named from the kernels' directory, as included."""

    def write(self, directory: Path) -> Path:
        """Writes kernel.cu, which it returns, and the headers into a directory. Raises OSError."""
        for header, text in self.headers:
            path = directory / header
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        path = directory / "kernel.cu"
        path.write_text(self.text, encoding="utf-8")
        return path


def kernels_directory() -> Path:
    """gkd/kernels in an installed wheel, else kernels beside gkd in a checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "kernels"
    return installed if installed.is_dir() else package.parent / "kernels"


def read_kernel(name: str, directory: Path) -> KernelSource:
    """<name>.cu and the headers it reaches. Raises CompileError if the kernel cannot be read.

    A header that is not there is left out: the compiler then reports it at its line.
    """
    try:
        text = (directory / f"{name}.cu").read_text(encoding="utf-8")
        headers: dict[str, str] = {}
        unread = [text]
        while unread:
            for header in _INCLUDE.findall(unread.pop()):
                if header not in headers and (directory / header).is_file():
                    headers[header] = (directory / header).read_text(encoding="utf-8")
                    unread.append(headers[header])
    except (OSError, UnicodeDecodeError) as error:
        raise CompileError(f"kernel `{name}`: its source cannot be read: {error}; install gkd-engines anew") from error
    return KernelSource(name, text, tuple(sorted(headers.items())))
