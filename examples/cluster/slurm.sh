#!/usr/bin/env bash
# Slurm: a Ray cluster on the allocated nodes, and AgentJet on the first one. Submit it with `sbatch`.
# AgentJet is installed at the same path on all nodes, usually on the shared file system. Submit from the repository with its
# environment activated, and set server.data_dir in two_machines.toml. After the time limit, submit it again: the run goes on
# from its journal and its newest checkpoint.

#SBATCH --job-name=agentjet
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00

set -euo pipefail
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
host=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | cut -d' ' -f1)

srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" \
  ray symmetric-run --address "$host:6379" --min-nodes "$SLURM_NNODES" -- \
  agentjet serve --config examples/cluster/two_machines.toml --set "compute.address=$host:6379" --set "compute.host=$host"
