"""Optimizers over sharded parameters and the learning-rate schedule. Each rank steps its own shards."""
