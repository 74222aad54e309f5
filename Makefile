# lce.c: `make run` trains the demonstration, `make test` runs the tests; both install what is missing first.
# `make help` lists the rest. There is nothing to configure: make detects the libraries on this machine,
# prints them, and builds with them. Needs GNU make 4; `make deps` installs what else is needed.

VARIANT   ?= release
BUILD     := build/$(VARIANT)
BIN       := $(BUILD)/
CUDA      ?= 1
MPI       ?= 1
CUDA_HOME ?=
# The CPU that -march names; empty: any of the architecture.
MARCH     ?= native
# Runs the tests in Python; those of a package need what it needs, and are skipped without.
PYTHON    ?= python3
# A folder with unpacked packages (DEPS_ROOT/usr/include, ...), for machines without apt.
DEPS_ROOT ?=
# 1,024 tokens a step, in the CPU's default chunks: LM head + loss hold an eighth of the materialized mode's.
RUN_ARGS  ?= --vocab 128256 --fused-lce --lce-chunk 114 --compare-modes

ifeq ($(origin CC),default)
  CC := gcc
endif
# All cores; a -j on the command line wins.
ifeq ($(MAKELEVEL),0)
  MAKEFLAGS += -j$(shell nproc)
endif
MAKEFLAGS += --no-builtin-rules --no-print-directory
Q := $(if $(V),,@)# `make V=1` shows whole commands

