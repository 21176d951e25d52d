#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=12
# Run `sbatch job.sh` in this folder: the container sees it as /workspace/example.
# If Slurm has no pyxis, delete the four --container lines.
srun -l --kill-on-bad-exit=1 --cpus-per-task=12 \
    --container-name=cont \
    --container-image=IMAGE_WITH_TORCH_AND_HOPLOOM \
    --container-mounts="/ogb-papers100m/:/workspace/dataset,$PWD:/workspace/example" \
    --container-workdir=/workspace/example \
    python3 multi_node.py --store /workspace/dataset/papers100M.store
