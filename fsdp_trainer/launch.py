"""Starts the processes of a run through `accelerate launch`, lets them save when stopped, and finds their exit code.

Works without torch: the parent of a run only waits.
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from fsdp_trainer.config import Config
from fsdp_trainer.config_checks import check_model_path
from fsdp_trainer.cuda_allocator import use_expandable_segments
from fsdp_trainer.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DistributedError,
    Interrupted,
    OutOfMemory,
    OutputError,
)
from fsdp_trainer.finished_run import describe_finished
from fsdp_trainer.hub import refuse_unreachable_model
from fsdp_trainer.launch_profile import check_profile, read_profile, write_profile
from fsdp_trainer.memory.hardware import CPU_RANKS
from fsdp_trainer.memory.machine import count_kills
from fsdp_trainer.model_config import refuse_hostile_config
from fsdp_trainer.output_log import OUTPUT, describe_parent, follow_lines
from fsdp_trainer.progress import log_error, log_line
from fsdp_trainer.run_folder import (
    COMMAND,
    REFUSALS,
    STATUS,
    check_writable,
    how_to_go_on,
    parse_json,
    read_json,
    writing,
)
from fsdp_trainer.run_lock import refuse_held_folder
from fsdp_trainer.signals import stopped_before_the_first_step
from fsdp_trainer.units import format_number

SCRIPT = Path(__file__).resolve().with_name("train.py")
AGENT = SCRIPT.with_name("launch_agent.py")
# Set for ranks that this package starts: what they leave when memory runs out is completed when they are gone.
LAUNCHER = "FSDP_TRAINER_LAUNCHER"
# What a run ends with whose rank was killed: by the rank that lost it, or by the agent itself.
AGREED = (ConfigError.exit_code, DataError.exit_code, CheckpointError.exit_code, OutputError.exit_code)  # by all ranks
KILLED = (DistributedError.exit_code, 128 + signal.SIGKILL)


def count_gpus(environ: Mapping[str, str] = os.environ) -> int:
    """Count the NVIDIA GPUs that a process started now would see; 0 without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=60, check=False)
    present = sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or present == 0:
        return present
    count = 0
    for name in visible.split(","):  # CUDA stops at the first entry it cannot use
        if not name.strip() or name.strip() == "-1" or (name.strip().isdigit() and int(name) >= present):
            break
        count += 1
    return count


@dataclass(frozen=True)
class Machines:
    """Several machines of one run: how many, which of them this is, and where the first one listens."""

    count: int
    rank: int
    address: str
    port: int

    @classmethod
    def parse(cls, count: int, *, rank: int | None, address: str | None) -> "Machines":
        """Read --nodes, --node-rank and --address HOST[:PORT]; ConfigError for what does not name one of them."""
        if rank is None or not 0 <= rank < count:
            said = "nothing" if rank is None else rank
            fix = f"give --node-rank 0 on the first machine, up to {count - 1} on the last"
            raise ConfigError("Which of the machines this is is not said.", values=f"--node-rank {said}", fix=fix)
        host, _, port = (address or "").rpartition(":") if ":" in (address or "") else (address or "", "", "")
        if not host or (port and not (port.isdigit() and 0 < int(port) < 65536)):
            fix = "give the first machine's name or IP address, the same on all: --address 10.0.0.1:29500"
            raise ConfigError("Where the machines meet is not said.", values=f"--address {address}", fix=fix)
        return cls(count, rank, host, int(port or 29500))


