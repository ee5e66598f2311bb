"""What methods compute in Triton, a file each; the slow form stands in the method's own file."""
