#!/usr/bin/env bash
# What one CUDA GPU can show: parity of a few rows, then predicted beside measured peak memory of some configurations, and
# tokens per second. At most 9 minutes by its own limits, expected to take 48 GB of the GPU, neither seen yet; `python -m benchmarks.gpu --dry` is the same on CPU. Run it
# in a checkout on the GPU machine; it needs torch, transformers and accelerate there.
#   benchmarks/gpu_check.sh [output folder]
# A machine without an index takes the rest from wheels/ in the checkout, filled beforehand by
#   pip download -d wheels pydantic ruamel.yaml typer rich xxhash psutil pytest pytest-timeout
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-benchmarks/out}
mkdir -p "$out"
python=${PYTHON:-python3}
if [ -d wheels ]; then
    "$python" -m pip install --quiet --no-index --find-links wheels \
        pydantic ruamel.yaml typer rich xxhash psutil pytest pytest-timeout
fi
{
    date -u
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv
    "$python" -c "import torch, transformers, accelerate
print('torch', torch.__version__, 'transformers', transformers.__version__, 'accelerate', accelerate.__version__)"
} | tee "$out/machine.txt"
failed=0
timeout 200 "$python" -m pytest tests/gpu -q -p no:cacheprovider 2>&1 | tee "$out/tests.txt" || failed=1
timeout 330 "$python" -m benchmarks.gpu 2>&1 | tee "$out/measured.txt" || failed=1
exit "$failed"
