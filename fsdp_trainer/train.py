"""The script that `accelerate launch fsdp_trainer/train.py --config run.yaml --section.key=value` runs on every rank.

Never imported: it puts `sys.path` right, reads the settings with the same code as the command, and calls `finetune`.
"""

import os
import sys

# Run by path, Python puts this folder first on sys.path, where our modules would hide others of the same name.
_FOLDER = os.path.dirname(os.path.realpath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != _FOLDER]

import argparse  # noqa: E402
import multiprocessing  # noqa: E402
import signal  # noqa: E402
import threading  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402
from contextlib import suppress  # noqa: E402
from importlib.util import find_spec  # noqa: E402
from pathlib import Path  # noqa: E402

# A checkout that was never installed, or not the one that is: the launcher and its ranks must be of one version.
_FOUND = find_spec("fsdp_trainer")
if _FOUND is None or os.path.dirname(os.path.realpath(str(_FOUND.origin))) != _FOLDER:
    sys.path.insert(0, os.path.dirname(_FOLDER))

from fsdp_trainer.config import Config  # noqa: E402
from fsdp_trainer.config_reading import check_command_flags  # noqa: E402
from fsdp_trainer.cuda_allocator import use_expandable_segments  # noqa: E402
from fsdp_trainer.errors import DistributedError, FolderInUse, FsdpTrainerError, Interrupted, OutputError  # noqa: E402
from fsdp_trainer.finished_run import describe_finished  # noqa: E402
from fsdp_trainer.launch_agent import tell_agent  # noqa: E402
from fsdp_trainer.launch_profile import check_environment  # noqa: E402
from fsdp_trainer.memory.plan_files import PLANNED, find_prediction  # noqa: E402
from fsdp_trainer.progress import log_error, log_line  # noqa: E402
from fsdp_trainer.run_folder import (  # noqa: E402
    REFUSALS,
    STATUS,
    explain_no_room,
    is_of_this_start,
    read_json,
    write_status,
)
from fsdp_trainer.signals import StopRequest, stop_on_signals  # noqa: E402


def main(words: list[str] | None = None) -> int:
    """Train as the command line says and return the exit code; a message names the rank it comes from."""
    with stop_on_signals() as stop:  # from here on: what comes while torch is imported is a stop and no death
        return _main(words, stop)


