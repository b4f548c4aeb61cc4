# make ablation   the main job: four loss normalisations compared on the embedded experiment (seeds=5 jobs=2 steps=60)
#                 all=1 takes the fifth setting too: sample+seq-mean, common practice
# make test       style, types, tests and property tests (slow=1 adds the slow ones)
PYTHON ?= python3
TORCH ?= torch==2.13.0
PAPER := sample+token-mean,rollout+token-mean,rollout+seq-mean,rollout+rollout-mean
VENV := .venv
BIN := $(VENV)/bin

.PHONY: ablation test clean

ablation: $(VENV)/.ready
	$(BIN)/harnessrl ablate ablations/normalization.yaml $(if $(all),,only=$(PAPER)) $(foreach k,seeds jobs steps,$(if $($(k)),$(k)=$($(k))))

test: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(if $(slow),,-m "not slow")

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("harnessrl needs Python 3.11 or newer, found " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --disable-pip-version-check $(TORCH)
	$(BIN)/pip install --disable-pip-version-check -e '.[train,figs,dev]'
	touch $@

clean:
	rm -rf $(VENV)
