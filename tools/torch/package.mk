# The PyTorch package: liblce.so, its wheel, and what tests/pytorch/ links. The Makefile reads this file twice.
ifndef SOURCES

# These start another make.
PACKAGE_GOALS += liblce.so sdist wheel
.PHONY: liblce.so link-liblce sdist wheel clean-torch

else

TORCH         := tools/torch/liblce
TORCH_SOURCES := $(wildcard $(TORCH)/*.c) $(if $(HAVE_CUDA),$(wildcard $(TORCH)/cuda/*.cu))
TORCH_HELPERS := $(filter-out tests/pytorch/test_%,$(wildcard tests/pytorch/*.c))
ifeq ($(VARIANT),emulated)
  TESTS += $(wildcard $(addprefix tests/pytorch/test_,batch_invariant.c divergence.c ids.c log_prob_values.c log_probs.c operations.c))
endif

# The tests link its objects, which need the core's archive once more after them.
TORCH_TESTS := $(patsubst %.c,$(BUILD)/%,$(filter tests/pytorch/%,$(TESTS)))
$(TORCH_TESTS): $(call objects,$(TORCH_SOURCES) $(TORCH_HELPERS))
$(TORCH_TESTS): ALL_LIBS := $(LIBRARY) $(ALL_LIBS)

# The shared library is a build of its own: position-independent, without MPI and NCCL (lce_join takes the ranks'
# collectives), and with the BLAS that is there when it is loaded (blas/). It needs no other library, so it looks for
# none and its TABLE names none. WHEEL=1: without debugging symbols and folders to search.
LIBLCE       ?= liblce.so
LIBLCE_BUILD ?= build/library
WHEEL        ?=
LIBLCE_TABLE  = liblce.so, with $$(or $$(COMPILER),no working compiler):$$(newline)  CUDA        $$(call \
	found,CUDA,nvcc $$(CUDA_VERSION) with cuBLASLt$$(comma) $$(GPU_TEXT),the CPU only ($$(NO_CUDA)))
LIBLCE_FLAGS  = BUILD=$(LIBLCE_BUILD) BIN=$(LIBLCE_BUILD)/ MPI=0 HAVE_NCCL= BLAS_LIBS= TABLE='$(LIBLCE_TABLE)' \
	$(patsubst %,HAVE_%=yes,CBLAS CJSON STB ZLIB CMOCKA) CPPFLAGS='$(CPPFLAGS) -DFOUND_BLAS -I$(TORCH)/blas' \
	CFLAGS='$(CFLAGS) -fPIC -fvisibility=hidden' CUFLAGS='$(CUFLAGS) -Xcompiler=-fPIC,-fvisibility=hidden'
liblce.so:
	@$(MAKE) $(LIBLCE_FLAGS) link-liblce

LIBLCE_SOURCES := $(filter kernels/%,$(SOURCES)) $(TORCH_SOURCES) $(wildcard $(TORCH)/blas/*.c)
for_wheel = $(if $(WHEEL),-s $(filter-out -Wl$(comma)-rpath%,$(1)),$(1))
link-liblce: $(call objects,$(LIBLCE_SOURCES)) $(BUILD)/sources
	@echo "  link  $(LIBLCE)"
	@rm -f $(BUILD)/parts.a
	$(Q)ar qcs $(BUILD)/parts.a $(filter %.o,$^)
	$(Q)$(CC) -shared -Wl,-z,defs $(ALL_CFLAGS) $(call for_wheel,$(ALL_LDFLAGS) $(BUILD)/$(TORCH)/liblce.c.o \
	  $(BUILD)/parts.a -ldl $(if $(HAVE_CUDA),$(CUDA_LIBS)) -lm) -o $(LIBLCE)

-include $(patsubst %,$(BUILD)/%.d,$(LIBLCE_SOURCES) $(TORCH_HELPERS))

# tools/torch as one file of sources, which builds by itself, and as a wheel that is built from it; for any CPU of
# the architecture and, with nvcc, for GPUs from sm_80 on.
DIST ?= dist
PACKING = $(if $(findstring /,$(PYTHON)),$(abspath $(PYTHON)),$(PYTHON))
define CHECK_PACKING
@$(PACKING) -c 'import setuptools, pip, sys; sys.exit(int(setuptools.__version__.split(".")[0]) < 77)' 2>/dev/null || \
  { echo "make $@: PYTHON=$(PYTHON) is no Python with pip and setuptools 77 or later; name one, or" \
         "$(PYTHON) -m pip install 'setuptools>=77'" >&2; exit 1; }
endef
SDIST = $(DIST)/lce_torch-$(shell sed -n 's/__version__ = "\(.*\)"/\1/p' tools/torch/lce/__init__.py).tar.gz
sdist:
	$(CHECK_PACKING)
	@mkdir -p $(DIST)
	@cd tools/torch && $(PACKING) -c 'import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])' \
	  $(abspath $(DIST)) >/dev/null
	@echo "  sdist $(SDIST)"

wheel: sdist
	@env -u MAKEFLAGS -u MAKELEVEL LCE_MAKE="GPUS=any $(LCE_MAKE) $(MAKEOVERRIDES)" \
	  $(PACKING) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $(DIST) $(SDIST)
	@ls -sh $(DIST)/lce_torch-*.whl

clean: clean-torch
clean-torch:
	rm -rf dist tools/torch/build tools/torch/*.egg-info liblce.so

endif
#: make liblce.so       builds linear_cross_entropy as a shared library (tools/torch/liblce/liblce.h)
#: make sdist wheel     packs tools/torch as dist/lce_torch-*.tar.gz, and builds the wheel from that