def _main(words: list[str] | None, stop: StopRequest) -> int:
    parser = argparse.ArgumentParser(
        description="Run by `accelerate launch`; every other word is a setting, --section.key=value.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="RUN.YAML", help="settings file")
    parser.add_argument("--plan", choices=("auto",), help="plan for this machine what no setting says")
    known, overrides = parser.parse_known_args(words)
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    use_expandable_segments(os.environ)
    config = None
    try:
        check_command_flags(overrides, root=Config, flags=("--config", "--plan"))
        config = Config.load(known.config, overrides)
        check_environment(config, os.environ)
        config.check_world(int(world_size))
        finished = describe_finished(config, unsaid=PLANNED if known.plan is not None else ())
        if finished is not None:  # every rank reads the same files before any of them writes
            log_line(finished, is_main=rank == "0")
            return 0
        _finetune(config, stop, settings_file=known.config, plans=known.plan is not None)
        _leave_report(config)
    except FsdpTrainerError as error:
        stopped = isinstance(error, Interrupted)  # agreed by all ranks, so it is the run's word and said once
        prefix = f"[rank {rank}] " if world_size != "1" and not stopped else ""
        if (rank == "0" if stopped else not error.heard) or _speaks_for_its_machine(world_size):
            log_error(f"{prefix}{error.headed()}")
        tell_agent(str(error), secondary=_is_secondary(error))
        if config is not None and not isinstance(error, FolderInUse):
            _leave_report(config, failed=True)
        return error.exit_code
    except Exception as error:
        tell_agent(traceback.format_exc(), secondary=_is_secondary(error))
        if config is not None:
            _leave_report(config, failed=True)
        raise
    return 0


def _leave_report(config: Config, *, failed: bool = False) -> None:
    """Write report.html on rank 0; what is drawn with is imported only now, when nothing else waits for memory.

    Not where a start was refused: the folder, and the page in it, are those of the run before.
    """
    if failed and not is_of_this_start(Path(config.output_dir) / STATUS):
        return
    if config.log.report and os.environ.get("RANK", "0") == "0":
        from fsdp_trainer.report.run_html import leave_report

        leave_report(Path(config.output_dir))


def _speaks_for_its_machine(world_size: str) -> bool:
    """True on the first rank of one of several machines: what a rank elsewhere says is in another log."""
    return os.environ.get("LOCAL_RANK") == "0" and os.environ.get("LOCAL_WORLD_SIZE", world_size) != world_size


def _is_secondary(error: Exception) -> bool:
    """Return whether an error may be what a rank meets when another one has gone: a lost connection, a SIGTERM."""
    return not isinstance(error, FsdpTrainerError) or isinstance(error, DistributedError | Interrupted)


def _finetune(config: Config, stop: StopRequest, *, settings_file: str | None, plans: bool) -> None:
    """Train, and leave the exit code in the run folder whichever rank fails: only there the launcher can find it."""
    try:
        from fsdp_trainer.training import finetune  # after the checks: it imports torch

        stop.check()
        if plans:
            from fsdp_trainer.finetuning import plan_on_ranks

            config, prediction = plan_on_ranks(config)
            check_environment(config, os.environ)
        else:
            prediction = find_prediction(settings_file, config, processes=int(os.environ.get("WORLD_SIZE", "1")))
        finetune(config, prediction=prediction)
        _leave_together()
    except FolderInUse:
        raise  # the folder, and what its status file says, are another run's
    except FsdpTrainerError as error:
        _outlive_the_agent()
        state = "interrupted" if isinstance(error, Interrupted) else "failed"
        record_end(
            Path(config.output_dir), error.exit_code, state=state, message=str(error), secondary=_is_secondary(error)
        )
        if isinstance(error, Interrupted):  # agreed by all ranks
            _leave_together()
        raise
    except Exception as error:
        _outlive_the_agent()
        if (full := explain_no_room(error)) is not None:
            record_end(Path(config.output_dir), full.exit_code, state="failed", message=str(full), secondary=False)
            raise full from error
        message = f"{type(error).__name__}: {error}"
        record_end(Path(config.output_dir), 1, state="failed", message=message, secondary=True)
        raise


def _outlive_the_agent() -> None:
    """Ignore SIGTERM from here on: when a rank has gone, the agent's would end this one before it has said which."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _leave_together() -> None:
    """Close the process group on all ranks: gloo's threads abort a process that exits with the group open.

    24 of 40 idle ranks ended with SIGABRT without this and none with it (torch 2.14.1, two cores).
    """
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def record_end(folder: Path, exit_code: int, *, state: str, message: str, secondary: bool) -> None:
    """Write how the run ended into its folder.

    A `secondary` end is what a rank sees when another one has gone: a lost connection, the agent's SIGTERM. It does not
    replace the failure that another rank of this run has recorded.
    """
    if secondary:
        time.sleep(SECONDS_FOR_THE_CAUSE)
    for place in (os.environ.get(REFUSALS), folder):  # where `write_status` has put what another rank said
        path = Path(place or folder, STATUS)
        status = read_json(path) or {}
        if secondary and status.get("state") == "failed" and is_of_this_start(path):
            return
    step = int(status.get("step") or 0)
    with suppress(OutputError):  # a full disk must not hide the error that is on its way up
        write_status(folder, state=state, exit_code=exit_code, step=step, message=message)


SECONDS_FOR_THE_CAUSE = 0.3  # all ranks fail at about the same moment; the one that knows why writes first


def _exit(code: int) -> None:
    """End the process with its own code, also where the other ranks could not be asked to leave together.

    At an exit with the group open gloo's threads abort the process, and its code would be that of SIGABRT.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        sys.exit(code)
    for child in multiprocessing.active_children():  # what the interpreter would do at its own exit
        child.terminate()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        _exit(main())
    except Exception:
        traceback.print_exc()
        _exit(1)
