"""Reads the settings of other tools (DeepSpeed, Accelerate, Transformers) and says what becomes of each."""