GOALS := $(or $(MAKECMDGOALS),all)
# These install what is missing, then start make over with build-and-GOAL.
RUNS  := run real-run test bench curves exercise
# A package beside the trainer has its rules in a file of its own, which is read here for its goals and again for
# the rules; without the file the rest builds as it does with it.
PACKAGES := $(wildcard tools/*/package.mk)
include $(PACKAGES)

.PHONY: all tests info deps deps-run deps-dev $(RUNS) $(RUNS:%=build-and-%) check format clean help
.PHONY: fuzz build-and-fuzz matplotlib page
.SECONDARY:
.DELETE_ON_ERROR:
all:

# --- Variants: each builds into its own directory, so that they coexist -------------------------------------

ifeq ($(VARIANT),release)
  OPTIMIZE := -O3
  BIN      :=
else ifeq ($(VARIANT),debug)
  OPTIMIZE := -Og -g3
else ifeq ($(VARIANT),asan)
  OPTIMIZE := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=undefined
  CUDA     := 0
else ifeq ($(VARIANT),clang)
  OPTIMIZE := -O3
  CC       := clang
else ifeq ($(VARIANT),fuzz)
  OPTIMIZE := -O1 -fno-omit-frame-pointer -fsanitize=address,undefined,fuzzer-no-link -fno-sanitize-recover=undefined
  CC       := clang
  CUDA     := 0
else ifeq ($(VARIANT),emulated)
  OPTIMIZE := -O2
else
  $(error VARIANT=$(VARIANT) is not known; it is one of release, debug, asan, clang, emulated or fuzz)
endif
# What a table calls has the table's parameters, whether it reads them or not.
WARNINGS := -Wall -Wextra -Wno-unused-parameter -Werror $(if $(filter fuzz,$(VARIANT)),-Wno-pass-failed)

# --- What is there ------------------------------------------------------------------------------------------

# These goals only start another make, or need no compiler: they skip the search.
SEARCH := $(filter-out $(RUNS) $(PACKAGE_GOALS) build-and-exercise fuzz page check format clean help,$(GOALS))
ifneq ($(SEARCH),)

MULTIARCH := $(shell $(CC) -print-multiarch 2>/dev/null)
ifneq ($(DEPS_ROOT),)
  DEPS_LIB      := $(abspath $(DEPS_ROOT))/usr/lib
  DEPS_CPPFLAGS := -isystem $(DEPS_ROOT)/usr/include -isystem $(DEPS_ROOT)/usr/include/$(MULTIARCH)
  DEPS_LDFLAGS  := $(foreach d,$(DEPS_LIB) $(DEPS_LIB)/$(MULTIARCH),-L$(d) -Wl,-rpath,$(d))
endif

hash  := \#
comma := ,
# $(call try,HEADERS,FLAGS): "yes" when a program that includes the headers compiles and links with the flags.
try = $(shell out=$$(mktemp); { printf '$(hash)include <%s>\n' stddef.h stdarg.h setjmp.h stdint.h $(1); \
	echo 'int main(void) { return 0; }'; } | $(CC) $(DEPS_CPPFLAGS) -x c - -o $$out $(DEPS_LDFLAGS) $(2) \
	2>/dev/null && echo yes; rm -f $$out)

HAVE_CC     := $(call try,stdio.h)
HAVE_CJSON  := $(call try,cjson/cJSON.h,-lcjson)
HAVE_CMOCKA := $(call try,cmocka.h,-lcmocka)
HAVE_STB    := $(call try,stdio.h stb/stb_ds.h)
HAVE_ZLIB   := $(call try,zlib.h,-lz)

# BLAS_LIBS names another CBLAS; BLAS_LIBS= does without. OpenBLAS with OpenMP's threads comes first.
ifeq ($(origin BLAS_LIBS),undefined)
  OPENMP_BLAS := $(foreach d,$(firstword $(wildcard $(DEPS_LIB:%=%/$(MULTIARCH)/openblas-openmp) \
                   /usr/lib/$(MULTIARCH)/openblas-openmp)),-L$(d) -Wl$(comma)-rpath$(comma)$(d)) -lopenblas
  BLAS_LIBS := $(strip $(or $(if $(call try,cblas.h,$(OPENMP_BLAS)),$(OPENMP_BLAS)),\
                 $(if $(call try,cblas.h,-lopenblas),-lopenblas),\
                 $(shell pkg-config --cflags --libs openblas 2>/dev/null)))
endif
HAVE_CBLAS := $(if $(BLAS_LIBS),$(call try,cblas.h,$(BLAS_LIBS)))

ifneq ($(MPI),0)
  MPI_LIBS := $(shell { pkg-config --cflags --libs mpi-c || pkg-config --cflags --libs ompi-c || \
                        { mpicc --showme:compile && mpicc --showme:link; }; } 2>/dev/null)
  HAVE_MPI := $(if $(MPI_LIBS),$(call try,mpi.h,$(MPI_LIBS)))
endif

# CUDA: nvcc 12.4 or later with cuBLASLt. NO_CUDA becomes the reason to do without.
ifeq ($(CUDA),0)
  NO_CUDA := switched off
else
  NVCC := $(firstword $(wildcard $(CUDA_HOME:%=%/bin/nvcc)) $(shell command -v nvcc) \
            $(wildcard /usr/local/cuda/bin/nvcc))
  ifeq ($(NVCC),)
    NO_CUDA := no nvcc in CUDA_HOME, PATH or /usr/local/cuda
  else
    CUDA_VERSION := $(shell $(NVCC) --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
    CUDA_DIR     := $(or $(CUDA_HOME),$(patsubst %/bin/nvcc,%,$(realpath $(NVCC))))
    CUDA_LIB     := $(firstword $(wildcard $(CUDA_DIR)/lib64 $(CUDA_DIR)/lib))
    CUDA_INCLUDE := $(addprefix -isystem ,$(filter-out /usr/include,$(CUDA_DIR)/include))
    CUDA_LIBS    := -L$(CUDA_LIB) -Wl,-rpath,$(CUDA_LIB) -lcudart -lcublasLt -ldl
    ifneq ($(firstword $(sort 012.004 $(shell printf '%03d.%03d' $(subst ., ,$(CUDA_VERSION))))),012.004)
      NO_CUDA := nvcc is $(CUDA_VERSION), 12.4 or later is needed
    else ifeq ($(shell command -v g++),)
      NO_CUDA := nvcc $(CUDA_VERSION) needs g++, which is missing
    else ifeq ($(call try,cublasLt.h,$(CUDA_INCLUDE) $(CUDA_LIBS)),)
      NO_CUDA := nvcc $(CUDA_VERSION) is there, but cuBLASLt is missing
    endif
  endif
endif
ifeq ($(NO_CUDA),)
  HAVE_CUDA := yes
  HAVE_NCCL := $(call try,nccl.h,$(CUDA_INCLUDE) $(CUDA_LIBS) -lnccl)
  CUDA_LIBS += $(if $(HAVE_NCCL),-lnccl) -lstdc++
  # For the GPUs here if nvcc knows them (90a: Hopper with its own instructions), else for a portable set.
  GPUS  := $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null))
  KNOWN := $(filter-out 5% 6% 7%,$(patsubst sm_%,%,$(shell $(NVCC) --list-gpu-code)))
  ifeq ($(or $(if $(GPUS),,none),$(filter-out $(KNOWN),$(GPUS))),)
    GPU_CODES := $(patsubst 90,90a,$(sort $(GPUS)))
    GPU_TEXT  := for the GPU here: $(GPU_CODES:%=sm_%)
  else
    GPU_CODES := 80 90a
    GPU_TEXT  := for sm_80$(comma) sm_90a and PTX
    PTX       := -gencode=arch=compute_80,code=compute_80
  endif
  ifeq ($(VARIANT),emulated)
    NVCC      := tests/emulator/nvcc
    GPU_TEXT  := for a GPU emulated on the CPU
    HAVE_NCCL :=
    CUDA_LIBS := -lstdc++
  endif
else ifeq ($(VARIANT),emulated)
  $(error VARIANT=emulated needs the headers of the CUDA Toolkit: $(NO_CUDA))
endif

# What `make deps` would install, as pairs package=reason; what tests alone need comes last.
MISSING := $(if $(HAVE_CC),,gcc=the_C_compiler libc6-dev=headers_of_the_C_library) \
	$(if $(HAVE_CBLAS),,libopenblas-openmp-dev=fast_GEMMs_on_the_CPU) \
	$(if $(HAVE_CJSON),,libcjson-dev=logs_and_settings_in_JSON) \
	$(if $(HAVE_STB),,libstb-dev=arrays_that_grow) \
	$(if $(HAVE_ZLIB),,zlib1g-dev=checksums_of_checkpoints) \
	$(if $(findstring needs g++,$(NO_CUDA)),g++=the_host_compiler_of_nvcc)
FOR_TESTS := $(if $(HAVE_CMOCKA),,libcmocka-dev=the_tests) \
	$(if $(shell command -v $(PYTHON)),,python3=the_tests_of_the_programs) \
	$(if $(filter 0,$(MPI)),,$(if $(HAVE_MPI),,libopenmpi-dev=ranks_on_the_CPU) \
	$(if $(shell command -v mpirun),,openmpi-bin=mpirun))
ifeq ($(filter deps-run,$(GOALS)),)
  MISSING += $(FOR_TESTS)
endif
MISSING := $(strip $(MISSING))

# --- Flags --------------------------------------------------------------------------------------------------

# Under -std=c11 GCC leaves out fused multiply-adds, and errno from sqrtf keeps loops from becoming vectors.
# What is promised is equal bits for equal builds on one machine; neither option touches that.
FOUND        := $(if $(HAVE_CBLAS),$(BLAS_LIBS)) $(if $(HAVE_MPI),$(MPI_LIBS))
HAVES        := $(foreach h,CBLAS CUDA NCCL MPI,$(if $(HAVE_$(h)),-DHAVE_$(h)))
ALL_CPPFLAGS := -D_GNU_SOURCE -I. $(HAVES) $(DEPS_CPPFLAGS) $(if $(HAVE_CUDA),$(CUDA_INCLUDE)) \
	$(patsubst -I%,-isystem %,$(filter -I%,$(FOUND))) $(CPPFLAGS)
ALL_CFLAGS   := -std=c11 -g $(OPTIMIZE) $(MARCH:%=-march=%) -ffp-contract=fast -fno-math-errno -fopenmp \
	$(WARNINGS) $(CFLAGS)
# CUDA code meets neither BLAS nor MPI: with and without them it stays built.
CU_CPPFLAGS  := -D_GNU_SOURCE -I. $(foreach h,CUDA NCCL,$(if $(HAVE_$(h)),-DHAVE_$(h))) $(DEPS_CPPFLAGS) \
	$(CUDA_INCLUDE) $(CPPFLAGS)
ALL_CUFLAGS  := -std=c++17 -O3 -lineinfo --expt-relaxed-constexpr \
	$(foreach g,$(GPU_CODES),-gencode=arch=compute_$(g),code=sm_$(g)) $(PTX) -Werror all-warnings \
	-Xcompiler=-g,-Wall,-Wextra,-Wno-unused-parameter,-Wno-missing-field-initializers,-Werror $(CUFLAGS)
ALL_LDFLAGS  := $(DEPS_LDFLAGS) -Wl,--as-needed $(LDFLAGS)
ALL_LIBS     := -lcjson -lz $(if $(HAVE_CUDA),$(CUDA_LIBS)) $(filter-out -I%,$(FOUND)) -lm

# --- What was found, printed when it changed and by `make info` --------------------------------------------

# $(call record,NAME,TEXT): keeps TEXT in build/VARIANT/NAME, which is as old as the last change; "changed"
# if that is now.
record = $(shell mkdir -p $(BUILD) 2>/dev/null; printf '%s\n' '$(subst ','\'',$(2))' | cmp -s - $(BUILD)/$(1) || \
	{ printf '%s\n' '$(subst ','\'',$(2))' >$(BUILD)/$(1) && echo changed; } 2>/dev/null)
found = $(if $(HAVE_$(1)),$(2),missing: $(3))
define newline


endef
BLAS_NAMES    := $(patsubst -l%,%,$(filter -l%,$(BLAS_LIBS)))
MISSING_NAMES := $(foreach m,$(MISSING),$(firstword $(subst =, ,$(m))))
define TABLE
lce.c, the $(VARIANT) build, with $(or $(COMPILER),no working compiler):
  CUDA        $(call found,CUDA,nvcc $(CUDA_VERSION) with cuBLASLt$(comma) $(GPU_TEXT),the CPU only ($(NO_CUDA)))
  NCCL        $(if $(HAVE_CUDA),$(call found,NCCL,found: one GPU or many,one GPU only),not looked for without CUDA)
  CBLAS       $(call found,CBLAS,$(BLAS_NAMES),plain loops instead$(comma) many times slower on the CPU)
  MPI         $(call found,MPI,found: mpirun starts ranks,one CPU process only)
  stb         $(call found,STB,found,cannot build)
  cJSON       $(call found,CJSON,found,cannot build)
  zlib        $(call found,ZLIB,found,cannot build)
  cmocka      $(call found,CMOCKA,found,cannot test)$(if $(MISSING),$(newline)`make deps` installs: $(MISSING_NAMES))
endef

COMPILER := $(shell $(CC) --version 2>/dev/null | head -n 1)
ifneq ($(filter-out info deps deps-run deps-dev,$(GOALS)),)
  ifeq ($(shell mkdir -p $(BUILD) 2>/dev/null && [ -w $(BUILD) ] && echo yes),)
    $(error $(abspath $(BUILD)) may not be written; build elsewhere (`make BUILD=/tmp/lce BIN=/tmp/lce/`), \
      or copy this folder)
  endif
  ifeq ($(HAVE_CC)$(filter gcc,$(CC)),)
    $(error CC=$(CC) does not compile a C program; name another compiler, such as CC=gcc)
  endif
endif
CHANGED  := $(call record,flags,$(COMPILER) $(CC) $(ALL_CPPFLAGS) $(ALL_CFLAGS) | $(ALL_LDFLAGS) $(ALL_LIBS)) \
	$(if $(HAVE_CUDA),$(call record,cuda-flags,$(NVCC) $(CUDA_VERSION) $(CU_CPPFLAGS) $(ALL_CUFLAGS)))
ifneq ($(or $(strip $(CHANGED)),$(filter all info,$(GOALS))),)
  ifeq ($(findstring s,$(filter-out --%,$(firstword -$(MAKEFLAGS)))),)
    $(info $(TABLE))
  endif
endif
ifneq ($(filter-out info deps deps-run deps-dev,$(GOALS)),)
  NEEDED := $(if $(HAVE_CC),$(if $(HAVE_CJSON),,cJSON) $(if $(HAVE_STB),,stb) $(if $(HAVE_ZLIB),,zlib),A working C compiler ($(CC)))
  ifneq ($(strip $(NEEDED)),)
    $(error $(strip $(NEEDED)): missing; `make deps` installs it)
  endif
endif

endif # SEARCH

# --- Sources, by directory ----------------------------------------------------------------------------------

# Without CUDA, kernels/cuda/ still computes how much scratch its operations need, for the plan.
SOURCES  := $(wildcard $(addsuffix /*.c,data kernels kernels/base kernels/cpu kernels/lce kernels/ranks model model/checkpoint \
	tools/ladder trainer)) $(if $(HAVE_CUDA),\
	$(filter-out %/absent.c,$(wildcard kernels/cuda/*.c)) $(wildcard kernels/cuda/*.cu tools/ladder/*.cu),\
	$(wildcard kernels/cuda/absent.c kernels/cuda/*scratch.c))
PROGRAMS := $(wildcard train.c tools/*.c)
TESTS    := $(wildcard tests/*/test_*.c)
HELPERS  := $(wildcard tests/*.c)
PYTHON_TESTS := $(wildcard tests/*/test_*.py)
FUZZERS  := $(wildcard tests/fuzz/*.c)
# The tests of CUDA's kernels, without the programs; small shapes, since the emulator is slow.
ifeq ($(VARIANT),emulated)
  SOURCES  += $(wildcard tests/emulator/*.cpp)
  TESTS    := $(wildcard $(addprefix tests/kernels/test_,attention.c cuda*.c fp8.c kernels_*.c \
    linear_cross_entropy.c loss_terms.c muon.c tile_sampling.c) \
    tests/model/test_masked_loss.c tests/tools/test_lce_ladder.c)
  PROGRAMS :=
  PYTHON_TESTS := $(wildcard tests/tools/test_leaves.py)
  export LCE_SMALL_SHAPES := 1
endif

ifneq ($(SEARCH),)
  SOURCES_CHANGED := $(call record,sources,$(SOURCES))
  # Programs outside of the build's folder come from the one that was built last.
  LAST_BUILD := $(if $(BIN),,$(shell mkdir -p build; echo $(BUILD) | cmp -s - build/last || echo $(BUILD) >build/last))
endif

LIBRARY       := $(BUILD)/lce.a
objects        = $(patsubst %,$(BUILD)/%.o,$(1))
programs       = $(addprefix $(BIN),$(basename $(1)))
include $(PACKAGES)
TEST_PROGRAMS := $(TESTS:%.c=$(BUILD)/%)
FUZZ_PROGRAMS := $(FUZZERS:%.c=$(BUILD)/%)

all: $(LIBRARY) $(call programs,$(PROGRAMS))
tests: $(TEST_PROGRAMS)
info:
	@:

# --- Building -----------------------------------------------------------------------------------------------

$(BUILD)/%.c.o: %.c $(BUILD)/flags
	@mkdir -p $(@D)
	@echo "  cc    $<"
	$(Q)$(CC) $(ALL_CPPFLAGS) $(ALL_CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/%.cu.o: %.cu $(BUILD)/cuda-flags $(filter tests/%,$(NVCC))
	@mkdir -p $(@D)
	@echo "  nvcc  $<"
	$(Q)$(NVCC) $(CU_CPPFLAGS) $(ALL_CUFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

$(BUILD)/%.cpp.o: %.cpp $(BUILD)/flags
	@mkdir -p $(@D)
	@echo "  c++   $<"
	$(Q)g++ $(ALL_CPPFLAGS) -std=c++20 -g $(OPTIMIZE) $(WARNINGS) -MMD -MP -c $< -o $@

# From scratch, without objects of deleted sources; q keeps equal names of two directories apart.
$(LIBRARY): $(call objects,$(SOURCES)) $(BUILD)/sources
	@echo "  ar    $@"
	@rm -f $@
	$(Q)ar qcs $@ $(filter %.o,$^)

define LINK
@mkdir -p $(@D)
@echo "  link  $@"
$(Q)$(CC) $(ALL_CFLAGS) $(ALL_LDFLAGS) $(filter %.o %.a,$^) $(1) $(ALL_LIBS) -o $@
endef

$(call programs,$(PROGRAMS)): $(BIN)%: $(BUILD)/%.c.o $(BUILD)/trainer/start.c.o $(LIBRARY) $(if $(BIN),,build/last)
	$(LINK)

$(TEST_PROGRAMS): $(BUILD)/%: $(BUILD)/%.c.o $(call objects,$(HELPERS)) $(BUILD)/trainer/start.c.o $(LIBRARY)
	$(call LINK,-lcmocka)

$(FUZZ_PROGRAMS): $(BUILD)/%: $(BUILD)/%.c.o $(LIBRARY)
	$(call LINK,-fsanitize=fuzzer)

-include $(patsubst %.o,%.d,$(call objects,$(SOURCES) $(PROGRAMS) $(TESTS) $(HELPERS) $(FUZZERS)))

# --- Running ------------------------------------------------------------------------------------------------

# With DEPS_ROOT nothing is installed.
# Where there is nvcc and no GPU, what runs is built without CUDA, in a folder beside the whole build's.
$(RUNS): NVCC_HERE = $(wildcard $(CUDA_HOME:%=%/bin/nvcc) /usr/local/cuda/bin/nvcc)$(shell command -v nvcc)
$(RUNS): GPU_HERE = $(wildcard /dev/nvidia* /dev/dxg)$(shell command -v nvidia-smi)
$(RUNS): CPU_ALONE = $(and $(filter file,$(origin CUDA)),$(filter release debug clang,$(VARIANT)),$(NVCC_HERE),$(if $(GPU_HERE),,yes))
$(RUNS):
	$(if $(CPU_ALONE),@echo "There is no GPU here: building for the CPU alone; \`make\` builds CUDA's part as well.")
	$(if $(DEPS_ROOT),,@$(MAKE) deps$(if $(filter test exercise,$@),,-run))
	@$(MAKE) $(if $(CPU_ALONE),CUDA=0 BUILD=$(BUILD)-cpu) build-and-$@

build-and-run: $(BIN)train
	$(if $(filter /%,$<),,./)$< $(RUN_ARGS)

build-and-real-run: $(BIN)train matplotlib
	LCE_TRAIN=$< tools/real_run.sh $(REAL_RUN_ARGS)

build-and-test: all tests matplotlib
	@PYTHON='$(PYTHON)' LCE_TRAIN=./$(BIN)train tests/run $(TEST_PROGRAMS) \
	  $(if $(shell command -v $(PYTHON)),$(PYTHON_TESTS))

# Each on one core from its seeds; the corpus and the findings stay in build/fuzz/tests/fuzz.
FUZZ_SECONDS ?= 20
fuzz:
	@$(MAKE) VARIANT=fuzz build-and-fuzz

build-and-fuzz: $(FUZZ_PROGRAMS:%=run-%)

$(FUZZ_PROGRAMS:%=run-%): run-%: %
	@mkdir -p $<.corpus
	@OMP_NUM_THREADS=1 ./$< -max_total_time=$(FUZZ_SECONDS) -max_len=4096 -timeout=10 -print_final_stats=1 \
	  -artifact_prefix=$<. $<.corpus $(wildcard tests/fuzz/seeds/$(<:$(BUILD)/tests/fuzz/fuzz_%=%)) >$<.log 2>&1 || \
	  { tail -n 60 $<.log; exit 1; }
	@echo "  fuzz  $(<F): $$(sed -n 's/^stat::number_of_executed_units: *//p' $<.log) inputs in $(FUZZ_SECONDS) s, clean"

# An exercise of kernels/lce/LCE.md: a file of the ladder with a hole, made once; the ladder's test checks it.
N         ?= 1
EXERCISES ?= exercises
HOLE       = $(EXERCISES)/$(N).c
$(BUILD)/$(HOLE).o: ALL_CFLAGS += -O1 -Wno-error -Wno-unused
$(BUILD)/$(HOLE:.c=): $(BUILD)/$(HOLE).o $(BUILD)/tests/tools/test_lce_ladder.c.o $(call objects,$(HELPERS)) $(LIBRARY)
	$(call LINK,-lcmocka)

build-and-exercise:
	@mkdir -p $(EXERCISES)
	@rung=$$(grep -l '// Exercise $(N):' tools/ladder/*.c) || \
	  { echo "N=$(N): there are exercises 1 to 7"; exit 1; }; \
	  [ -e $(HOLE) ] || awk '/\/\/ end of exercise $(N)$$/ { hole = 0 } hole == 1 && !/^ *\/\// { hole = 2 } \
	    hole < 2 { print } /\/\/ Exercise $(N):/ { hole = 1 }' $$rung >$(HOLE)
	@$(MAKE) $(BUILD)/$(HOLE:.c=)
	@EXERCISE=$(N) tests/run $(BUILD)/$(HOLE:.c=) || { echo "Exercise $(N): fill $$(grep -Hn '// Exercise $(N):' $(HOLE))"; exit 1; }
	@echo "Exercise $(N) is done."

build-and-bench: $(BIN)tools/bench_lce $(BIN)train
	$(BIN)tools/bench_lce --materialized
	./$(BIN)train --model gpt2-124m --batch 4 --seq-len 64 --device cpu --steps 6 --sample-every 0 \
	  --val-fraction 0 --profile

build-and-curves: $(BIN)train $(BIN)tools/bench_lce matplotlib
	LCE_TRAIN=$< $(PYTHON) tools/memory_curve

# For Debian's own python from Debian, for any other from PyPI. Without it there are tables, and no pictures.
matplotlib:
	@$(if $(DEPS_ROOT),,$(PYTHON) -c 'import matplotlib' 2>/dev/null || \
	  if [ "$$($(PYTHON) -c 'import sys; print(sys.prefix)')" = /usr ]; then tools/deps.sh python3-matplotlib=pictures; else \
	    echo "Installing matplotlib, which draws: $(PYTHON) -m pip install matplotlib"; \
	    $(PYTHON) -m pip install --quiet --disable-pip-version-check matplotlib; fi || echo "Carrying on without it.")

# The page's address is where the README's picture links to: it is set there alone.
PAGE      ?= build/page
README_URL = ${shell sed -n 's|^\[!\[.*\](\(https*://[^)]*\))$$|\1|p' README.md}
PAGE_URL   = $(patsubst %/,%,$(README_URL))
PAGE_META  = s|<meta property="og:type".*|&\n<meta property="og:url" content="$(PAGE_URL)/">\n<meta property="og:image" \
	content="$(PAGE_URL)/llama-1b.png">|;
page:
	@mkdir -p $(PAGE)
	$(Q)cp README.md kernels/lce/*.md kernels/lce/*.png tools/curves/llama-1b.png $(PAGE)
	$(Q)sed '$(if $(PAGE_URL),$(PAGE_META)) s|"../../README.md"|"README.md"|' kernels/lce/page.html >$(PAGE)/index.html
	@echo "$(PAGE) is complete. Copy it to any static host, or look at it here: python3 -m http.server -d $(PAGE)"
	@$(if $(PAGE_URL),,echo "Once it has an address, let the README's picture link there: previews then show the picture, too.")

deps deps-run:
	@$(if $(MISSING),tools/deps.sh $(MISSING),$(if $(filter 0,$(MAKELEVEL)),echo "Nothing is missing."))

deps-dev: deps
	@tools/deps.sh \
	  $(if $(shell command -v clang),,clang=a_second_compiler) \
	  $(if $(wildcard /usr/lib/llvm*/lib/libomp.so /usr/lib64/libomp.so),,libomp-dev=OpenMP_for_clang) \
	  $(if $(shell command -v clang-format),,clang-format=code_formatting) \
	  $(if $(shell command -v cppcheck),,cppcheck=static_analysis)

