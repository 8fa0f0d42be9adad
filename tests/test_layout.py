"""Checks that the code keeps to the layout: imports point down, sizes hold, and what must not be in it is not.

Each rule is a function from source text to a list of findings, so that each is also shown to catch a small bad example.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fsdp_trainer"

# Which part of the package a module belongs to, and what each part may import (besides modules of its own part).
# Longest match wins; "" is the package itself, which loads its public names lazily from the top.
PARTS = {
    "": "top",
    "__main__": "cli",
    "cli": "cli",
    "train": "cli",
    "launch": "launch",
    "launch_profile": "config",
    "cuda_allocator": "config",
    "launch_agent": "launch",
    "ladder": "ladder",
    "saving": "training",
    "nonfinite": "training",
    "rank_watch": "training",
    "training_data": "training",
    "preview": "training",
    "doctor": "training",
    "self_test": "training",
    "demo": "cli",
    "training": "training",
    "finetuning": "start",
    "train_result": "report",
    "output_log": "base",
    "training_start": "training",
    "profiling": "training",
    "rehearsal": "training",
    "profile_summary": "base",
    "training_ledger": "training",
    "trace_marks": "assembly",
    "evaluation": "training",
    "out_of_memory": "training",
    "out_of_memory_page": "launch",
    "phases": "techniques",
    "memory.planner": "planner",
    "memory.plan": "planner",
    "memory.planning": "planner",
    "memory.import_memory": "planner",
    "memory.calibration": "planner",
    "memory.candidates": "planner",
    "memory.candidate_estimates": "planner",
    "memory.remedies": "planner",
    "memory.measure": "measure",
    "memory.ledger": "report",  # it shows itself, as a plan does
    "memory.phase_peaks": "measure",
    "memory.gloo_settling": "measure",
    "memory.trace": "measure",
    "memory.cuda_kernels": "measure",
    "memory.work": "measure",
    "memory.quick": "measure",
    "memory.simulation": "measure",
    "memory.predicted": "measure",
    "memory.postmortem": "measure",
    "memory.advice": "measure",
    "memory.simulate": "simulate",
    "memory.allocator": "simulate",
    "memory.recording": "facts",
    "memory.traced_run": "simulate",
    "memory.simulation_cache": "simulate",
    "memory.simulation_process": "simulate",
    "memory.simulation_workers": "simulate",
    "memory.simulation_text": "facts",
    "memory.traced_time": "simulate",
    "memory.timing": "facts",
    "memory.rates": "facts",
    "memory.extrapolate": "simulate",
    "memory.estimate": "facts",
    "memory.hardware": "facts",
    "memory": "facts",
    "report": "report",
    "interop": "interop",
    "step": "assembly",
    "run": "assembly",
    "runtime": "techniques",
    "simulated": "techniques",
    "agreement": "techniques",
    "signals": "base",
    "patches": "techniques",
    "model": "techniques",
    "model_card": "techniques",
    "offline_export": "training",
    "loading": "techniques",
    "pieces": "techniques",
    "weight_files": "techniques",
    "gguf_model": "techniques",
    "custom_code": "techniques",
    "decoder_probe": "techniques",
    "causality": "techniques",
    "rotary": "techniques",
    "small_copy": "techniques",
    "bin_archive": "techniques",
    "conversions": "techniques",
    "sharding": "techniques",
    "gloo_reduce_scatter": "techniques",
    "activation_checkpointing": "techniques",
    "attention": "techniques",
    "loss": "techniques",
    "router_loss": "techniques",
    "optim": "techniques",
    "data": "techniques",
    "checkpoint": "techniques",
    "export": "techniques",
    "config": "config",
    "config_world_checks": "config",
    "resume_rules": "config",
    "finished_run": "config",
    "model_config": "base",
    "limited": "base",
    "run_folder": "base",
    "run_lock": "base",
    "hub": "base",
    "caches": "base",
    "run_record": "base",
    "run_metrics": "base",
    "progress": "base",
    "units": "base",
    "errors": "base",
}
BELOW = {
    "base": set(),
    "facts": {"base"},
    "config": {"facts", "base"},
    "techniques": {"config", "facts", "base"},
    "assembly": {"techniques", "config", "facts", "base"},
    "measure": {"report", "techniques", "config", "facts", "base"},
    "simulate": {"assembly", "measure", "techniques", "config", "facts", "base"},
    # A plan shows itself in a notebook; what report/ gets of it are plain values.
    "planner": {"report", "simulate", "assembly", "measure", "techniques", "config", "facts", "base"},
    "report": {"config", "facts", "base"},
    "interop": {"config", "facts", "base"},
    # What would have fitted is worked out where the ranks were started, when they are gone.
    "launch": {"measure", "report", "interop", "config", "facts", "base"},
    "ladder": {"launch", "planner", "report", "simulate", "measure", "techniques", "config", "facts", "base"},
    # The ledger is shown at the end of a run; what report/ gets of it are plain values.
    "training": {"report", "launch", "assembly", "measure", "techniques", "config", "facts", "base"},
}
BELOW["start"] = set(BELOW)
BELOW["cli"] = set(BELOW) | {"top"}
BELOW["top"] = set(BELOW) - {"cli"}

SUB_PACKAGES = {"data", "optim", "memory", "interop", "report"}
BANNED_NAMES = {"utils", "util", "core", "base", "common", "helpers", "misc", "registry", "manager", "callbacks"}
# Answer at once on any machine: importing torch alone took 2 to 13 s.
WITHOUT_TORCH = (
    "errors",
    "units",
    "progress",
    "run_folder",
    "config",
    "resume_rules",
    "cli",
    "launch",
    "demo",
    "gguf_model",
    "",
    "__main__",
)
WITHOUT_TORCH += ("cuda_allocator", "run_lock", "data", "data.sources", "data.formats", "data.readers")
WITHOUT_TORCH += ("data.known_keys", "data.messages", "data.shapes", "data.strict_json")
WITHOUT_TORCH += ("memory", "memory.hardware", "memory.machine", "memory.estimate")
WITHOUT_TORCH += ("memory.simulation", "memory.recording", "memory.timing", "memory.rates", "memory.estimate_time")
WITHOUT_TORCH += ("memory.planning", "memory.calibration", "memory.import_memory", "cli_import")
WITHOUT_TORCH += ("memory.plan", "memory.planner", "memory.candidates", "memory.candidate_estimates", "memory.remedies")
WITHOUT_TORCH += ("ladder",)
WITHOUT_TORCH += ("finetuning", "train_result", "output_log", "out_of_memory_page", "memory.advice")
WITHOUT_TORCH += ("optim.schedule", "interop", "interop.gpu_profile")
WITHOUT_TORCH += ("export_source", "checkpoint_folder", "checkpoint_manifest")
WITHOUT_TORCH += (
    "caches",
    "hub",
    "run_record",
    "run_metrics",
    "report.watch_text",
    "report.runs_text",
    "finished_run",
    "signals",
)
WITHOUT_TORCH += ("memory.ledger", "memory.predicted", "model_config", "limited")
WITHOUT_TORCH += ("memory.host", "memory.quick", "memory.simulation_text", "report")
HEAVY = {"torch", "transformers", "accelerate", "datasets", "bitsandbytes", "torchao"}
MAY_PRINT = ("cli", "cli_plan", "cli_import", "cli_ladder", "cli_watch", "cli_report", "progress", "report", "demo")
# simulated.py is the simulated part of the runtime: what it changes, it undoes on exit.
MAY_PATCH = ("patches", "runtime", "simulated", "memory.trace", "memory.cuda_kernels")
PATCHED = {"torch", "transformers", "accelerate"}
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 500
SMALL_FUNCTIONS = {
    "run": ("build_run",),
    "step": ("train_step", "eval_step"),
    "training": ("finetune", "_finetune", "train_loop"),
}
MAX_SMALL_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Source:
    """One Python file of the package: its dotted name inside the package, its text and its tree."""

    module: str
    text: str
    tree: ast.Module
    is_package: bool = False


def make_source(module: str, text: str, *, is_package: bool = False) -> Source:
    return Source(module=module, text=text, tree=ast.parse(text), is_package=is_package)


def package_sources() -> list[Source]:
    sources = []
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        sources.append(make_source(module, path.read_text(encoding="utf-8"), is_package=is_package))
    return sources


def tracked_files() -> list[Path]:
    """The files git knows or would add; without git (a source archive), everything outside hidden and built folders."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        paths = [ROOT / line for line in listed.stdout.splitlines()]
    else:
        paths = [p for p in ROOT.rglob("*") if not any(x.startswith(".") for x in p.relative_to(ROOT).parts)]
    return [path for path in paths if path.is_file()]


