"""What gkd raises.

GkdError
├── ShapeError    a tensor's shape does not fit the operator
├── DtypeError    a tensor's dtype does not fit the operator
└── DeviceError   a device or a precision that was asked for cannot be used here
"""


class GkdError(Exception):
    """Base of everything that gkd raises on purpose."""


class ShapeError(GkdError):
    """A tensor's shape does not fit the operator; nothing was computed."""


class DtypeError(GkdError):
    """A tensor's dtype does not fit the operator; nothing was computed."""


class DeviceError(GkdError):
    """A device or a precision that was asked for cannot be used here."""
