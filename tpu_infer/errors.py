"""The exception tree. Every error a user can cause is one of these, and its text says what to do.

TpuInferError
├── ConfigError              a key of the configuration is unknown, mistyped or out of range
├── ModelError               the model cannot be used
│   ├── ModelNotFoundError       no such file, directory or name
│   ├── ModelFileError           a file is truncated, foreign or contradicts itself
│   ├── UnsupportedModelError    an architecture, tensor type or option that is not known here
│   └── DownloadError            the network or the index failed; nothing half-fetched is kept as whole
├── CacheDirectoryError      a cache directory is missing and cannot be made, or cannot be written
├── MeshError                the mesh does not divide the model, or asks for devices that are not there
├── CapacityError            the device has no room; carries the bytes needed and available
├── RequestError             one request is wrong; carries the parameter's name and a code
│   └── ContextLengthError       the prompt leaves no room for a token
└── EngineError              the service itself failed
    ├── EngineDeadError          the engine stopped; requests are refused
    ├── NonFiniteLogitsError     one row's logits are not numbers; that request alone fails
    └── CompileAfterReadyError   a program was compiled while serving
"""


class TpuInferError(Exception):
    """Root of the tree; its text is safe to show to the operator."""


class ConfigError(TpuInferError):
    """A configuration key is unknown, has the wrong type or is out of range."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


class ModelError(TpuInferError):
    """The model cannot be used."""


class ModelNotFoundError(ModelError):
    """No such file, directory or name."""


class ModelFileError(ModelError):
    """A model file is truncated, foreign or contradicts itself; the text names the file."""


class UnsupportedModelError(ModelError):
    """An architecture, tensor type or option that is not known here; the text lists what is."""


class DownloadError(ModelError):
    """The network or the index failed."""


class CacheDirectoryError(TpuInferError):
    """A cache directory cannot be made or written."""


class MeshError(TpuInferError):
    """The mesh does not divide the model, or asks for devices that are not there."""


class CapacityError(TpuInferError):
    """The device has no room. `needed_bytes` and `available_bytes` are per device."""

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class RequestError(TpuInferError):
    """One request is wrong. `param` is the field at fault, `code` a stable machine-readable word."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """The prompt (with the tokens asked for) does not fit the model's context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class EngineError(TpuInferError):
    """The service itself failed."""


class EngineDeadError(EngineError):
    """The engine has stopped; the text says why."""


class NonFiniteLogitsError(EngineError):
    """A row's logits were not finite; only that request fails."""


class CompileAfterReadyError(EngineError):
    """A program was compiled after the service said that it was ready."""