def plan_processes(
    config: Config, *, profile: Path | None, processes: int | None, machines: int = 1
) -> tuple[int, dict[str, Any] | None]:
    """Decide how many processes a run gets and check settings and profile against that number, before anything starts.

    Without a number it is what the profile says, else one per visible GPU (CPU_RANKS without one) on each of
    `machines`. Raises ConfigError for more than the machine has GPUs or, on CPU, four times its cores.
    """
    content = read_profile(profile) if profile is not None else None
    if content is not None:
        check_profile(content, config, source=str(profile))
        in_profile = content.get("num_processes", 1)
        if processes is not None and processes != in_profile:
            raise ConfigError(
                "the profile asks for another number of processes",
                values=f"--processes {processes}, num_processes: {in_profile} in {profile}",
                fix="make both the same, or leave out one of the two",
            )
        processes = in_profile
        if machines > 1 and content.get("num_machines", 1) != machines:
            raise ConfigError(
                "the profile is for another number of machines",
                values=f"--nodes {machines}, num_machines: {content.get('num_machines', 1)} in {profile}",
                fix="make both the same, or leave out one of the two",
            )
    gpus = 0 if content is not None and content.get("use_cpu") else count_gpus()
    if processes is None:
        processes = machines * (gpus or CPU_RANKS)
    machines = max(machines, int((content or {}).get("num_machines") or 1))
    if processes % machines:
        raise ConfigError(
            "the processes do not divide over the machines",
            values=f"--processes {processes}, {machines} machines",
            fix=f"--processes counts those of all machines: give a multiple of {machines}",
        )
    if processes < 1:
        raise ConfigError("a run needs a process", values=f"--processes {processes}", fix="give 1 or more")
    _check_machine(
        processes // machines,
        given=f"--processes {processes}" if profile is None else f"num_processes: {processes} in {profile}",
        gpus=gpus,
    )
    config.check_world(processes)
    return processes, content


def _check_machine(processes: int, *, given: str, gpus: int) -> None:
    """Refuse more processes than this machine has GPUs or, without any, far more than cores."""
    if gpus and processes > gpus:
        raise ConfigError(
            "there are more processes than GPUs",
            values=f"{given}, {format_number(gpus, 'GPU')} visible (CUDA_VISIBLE_DEVICES counts)",
            fix=f"ask for {gpus} or fewer, or hide the GPUs with CUDA_VISIBLE_DEVICES= to train on CPU",
        )
    if gpus:
        return
    cores = count_cores()
    # A few more are let through: another number of ranks, or copies of shards, are tried on a small machine.
    most = max(8, 4 * cores)
    if processes > most:
        raise ConfigError(
            "there are far more processes than CPU cores, so they would only wait for each other",
            values=f"{given}, {format_number(cores, 'core')} and no GPU",
            fix=f"ask for {cores} (at most {most})",
        )
    if processes > max(2, cores):  # two are the smallest run that shards
        log_error(f"warning: {given}, on {format_number(cores, 'core')}: they will wait for each other")


def count_cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(
    config: Config,
    *,
    arguments: Sequence[str],
    profile: str | Path | None = None,
    processes: int | None = None,
    machines: Machines | None = None,
    on_line: Callable[[str], None] | None = None,
    typed: Sequence[str] = (),
    on_quiet: Callable[[], None] = lambda: None,
    unsaid: Collection[str] = (),
    on_refusal: Callable[[str], None] = lambda message: None,
) -> int:
    """Run train.py with `arguments` in N processes and return the exit code of the run.

    Of several `machines` each calls this, and `processes` are those of all; they share the file system of output_dir.
    Ctrl-C and SIGTERM are passed to the workers, which save and stop; a second Ctrl-C ends them at once. With `on_line`
    (a notebook, where a child's output would go to the server's terminal) each line of output is handed to it, and
    kept in the run folder; the workers then save and stop also when this process is killed. `on_quiet` is called ten
    times a second while no line comes. `typed` is the command of the user, to which a run that is out of memory adds
    what would fit. A run that has finished already is said to have, and no process is started; `unsaid` names the
    settings that a plan will choose. `on_refusal` gets the message of a start that left the folder as it was.
    """
    if (finished := describe_finished(config, unsaid=unsaid)) is not None:
        (on_line or log_line)(finished)
        return 0
    profile = Path(profile) if profile is not None else None
    count = 1 if machines is None else machines.count
    processes, content = plan_processes(config, profile=profile, processes=processes, machines=count)
    check_model_path(config.model.path)
    refuse_hostile_config(config.model.path, trust_remote_code=config.model.trust_remote_code)
    refuse_unreachable_model(config.model.path, tokenizer=config.model.tokenizer, revision=config.model.revision)
    check_trackers(config.log.trackers)
    check_writable(Path(config.output_dir))
    with tempfile.TemporaryDirectory(prefix="fsdp_trainer-") as folder:
        if profile is None:
            on_cpu = count_gpus() == 0
            path = Path(folder, "profile.yaml")
            profile = write_profile(path, config, processes=processes, use_cpu=on_cpu, machines=count)
            content = read_profile(profile)
        assert content is not None
        if content.get("num_machines", 1) == 1:  # on others, the run that holds it may be this very one
            refuse_held_folder(Path(config.output_dir))
        command = launch_command(profile, content, arguments=arguments, machines=machines)
        environ = launch_environment(os.environ, content, processes=processes)
        environ |= {COMMAND: shlex.join(typed), REFUSALS: folder}
        status = Path(config.output_dir, STATUS)
        before, kills = _modified(status), count_kills()
        log = Path(config.output_dir, OUTPUT)
        code, signals = _run(command, environ, on_line=on_line, on_quiet=on_quiet, log=log)
        refused, why = read_status(Path(folder, STATUS))
    if code == 0:
        return 0
    code, stopped_by = code if code > 0 else 128 - code, signals[0] if signals else None
    has_written = _modified(status) != before
    # The agent's code is that of the rank that failed first; which one knows the cause stands in the run folder.
    written, message = read_status(status) if has_written else (None, "")
    if written is None and refused is not None:
        on_refusal(why)
        return refused
    if written is None and len(signals) == 1 and not has_written:  # before a rank was there to say so
        error = stopped_before_the_first_step(signal.Signals(signals[0]).name, command=shlex.join(typed))
        on_refusal(str(error))
        (on_line or log_error)(error.headed())
        return error.exit_code
    if not message and code > 128 and stopped_by is None:
        message = _describe_death(code - 128, Path(config.output_dir))
    if stopped_by is None and count_kills() > kills and (written or code) in KILLED:
        written = _record_kill(config, processes=processes, machines=count)
    if written == OutOfMemory.exit_code and (page := _finish_page(config, typed)):
        message = ""
        for line in page:
            (on_line or log_error)(line)
    began = (read_json(status) or {}).get("started") is not None
    said_once = processes == 1 or written == Interrupted.exit_code or (written in AGREED and not began)
    if message and not (written and said_once):  # said again: other ranks may have had something to say after it
        (on_line or log_error)(f"error: {message}")
    if written:
        return written
    return 128 + stopped_by if stopped_by is not None else code


