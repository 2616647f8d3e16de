# make run     trains Harmonic on this project's own source text, about a minute
# make test    every test; needs gcc (or clang) and nothing else
# make help    the rest

MODELS := harmonic baselines
MODEL  ?= $(MODELS)

# ------------------------------------------------------------------------------------------------------------------
# Threads that wait for each other spin 10,000 rounds (libgomp: 300,000), then sleep: on a machine with other programs at
# work that is up to ten times faster, on an idle one no slower.
export GOMP_SPINCOUNT ?= 10000

# what is here: compiler, OpenMP, nvcc, GPU

CC  := $(if $(filter default,$(origin CC)),$(firstword $(shell command -v gcc clang cc 2>/dev/null) cc),$(CC))
CXX := $(if $(filter default,$(origin CXX)),$(firstword $(shell command -v g++ clang++ c++ 2>/dev/null) c++),$(CXX))

try     = $(shell echo 'int main(void){return 0;}' | $(CC) -Werror $(1) -x c - -o /dev/null 2>/dev/null && echo '$(1)')
OPENMP := $(call try,-fopenmp)
WIDE   := $(call try,-mprefer-vector-width=512)
NVCC   := $(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
GPU    := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1)

# Not -ffast-math: it would delete isnan. These are its parts that a training step profits from and a NaN survives.
FLOAT  := -ffp-contract=fast -fno-math-errno -fno-trapping-math -fassociative-math -fno-signed-zeros -freciprocal-math
WARN   := -Wall -Wextra -Wno-unused-function -Wno-missing-field-initializers
CFLAGS := -std=gnu11 -O3 -march=native $(WIDE) $(FLOAT) $(or $(OPENMP),-Wno-unknown-pragmas) $(WARN)
SAN    := -std=gnu11 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all $(WARN)

PRECISION ?= bf16
ARCH      ?= $(if $(GPU),native,sm_80)
NVFLAGS   := -std=c++17 -O3 -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wno-unused-function,-Wno-missing-field-initializers $(if $(OPENMP),-Xcompiler -fopenmp)
NVLIBS    := -lcublas -lcufft
NVFLAGS   += $(if $(filter fp32,$(PRECISION)),-DPRECISION_FP32)

define found
	@echo "compiler: $(CC)   OpenMP: $(if $(OPENMP),yes,NO)   nvcc: $(or $(NVCC),no)   GPU: $(or $(GPU),no)"
	$(if $(OPENMP),,@echo "*** $(CC) found no OpenMP: everything will run on ONE core. Debian: apt install gcc (or libomp-dev for clang); macOS: brew install gcc, make CC=gcc-14 ***")
endef

# ------------------------------------------------------------------------------------------------------------------
# programs

.PHONY: cpu cuda cuda-check emu run test test-gpu bench bench-gpu leak fuzz help clean found
.SECONDARY:
.DEFAULT_GOAL := help

help: found
	@echo
	@echo "make run         train Harmonic on this project's own source text, about a minute (MODEL=baselines PRESET=mamba-tiny for another)"
	@echo "make test        all tests, no GPU, no network (MODEL=harmonic: one model's)"
	@echo "make cpu         build/cpu/train_X and build/dev/prepare"
	@echo "make cuda        build/cuda/train_X with nvcc (PRECISION=fp32, ARCH=sm_90)"
	@echo "make emu         build/emu/train_X: the CUDA programs on the CPU, to test them (slow)"
	@echo "make bench       where a CPU training step's time goes, against this machine's peaks (MODEL=baselines FLAGS='--model hyena')"
	@echo "make test-gpu    the CUDA tests on a GPU          make bench-gpu   timings there"
	@echo "make leak MODEL=harmonic CKPT=out/model.safetensors    does a checkpoint see the future?"
	@echo "make fuzz        break files for a minute a reader, with sanitizers (SECONDS=60)"
	@echo "make clean       remove build/"

found:
	$(found)

cpu: found build/dev/prepare $(MODELS:%=build/cpu/train_%)
cuda: found $(patsubst %.cu,build/cuda/%,$(wildcard train_*.cu))
emu: $(patsubst %.cu,build/emu/%,$(wildcard train_*.cu))

