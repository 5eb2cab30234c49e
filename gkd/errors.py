"""What gkd raises.

GkdError
├── ShapeError    a tensor's shape does not fit the operator
├── DtypeError    a tensor's dtype does not fit the operator
├── CompileError  a kernel could not be compiled
├── EnvError      an environment variable's value means nothing
├── DeviceError   a device or a precision that was asked for cannot be used here
└── DriverError       a call to the CUDA driver failed
    └── OutOfMemory       for want of device memory
"""


class GkdError(Exception):
    """Base of everything that gkd raises on purpose."""


class ShapeError(GkdError):
    """A tensor's shape does not fit the operator; nothing was computed."""


class DtypeError(GkdError):
    """A tensor's dtype does not fit the operator; nothing was computed."""


class DeviceError(GkdError):
    """A device or a precision that was asked for cannot be used here."""


class CompileError(GkdError):
    """A kernel could not be compiled; the message holds the compiler's log, the options and a copy of the source."""


class EnvError(GkdError):
    """An environment variable's value means nothing."""


class DriverError(GkdError):
    """A call to the CUDA driver failed; but for OutOfMemory, the context may be lost."""


class OutOfMemory(DriverError):
    """The device's memory does not suffice."""
