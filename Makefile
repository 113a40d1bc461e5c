# Set-up is no step of its own: `make run` and `make test` make .venv, install what the requirements files pin, fetch
# the model they need, and do none of it again until something changes. An interrupted set-up is made good by the
# next call.

# What to ask. It reaches run.py through the environment, as it stands: quotes, $, backquotes and newlines are text.
PROMPT ?= Why is the sky blue?
override PROMPT := $(value PROMPT)
export PROMPT

# More flags for run.py or pytest: make run ARGS="-n 50 --stats", make test ARGS="-k tokenizer"
ARGS ?=

# The Python that makes .venv, 3.11 or newer: make run PYTHON=python3.12
PYTHON ?= python3

# One more package index to install from. On Linux, PyPI's torch brings gigabytes of CUDA; the build for CPUs alone:
# make run INDEX=https://download.pytorch.org/whl/cpu
# (To install from a mirror of PyPI instead, set pip's own PIP_INDEX_URL.)
INDEX ?=

RUN := .venv/bin/python run.py
# Two processes; the tests of a file stay together, since they share models. Not the files with many tests first: those
# with few take longest, and one of them would run alone at the end.
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

# Other engines that `run.py bench --peer NAME` measures in turn with this one, each in an environment of its own.
PEERS := llama.cpp transformers openvino

.PHONY: help run chat test quick soak sanitize cuda-check cuda-one bench bench-peers models heads screens clean

help:  ## list what make can do (this list)
	@awk -F ':[^#]*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'PROMPT="..."       what to ask                          ARGS="..."  more flags for run.py or pytest'
	@echo 'PYTHON=python3.12  the Python that makes .venv          INDEX=URL   one more package index, for instance'
	@echo '                   https://download.pytorch.org/whl/cpu: torch for CPUs alone, without gigabytes of CUDA'
	@echo 'Models are kept in $$QUIRE_MODELS, by default ~/.cache/quire.'

run: .venv/.native  ## answer PROMPT="..." with the default model, fetched once
	@$(RUN) generate -p="$$PROMPT" $(ARGS)

chat: .venv/.native  ## talk with the default model
	@$(RUN) chat $(ARGS)

test: .venv/.ready-dev .venv/.native  ## run the whole test suite
	@$(RUN) models --fetch default
	@$(MAKE) --no-print-directory cuda-one
	.venv/bin/python -m pytest $(PARALLEL) -m "not soak" $(ARGS)

quick: .venv/.ready-dev .venv/.native  ## run the tests that need no model file and no patience (under 90 seconds)
	.venv/bin/python -m pytest $(PARALLEL) -m "not slow and not models" $(ARGS)

soak: .venv/.ready-dev .venv/.native  ## run the long tests: other generated inputs every time, batch killed 50 times, the larger models
	LARGE_TOKENS=64 .venv/bin/python -m pytest -m soak $(ARGS)
	.venv/bin/python -m pytest -m hypothesis --hypothesis-profile=soak $(ARGS)
	NUM_KILLS=50 .venv/bin/python -m pytest tests/test_batch.py -k killed $(ARGS)
	LARGE_TOKENS=64 .venv/bin/python -m pytest tests/test_reference.py -k qwen0.5b $(ARGS)

sanitize: .venv/.ready-dev  ## run the kernels under the compiler's sanitizers: addresses and leaks, undefined behaviour, threads
	@$(MAKE) --no-print-directory -j2 $(DRIVERS)
	build/sanitize/address/driver
	build/sanitize/amx/driver
	UBSAN_OPTIONS=print_stacktrace=1 build/sanitize/undefined/driver
	TSAN_OPTIONS=die_after_fork=0:halt_on_error=1 build/sanitize/thread/driver
	EMULATOR_SANITIZE=1 ASAN_OPTIONS=detect_leaks=0 \
	    LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	    .venv/bin/python -m pytest -q -m "not slow" tests/test_emu.py

cuda-check:  ## compile the CUDA kernels for sm_80, sm_90 and sm_100, and tell what registers they take
	@$(call with_nvcc,$(MAKE) --no-print-directory -j2 $(ARCHITECTURES:%=build/cuda/%/.checked) && \
	    $(PYTHON) tools/registers.py $(CUDA_LOGS))