# --- the rules -------------------------------------------------------------------------------------------------------


def part_of(module: str) -> str | None:
    """The part a module belongs to; a file config_reading.py counts to config, sources below data/ to data."""
    names = module.split(".")
    for end in range(len(names), 0, -1):
        name = ".".join(names[:end])
        if name in PARTS:
            return PARTS[name]
        stem = name.rsplit("_", 1)[0]
        if "_" in names[end - 1] and stem in PARTS:
            return PARTS[stem]
    return PARTS[""] if module == "" else None


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """Every module imported anywhere in the file (functions too), absolute, as (line, name)."""
    package = source.module.split(".") if source.module else []
    if not source.is_package:
        package = package[:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                above = [PACKAGE, *package][: 1 + len(package) - (node.level - 1)]
                base = ".".join([*above, *([node.module] if node.module else [])])
            else:
                base = node.module or ""
            yield node.lineno, base
            # `from fsdp_trainer import run` and `from fsdp_trainer.memory import planner` name modules too.
            if base.split(".")[0] == PACKAGE:
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def find_upward_imports(source: Source) -> list[str]:
    own = part_of(source.module)
    if own is None:
        return [f"{source.module}: belongs to no part; add it to PARTS"]
    found = []
    for line, name in imported_modules(source):
        if not name.startswith(f"{PACKAGE}."):
            continue
        target = name.removeprefix(f"{PACKAGE}.")
        part = part_of(target)
        if part is None and "." not in target:
            continue  # a name of the package's own __init__, e.g. Config
        if part is not None and part != own and part not in BELOW[own]:
            found.append(f"{source.module}:{line}: {own} must not import {part} ({name})")
    return found


def is_light(module: str) -> bool:
    """True for modules that must not bring torch in."""
    named = any(module == name or (name and module.startswith(f"{name}_")) for name in WITHOUT_TORCH)
    return named or module.split(".")[0] in ("interop", "report")


def find_heavy_imports(source: Source) -> list[str]:
    """Imports that bring torch and its like in when the module is imported, by themselves or through one of ours."""
    if not is_light(source.module):
        return []
    return [
        f"{source.module}:{line}: imports {name} at module level"
        for line, name in _import_time_imports(source.tree.body)
        if name.split(".")[0] in HEAVY
        or (name.startswith(f"{PACKAGE}.") and not is_light(name.removeprefix(f"{PACKAGE}.")))
    ]


def _import_time_imports(body: Iterable[ast.stmt]) -> Iterator[tuple[int, str]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _import_time_imports(node.orelse)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from _import_time_imports(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _import_time_imports(handler.body)


def find_banned_names(source: Source) -> list[str]:
    names = source.module.split(".") if source.module else []
    found = [f"{source.module}: no module is called {name}" for name in names if name in BANNED_NAMES]
    packages = names if source.is_package else names[:-1]
    if len(packages) > 1 or (packages and packages[0] not in SUB_PACKAGES):
        found.append(f"{source.module}: the only sub-packages are {', '.join(sorted(SUB_PACKAGES))}")
    found += [
        f"{source.module}:{node.lineno}: no class is a Manager ({node.name})"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith("Manager")
    ]
    return found


def find_oversize(source: Source) -> list[str]:
    lines = source.text.count("\n")
    found = [f"{source.module}: {lines} lines, at most {MAX_FILE_LINES}"] if lines > MAX_FILE_LINES else []
    small = SMALL_FUNCTIONS.get(source.module, ())
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            limit = MAX_SMALL_FUNCTION_LINES if node.name in small else MAX_FUNCTION_LINES
            if length > limit:
                found.append(f"{source.module}:{node.lineno}: {node.name} has {length} lines, at most {limit}")
    return found


def find_prints(source: Source) -> list[str]:
    if source.module.split(".")[0] in MAY_PRINT:
        return []
    return [
        f"{source.module}:{node.lineno}: print belongs in {', '.join(MAY_PRINT)}"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def find_patches(source: Source) -> list[str]:
    """Assignments to attributes of torch, transformers or accelerate, and setattr on them."""
    if source.module in MAY_PATCH:
        return []
    foreign = _foreign_names(source.tree)
    found = []
    for node in ast.walk(source.tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"setattr", "delattr"} and node.args:
            targets = [ast.Attribute(value=node.args[0], attr="?")]
        for target in targets:
            while isinstance(target, ast.Subscript):
                target = target.value
            text = ast.unparse(target)
            if isinstance(target, ast.Attribute) and _root_name(target) in foreign and not _is_setting(text):
                found.append(f"{source.module}:{getattr(node, 'lineno', 0)}: patches {text}")
    return found


def _is_setting(target: str) -> bool:
    """Attributes that torch documents as switches are set, not patched."""
    return target.startswith(("torch.backends.", "torch._dynamo.config.", "torch._inductor.config."))


def _foreign_names(tree: ast.Module) -> set[str]:
    """Names bound by an import to a module or class of a patched library."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in PATCHED:
                    names.add(alias.asname or alias.name.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in PATCHED:
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def find_missing_docstrings(source: Source) -> list[str]:
    return [] if ast.get_docstring(source.tree) else [f"{source.module}: no docstring"]


# Written in pieces so that this file does not find itself.
FOREIGN_TEXT = re.compile(
    "|".join(
        (
            r"(?<![\w.])/(?:wo"
            r"rk|ro"
            r"ot|ho"
            r"me/\w+|Us"
            r"ers/\w+|opt/wh"
            r"eels|opt/py"
            r"pi)/[\w.]",  # a machine's paths
            r"pypi\." r"org|files\.python" r"hosted|registry\.npm" r"js|--index" r"-url|--extra-index" r"-url",
        )
    )
)


def find_foreign_text(name: str, text: str) -> list[str]:
    """Paths of one machine and hosts of package registries."""
    return [
        f"{name}:{number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for match in FOREIGN_TEXT.finditer(line)
    ]


# --- the package keeps the rules -------------------------------------------------------------------------------------

RULES = (
    find_upward_imports,
    find_heavy_imports,
    find_banned_names,
    find_oversize,
    find_prints,
    find_patches,
    find_missing_docstrings,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule: Callable[[Source], list[str]]) -> None:
    sources = package_sources()
    assert sources
    found = [finding for source in sources for finding in rule(source)]
    assert not found, "\n".join(found)


def test_small_functions_exist() -> None:
    """A renamed build_run or train_step must not slip out of its size limit."""
    by_module = {source.module: source for source in package_sources()}
    for module, names in SMALL_FUNCTIONS.items():
        defined = {node.name for node in by_module[module].tree.body if isinstance(node, ast.FunctionDef)}
        assert set(names) <= defined, f"{module} has no {set(names) - defined}"


def test_tracked_files_name_no_machine_and_no_registry() -> None:
    found = []
    for path in tracked_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += find_foreign_text(str(path.relative_to(ROOT)), text)
    assert not found, "\n".join(found)


# --- the rules catch what they are for -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("loss", "from fsdp_trainer.run import build_run"),
        ("loss", "import fsdp_trainer.training"),
        ("loss", "from fsdp_trainer import step"),
        ("loss", "from . import cli"),
        ("data.loader", "from ..run import Run"),
        ("errors", "from fsdp_trainer.config import Config"),
        ("config", "def f():\n    from fsdp_trainer.model import build_model"),
        ("config_reading", "from fsdp_trainer.checkpoint import x"),
        ("run", "from fsdp_trainer.training import finetune"),
        ("report.plots", "from fsdp_trainer.training import finetune"),
        ("training", "from fsdp_trainer.memory.planner import plan"),
        ("training", "from fsdp_trainer.memory import planner"),
        ("memory.measure", "from fsdp_trainer.training import finetune"),
        ("launch", "from fsdp_trainer.training import finetune"),
        ("launch_profile", "from fsdp_trainer.model import load"),
        ("somewhere_new", "import os"),
    ],
)
def test_upward_import_is_found(module: str, text: str) -> None:
    assert find_upward_imports(make_source(module, text))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("cli", "from fsdp_trainer.training import finetune"),
        ("run", "from fsdp_trainer.loss import x\nfrom fsdp_trainer.data.loader import y"),
        ("data.loader", "from .packing import pack"),
        ("data.loader", "from fsdp_trainer.config import DataConfig"),
        ("config_reading", "from fsdp_trainer.config_checks import x"),
        ("demo", "from fsdp_trainer import Config"),
        ("memory.planner", "from fsdp_trainer.memory.simulate import simulate"),
    ],
)
def test_downward_import_is_allowed(module: str, text: str) -> None:
    assert not find_upward_imports(make_source(module, text))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("config", "import torch"),
        ("config_checks", "import torch.distributed as dist"),
        ("cli", "from transformers import AutoModel"),
        ("errors", "try:\n    import torch\nexcept ImportError:\n    torch = None"),
        ("launch", "try:\n    pass\nexcept ImportError:\n    import accelerate"),
        ("units", "class A:\n    import torch"),
        ("interop.deepspeed", "import torch"),
        ("", "import torch"),
        ("cli", "from fsdp_trainer.training import finetune"),
        ("cli_extras", "import fsdp_trainer.run"),
        ("launch", "from fsdp_trainer.data.loader import Rows"),
    ],
)
def test_heavy_import_is_found(module: str, text: str) -> None:
    assert find_heavy_imports(make_source(module, text))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("config", "def f():\n    import torch"),
        ("cli", "def f():\n    from fsdp_trainer.training import finetune"),
        ("cli", "from fsdp_trainer.config import Config\nfrom fsdp_trainer.launch import launch"),
        ("config", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("loss", "import torch"),
    ],
)
def test_lazy_heavy_import_is_allowed(module: str, text: str) -> None:
    assert not find_heavy_imports(make_source(module, text))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("utils", ""),
        ("data.core", ""),
        ("optim.base", ""),
        ("layers.attention", ""),
        ("data.readers.jsonl", ""),
        ("run", "class RunManager: pass"),
    ],
)
def test_banned_name_is_found(module: str, text: str) -> None:
    assert find_banned_names(make_source(module, text))


def test_unknown_sub_package_is_found() -> None:
    assert find_banned_names(make_source("layers", "", is_package=True))
    assert not find_banned_names(make_source("data", "", is_package=True))


def test_oversize_is_found() -> None:
    def function(name: str, lines: int) -> str:
        return f"def {name}():\n" + "    x = 1\n" * (lines - 1)

    assert not find_oversize(make_source("loss", function("f", 80)))
    assert find_oversize(make_source("loss", function("f", 81)))
    assert find_oversize(make_source("loss", "class A:\n    async " + function("f", 81).replace("\n", "\n    ")[:-4]))
    assert not find_oversize(make_source("run", function("build_run", 60)))
    assert find_oversize(make_source("run", function("build_run", 61)))
    assert find_oversize(make_source("step", function("train_step", 61)))
    assert not find_oversize(make_source("loss", "x = 1\n" * 500))
    assert find_oversize(make_source("loss", "x = 1\n" * 501))


def test_print_is_found() -> None:
    assert find_prints(make_source("run", "def f():\n    print('x')"))
    assert not find_prints(make_source("cli", "print('x')"))
    assert not find_prints(make_source("run", "console.print('x')"))


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.nn.functional.linear = mine",
        "import torch.nn.functional as F\nF.linear = mine",
        "from transformers import PreTrainedModel\nPreTrainedModel.forward = mine",
        "import accelerate\nsetattr(accelerate.Accelerator, 'prepare', mine)",
        "import accelerate.state\naccelerate.state.PartialState._shared_state['device'] = 1",
        "def f():\n    from accelerate import PartialState\n    PartialState._shared_state['x'] = 1",
        "import torch\ndel torch.foo",
    ],
)
def test_patch_is_found(text: str) -> None:
    assert find_patches(make_source("loss", text))
    assert not find_patches(make_source("patches", text))


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.backends.cuda.matmul.allow_tf32 = True",
        "import torch\nx = torch.zeros(3)\nx.requires_grad = True",
        "model.config.use_cache = False",
    ],
)
def test_ordinary_assignment_is_allowed(text: str) -> None:
    assert not find_patches(make_source("loss", text))


def test_missing_docstring_is_found() -> None:
    assert find_missing_docstrings(make_source("loss", "x = 1"))
    assert not find_missing_docstrings(make_source("loss", '"""What it is."""'))


def test_foreign_text_is_found() -> None:
    bad = (
        "see /wo" + "rk/main/x",
        "/ho" + "me/ann/x.py",
        "/ro" + "ot/.cache",
        "https://pypi." + "org/simple",
        "--index" + "-url x",
    )
    for text in bad:
        assert find_foreign_text("x", text), text
    for text in ("~/.cache/fsdp_trainer", "pip install x", "a/wor" + "k/y", "https://github.com/pytorch"):
        assert not find_foreign_text("x", text), text
