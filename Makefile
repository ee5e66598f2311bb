# make demo   learn a 70% mask for the reference model on a CPU and compare it, in minutes
# make test   the default test suite
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= outputs/demo

.PHONY: demo test lint gpu-test slurm-test clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,slurm]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/python -m leank_train +experiment=reference_demo hydra.run.dir=$(OUT)
	$(BIN)/python -m eval +experiment=reference_ruler mask=$(OUT)/mask.safetensors hydra.run.dir=$(OUT)/eval \
		benchmark.lengths=[1024]
	@sed -n '/^## By length/,/^## 1024/p' $(OUT)/eval/summary.md | sed '$$d'
	@echo "mask: $(OUT)/mask.safetensors  pictures: $(OUT)/plots/  tables: $(OUT)/validation.md $(OUT)/eval/report.html"

test: $(VENV)/installed
	$(BIN)/python -m pytest -q

lint: $(VENV)/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

gpu-test: $(VENV)/installed
	$(BIN)/python -m pytest -q -m gpu

slurm-test: $(VENV)/installed
	$(BIN)/python -m pytest -q -m slurm tests/scripts/test_slurm.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