bench: .venv/.native  ## measure speed on this machine
	@$(RUN) bench $(ARGS)

bench-peers: $(PEERS:%=.venv-peers/%/.ready)  ## install what ARGS="--peer llama.cpp" and others measure (long: one is compiled)
	@ls $^ >/dev/null

models: .venv/.ready  ## fetch the models of tests and benchmarks: the default and a Qwen2.5-Coder pair (1.7 GB)
	@$(RUN) models --fetch default
	@$(RUN) models --fetch pair

screens: .venv/.ready-dev .venv/.native  ## run the default model in a terminal and put what it shows into README.md
	@$(RUN) models --fetch default
	.venv/bin/python tools/screens.py

heads: .venv/.native  ## train draft heads for the default model, into heads/ beside it (40 minutes)
	@$(RUN) models --fetch default
	.venv/bin/python tools/train_head.py both "$${QUIRE_MODELS:-~/.cache/quire}/heads/SmolLM2-135M-Instruct" $(ARGS)

clean:  ## remove .venv and everything built; downloaded models stay
	rm -rf .venv .venv-peers build .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Set-up. $(call need,TEST,WHAT TO SAY) stops make with one line where a shell test fails.

need = $(if $(shell $(1) >/dev/null 2>&1 && echo ok),,$(error $(2)))
VERSION := import sys; sys.exit(sys.hexversion < 0x030b0000)
PIP := .venv/bin/python -m pip --disable-pip-version-check

# Runs a shell script while no other make sets up. The lock ends with its holder, however that ends.
LOCKED = "$(PYTHON)" -c 'import fcntl, os, sys; os.dup2(os.open("requirements.txt", os.O_RDONLY), 9); \
    fcntl.flock(9, fcntl.LOCK_EX); os.execvp("sh", ["sh", "-ec", sys.argv[1]])'

# .installing lies there while pip works. Found later, it tells of a pip that was killed and may have left a package
# half copied: .venv is made anew, as it is when the Python it was made with is gone.
NEW_VENV = if test -e .venv/.installing || ! $(PIP) --version >/dev/null 2>&1; then \
    rm -rf .venv; "$(PYTHON)" -m venv .venv; fi
INSTALL = touch .venv/.installing; \
    $(PIP) install $(if $(INDEX),--extra-index-url "$(INDEX)") -r $< >&2; rm .venv/.installing; touch $@

$(if $(shell test -x .venv/bin/python -a ! -e .venv/.installing || rm -f .venv/.ready .venv/.ready-dev),)

.venv/.ready: requirements.txt
	$(call need,command -v "$(PYTHON)",no $(PYTHON) here: install Python 3.11 or newer (Debian: apt-get install \
	    python3 python3-venv) or name one with make PYTHON=/path/to/it)
	$(call need,"$(PYTHON)" -c "$(VERSION)",$(PYTHON) is older than 3.11: install a newer one (Debian: apt-get install \
	    python3.11 python3.11-venv) and name it with make PYTHON=python3.11)
	$(call need,"$(PYTHON)" -c "import venv; import ensurepip",$(PYTHON) cannot make a virtual environment: install \
	    its venv module (Debian: apt-get install python3-venv))
	$(call need,command -v g++ || command -v c++ || command -v clang++,no C++ compiler here: install one (Debian: \
	    apt-get install g++; macOS: xcode-select --install))
	@$(LOCKED) '$(NEW_VENV); $(INSTALL)'

.venv/.ready-dev: requirements-dev.txt .venv/.ready
	@$(LOCKED) '$(INSTALL)'

