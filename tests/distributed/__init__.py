"""Tests that need several processes (gloo on CPU), or one process set up like one of several."""