HEADERS := $(wildcard dev/*.h)

build/cpu/train_%: train_%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $< -o $@ -lm

build/dev/prepare: dev/prepare.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $< -o $@ -lm

# the same sources for a GPU, and for the emulator: launches rewritten, g++ instead of nvcc
build/cuda/train_%: train_%.cu $(HEADERS)
	@mkdir -p $(@D)
	@test -n "$(NVCC)" || { echo "make cuda needs nvcc (the CUDA Toolkit); none was found in PATH or /usr/local/cuda/bin"; exit 2; }
	$(NVCC) $(NVFLAGS) -arch=$(ARCH) $< -o $@ $(NVLIBS)

# ------------------------------------------------------------------------------------------------------------------
# make run

RUN  := $(firstword $(MODEL))
# PRESET=mamba-tiny: another of the presets
PRESET ?= $(if $(filter baselines,$(RUN)),transformer,$(RUN))-tiny
PROG := build/$(if $(and $(NVCC),$(GPU)),cuda,cpu)/train_$(RUN)

run: found build/dev/prepare $(PROG)
	@PREPARE=build/dev/prepare data/self.sh
	@rm -rf build/run
	@$(PROG) --preset $(PRESET) --train data/self/train.bin --val data/self/val.bin --tokenizer bytes --val-batches 0 --out build/run
	@echo; echo "--- 500 bytes from the trained model, after 'static void ':"; echo
	@$(PROG) --init build/run/model.safetensors --generate --prompt "static void " --sample-len 500 --temperature 0.7
	@echo
	@echo "what next:  read train_$(RUN).c from the top; $(PROG) --help; make test;"
	@echo "            more text: $(PROG) --init build/run/model.safetensors --generate --prompt 'for (int ' --sample-len 1000"
	@echo "            your own text: see 'Train on your own text' in README.md; the loss curve: python3 dev/plot.py build/run/log.tsv --text"

# ------------------------------------------------------------------------------------------------------------------
# make test: programs in test/ that are compiled once per model (build/test/NAME_MODEL), and scripts

THIS    = -DTRAIN_FILE='"../train_$*.c"' -DMODEL_FILE='"models/$*.h"'
DOUBLE := -std=gnu11 -O2 -march=native -DREAL=double $(WARN) -Wno-unknown-pragmas
IN_FLOAT  := decode leak learn matmul numbers threads bench
IN_DOUBLE := gradcheck layers reference attention ssm_layers
CHECKERS  := $(wildcard test/*.h test/models/*.h) $(HEADERS)

define float_checker
build/test/$(1)_%: test/$(1).c train_%.c $(CHECKERS)
	@mkdir -p $$(@D)
	$$(CC) $$(CFLAGS) $$(THIS) $$< -o $$@ -lm
endef
define double_checker
build/test/$(1)_%: test/$(2).c train_%.c $(CHECKERS)
	@mkdir -p $$(@D)
	$$(CC) $$(DOUBLE) $$(THIS) $$< -o $$@ -lm
endef
$(foreach t,$(IN_FLOAT),$(eval $(call float_checker,$(t))))
$(foreach t,$(IN_DOUBLE),$(eval $(call double_checker,$(t),$(t))))
$(eval $(call double_checker,matmul_double,matmul))

build/test/test_%: test/test_%.c test/check.h $(HEADERS) dev/prepare.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $< -o $@ -lm
build/test/dump_check: test/dump_check.c test/check.h
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $< -o $@ -lm
build/test/fuzz: test/fuzz.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SAN) $< -o $@ -lm

MODEL_TESTS  := gradcheck layers reference matmul matmul_double numbers threads decode leak learn
OWN_TESTS     = $(if $(filter baselines,$(1)),attention ssm_layers)
TEST_BUILDS  := build/dev/prepare build/test/test_tokenizer build/test/test_dataloader build/test/dump_check \
                $(foreach m,$(MODEL),build/cpu/train_$(m) $(foreach t,$(MODEL_TESTS) $(call OWN_TESTS,$(m)),build/test/$(t)_$(m)))
HAVE_CXX     := $(shell command -v $(CXX) 2>/dev/null)
EMULATED     := $(if $(HAVE_CXX),test/test_emulator.sh $(foreach m,$(MODEL),$(if $(wildcard train_$(m).cu),'test/test_twin.sh $(m)')))

# MODEL=x: that model's tests only
GENERAL_TESTS = build/test/test_tokenizer build/test/test_dataloader test/test_prepare.sh test/test_sync.sh test/test_run.sh test/test_readme.sh 'dev/sync.sh --check'
ALL_TESTS     = $(if $(filter command line,$(origin MODEL)),,$(GENERAL_TESTS)) \
                $(foreach m,$(MODEL),$(foreach t,$(MODEL_TESTS) $(call OWN_TESTS,$(m)),build/test/$(t)_$(m)) \
                'MODEL=$(m) test/test_fma.sh' 'MODEL=$(m) test/test_cli.sh' 'MODEL=$(m) test/test_resume.sh' 'MODEL=$(m) test/test_dump.sh' \
                'MODEL=$(m) test/test_memory.sh')

test: found
	@$(MAKE) --no-print-directory -s -j2 $(TEST_BUILDS)
	@$(if $(HAVE_CXX),,echo "*** no C++ compiler ($(CXX)): the CUDA programs are NOT checked against the C ones here ***")
	@CC="$(CC)" CXX="$(CXX)" test/run.sh $(ALL_TESTS) $(EMULATED)

# what is timed: FLAGS='--model hyena --vocab 4096', or these runs of each model
BENCH = $(if $(FLAGS),'$(FLAGS)',$(if $(filter baselines,$(1)),'--preset llama' '--preset harmonic-mamba' '--model mamba2' '--model hyena','--preset harmonic-28m'))
bench: $(MODEL:%=build/test/bench_%)
	@$(foreach m,$(MODEL),for flags in $(call BENCH,$(m)); do build/test/bench_$(m) $$flags; echo; done;)

leak: build/test/leak_$(RUN)
	@test -n "$(CKPT)" || { echo "which checkpoint? make leak MODEL=$(RUN) CKPT=out/model.safetensors"; exit 2; }
	@build/test/leak_$(RUN) $(CKPT)

SECONDS ?= 60
fuzz: build/test/fuzz
	@build/test/fuzz loader $(SECONDS) 1
	@ASAN_OPTIONS=detect_leaks=0 build/test/fuzz checkpoint $(SECONDS) 1

# ------------------------------------------------------------------------------------------------------------------
# CUDA: on a GPU, on the emulator, and compiled for GPUs that are not here

test-gpu: found
	@test -n "$(NVCC)" -a -n "$(GPU)" || { echo "make test-gpu needs nvcc and a GPU; make test checks the same kernels on the emulator"; exit 2; }
	@GPU=1 NVCC="$(NVCC)" CC="$(CC)" CXX="$(CXX)" test/run.sh $(foreach m,$(MODEL),$(if $(wildcard train_$(m).cu),'test/test_twin.sh $(m)'))

build/cuda/bench_%: test/bench_gpu.cu train_%.cu $(CHECKERS)
	@mkdir -p $(@D)
	$(NVCC) $(NVFLAGS) -arch=$(ARCH) -DTRAIN_CU='"../train_$*.cu"' -DMODEL_FILE='"models/$*.h"' $< -o $@ $(NVLIBS)
bench-gpu: found $(MODEL:%=build/cuda/bench_%)
	@test -n "$(GPU)" || { echo "make bench-gpu needs a GPU"; exit 2; }
	@$(foreach m,$(MODEL),for flags in $(call BENCH,$(m)); do build/cuda/bench_$(m) $$flags; echo; done;)

# every .cu for every GPU in ARCHS that nvcc knows, both precisions, warnings are errors, and no register spills
ARCHS := sm_80 sm_90 $(if $(NVCC),$(shell $(NVCC) --list-gpu-code 2>/dev/null | grep -x sm_100))
cuda-check:
	@test -n "$(NVCC)" || { echo "make cuda-check needs nvcc"; exit 2; }
	@mkdir -p build/cuda
	@for m in $(MODEL); do for arch in $(ARCHS); do for p in "" -DPRECISION_FP32; do \
	    echo "nvcc -arch=$$arch $$p train_$$m.cu"; \
	    $(NVCC) $(filter-out -DPRECISION_FP32,$(NVFLAGS)) $$p -arch=$$arch -Xptxas -v train_$$m.cu -o build/cuda/check $(NVLIBS) > build/cuda/check.log 2>&1 || { cat build/cuda/check.log; exit 1; }; \
	    test "$$(grep -c 'spill stores' build/cuda/check.log)" -gt 0 || { echo "ptxas said nothing of spills"; exit 1; }; \
	    if grep 'spill' build/cuda/check.log | grep -v ' 0 bytes spill stores, 0 bytes spill loads'; then echo "register spills"; exit 1; fi; \
	done; done; done

# the CUDA programs on the CPU: launches rewritten by sed, compiled by g++ against test/cuda_on_cpu.h
build/emu/train_%: train_%.cu test/cuda_on_cpu.h test/cuda_on_cpu.sed $(HEADERS)
	@mkdir -p $(@D)
	sed -E -e '1i #line 1 "$<"' -f test/cuda_on_cpu.sed $< > $@.cpp
	$(CXX) -std=c++17 -O2 -fopenmp -fno-strict-aliasing -I. -include test/cuda_on_cpu.h $(if $(filter fp32,$(PRECISION)),-DPRECISION_FP32) $@.cpp -o $@ -lm

clean:
	rm -rf build
