"""Tests of fsdp_trainer. Helpers live beside them: `ranks`, `models`, `reference`."""
