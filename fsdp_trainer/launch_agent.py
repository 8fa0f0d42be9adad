"""Both ends of torch's elastic agent: the process that runs it, and what a rank leaves for its report.

Run by path with the arguments of `accelerate launch`, it does what that does, but ends with the exit code of the rank
that failed first and without the agent's traceback: each rank has said what went wrong, and `launch` says it last.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path


def tell_agent(text: str, *, secondary: bool = False) -> None:
    """Leave `text` where the agent looks for the cause of this rank's failure, so that its report ends with it.

    What torch's `record` decorator does, without importing torch. `secondary`: the cause is with another rank.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    # The format of torch/distributed/elastic/multiprocessing/errors (2.11 to 2.15). The earliest failure counts as the
    # cause and the agent counts whole seconds, so one that follows another is dated a second later.
    message = {"message": text, "extraInfo": {"timestamp": str(int(time.time()) + secondary)}}
    try:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError:  # a full disk must not hide the error itself, which stands on the screen
        return


def main() -> int:
    """Run `accelerate launch` with this process's arguments and return the exit code."""
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _quiet_the_agent()
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    try:
        launch_command(launch_command_parser().parse_args())
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return _as_shell(failure.exitcode)
    except subprocess.CalledProcessError as error:  # a profile with `distributed_type: NO` has no agent
        return _as_shell(error.returncode)
    except SignalException as error:
        return 128 + error.sigval
    return 0


def _stop_with_parent() -> None:
    """Ask the workers to save and stop when the process that started them for a notebook has ended.

    A kernel that is restarted gets a SIGTERM and 2.5 s later a SIGKILL (jupyter_client 8): too little for a save.
    """
    import psutil  # not before `main`, when modules of ours may hide others

    parent = os.environ.get(
        "FSDP_TRAINER_PARENT"
    )  # set by output_log.describe_parent; nothing of ours is imported here
    while parent is not None:
        if os.getppid() != int(parent):
            workers = psutil.Process().children()
            for worker in workers:
                with suppress(psutil.NoSuchProcess):
                    worker.terminate()
            if not workers:  # nothing to save yet
                os.kill(os.getpid(), signal.SIGTERM)
            return
        time.sleep(1.0)


def _as_shell(code: int) -> int:
    return code if code > 0 else 128 - code


def _quiet_the_agent() -> None:
    """Leave out "failed (exitcode: 1) local_rank: 0" and the like; whoever sets LOGLEVEL wants to see them."""
    if "LOGLEVEL" in os.environ:
        return
    for name in ("multiprocessing.api", "agent.server.api", "agent.server.local_elastic_agent"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)


if __name__ == "__main__":
    # Run by path, Python puts this folder first on sys.path, where our modules would hide others of the same name.
    folder = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or os.curdir) != folder]
    sys.exit(main())
