"""Whole runs: launched as a user launches them, with the real model."""
