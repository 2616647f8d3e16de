# make run     trains Harmonic on this project's own source text, about a minute
# make test    every test; needs gcc (or clang) and nothing else
# make help    the rest

MODELS := harmonic baselines
MODEL  ?= $(MODELS)

# ------------------------------------------------------------------------------------------------------------------
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
CFLAGS := -std=gnu11 -O3 -march=native $(WIDE) $(FLOAT) $(OPENMP) $(WARN)
SAN    := -std=gnu11 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all $(WARN)

PRECISION ?= bf16
ARCH      ?= $(if $(GPU),native,sm_80)
NVFLAGS   := -std=c++17 -O3 -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wno-unused-function,-Wno-missing-field-initializers $(if $(OPENMP),-Xcompiler -fopenmp)
NVLIBS    := -lcublas
NVFLAGS   += $(if $(filter fp32,$(PRECISION)),-DPRECISION_FP32)

SAY := @
define found
	@echo "compiler: $(CC)   OpenMP: $(if $(OPENMP),yes,NO)   nvcc: $(or $(NVCC),no)   GPU: $(or $(GPU),no)"
	$(if $(OPENMP),,@echo "*** $(CC) found no OpenMP: everything will run on ONE core. Debian: apt install gcc (or libomp-dev for clang); macOS: brew install gcc, make CC=gcc-14 ***")
endef

# ------------------------------------------------------------------------------------------------------------------
# programs

.PHONY: all cpu cuda emu run test test-gpu bench bench-gpu leak fuzz help clean found
.DEFAULT_GOAL := help

help: found
	@echo
	@echo "make run         train Harmonic on this project's own source text, about a minute (MODEL=... for another model)"
	@echo "make test        all tests, no GPU, no network (MODEL=harmonic: one model's)"
	@echo "make cpu         build/cpu/train_X and build/dev/prepare"
	@echo "make cuda        build/cuda/train_X with nvcc (PRECISION=fp32, ARCH=sm_90)"
	@echo "make emu         build/emu/train_X: the CUDA programs on the CPU, to test them (slow)"
	@echo "make bench       where a CPU training step's time goes, against this machine's peaks"
	@echo "make test-gpu    the CUDA tests on a GPU          make bench-gpu   timings there"
	@echo "make leak MODEL=harmonic CKPT=out/model.safetensors    does a checkpoint see the future?"
	@echo "make fuzz        break files for a minute a reader, with sanitizers (SECONDS=60)"
	@echo "make clean       remove build/"

found:
	$(found)

cpu: found build/dev/prepare $(MODELS:%=build/cpu/train_%)
cuda: found $(MODELS:%=build/cuda/train_%)
emu: $(MODELS:%=build/emu/train_%)

HEADERS := $(wildcard dev/*.h)

build/cpu/train_%: train_%.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $< -o $@ -lm

build/dev/prepare: dev/prepare.c $(HEADERS)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $< -o $@ -lm

clean:
	rm -rf build
