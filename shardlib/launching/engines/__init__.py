"""One engine a file: from a job to what Slurm, Kubernetes, Cloud TPU, Ray or SkyPilot are given."""