def _record_kill(config: Config, *, processes: int, machines: int) -> int:
    from fsdp_trainer.out_of_memory_page import leave_host_kill  # here: only a run that failed needs the planner's code

    return leave_host_kill(config, processes=processes, machines=machines)


def _finish_page(config: Config, typed: Sequence[str]) -> list[str]:
    """Complete what the ranks left of how memory ran out, and return it as lines for a terminal."""
    from fsdp_trainer.out_of_memory_page import finish_page
    from fsdp_trainer.report.out_of_memory_text import format_out_of_memory

    found = finish_page(Path(config.output_dir), command=typed)
    return [] if found is None else format_out_of_memory(found).splitlines()


def _describe_death(number: int, output_dir: Path) -> str:
    """Say what is known of a process that had no time to say it: a rank that is alone, or the agent itself."""
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    error = DistributedError(
        "A process of the run was killed.",
        values=f"it ended with {name}",
        fix=f"look in the system's log: a SIGKILL is mostly the machine out of memory; {how_to_go_on(output_dir)}",
    )
    return str(error)


def check_trackers(trackers: Sequence[str]) -> None:
    """Refuse trackers whose package is not installed: each is a module of the tracker's name."""
    modules = {"tensorboard": ("tensorboard", "tensorboardX")}
    missing = [name for name in trackers if not any(find_spec(module) for module in modules.get(name, (name,)))]
    if missing:
        raise ConfigError(
            "a tracker is not installed",
            values=f"log.trackers: {list(trackers)}, not installed: {', '.join(missing)}",
            fix=f"install {', '.join(missing)}, or take {'it' if len(missing) == 1 else 'them'} out of log.trackers",
        )


def launch_command(
    profile: Path, content: Mapping[str, Any], *, arguments: Sequence[str], machines: Machines | None = None
) -> list[str]:
    """Build the command line that starts the workers."""
    command = [sys.executable, str(AGENT), "--config_file", str(profile)]
    if machines is not None:
        command += ["--machine_rank", str(machines.rank), "--main_process_ip", machines.address]
        command += ["--main_process_port", str(machines.port)]
    if not content.get("main_process_port") and content.get("num_machines", 1) == 1:
        command += ["--main_process_port", str(free_port())]  # 29500 for every run would make two of them collide
    return [*command, str(SCRIPT), *arguments]


