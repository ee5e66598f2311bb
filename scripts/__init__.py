"""Programs around the library: pretraining of the reference model, benchmarks, Slurm, dashboards."""
