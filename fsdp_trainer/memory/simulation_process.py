"""`fsdp_trainer.simulate`: the simulation in a process of its own, so that it may be called anywhere.

A notebook may have a run, or have taken a backward pass, after which torch's autograd accepts no new kind of device
(torch 2.14, engine.cpp); and a simulation changes torch for the life of its process. The answer comes back whole,
errors as they were raised. No torch is imported here.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from fsdp_trainer.config import Config
from fsdp_trainer.errors import FsdpTrainerError
from fsdp_trainer.memory.hardware import Hardware, parse_gpus
from fsdp_trainer.memory.simulation import Simulation, check_known

_CODE = "from fsdp_trainer.memory.simulation_process import answer; answer()"
# What a launcher, or a run in this process, tells its ranks: the child is no rank of theirs.
_OF_A_RUN = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("ACCELERATE_", "FSDP_", "TORCHELASTIC_"),
)


def simulate(config: Config, hardware: Hardware | str, *, expandable_segments: bool = True) -> Simulation:
    """Say what a run of `config` takes on `hardware`: memory by phase and kind, whether it fits, the time of a step.

    `hardware` is what `--gpus` takes, such as "8xH100-80GB" or the path of a YAML file, or a Hardware. Needs a
    config.json: no GPU, no weights, no tokenizer. `expandable_segments` replays torch's allocator as a run sets it;
    False what it does under PYTORCH_ALLOC_CONF=expandable_segments:False. Runs in a process of its own, which takes
    some seconds to start; may be called before, during and after a training run. Raises ConfigError for what cannot be
    trained or is not known.
    """
    check_known(config)
    described = hardware if isinstance(hardware, Hardware) else parse_gpus(hardware)
    config.check_world(described.count)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "answer"
        done = subprocess.run(
            [sys.executable, "-c", _CODE, str(os.getpid())],
            input=pickle.dumps((config.to_dict(), described, expandable_segments, str(path))),
            env=child_environment(os.environ),
            capture_output=True,
            check=False,
        )
        found = pickle.loads(path.read_bytes()) if path.exists() else None
    if isinstance(found, BaseException):
        raise found
    if not isinstance(found, Simulation):
        raise FsdpTrainerError(
            "The simulation's process ended without an answer.",
            values=f"exit code {done.returncode}; {done.stderr.decode(errors='replace').strip()[-2000:]}",
            fix="give the machine 2 GB of free memory, or report this with the settings",
        )
    return found


def hide_gpus(environ: MutableMapping[str, str]) -> None:
    """Let a process that has not imported torch yet see no GPU: a context of its own would take memory from a run."""
    environ["CUDA_VISIBLE_DEVICES"] = ""


def child_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that simulates: no rank of a run, and no GPU."""
    found = {name: value for name, value in given.items() if not name.startswith(_OF_A_RUN)}
    # The package and the libraries are found where this process found them.
    found["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    hide_gpus(found)
    return found


def end_with_parent(parent: int) -> None:
    """Have this process end at once when the process `parent` that started it is gone, however that went.

    A signal may leave the parent no time to end it, and a simulation goes on for seconds.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def answer() -> None:
    """Read a question from standard input, simulate, and leave the answer in the file it names: the child's part."""
    end_with_parent(int(sys.argv[1]))
    settings, hardware, expandable_segments, path = pickle.load(sys.stdin.buffer)
    from fsdp_trainer.memory.simulate import simulate as simulate_here  # imports torch

    found: Simulation | FsdpTrainerError
    try:
        found = simulate_here(Config.from_dict(settings), hardware, expandable_segments=expandable_segments)
    except FsdpTrainerError as error:
        found = error
    Path(path).write_bytes(pickle.dumps(found))
