#!/bin/bash
# A table on a cluster: the jobs of the array make its runs together, in one folder that all jobs see.
#
#   sbatch configs/slurm-table.sh mine.yaml --out /shared/tables      # as often as jobs were killed: they go on
#   protofl table mine.yaml --out /shared/tables                      # at the end: the whole table
#
#SBATCH --job-name=protofl-table
#SBATCH --array=1-16
#SBATCH --cpus-per-task=2
#SBATCH --requeue
exec protofl table "$@"
