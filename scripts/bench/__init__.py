"""Measurements of time, memory and quality, a folder for each subject: python -m scripts.bench.FOLDER.NAME OUT."""
