"""Forty pickles that a reader must not obey, each of which would leave a mark or end the process if it ran.

`make` takes the path of the mark, which a payload creates by whatever way it is about.
"""

from __future__ import annotations

import pickle
import struct
from pathlib import Path
from typing import Any

STOP = b"."


class _Call:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def _global(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def _stack_global(module: str, name: str) -> bytes:
    return b"\x80\x04" + _text(module) + _text(name) + b"\x93"


def _call(function: bytes, *arguments: str) -> bytes:
    return function + b"(" + b"".join(_text(argument) for argument in arguments) + b"tR"


def make(mark: Path) -> dict[str, bytes]:
    """Return forty hostile pickles by name."""
    command, source = f"touch {mark}", f"open({str(mark)!r}, 'w').close()"
    return {
        **_by_function(mark, command, source),
        **_by_opcode(command, source),
        **_inside_a_table(command),
        **_bombs(),
    }


def _by_function(mark: Path, command: str, source: str) -> dict[str, bytes]:
    import builtins
    import importlib
    import os
    import runpy
    import subprocess

    calls: dict[str, Any] = {
        "os_system": _Call(os.system, command),
        "os_popen": _Call(os.popen, command),
        "subprocess_call": _Call(subprocess.call, ["touch", str(mark)]),
        "popen_class": _Call(subprocess.Popen, ["touch", str(mark)]),
        "eval": _Call(eval, source),
        "exec": _Call(exec, source),
        "open_for_writing": _Call(open, str(mark), "w"),
        "import": _Call(__import__, "antigravity"),
        "import_module": _Call(importlib.import_module, "antigravity"),
        "path_touch": _Call(Path.touch, mark),
        "os_mkdir": _Call(os.mkdir, str(mark)),
        "run_path": _Call(runpy.run_path, str(mark)),
        "map_and_list": _Call(list, _Call(map, os.system, [command])),
        "nested_pickle": _Call(pickle.loads, pickle.dumps(_Call(os.system, command))),
        "breakpoint": _Call(builtins.breakpoint),
        "exit": _Call(os._exit, 3),
    }
    return {name: pickle.dumps(value, protocol=4) for name, value in calls.items()}


def _by_opcode(command: str, source: str) -> dict[str, bytes]:
    system, evaluate = _global("posix", "system"), _global("builtins", "eval")
    return {
        "global_protocol_0": b"cposix\nsystem\n(S'" + command.encode() + b"'\ntR" + STOP,
        "inst": b"(" + _text(command) + b"iposix\nsystem\n" + STOP,
        "obj": b"(" + system + _text(command) + b"o" + STOP,
        "newobj": b"\x80\x02" + _global("subprocess", "Popen") + _text(command) + b"\x85\x81" + STOP,
        "newobj_ex": b"\x80\x04" + _global("subprocess", "Popen") + _text(command) + b"\x85}\x92" + STOP,
        "build_sets_state": b"\x80\x04"
        + _global("logging", "Handler")
        + b")\x81}"
        + _text("level")
        + system
        + b"sb"
        + STOP,
        "getattr_chain": _global("builtins", "getattr")
        + b"("
        + _call(_global("builtins", "__import__"), "os")
        + _text("system")
        + b"tR("
        + _text(command)
        + b"tR"
        + STOP,
        "stack_global": _call(_stack_global("posix", "system"), command) + STOP,
        "dotted_name": _call(_stack_global("os", "path.os.system"), command) + STOP,
        "reduce_in_a_list": b"]" + _call(evaluate, source) + b"a" + STOP,
        "reduce_as_a_key": b"}" + _call(evaluate, source) + b"Ns" + STOP,
        "reduce_then_popped": _call(evaluate, source) + b"0N" + STOP,
        "memo_hides_it": system + b"q\x000h\x00(" + _text(command) + b"tR" + STOP,
        "persistent_id": b"P" + command.encode() + b"\n" + STOP,
        "binary_persistent_id": _text(command) + b"Q" + STOP,
        "extension_code": b"\x80\x02\x82\x01(" + _text(command) + b"tR" + STOP,
        "two_pickles": b"N." + _call(system, command) + STOP,
    }


def _inside_a_table(command: str) -> dict[str, bytes]:
    """Return payloads that stand where a table of contents has something harmless."""
    metadata = _stack_global("torch.distributed.checkpoint.metadata", "Metadata")
    size = _stack_global("torch", "Size")[2:]
    call = _call(_global("posix", "system"), command)
    return {
        "in_the_tensors": metadata + b")\x81}" + _text("state_dict_metadata") + call + b"sb" + STOP,
        "in_a_size": b"\x80\x04" + size + b"(" + call + b"tR" + STOP,
        "torch_load": b"\x80\x04" + _call(_stack_global("torch", "load")[2:], command) + STOP,
        "class_attribute": metadata + b"(N}" + _text("__setstate__") + _global("posix", "system") + b"stb" + STOP,
    }


def _bombs() -> dict[str, bytes]:
    return {
        "huge_memo": b"\x80\x04Nr\xff\xff\xff\x7f" + STOP,
        "huge_bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b"x" + STOP,
        "deep_tuple_as_a_key": b"\x80\x04})" + b"\x85" * 1_000_000 + b"Ns" + STOP,
    }
