# make install | demo | test | test-rest | test-all | test-docs | test-device | test-slurm | test-next | oracles | lint | versions | bench | convergence | paper | playground | gpu-check | test-gpu | clean. Everything needs .venv, which is made at the first call.

PYTHON := .venv/bin/python
WANTED := $(shell cat .python-version)

.PHONY: help install demo test test-proofs test-rest test-all test-docs test-device test-slurm test-next oracles lint versions bench convergence paper playground test-playground lint-page gpu-check test-gpu clean

help:
	@echo "make install   .venv with all that is needed (about 6 GB, a few minutes)"
	@echo "make demo      train a small GPT with 2BW on two processes (two to three minutes)"
	@echo "make test      unit tests, and tests with several processes for each claim about the update rule (four minutes on two cores)"
	@echo "make test-rest  all other tests that need nothing but .venv (nine minutes); make test-all runs both"
	@echo "make test-docs  run the commands of docs/quick_start.md and docs/data.md as they stand there (three minutes)"
	@echo "make test-device  torch's CUDA path on a stand-in for the GPU (six minutes; needs g++)"
	@echo "make test-slurm  train on a real Slurm of two nodes on this host (four minutes; needs slurm-wlm and munge)"
	@echo "make oracles   compare models and losses with those of megatron-bridge and lm-eval (two minutes; installs both in build/)"
	@echo "make test-next MEGATRON=DIR  names and bits on another Megatron, such as a checkout of its main branch (two minutes)"
	@echo "make lint      ruff (check and format), the types of engine/ and schedules/, and the order of the rooms"
	@echo "make versions  this environment as a row of CONTRIBUTING.md's table of tested versions"
	@echo "make bench     how busy the stages are under each schedule (a quarter of an hour; needs an idle machine)"
	@echo "make convergence  the loss of 2BW against vanilla's, recorded in docs/convergence.md (an hour; fails above 0.1 %)"
	@echo "make paper     every figure and table of the paper: predicted, measured here, its own values (four minutes)"
	@echo "make playground  build the page docs/playground and serve it on localhost (needs npm)"
	@echo "make test-playground  the page in Chromium, and its Python in node (needs npm and chromium; installs playwright)"
	@echo "make lint-page  prettier on the pages' JavaScript, HTML and CSS (needs npx)"
	@echo "make gpu-check  what holds on the GPUs of this machine (a quarter of an hour; docs/gpu.md)"
	@echo "make test-gpu  tests/distributed on the GPUs of this machine (docs/gpu.md)"
	@echo "make clean     remove caches and builds; .venv and out/, which has trained models, stay"

install: .venv/.installed

# Made again when the dependencies may have changed. A python will do if it is new enough and has what venv needs
# (Debian packs ensurepip apart).
.venv/.installed: pyproject.toml .python-version
	@if ! $(PYTHON) -c "import pip" 2>/dev/null; then \
	    for python in python$(WANTED) python3 ""; do \
	        "$$python" -c "import ensurepip, sys; sys.exit(sys.version_info < tuple(map(int, '$(WANTED)'.split('.'))))" \
	            2>/dev/null && break; \
	    done; \
	    if [ -z "$$python" ]; then \
	        echo "make: no Python >= $(WANTED) with ensurepip; install python$(WANTED) and python$(WANTED)-venv" >&2; \
	        exit 1; \
	    fi; \
	    "$$python" -m venv .venv || exit 1; \
	fi
	@echo "installing into .venv: about 6 GB, a few minutes"
	$(PYTHON) -m pip install -e '.[test]'
	@touch $@

demo: install
	$(PYTHON) -m megatron_2bw.cli demo

# Workers take over each other's tests, so both end at one time.
PYTEST := $(PYTHON) -m pytest --durations=10
TWO := -n 2 --dist worksteal

OF_THE_RULE := $(patsubst %,tests/distributed/test_%.py,update_rule equivalence correction)

test: install
	$(PYTEST) $(TWO) tests/unit
	$(PYTEST) $(TWO) -m proof $(OF_THE_RULE)

test-proofs: install
	$(PYTEST) $(TWO) -m proof tests/distributed $(OF_THE_RULE:%=--ignore %)

# .ci/run gives LESS, REST and RULE, and leaves the others to .ci/run nightly.
REST ?= tests/distributed tests/e2e tests/lists
test-rest: install
	$(PYTEST) $(TWO) -m "not proof$(LESS)" $(REST)

test-all: test test-proofs test-rest test-device

test-docs: install
	$(PYTEST) --timeout 1800 tests/docs

# Without a GPU; tests/device/device.cpp says what the stand-in does.
RULE ?= .py
test-device: install
	rm -rf build/coverage
	$(subst -m pytest,-m coverage run -m pytest,$(PYTEST)) $(TWO) --device stand-in -m "(device or proof)$(LESS)" \
	    tests/device tests/model $(RULE:%=tests/distributed/test_update_rule%)
	$(PYTHON) -m coverage combine --quiet && $(PYTHON) -m tests.device.lines

