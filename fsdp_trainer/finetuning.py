"""`fsdp_trainer.finetune`: a run as a script or a notebook starts it, in this process or in several of its own.

No torch is imported here: with `processes` this one only waits and shows, whatever it has imported before.
"""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fsdp_trainer.config import Config
from fsdp_trainer.errors import ConfigError, FsdpTrainerError, Interrupted, OutOfMemory
from fsdp_trainer.finished_run import describe_finished
from fsdp_trainer.launch import launch, read_status
from fsdp_trainer.memory.plan_files import PLANNED, prediction_of, refuse_unfit
from fsdp_trainer.memory.planning import plan_for_ranks
from fsdp_trainer.out_of_memory_page import read_record
from fsdp_trainer.progress import log_line
from fsdp_trainer.report.notebook import execution_count, in_kernel, show_run
from fsdp_trainer.report.out_of_memory_text import format_out_of_memory
from fsdp_trainer.report.plan_text import summarize
from fsdp_trainer.run_folder import PREDICTION, SETTINGS, STATUS
from fsdp_trainer.train_result import TrainResult

_BY_SIGNAL = (128 + 2, 128 + 15)  # SIGINT and SIGTERM, where no rank came to save


def finetune(
    config: Config,
    *,
    processes: int | None = None,
    plan: Literal["auto"] | None = None,
    prediction: Mapping[str, Any] | None = None,
) -> TrainResult:
    """Fine-tune as `config` says and return what came of it; inside a launched process it is one of the ranks.

    With `processes` it starts that many and waits; a notebook's cell then shows the run while it goes. `plan` "auto"
    plans for this machine what `config` does not say. `prediction` is what a plan said of this run, to be kept in its
    folder. Raises FsdpTrainerError for what the user can mend; Interrupted after a signal (a notebook's stop button),
    with a checkpoint saved: the same call goes on from there.
    """
    if plan not in (None, "auto"):
        raise ConfigError("This is no way to plan.", values=f"plan: {plan!r}", fix='plan="auto", or leave it out')
    if plan is not None and prediction is not None:
        raise ConfigError(
            "A run that is planned now has no earlier prediction.",
            values='plan="auto" and prediction',
            fix="give one of the two",
        )
    if processes is not None and not _is_launched():
        return _start_processes(config, processes, plan=plan, prediction=prediction)
    if (finished := describe_finished(config, unsaid=PLANNED if plan else ())) is not None:
        log_line(finished, is_main=os.environ.get("RANK", "0") == "0")
        return TrainResult.read(config.output_dir)
    from fsdp_trainer import training

    if plan is not None:
        config, prediction = plan_on_ranks(config)
    return TrainResult.read(training.finetune(config, prediction=prediction))


def plan_on_ranks(config: Config) -> tuple[Config, dict[str, Any]]:
    """Plan on rank 0 for the machines that the ranks are on; return the settings and what is predicted, on all ranks.

    The simulations run in processes of their own, so that this one stays as a run finds it.
    """
    from fsdp_trainer.agreement import run_on_main
    from fsdp_trainer.runtime import join_process_group
    from fsdp_trainer.training_data import check_inputs

    on_cpu = join_process_group(timeout_minutes=config.train.timeout_minutes)
    ranks, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))

    def decide() -> tuple[dict[str, Any], dict[str, Any]]:
        check_inputs(config)  # a plan needs neither weights nor data, and may take minutes
        log_line("planning for this machine ...")
        plan = plan_for_ranks(config, ranks=ranks, ranks_per_node=local, on_cpu=on_cpu)
        if plan.chosen is None:
            raise refuse_unfit(plan)
        log_line(summarize(plan.to_json()))
        return plan.chosen.config.to_dict(), prediction_of(plan)

    settings, prediction = run_on_main(decide)
    return Config.from_dict(settings), prediction


def _is_launched() -> bool:
    # RANK alone says little: a notebook that has trained in its own process has it as well, from build_runtime.
    return "TORCHELASTIC_RUN_ID" in os.environ or int(os.environ.get("WORLD_SIZE", "1")) > 1


def _start_processes(
    config: Config, processes: int, *, plan: str | None, prediction: Mapping[str, Any] | None
) -> TrainResult:
    folder = Path(config.output_dir)
    with tempfile.TemporaryDirectory() as temporary:
        settings = Path(temporary) / SETTINGS
        # What was not said is left for the plan.
        settings.write_text(config.to_yaml(names=config.given if plan else None), encoding="utf-8")
        if prediction is not None:
            (Path(temporary) / PREDICTION).write_text(json.dumps(prediction), encoding="utf-8")
        arguments = ["--config", str(settings), *(["--plan", plan] if plan else [])]
        said: list[str] = []
        run = partial(
            launch,
            config,
            arguments=arguments,
            processes=processes,
            unsaid=PLANNED if plan else (),
            on_refusal=said.append,
        )
        if in_kernel():  # it shows what this process shows, not what a child writes to the server's terminal
            with show_run(folder) as cell:
                _check(run(on_line=cell.add, on_quiet=cell.rest), folder, said)
        else:
            _check(run(), folder, said)
    return replace(TrainResult.read(folder), shown_in=execution_count())


def _check(code: int, folder: Path, said: Sequence[str]) -> None:
    if code:
        raise _error_of(code, folder, said)


def _error_of(code: int, folder: Path, said: Sequence[str] = ()) -> FsdpTrainerError:
    """What went wrong, as the ranks left it in the run folder, or `said` where they left that as it was."""
    if code == OutOfMemory.exit_code and (found := read_record(folder)) is not None:
        return OutOfMemory(format_out_of_memory(found))
    written, message = (code, said[0]) if said else read_status(folder / STATUS)
    kind = {error.exit_code: error for error in FsdpTrainerError.__subclasses__()}.get(code, FsdpTrainerError)
    if message and written == code:  # not an earlier run's; its three parts are in it already
        return kind(message)
    if code in _BY_SIGNAL:
        from fsdp_trainer.checkpoint_folder import published

        saved = published(folder)
        found = f"the last checkpoint is {saved[0]}" if saved else "there is no checkpoint yet"
        return Interrupted("Stopped before a checkpoint was saved.", values=found, fix="start it again to go on")
    said = "see what its processes have said above"
    return kind("The run did not finish.", values=f"exit code {code}", fix=said)