# --- Checks and formatting ----------------------------------------------------------------------------------

# Every file that git tracks or would track.
FILES = $(wildcard $(shell git ls-files -co --exclude-standard 2>/dev/null || find * -type f -not -path 'build/*'))
CODE  = $(filter %.c %.h %.cu %.cuh %.cpp,$(FILES))

# Words that defer work to later, and references (and paths) that mean nothing outside the author's machine.
WORDS := TO[D]O|FIX[M]E|XX[X]|ST[U]B|HA[C]K|ISS[U]E \#?[0-9]+

check:
	clang-format --dry-run -Werror --ferror-limit=1 $(CODE)
	@mkdir -p build/cppcheck
	cppcheck --quiet -j$(shell nproc) --cppcheck-build-dir=build/cppcheck --std=c11 -I. \
	  --enable=warning,portability,performance --inline-suppr --error-exitcode=1 $(filter %.c,$(CODE))
	! grep -nIiE '\b($(WORDS))\b|/(home|root|work)/' $(FILES)

format:
	clang-format -i $(CODE)

clean:
	rm -rf build dist
	for file in $(basename $(PROGRAMS)); do [ ! -f $$file ] || rm $$file; done

help:
	@sed -n 's/^#: \?//p' Makefile $(PACKAGES)

#: make                 builds ./train and the programs of tools/, and prints what was found on this machine
#: make tests           builds the test programs
#: make run             installs what is missing, builds, and trains the demonstration;
#:                      RUN_ARGS="..." for other options
#: make real-run        fetches text, trains fused, materialized and sampled, and draws the comparison
#:                      (tools/real_run.sh --help); REAL_RUN_ARGS="..." for other options
#: make test            installs what is missing, builds, and runs all tests
#: make exercise N=1    an exercise of kernels/lce/LCE.md, 1 to 7: fill the hole in exercises/1.c
#: make fuzz            fuzzes the file readers, FUZZ_SECONDS=20 each (needs clang)
#: make bench           installs what is missing, builds, and times LM head + loss and a step on the CPU
#: make curves          installs what is missing, builds, and draws a memory curve (tools/CURVES.md)
#: make page            copies kernels/lce/page.html, with what it links to, into build/page for any static host
#: make info            only prints what was found
#: make deps            only installs what is missing, also for the tests (Debian packages; lists them)
#: make deps-dev        also installs what `make check` needs
#: make check           checks formatting (clang-format), runs cppcheck, and searches for forbidden words
#: make format          formats the code with clang-format
#: make clean           removes what was built
#:
#: VARIANT=release|debug|asan|clang|emulated|fuzz   a separate build under build/VARIANT (default release)
#: CC=clang  CFLAGS=...  WARNINGS=    another compiler, more flags, no -Werror
#: CUDA=0  MPI=0  BLAS_LIBS=          build without;  BLAS_LIBS="-L... -lname" links another CBLAS
#: CUDA_HOME=/usr/local/cuda-13.0     selects the CUDA toolkit;  CUFLAGS=... more flags for nvcc
#: GPUS="80 90"  MARCH=               for these GPUs, not those here; for any CPU (default -march=native)
#: PYTHON=...                         runs the tests of the programs and packages
#: DEPS_ROOT=folder                   also searches unpacked packages there for headers and libraries
#: V=1                                prints whole commands
