#!/bin/bash
# One run on several machines under SLURM: one task a machine, each starts the ranks of its own GPUs.
#
#   sbatch --nodes 2 examples/multinode/slurm.sh --config run.yaml
#
# output_dir, the data and the model must be on storage that all machines see.
#SBATCH --job-name=fsdp-trainer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
# SIGTERM two minutes before the time is up: the run saves, and the same command goes on from there.
#SBATCH --signal=TERM@120
set -euo pipefail

first="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export first
# In quotes, so that every machine reads its own SLURM_NODEID.
exec srun --kill-on-bad-exit=1 bash -c \
  './launch.sh train --nodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --address "$first:29500" "$@"' launch "$@"