# The kernels, compiled into build/. Where that fails, torch computes instead, and each start says so.
.venv/.native: .venv/.ready native.py csrc/binding.cpp $(wildcard csrc/*.h csrc/cpu/*)
	@echo 'compiling the kernels into build/ (a minute)' >&2
	@.venv/bin/python -c 'import native; native.load()' || echo 'that failed: torch will compute, much slower' >&2
	@touch $@

# An engine that cannot be installed keeps no other from it, and leaves its log. gcc 12 miscompiles how llama.cpp sets up
# AMX (it drops stores to the configuration): it crashes at first use without these flags.
.venv-peers/llama.cpp/.ready: export CMAKE_ARGS = -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse' -DGGML_NATIVE=ON
.venv-peers/%/.ready: peers/%.txt
	@echo 'installing $* into .venv-peers/' >&2
	@rm -rf .venv-peers/$*; mkdir -p .venv-peers
	@if "$(PYTHON)" -m venv .venv-peers/$* && .venv-peers/$*/bin/python -m pip --disable-pip-version-check install \
	    $(if $(INDEX),--extra-index-url "$(INDEX)") -r $< >.venv-peers/$*.log 2>&1; \
	    then rm .venv-peers/$*.log; touch $@; \
	    else rm -rf .venv-peers/$*; echo '$* cannot be installed: .venv-peers/$*.log says why' >&2; fi

# The kernels and csrc/sanitize.cpp, which calls them, once for each sanitizer. Objects stay until a source changes,
# and appear whole or not at all: a compiler may be killed.

# amx: addresses, with AVX-512 and AMX in an emulator.
SANITIZERS := address undefined thread amx
DRIVERS := $(SANITIZERS:%=build/sanitize/%/driver)
WATCHED := -std=c++17 -O1 -g1 -ffp-contract=off -Wall -Wextra -pthread -fno-omit-frame-pointer -fno-sanitize-recover=all

build/sanitize/undefined/driver: WATCHED += -fsanitize=float-cast-overflow
build/sanitize/amx/driver: WATCHED += -DEMULATED -Wno-psabi --param asan-instrumentation-with-call-threshold=0
sanitizer_of = -fsanitize=$(if $(filter amx,$(1)),address,$(1))

define SANITIZED
build/sanitize/$(1)/%.o: csrc/%.cpp $(wildcard csrc/*.h csrc/cpu/*.h csrc/cpu/*.inc csrc/emu/x86_emu.h)
	@mkdir -p $$(@D)
	$$(CXX) $$(WATCHED) $(call sanitizer_of,$(1)) -c $$< -o $$@.part && mv $$@.part $$@

build/sanitize/$(1)/driver: $(patsubst csrc/%.cpp,build/sanitize/$(1)/%.o,$(wildcard csrc/cpu/*.cpp) csrc/sanitize.cpp)
	$$(CXX) $$(WATCHED) $(call sanitizer_of,$(1)) $$^ -o $$@
endef
$(foreach name,$(SANITIZERS),$(eval $(call SANITIZED,$(name))))

# The CUDA kernels (gpu.py has the same flags), to see whether they compile; a run compiles its own. Where there is no
# nvcc a line says so.

ARCHITECTURES := sm_80 sm_90 sm_100
NVCC_FLAGS := -O3 -std=c++17 -fmad=false --expt-relaxed-constexpr
CUDA_SOURCES := $(wildcard csrc/cuda/*.cu)
CUDA_LOGS = $(foreach name,$(ARCHITECTURES),$(CUDA_SOURCES:csrc/cuda/%.cu=build/cuda/$(name)/%.log))

with_nvcc = if command -v nvcc >/dev/null; then $(1); \
    else echo 'no nvcc here: the CUDA kernels were not compiled' >&2; fi

cuda-one:
	@$(call with_nvcc,$(MAKE) --no-print-directory -j2 build/cuda/sm_90/.checked)

define CUDA_OBJECTS
build/cuda/$(1)/.checked: $(CUDA_SOURCES:csrc/cuda/%.cu=build/cuda/$(1)/%.log)
	@touch $$@

build/cuda/$(1)/%.log: csrc/cuda/%.cu $(wildcard csrc/*.h csrc/cpu/*.h csrc/cuda/*.cuh)
	@mkdir -p $$(@D)
	nvcc $$(NVCC_FLAGS) -arch=$(1) -Xptxas -v -c $$< -o $$(@:.log=.o) 2>$$@.part || (cat $$@.part >&2; false)
	@mv $$@.part $$@
endef
$(foreach name,$(ARCHITECTURES),$(eval $(call CUDA_OBJECTS,$(name))))
