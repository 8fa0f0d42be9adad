"""Write configs/accelerate: a profile for each card and count of fsdp_trainer/interop/profiles.csv.

.venv/bin/python configs/make_profiles.py
"""

from pathlib import Path

from fsdp_trainer.interop.gpu_profile import format_profile, shipped_profiles
from fsdp_trainer.memory.hardware import parse_gpus

FOLDER = Path(__file__).with_name("accelerate")


def main() -> None:
    """Write every profile, and take away what no longer belongs."""
    made = {f"{profile.name}.yaml": format_profile(parse_gpus(profile.gpus)) for profile in shipped_profiles()}
    for stale in {path.name for path in FOLDER.glob("*.yaml")} - made.keys():
        (FOLDER / stale).unlink()
    for name, text in made.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
