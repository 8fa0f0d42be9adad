"""Lets `python -m fsdp_trainer` do what the `fsdp-trainer` command does."""

from fsdp_trainer.cli import main

if __name__ == "__main__":
    main()
