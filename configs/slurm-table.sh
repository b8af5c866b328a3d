#!/bin/bash
# A table on a cluster: each job of the array makes every N-th run, into one folder that all jobs see.
#
#   sbatch configs/slurm-table.sh mine.yaml --out /shared/tables      # as often as jobs were killed: they go on
#   protofl table mine.yaml --out /shared/tables                      # at the end: the whole table
#
#SBATCH --job-name=protofl-table
#SBATCH --array=1-16
#SBATCH --cpus-per-task=2
#SBATCH --requeue
exec protofl table "$@" --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