# megatron-bridge pins other versions of what .venv has, so it has an environment of its own, which sees those of .venv.
# 5.12.1 is the newest transformers that megatron-bridge 0.6.2 takes. lm-eval brings many packages.
build/oracles/.installed: .venv/.installed
	$(PYTHON) -m venv --without-pip build/oracles
	$(PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	    "$$(build/oracles/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	$(PYTHON) -m pip --python build/oracles install --no-deps megatron-bridge==0.6.2 omegaconf==2.4.0 \
	    antlr4-python3-runtime==4.9.3
	$(PYTHON) -m pip --python build/oracles install lm-eval==0.4.13 transformers==5.12.1
	@touch $@

# A checkout of Megatron-LM, such as its main branch; the wheel's compiled helper serves it too.
test-next: install
	@test -d "$(MEGATRON)/megatron" || { echo "make test-next: give MEGATRON=DIR, a checkout of Megatron-LM" >&2; exit 2; }
	cp -n $$($(PYTHON) -c "import megatron.core.datasets as d; print(d.__path__[0])")/helpers_cpp*.so \
	    $(MEGATRON)/megatron/core/datasets/
	test -z "$$($(PYTHON) -m tests.megatron_names $(MEGATRON) | tee /dev/stderr)"
	PYTHONPATH=$(MEGATRON):$(CURDIR) $(PYTEST) $(TWO) -m proof tests/distributed/test_update_rule.py \
	    tests/distributed/test_experts.py tests/distributed/test_checkpoint.py tests/distributed/test_hybrid.py

oracles: build/oracles/.installed
	$(PYTEST) -k "bridge or word_perplexity" tests/distributed/test_convert.py tests/e2e/test_wikitext.py

test-slurm: install
	@for name in sbatch slurmctld slurmd munged; do \
	    PATH="$$PATH:/usr/sbin" command -v $$name >/dev/null || \
	        { echo "make: $$name is not installed: apt-get install slurm-wlm munge" >&2; exit 1; }; \
	done
	$(PYTEST) $(if $(LESS),-m 'not nightly') tests/slurm

lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	.venv/bin/lint-imports --no-logo

versions: install
	@$(PYTHON) -c "from importlib.metadata import version; import platform; \
	    row = [platform.python_version(), *map(version, ['torch', 'megatron-core', 'transformers'])]; \
	    print('|', ' | '.join([*row, platform.freedesktop_os_release()['PRETTY_NAME']]), '|')"

bench: install
	$(PYTHON) bench/schedule_efficiency.py --stages 8 --microbatches 8 --json out/bench/all_schedules.json
	$(PYTHON) bench/schedule_efficiency.py --real --stages 2 --microbatches 4 --iterations 14 --json out/bench/real_compute.json

# 2bw as it is by default; tokens a batch, vanilla's best rate and validation batches.
BATCHES := 512:4e-3:200 2048:4e-3:50 8192:8e-3:16
SEEDS := 2001,2002,2003
ITERATIONS := 300
# All late, with the parts of the gradient that eight stages know of eight microbatches (docs/convergence.md).
PREDICT := --two-bw-late all --two-bw-extra-warmup 1,2,1
# The paper's recipe (scripts/paper.yaml) without a correction: 0.10 % above vanilla, and three standard deviations of
# three seeds (0.105 and 0.020 after 150 iterations, 0.102 and 0.065 after 300).
PAPER := --lr-decay-style linear --lr-warmup-fraction 0.01 --min-lr 1e-5 --adam-beta2 0.999 --weight-decay 0.01
PAPER_GAP := 0.3

convergence: install
	@data=$$($(PYTHON) -c "from megatron_2bw.tools.data.corpus import build_corpus as c; print(*c(vocab_size=512).flags())") && \
	for batch in $(BATCHES); do \
	    set -- $$(echo $$batch | tr : ' '); \
	    $(PYTHON) -m megatron_2bw.cli convergence batch$$1-$(ITERATIONS) --variants vanilla,2bw --lr $$2 --seeds $(SEEDS) --device cpu --jobs 2 --max-gap 0.1 -- $$data \
	        --hidden-size 128 --num-layers 2 --train-iters $(ITERATIONS) --lr-warmup-iters 20 --log-interval 10 \
	        --micro-batch-size $$(($$1 / 512)) --global-batch-size $$(($$1 / 128)) --eval-iters $$3 --eval-interval 101 || \
	        exit 1; \
	done && \
	$(PYTHON) -m megatron_2bw.cli convergence predict-$(ITERATIONS) --variants vanilla --variant "predict=$(PREDICT)" --lr 4e-3 --seeds $(SEEDS) --device cpu --ranks 4 --max-gap 0.1 -- $$data \
	    --hidden-size 128 --num-layers 2 --pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'E|t|t|L' \
	    --train-iters $(ITERATIONS) --lr-warmup-iters 20 --log-interval 10 --micro-batch-size 2 --global-batch-size 16 \
	    --eval-iters 16 --eval-interval 10001 && \
	$(PYTHON) -m megatron_2bw.cli convergence paper-$(ITERATIONS) --variants vanilla,paper --lr 1e-4 --seeds $(SEEDS) --device cpu --jobs 2 --max-gap $(PAPER_GAP) -- $$data $(PAPER) \
	    --hidden-size 128 --num-layers 2 --train-iters $(ITERATIONS) --log-interval 10 --eval-iters 50 --eval-interval 1001

paper: install
	$(PYTHON) scripts/paper.py

playground: install
	$(PYTHON) scripts/playground.py

test-playground: install
	$(PYTHON) -c "import playwright" 2>/dev/null || $(PYTHON) -m pip install -q 'playwright>=1.65' || \
	    echo "make: playwright is not installed; the tests that need it are skipped" >&2
	$(PYTEST) tests/page

# The pages' JavaScript, HTML and CSS; .prettierrc.json is its configuration.
PRETTIER := npx --yes prettier@3.10.1
PAGES := docs/playground megatron_2bw/tools/timelines/page megatron_2bw/tools/planner/tell/page tests/page

lint-page:
	$(PRETTIER) --check $(PAGES)

gpu-check: install
	$(PYTHON) -m megatron_2bw.cli gpu-check

test-gpu: install
	$(PYTEST) --device cuda tests/distributed

clean:
	rm -rf build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