def launch_environment(environ: Mapping[str, str], content: Mapping[str, Any], *, processes: int) -> dict[str, str]:
    """Build the environment of the workers."""
    result = dict(environ)
    result[LAUNCHER] = "1"
    use_expandable_segments(result)
    if content.get("use_cpu"):
        # Accelerate drops a profile's use_cpu on the way to FSDP workers; on a machine with GPUs they would take those.
        result["ACCELERATE_USE_CPU"] = "true"
    local = max(1, processes // int(content.get("num_machines", 1)))
    # torchrun would set 1 thread for each of several processes, whatever the machine has.
    result.setdefault("OMP_NUM_THREADS", str(max(1, count_cores() // local)))
    return result


def free_port() -> int:
    """Ask the system for a TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _run(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    on_line: Callable[[str], None] | None,
    on_quiet: Callable[[], None],
    log: Path,
) -> tuple[int, list[int]]:
    """Run the command to its end; return its exit code and the signals that came."""
    environ = dict(environ)
    with ExitStack() as stack:
        output, start = None, 0
        if on_line is not None:
            describe_parent(environ)
            with writing(log):
                output = stack.enter_context(log.open("ab"))
                start = output.tell()
        # Its own session: the terminal's Ctrl-C must reach us alone, or the elastic agent would end workers that save.
        child = subprocess.Popen(
            command,
            env=environ,
            start_new_session=True,
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
        )
    with _passing_signals(child) as received:
        try:
            if on_line is not None:

                def is_over() -> bool:
                    return child.poll() is not None

                follow_lines(log, start=start, is_over=is_over, on_line=on_line, on_quiet=on_quiet)
            code = child.wait()
        finally:
            _end(child)
    return code, received


@contextmanager
def _passing_signals(child: "subprocess.Popen[Any]") -> Iterator[list[int]]:
    """Pass SIGINT, SIGTERM and SIGHUP to the workers while the context is open; yields the signals received."""
    received: list[int] = []
    workers: list[psutil.Process] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            # SIGHUP means the terminal is gone; the workers know SIGTERM and Ctrl-C.
            passed = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            workers.extend(ask_workers_to_stop(child.pid, number=passed))
        elif len(received) == 2 and number != signal.SIGINT:
            child.terminate()  # the elastic agent gives its workers 30 s
        else:  # a person who asks twice does not want to wait
            _kill_session(child.pid)

    if threading.current_thread() is not threading.main_thread():  # Python sets handlers in the main thread only
        yield received
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        _kill(workers)  # an agent that was ended in a bad moment leaves them behind


def ask_workers_to_stop(
    agent_pid: int, *, number: int = signal.SIGTERM, script: str = str(SCRIPT)
) -> list[psutil.Process]:
    """Send a signal to the processes that run the training script, not to the agent above them; return them.

    The agent must live: on its own SIGTERM it kills the workers after 30 s, in the middle of a save.
    """
    asked = []
    with suppress(psutil.NoSuchProcess):
        # Direct children only: data workers have the same command line and end with the worker that started them.
        for process in psutil.Process(agent_pid).children(recursive=False):
            with suppress(psutil.NoSuchProcess):
                if script in process.cmdline():
                    process.send_signal(number)
                    asked.append(process)
    if not asked:  # nothing to save yet
        with suppress(ProcessLookupError):
            os.kill(agent_pid, signal.SIGTERM)
    return asked


def _end(child: "subprocess.Popen[Any]") -> None:
    """Leave no process behind when the wait ended by an exception."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=40)
        _kill_session(child.pid)
        child.wait()


def _kill_session(pid: int) -> None:
    try:
        workers = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        workers = []
    _kill(workers)  # torchrun gives each worker a session of its own, so the group would not reach them
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _modified(path: Path) -> int | None:
    """Return the file's time stamp; compared for change, not with a clock, which a file server may not share."""
    return path.stat().st_mtime_ns if path.is_file() else None


def read_status(path: Path) -> tuple[int | None, str]:
    """Return the exit code and the message that the workers left, where the file holds them."""
    try:
        status = parse_json(path.read_text(encoding="utf-8"))
        code, message = status["exit_code"], status.get("message", "")
    except (OSError, ValueError, KeyError, TypeError):
        return None, ""
    return (code if isinstance(code, int) and 0 < code < 256 else None), str(message)
