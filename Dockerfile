# lce.c on NVIDIA's CUDA image, which has nvcc, cuBLASLt and NCCL. GPUs need the NVIDIA Container Toolkit.
#
#   docker build -t lce .
#   docker run --rm --gpus all lce                                                       # make run
#   docker run --rm --gpus all --ipc host lce tools/launch 8 ./train --model llama-1b    # NCCL's shared memory
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
# For any GPU and CPU, so that `make run` finds everything built.
ENV MAKEFLAGS="GPUS= MARCH="
WORKDIR /lce
COPY . .
RUN apt-get update && apt-get install --yes --no-install-recommends make \
    && make deps && make && rm -rf /var/lib/apt/lists/*
CMD ["make", "run"]
