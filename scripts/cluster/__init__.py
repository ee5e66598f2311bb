"""Slurm: batch files, and a real Slurm on one machine for tests."""
