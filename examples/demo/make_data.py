"""Writes the demo's data set: spoken requests turned into commands of a home-control language that exists nowhere else.

The language is invented, so no model knows it before training. The held-out questions name pairs of room and device
that never occur in training, so a right answer shows that the rule was learned and not the sentence. All of it is made
here: `python examples/demo/make_data.py` writes the two files again, byte for byte.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

SYSTEM = "Translate into HomeScript."
ROOMS = ("kitchen", "hall", "attic", "study", "garage", "bedroom", "cellar", "office", "living room", "guest room")
SWITCHED = ("lamp", "fan", "heater", "radio")
MOVED = ("window", "blinds", "curtain", "door")
LEVELS = {"lamp": "%", "fan": "%", "radio": "%", "heater": "C", "blinds": "%"}

# Every fifth (room, device) pair is kept out of training altogether. Each room and each device is seen with others.
HELD_OUT_EVERY = 5
TRAIN_RECORDS = 400
HELD_OUT_RECORDS = 40
SEED = 17

SWITCH_REQUESTS = (
    "Turn {value} the {device} in the {room}.",
    "Turn the {room} {device} {value}.",
    "Please switch {value} the {device} in the {room}.",
    "Could you switch the {device} in the {room} {value}?",
)
MOVE_REQUESTS = (
    "{verb} the {device} in the {room}.",
    "{verb} the {room} {device}.",
    "Please {lower_verb} the {device} in the {room}.",
    "Could you {lower_verb} the {room} {device}?",
)
LEVEL_REQUESTS = (
    "Set the {device} in the {room} to {value}.",
    "Set the {room} {device} to {value}.",
    "I want the {device} in the {room} at {value}.",
)
QUESTIONS = (
    "What is the {device} in the {room} doing?",
    "How is the {room} {device}?",
    "Check the {device} in the {room}.",
)


def _address(room: str, device: str) -> str:
    return f"@{room.replace(' ', '_')}/{device}"


def _delay(rng: random.Random) -> tuple[str, str]:
    """Returns the words put before a request and what they add to its command; most requests have none."""
    if rng.random() < 0.75:
        return "", ""
    minutes = rng.choice((5, 10, 15, 20, 30, 45))
    return f"In {minutes} minutes: ", f" +{minutes}min"


def _switch(rng: random.Random, room: str, device: str) -> tuple[str, str]:
    value = rng.choice(("on", "off"))
    request = rng.choice(SWITCH_REQUESTS).format(value=value, device=device, room=room)
    return request, f"{_address(room, device)} := {value.upper()}"


def _move(rng: random.Random, room: str, device: str) -> tuple[str, str]:
    verb, value = rng.choice((("Open", "OPEN"), ("Close", "SHUT")))
    request = rng.choice(MOVE_REQUESTS).format(verb=verb, lower_verb=verb.lower(), device=device, room=room)
    return request, f"{_address(room, device)} := {value}"


def _level(rng: random.Random, room: str, device: str) -> tuple[str, str]:
    unit = LEVELS[device]
    number = rng.randrange(16, 26) if unit == "C" else rng.randrange(10, 100, 10)
    spoken = f"{number} degrees" if unit == "C" else f"{number} percent"
    request = rng.choice(LEVEL_REQUESTS).format(value=spoken, device=device, room=room)
    return request, f"{_address(room, device)} := {number}{unit}"


def _question(rng: random.Random, room: str, device: str) -> tuple[str, str]:
    return rng.choice(QUESTIONS).format(device=device, room=room), f"{_address(room, device)} ??"


def _record(rng: random.Random, room: str, device: str) -> dict:
    kinds = [_switch if device in SWITCHED else _move]
    kinds += [_level] if device in LEVELS else []
    kind = _question if rng.random() < 0.2 else rng.choice(kinds)
    request, command = kind(rng, room, device)
    if kind is not _question:
        words, suffix = _delay(rng)
        request, command = words + request, command + suffix
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": request},
        {"role": "assistant", "content": command},
    ]
    return {"messages": messages}


def _records(rng: random.Random, pairs: list[tuple[str, str]], count: int) -> list[dict]:
    """Goes round the pairs until there are `count` different requests."""
    found: dict[str, dict] = {}
    index = 0
    while len(found) < count:
        room, device = pairs[index % len(pairs)]
        record = _record(rng, room, device)
        found.setdefault(record["messages"][1]["content"], record)
        index += 1
    records = list(found.values())
    rng.shuffle(records)
    return records


def build_data() -> tuple[list[dict], list[dict]]:
    """Makes the training and the held-out records; they share no (room, device) pair."""
    pairs = [(room, device) for room in ROOMS for device in SWITCHED + MOVED]
    # 8 devices a room and every fifth pair: the held-out device moves on by two from room to room.
    held_out = pairs[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    train = [pair for pair in pairs if pair not in held_out]
    rng = random.Random(SEED)
    return _records(rng, train, TRAIN_RECORDS), _records(rng, held_out, HELD_OUT_RECORDS)


def main() -> None:
    """Writes train.jsonl and held_out.jsonl beside this script."""
    for name, records in zip(("train", "held_out"), build_data(), strict=True):
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        Path(__file__).with_name(f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
