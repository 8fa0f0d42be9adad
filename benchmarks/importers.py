"""What the importers make of every settings file below some folders, as a table; --against lists what changed.

    python -m benchmarks.importers FOLDER... [--against TABLE.md] > NEW.md

DeepSpeed files are tried as they are, and those that say "auto" also with the first *args.json beside them; all on 8
GPUs. A file that is none of the three kinds is left out.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fsdp_trainer.config import Config
from fsdp_trainer.errors import FsdpTrainerError
from fsdp_trainer.interop.accelerate_profile import import_accelerate
from fsdp_trainer.interop.deepspeed import import_deepspeed
from fsdp_trainer.interop.folder import build_config, check_refused
from fsdp_trainer.interop.trainer import import_trainer
from fsdp_trainer.interop.verdicts import Import

_HEAD = ("| file | exit | refused | settings that differ from the defaults |", "|---|---|---|---|")
_OF_DEEPSPEED = ('"zero_optimization"', '"train_batch_size"', '"train_micro_batch_size_per_gpu"')
_OF_ARGUMENTS = ('"output_dir"', '"per_device_train_batch_size"', '"learning_rate"')
WORLD = 8


def make_rows(folder: Path) -> Iterator[str]:
    """Yield one row a file and way of importing it, sorted by name."""
    arguments = next(iter(sorted(folder.rglob("*args.json"))), None)
    for path in sorted([*folder.rglob("*.json"), *folder.rglob("*.yaml"), *folder.rglob("*.yml")]):
        text, name = path.read_text(encoding="utf-8", errors="replace"), path.name
        if path.suffix != ".json":
            if "distributed_type" in text:
                yield _row(name, lambda path=path: import_accelerate(path, micro_batch_size=1))
        elif any(word in text for word in _OF_DEEPSPEED) and '"deepspeed"' not in text:
            yield _row(name, lambda path=path: import_deepspeed(path, world_size=WORLD))
            if arguments is not None and '"auto"' in text:
                given = {"training_args": arguments, "world_size": WORLD}
                yield _row(f"{name} with {arguments.name}", lambda path=path, g=given: import_deepspeed(path, **g))
        elif any(word in text for word in _OF_ARGUMENTS):
            yield _row(name, lambda path=path: import_trainer(path, world_size=WORLD))


def _row(name: str, read: Callable[[], Import]) -> str:
    refused = settings = ""
    try:
        imported = read()
        refused = "; ".join(f"{one.key.name}: {one.text}" for one in imported.of_kind("refused"))
        check_refused(imported, allow=False)
        settings, code = _differences(build_config(imported)), 0
    except FsdpTrainerError as error:
        code, refused = error.exit_code, refused or f"{error.what} ({error.values})"
    return f"| {name} | {code} | {_cell(refused)} | {_cell(settings)} |"


def _differences(config: Config) -> str:
    held, defaults = config.to_dict(), Config().to_dict()
    found = []
    for section, values in held.items():
        of = values.items() if isinstance(values, dict) else ()
        found += [f"{section}.{k}={json.dumps(v)}" for k, v in of if v != defaults[section][k]]
        found += [] if isinstance(values, dict) or values == defaults[section] else [f"{section}={values}"]
    return " ".join(found)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def make_table(folders: Sequence[Path]) -> list[str]:
    """Return the lines of the table on all files below these folders."""
    return [*_HEAD, *(row for folder in folders for row in make_rows(folder))]


def main() -> None:
    """Print the table, then what changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--against", type=Path, help="an older table")
    words = parser.parse_args()
    rows = make_table(words.folders)
    print("\n".join(rows))
    if words.against is not None:
        old = set(words.against.read_text(encoding="utf-8").splitlines())
        changed = [row for row in rows if row not in old]
        print(f"\n{len(changed)} of {len(rows)} rows changed:\n")
        for row in changed:
            name = row.split(" | ")[0]
            print("\n".join([*(f"- {one}" for one in sorted(old) if one.split(" | ")[0] == name), f"+ {row}", ""]))


if __name__ == "__main__":
    main()
