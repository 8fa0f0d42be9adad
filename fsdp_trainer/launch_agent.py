"""Both ends of torch's elastic agent: the process that runs it, and what a rank leaves for its report.

Run by path with the arguments of `accelerate launch`, it does what that does, but ends with the exit code of the rank
that failed first and without the agent's traceback: each rank has said what went wrong, and `launch` says it last.
"""

import json
import logging
import os
import subprocess
import sys
import time
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
