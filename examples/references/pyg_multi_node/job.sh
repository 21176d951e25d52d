#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12
# sbatch job.sh. Leave the three --container lines out where Slurm has no pyxis.
srun -l --kill-on-bad-exit=1 --cpus-per-task=12 \
    --container-name=cont \
    --container-image=IMAGE_WITH_TORCH_AND_HOPLOOM \
    --container-mounts=/ogb-papers100m/:/workspace/dataset \
    python3 multi_node.py --store /workspace/dataset/papers100M.store
