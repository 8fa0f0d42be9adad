"""Every error a user can cause, with the exit code the process ends with.

Each message has three parts: what is wrong, the values that show it, and what to set instead.
"""


class FsdpTrainerError(Exception):
    """Base of the errors this package raises on purpose; `exit_code` is what the command ends with."""

    exit_code = 1
    heard = False  # another rank's error, raised on this one as well; that rank says it
    labels = ("found", "to fix")

    def __init__(self, what: str, *, values: str = "", fix: str = "") -> None:
        self.what, self.values, self.fix = what, values, fix
        parts = [f"  {label}: {text}" for label, text in zip(self.labels, (values, fix), strict=True) if text]
        super().__init__("\n".join([what, *parts]))

    def headed(self) -> str:
        """Return the message as a terminal shows it."""
        return f"error: {self}"

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: the message says what to do, and the code is not the user's."""
        return f"{type(self).__name__}: {self}".split("\n")


class ConfigError(FsdpTrainerError):
    """A setting is wrong, contradicts another one, or cannot take effect."""

    exit_code = 2


class FolderInUse(ConfigError):
    """Another run holds the lock on output_dir; nothing in it was touched, its status file included."""


class DataError(FsdpTrainerError):
    """A record, a file, a chat template or the tokenizer cannot be used as asked."""

    exit_code = 3


class CheckpointError(FsdpTrainerError):
    """A checkpoint or a model folder is incomplete, damaged, or of another run."""

    exit_code = 4


class NonFiniteError(FsdpTrainerError):
    """Loss or gradient became NaN or infinite and `train.on_nonfinite` says to stop."""

    exit_code = 5


class DistributedError(FsdpTrainerError):
    """The processes are not what was asked for: too few ranks, FSDP not active, a rank lost."""

    exit_code = 6


class OutputError(FsdpTrainerError):
    """A file of the run cannot be written: no room, no permission, something else in its place."""

    exit_code = 7


class FailedSave(CheckpointError, OutputError):
    """A checkpoint or a model could not be written; the checkpoints that are there are as they were."""

    exit_code = OutputError.exit_code


class OutOfMemory(FsdpTrainerError):
    """A GPU or a machine had no memory left; out_of_memory.json in the run folder says where and what would fit."""

    exit_code = 8


class Interrupted(FsdpTrainerError):
    """A signal asked the run to stop; a checkpoint was saved and the run can be resumed."""

    exit_code = 75  # EX_TEMPFAIL: schedulers read it as "start me again"
    labels = ("so far", "to go on")

    def headed(self) -> str:
        """Return the message as a terminal shows it: what the user asked for is no error."""
        return str(self)
