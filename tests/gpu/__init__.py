"""What only a CUDA device can show; every test here skips by itself where there is none."""
