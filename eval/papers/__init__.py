"""Every figure and table of the papers, as this pipeline makes it."""
